"""Attention as tiles over SMs: loads by hand, a fit that finds what times were made of, and what lies beyond points."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from calibrate.held.tiles import fitted_tiles, tile_models
from sim.engine.costs.tiles import TiledAttention, busiest, tiled_s
from sim.schedule.derive.kernels import KernelUse, attention_use
from sim.schedule.ir.masks import CAUSAL, FULL, Band
from sim.words.profile import Point, TileModel

SMS = 10
MODEL = TileModel(kernel="attention_forward", dtype="bf16", head_dim=64, fixed_s=5e-6, tile_s=2e-6, pair_s=1e-6)


def attention(queries: int, keys: int, heads: int, band: Band = FULL, backward: bool = False) -> KernelUse:
    return attention_use(backward, "bf16", (1, queries, heads, 64), keys, heads, band)


def point(use: KernelUse, seconds: float) -> Point:
    fields: dict[str, Any] = dict.fromkeys(("median_s", "mean_s", "low_s", "high_s"), seconds)
    fields |= {name: getattr(use, name) for name in ("kernel", "variant", "dtype", "shape", "flops")}
    return Point(condition="idle", runs=1, nbytes=use.hbm_bytes, **fields)


def seconds_of(tiled: TiledAttention, use: KernelUse) -> float:
    found = tiled.seconds(use, SMS, 1.0)
    assert found
    return found.seconds


def test_alike_tiles_run_in_whole_waves() -> None:
    """512 queries of 3 heads are 12 tiles, two waves on 10 SMs, each of 8 pairs; backward has a tile per 128 keys."""
    assert busiest(attention(512, 1024, 3), SMS) == (2, 16)
    assert busiest(attention(512, 1024, 3, backward=True), SMS) == (3, 12)


def test_tiles_of_a_causal_mask_fill_each_others_gaps() -> None:
    """1024 tokens of 10 heads: 80 tiles; of 64 pairs a head 36 are computed, those on the diagonal whole. With one head
    the longest tile, 8 pairs, takes longest.
    """
    load = busiest(attention(1024, 1024, 10, CAUSAL), SMS)
    assert load.tiles == 8
    assert load.pairs == pytest.approx(36, rel=1e-2)
    assert busiest(attention(1024, 1024, 1, CAUSAL), SMS) == (1, 8)


def test_blocks_of_another_shape_keep_their_own_share() -> None:
    """Squares take twice what the model says, blocks of twice as many queries as keys three times; what was not timed
    goes by the nearest shape.
    """
    shapes = {(1024, 1024): 2.0, (4096, 4096): 2.0, (2048, 1024): 3.0}
    points = [point(use, factor * tiled_s(MODEL, use, SMS)) for (q, k), factor in shapes.items()
              for use in (attention(q, k, 8),)]  # fmt: skip
    table = TiledAttention([MODEL], points, SMS)
    for (queries, keys), factor in (
        {(2048, 2048): 2.0, (4096, 2048): 3.0, (8192, 1024): 3.0, (1024, 2048): 2.0}
    ).items():
        use = attention(queries, keys, 8)
        found = table.seconds(use, SMS, 1.0)
        assert found
        assert found[0] == pytest.approx(factor * tiled_s(MODEL, use, SMS)), (queries, keys)


def test_a_window_shortens_tiles() -> None:
    """64 tiles of 4 heads see 8 of 16 pairs each at most, not all keys: fewer pairs take less."""
    whole, window = attention(2048, 2048, 4, CAUSAL), attention(2048, 2048, 4, Band(left=255, right=0))
    assert window.variant == "masked"
    assert busiest(whole, 1000).pairs == 16
    assert busiest(window, 1000).pairs < 8


def test_the_fixed_time_of_a_backward_pass_is_bounded_by_that_of_three_forward_ones() -> None:
    """Long kernels alone, all 1 ms too long: an intercept that no short one has shown."""
    forward = [point(use, tiled_s(MODEL, use, SMS)) for use in (attention(n, n, 8) for n in (256, 1024, 4096))]
    model = msgspec.structs.replace(MODEL, kernel="attention_backward")
    uses = [attention(n, n, 8, backward=True) for n in (2048, 4096, 8192)]
    backward = [point(use, 1e-3 + tiled_s(model, use, SMS)) for use in uses]
    of_forward, of_backward = tile_models([*backward, *forward], SMS)
    assert of_forward.kernel == "attention_forward"
    assert of_backward.fixed_s <= 3 * of_forward.fixed_s * (1 + 1e-6)


def test_the_fit_finds_what_times_were_made_of() -> None:
    uses = [attention(n, n, heads, band) for n in (256, 1024, 4096) for heads in (1, 4, 32) for band in (FULL, CAUSAL)]
    found = fitted_tiles([point(use, tiled_s(MODEL, use, SMS)) for use in uses], SMS)
    for name in ("fixed_s", "tile_s", "pair_s"):
        assert getattr(found, name) == pytest.approx(getattr(MODEL, name), rel=1e-4)
    free = msgspec.structs.replace(MODEL, tile_s=0.0)
    found = fitted_tiles([point(use, tiled_s(free, use, SMS)) for use in uses], SMS)
    assert found.tile_s == pytest.approx(0, abs=1e-9)


def test_measured_points_come_back_and_long_sequences_do_not_depend_on_heads() -> None:
    """One head is slow at 1024 tokens, since 8 tiles are less than a wave. At 64K it has 512, as 64 heads at 1024."""
    few, many = attention(1024, 1024, 1, CAUSAL), attention(1024, 1024, 64, CAUSAL)
    points = [point(few, 3 * tiled_s(MODEL, few, SMS)), point(many, 1.1 * tiled_s(MODEL, many, SMS))]
    tiled = TiledAttention([MODEL], points, SMS)
    for one in points:
        use = few if one is points[0] else many
        assert tiled.seconds(use, SMS, 1.0) == (pytest.approx(one.median_s), "", 0)
    long = attention(65536, 65536, 1, CAUSAL)
    assert seconds_of(tiled, long) == pytest.approx(1.1 * tiled_s(MODEL, long, SMS))


def test_heads_that_were_measured_with_short_sequences_only_say_nothing_of_long_ones() -> None:
    """Two heads at 1024 tokens took twice their tiles' time, one head there and at 4096 just that."""
    short = point(attention(1024, 1024, 2), 2 * tiled_s(MODEL, attention(1024, 1024, 2), SMS))
    rest = [point(use, tiled_s(MODEL, use, SMS)) for use in (attention(1024, 1024, 1), attention(4096, 4096, 1))]
    tiled = TiledAttention([MODEL], [short, *rest], SMS)
    assert tiled.seconds(attention(1024, 1024, 2), SMS, 1.0) == (pytest.approx(short.median_s), "", 0)
    for tokens in (4096, 32768):
        long = attention(tokens, tokens, 2)
        assert seconds_of(tiled, long) == pytest.approx(tiled_s(MODEL, long, SMS))


def test_lengths_beyond_twice_the_measured_ones_are_said() -> None:
    """Points of 1K and 4K, 8 heads: 512 to 8K are no more than a factor of two away, whatever the number of heads."""
    points = [point(use, tiled_s(MODEL, use, SMS)) for use in (attention(n, n, 8) for n in (1024, 4096))]
    tiled = TiledAttention([MODEL], points, SMS)
    for tokens, doublings in ((512, 0), (4096, 0), (8192, 1)):
        found = tiled.seconds(attention(tokens, tokens, 32), SMS, 1.0)
        assert found
        assert (found.note, found.doublings) == ("", pytest.approx(doublings)), tokens
    for tokens, doublings in ((256, 0), (16384, 2), (2**20, 8)):
        found = tiled.seconds(attention(tokens, tokens, 32), SMS, 1.0)
        assert found
        assert found.note == f"attention_forward full of size {tokens}: beyond the measured range"
        assert found.doublings == pytest.approx(doublings)


def test_any_length_beyond_the_points_has_a_share() -> None:
    """The longest point is found again from a far longer sequence, whatever rounding does to its logarithm."""
    tiled = TiledAttention([MODEL], [point(attention(256, 256, 1), 1e-3)], SMS)
    assert all(tiled.seconds(attention(n * 2**12, n * 2**12, 1), SMS, 1.0) for n in range(1, 400))


def test_faster_sms_other_head_dims_and_types() -> None:
    tiled = TiledAttention([MODEL], [], SMS)
    use = attention(4096, 4096, 8)
    faster = tiled.seconds(use, SMS, 2.0)
    assert faster is not None
    assert faster[0] - MODEL.fixed_s == pytest.approx((tiled_s(MODEL, use, SMS) - MODEL.fixed_s) / 2)
    wide = attention_use(False, "bf16", (1, 4096, 8, 128), 4096, 8, FULL)
    twice = tiled.seconds(wide, SMS, 1.0)
    assert twice is not None
    assert twice[0] - MODEL.fixed_s == pytest.approx(2 * (tiled_s(MODEL, use, SMS) - MODEL.fixed_s))
    assert "rate of head dim 64" in twice[1]
    assert tiled.seconds(use._replace(dtype="fp32"), SMS, 1.0) is None
    assert tiled.seconds(attention(4096, 4096, 8, backward=True), SMS, 1.0) is None
