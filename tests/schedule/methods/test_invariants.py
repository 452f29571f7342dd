"""Every schedule x every invariant: a new builder is tested by being listed in the catalog, an option as a variant."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import pytest

from sim.accounts.memory import Lifetime, lifetimes, walk
from sim.base.errors import InputError, LengthError
from sim.schedule.derive.show import grid, logical_times
from sim.schedule.ir.ops import COMPUTE, Attend, AttendBackward, Exchange
from sim.schedule.ir.program import Schedule
from sim.schedule.methods.catalog import SCHEDULES
from sim.schedule.proof.check import Checked, check
from sim.setup.setup import Setup
from sim.words.mesh import Mesh
from sim.words.workload import Workload
from tests.helpers import VARIANTS, by_tier, checked_or_refused, make_checked, make_model, slow_but

PARALLEL = [name for name in VARIANTS if VARIANTS[name].schedule != "single"]
RANKS = (1, 2, 3, 4, 8)
HEADS = ((8, 8), (8, 4), (8, 2), (8, 1))
MASKS = ({"mask": "causal"}, {"mask": "full"}, {"mask": "causal", "window": 7})
EVERY = tuple(itertools.product(RANKS, HEADS, MASKS, ("forward", "backward", "both"), (1, 2)))
FEW = tuple(itertools.product(RANKS, ((8, 4), (8, 1)), MASKS, ("both",), (2,)))


def build(
    name: str, ranks: int, heads: tuple[int, int], mask: dict[str, Any], passes: str, batch: int
) -> Checked | None:
    """Return the schedule, or None where it is refused with the values that are allowed."""
    fields: dict[str, Any] = {"seq": 48, "batch": batch, "passes": passes, "dtype": "bf16", **mask}
    return checked_or_refused(name, Workload(model=make_model(*heads), **fields), ranks)


def proved(name: str, *, catalog: int, variants: int) -> list[Checked]:
    """Return schedules, without those that are refused: one of so many cells, of all or of a few for the variants."""
    cells = EVERY[::catalog] if name in SCHEDULES else FEW[::variants]
    return [checked for cell in cells if (checked := build(name, *cell))]


class Some(NamedTuple):
    """A variant, and some of its schedules."""

    name: str
    schedules: list[Checked]


FINENESS = {name: {"catalog": 31, "variants": 13} for name in VARIANTS} | {
    f"more of {name}": {"catalog": 11, "variants": 5} for name in VARIANTS
}


@pytest.fixture(
    scope="module",
    params=slow_but(SCHEDULES, FINENESS),
)
def some(request: pytest.FixtureRequest) -> Some:
    """Every variant in turn; a cell that is not refused by the rules of ``is_refused`` is proved here."""
    name = request.param.removeprefix("more of ")
    return Some(name, proved(name, **FINENESS[request.param]))


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_every_cell_is_proved_or_refused(name: str) -> None:
    assert proved(name, catalog=5, variants=2)


@pytest.mark.sweep
def test_schedules_are_deterministic_and_survive_json(some: Some) -> None:
    assert some.schedules
    for checked in some.schedules[::2]:
        schedule = checked.schedule
        again = VARIANTS[some.name].build(schedule.header.workload, schedule.header.mesh)
        assert again.hash == schedule.hash
        data = schedule.to_json()
        read = Schedule.from_json(data)
        assert read.to_json() == data
        assert read.hash == schedule.hash
        check(read)


@pytest.mark.sweep
def test_an_exchange_lists_its_sends_then_its_receives(some: Some) -> None:
    for checked in some.schedules:
        transfers, of = checked.matching.transfers, checked.matching.transfers_of
        sent = {key: [number for number in numbers if transfers[number].source == key] for key, numbers in of.items()}
        taken = {key: [number for number in numbers if transfers[number].target == key] for key, numbers in of.items()}
        assert of == {key: sent[key] + taken[key] for key in of}
        assert sum(map(len, sent.values())) == sum(map(len, taken.values())) == len(transfers)


@pytest.mark.sweep
def test_buffers_are_freed_and_the_walk_returns_to_what_the_caller_holds(some: Some) -> None:
    for checked in some.schedules:
        for program, dependencies in zip(checked.schedule.programs, checked.dependencies, strict=True):
            spans = lifetimes(program, dependencies)
            outside = {port.view.buffer for port in (*program.inputs, *program.outputs)}
            used_by: list[list[int]] = [[] for _ in spans]
            for index, op in enumerate(program.ops):
                for number in {view.buffer for view in (*op.reads, *op.writes)}:
                    used_by[number].append(index)
            for number, span in enumerate(spans):
                uses = used_by[number]
                assert uses, f"{program.buffers[number].name} is never used"
                if number in outside:
                    assert span.end == len(program.ops)
                elif all(program.ops[index].stream == COMPUTE for index in uses):
                    assert span == Lifetime(uses[0], uses[-1] + 1)
                else:
                    assert span.first == uses[0]
                    assert uses[-1] < span.end
            found = walk(program, dependencies)
            assert found.peak_bytes == max(found.in_use)
            assert sum(found.by_category.values()) == found.peak_bytes


BATCH, SEQ, HEADS_Q, HEADS_KV, DIM, E = 2, 48, 8, 4, 16, 2


def ring_wire(p: int, kv_heads: int = HEADS_KV, *, behind: int = 4, hops: int | None = None) -> int:
    """Over p ranks: KV P-1 hops in each pass, dKV (``behind`` bytes an element) P hops if not said otherwise."""
    kv = 2 * BATCH * SEQ // p * kv_heads * DIM
    return p * (2 * (p - 1) * kv * E + ((p if p > 1 else 0) if hops is None else hops) * kv * behind)


def burst_wire(p: int, behind: int = 4) -> int:
    """Forward as a ring; backward q and dout in the model's type, lse and delta in fp32 P-1 hops, dq P hops."""
    q, rows = BATCH * SEQ // p * HEADS_Q * DIM, BATCH * SEQ // p * HEADS_Q
    kv = 2 * BATCH * SEQ // p * HEADS_KV * DIM
    return p * ((p - 1) * (kv * E + 2 * q * E + 2 * rows * 4) + (p * q * behind if p > 1 else 0))


def traded(u: int, heads: int) -> int:
    """All-to-alls of so many heads of all tokens among u ranks."""
    return heads * BATCH * SEQ * DIM * E * (u - 1) // u


def balanced_wire(p: int, behind: int = 4) -> int:
    """Round t: (P-t) fetched KV and returned dKV; t queries with their results, but none in an even P's last round."""
    rows = BATCH * SEQ // p
    q, kv, lse = rows * HEADS_Q * DIM, 2 * rows * HEADS_KV * DIM, rows * HEADS_Q * 4
    total = 0
    for t in range(1, p // 2 + 1):
        helped = t if 2 * t != p else 0
        total += (p - t) * kv * (E + E + behind) + helped * (2 * q * E + lse + 3 * q * E + lse + q * behind)
    return total


def ulysses_wire(u: int) -> int:
    return 2 * traded(u, 2 * HEADS_Q + 2 * max(HEADS_KV, u))


def upipe_again(u: int) -> int:
    return traded(u, HEADS_Q + 2 * max(HEADS_KV, u))


WIRE: dict[str, Callable[[int], int]] = {
    "single": lambda _: 0,
    "ring": ring_wire,
    "zigzag": ring_wire,
    "striped": ring_wire,
    "burst": lambda p: burst_wire(p, behind=E),
    "double-ring": lambda p: ring_wire(p, hops={1: 0, 2: 2, 4: 4 + 2}[p]),  # inner rings of 1, 2 and 2
    "balanced-ring": balanced_wire,
    "allgather": lambda p: ring_wire(p, behind=E, hops=p - 1),
    "ulysses": ulysses_wire,
    "usp": ulysses_wire,  # no more than 4 ranks: all of them trade heads
    "upipe": lambda p: ulysses_wire(p) + upipe_again(p),
    "zigzag of each document": ring_wire,
    "double-ring of each document": lambda p: ring_wire(p, hops={1: 0, 2: 2, 4: 4 + 2}[p]),
    "usp of each document": lambda p: ulysses_wire(min(p, 2)) + ring_wire(max(p // 2, 1), hops=max(p // 2, 1) - 1),
    "ring from the KV at hand": lambda p: ring_wire(p, hops=p - 1),
    "ring, queries travel": lambda p: burst_wire(p, behind=E),
    "ring, no overlap": ring_wire,
    "zigzag from the KV at hand": lambda p: ring_wire(p, behind=E, hops=p - 1),
    "striped from the KV at hand": lambda p: ring_wire(p, hops=p - 1),
    "striped, queries travel": burst_wire,
    "ring, packed": ring_wire,
    "ring, messages apart": ring_wire,
    "zigzag as TransformerEngine": lambda p: ring_wire(p, behind=E, hops=p - 1),
    "zigzag as torch": lambda p: ring_wire(p, kv_heads=HEADS_Q),
    "burst, packed and apart": lambda p: burst_wire(p, behind=E),
    "double ring, packed and apart": lambda p: ring_wire(p, hops={1: 0, 2: 2, 4: 4 + 2}[p]),
    "usp, messages apart": lambda p: ulysses_wire(min(p, 2)) + ring_wire(max(p // 2, 1)),
    "double ring of stripes": lambda p: ring_wire(p, hops={1: 0, 2: 2, 4: 4 + 2}[p]),
    "double ring of single ranks": ring_wire,
    "double ring, no overlap": lambda p: ring_wire(p, behind=E),  # in one node: one ring
    "balanced ring, no overlap": lambda p: balanced_wire(p, behind=E),
    "allgather of slices": lambda p: ring_wire(p, hops=p - 1),
    "ulysses, packed": ulysses_wire,
    "ulysses, async": ulysses_wire,
    "ulysses, the host waits": ulysses_wire,
    "usp of 2": lambda p: ulysses_wire(min(p, 2)) + ring_wire(max(p // 2, 1)),
    "usp, sums as published": lambda p: ulysses_wire(min(p, 2)) + ring_wire(max(p // 2, 1)),
    "usp of 4": ulysses_wire,
    "usp of 1": ring_wire,
    "usp, rings inside": lambda p: ulysses_wire(min(p, 2)) + ring_wire(max(p // 2, 1)),
    "usp, queries travel": lambda p: ulysses_wire(min(p, 2)) + burst_wire(max(p // 2, 1)),
    "upipe over rings": lambda p: (
        ulysses_wire(min(p, 2)) + upipe_again(min(p, 2)) + ring_wire(max(p // 2, 1), kv_heads=HEADS_Q)
    ),
    "upipe, kept": ulysses_wire,
    "fpdt": ulysses_wire,
    "fpdt in chunks": ulysses_wire,
    "fpdt on the GPU": ulysses_wire,
    "fpdt as published": ulysses_wire,
    "upipe of 1": lambda p: ring_wire(p, kv_heads=HEADS_Q),
    "standard attention": lambda _: 0,
    "memory-efficient attention": lambda _: 0,
}
"""What all ranks together send of a batch of 2 x 48 tokens, 8:4 heads of 16 in bf16, forward and backward."""


@pytest.mark.sweep
@pytest.mark.parametrize("name", VARIANTS)
def test_claims_follow_the_papers(name: str) -> None:
    """FLOPs 2*S*(S+1)*H*D forward under a causal mask and 2.5 times that backward; bytes as each paper has them."""
    causal = BATCH * 2 * SEQ * (SEQ + 1) * HEADS_Q * DIM * 7 // 2
    every = BATCH * SEQ * SEQ * HEADS_Q * DIM
    flops = {"standard attention": every * (4 + 8), "memory-efficient attention": every * (4 + 10)}
    for ranks in (1, 2, 4):
        checked = build(name, ranks, (HEADS_Q, HEADS_KV), {"mask": "causal"}, "both", BATCH)
        if checked is None:
            assert VARIANTS[name].schedule == "single"
            continue
        claims = checked.schedule.header.claims
        assert claims is not None
        assert claims.attention_flops == flops.get(name, causal)
        assert claims.wire_bytes == WIRE[name](ranks)


def test_replicas_of_heads_are_charged() -> None:
    """8 ranks, 2 key/value heads: each of k, v, dk and dv travels as 8 heads."""
    checked = build("ulysses", 8, (8, 2), {"mask": "causal"}, "both", BATCH)
    assert checked is not None
    assert checked.schedule.header.claims is not None
    assert checked.schedule.header.claims.wire_bytes == 2 * traded(8, 2 * 8 + 2 * 8)


def test_the_ring_attends_only_to_what_the_mask_keeps() -> None:
    checked = build("ring", 4, (8, 4), {"mask": "causal"}, "both", 1)
    assert checked is not None
    for program in checked.schedule.programs:
        assert sum(isinstance(op, Attend) for op in program.ops) == program.rank + 1
        assert sum(isinstance(op, AttendBackward) for op in program.ops) == program.rank + 1


@pytest.mark.parametrize("name", ["zigzag", "double-ring", "usp of 1", "burst"])
def test_zigzag_gives_every_rank_the_same_work(name: str) -> None:
    """One kernel a step on every rank, and exactly the same FLOPs of attention on all."""
    checked = build(name, 4, (8, 4), {"mask": "causal"}, "both", 1)
    assert checked is not None
    work = {sum(use.flops for use in uses if use and "attention" in use.kernel) for uses in checked.kernels}
    attends = [sum(isinstance(op, Attend) for op in program.ops) for program in checked.schedule.programs]
    assert len(work) == 1
    assert attends == [4] * 4


def test_striped_blocks_are_triangles() -> None:
    """With the diagonal where the source is not ahead, without it (one row and one column less) where it is."""
    checked = build("striped", 4, (8, 4), {"mask": "causal"}, "forward", 1)
    assert checked is not None
    for program in checked.schedule.programs:
        sizes = [op.q.shape[1] for op in program.ops if isinstance(op, Attend)]
        assert sizes == [12] * (program.rank + 1) + [11] * (3 - program.rank)


@pytest.mark.parametrize(
    ("name", "forward", "backward", "behind"),
    [("ring", 1, 1, 0), ("zigzag", 1, 1, 0), ("ring from the KV at hand", 1, 1, 1), ("burst", 1, 1, 0)],
)
def test_rings_hop_as_often_as_published_code(name: str, forward: int, backward: int, behind: int) -> None:
    """P-1 hops of what travels in each pass; of its gradients P, or P-1 from the KV at hand."""
    for ranks in (2, 3, 8):
        checked = build(name, ranks, (8, 4), {"mask": "full"}, "both", 1)
        assert checked is not None
        ops = [op for op in checked.schedule.program(0).ops if isinstance(op, Exchange)]
        labels = {part: [op.label for op in ops if op.part == part] for part in ("forward", "backward")}
        assert len(labels["forward"]) == ranks - forward
        hops_behind = [label for label in labels["backward"] if label.startswith("send d")]
        assert len(labels["backward"]) - len(hops_behind) == ranks - backward
        assert len(hops_behind) == ranks - behind


def test_helpers_idle_in_the_last_round_of_an_even_ring() -> None:
    """P = 4: in round 1 rank 0 helps rank 3; in round 2 ranks 2 and 3 attend to 0 and 1, which do nothing."""
    checked = build("balanced-ring", 4, (8, 4), {"mask": "causal"}, "forward", 1)
    assert checked is not None
    labels = [[op.label for op in program.ops if isinstance(op, Attend)] for program in checked.schedule.programs]
    assert labels == [
        ["attend own", "attend for q3"],
        ["attend own", "attend kv0"],
        ["attend own", "attend kv1", "attend kv0"],
        ["attend own", "attend kv2", "attend kv1"],
    ]


def test_upipe_needs_room_for_few_heads() -> None:
    """Beside the rank's own tokens, Ulysses keeps q, k, v of its heads; UPipe those of one stage, if it sends again."""
    fields: dict[str, Any] = {"model": make_model(32, 32), "seq": 512, "dtype": "bf16"}
    peaks = {}
    for name in ("ulysses", "upipe", "upipe, kept"):
        checked = make_checked(name, Workload(**fields), 4)
        peaks[name] = walk(checked.schedule.program(0), checked.dependencies[0]).peak_bytes
    heads = 3 * 512 * 32 // 4 * 16 * 2  # q, k, v of all tokens and a rank's heads
    assert peaks["ulysses"] - peaks["upipe"] > heads / 2
    assert peaks["upipe, kept"] - peaks["upipe"] > heads / 2


@pytest.mark.parametrize("name", by_tier({"zigzag", "ulysses", "upipe"}, {*SCHEDULES} - {"single"}, PARALLEL))
def test_what_communication_holds_does_not_grow_with_layers(name: str) -> None:
    """Also on ranks that pass keys on without attending to them."""
    peaks = []
    for layers in (2, 5):
        fields: dict[str, Any] = {"scope": "layer", "layers": layers, "dtype": "bf16", "passes": "forward"}
        checked = checked_or_refused(name, Workload(model=make_model(8, 4), seq=64, **fields), 4)
        assert checked is not None
        held = [
            sum(
                program.buffers[number].nbytes * (span.end == len(program.ops))
                for number, span in enumerate(lifetimes(program, dependencies))
                if program.buffers[number].category in {"communication", "repartition"}
            )
            for program, dependencies in zip(checked.schedule.programs, checked.dependencies, strict=True)
        ]
        peaks.append(held)
    assert peaks[0] == peaks[1]


@pytest.mark.parametrize("name", VARIANTS)
def test_programs_are_built_lazily(name: str) -> None:
    variant = VARIANTS[name]
    ranks = 1 if variant.schedule == "single" else 4
    workload = Workload(model=make_model(8, 8), seq=48)
    schedule = variant.build(workload, variant.mesh(ranks, workload.model))
    assert not schedule._programs
    schedule.program(ranks - 1)
    assert list(schedule._programs) == [ranks - 1]


@pytest.mark.sweep
@pytest.mark.parametrize("name", slow_but(SCHEDULES, VARIANTS))
def test_the_grid_shows_every_op_once(name: str) -> None:
    checked = build(name, 1 if VARIANTS[name].schedule == "single" else 4, (8, 4), {"mask": "causal"}, "both", 1)
    assert checked is not None
    waits = [found.waits for found in checked.dependencies]
    times = logical_times(checked.schedule, checked.matching, waits)
    for program, found in zip(checked.schedule.programs, waits, strict=True):
        for index, needed in enumerate(found):
            assert all(times[program.rank, other] < times[program.rank, index] for other in needed)
    ranks = list(range(checked.schedule.num_ranks))
    shown = grid(checked.schedule, times, ranks)
    words = [word for row in shown for cell in row for word in cell.split(" ") if word]
    assert len(words) == sum(len(program.ops) for program in checked.schedule.programs)


@pytest.mark.parametrize("name", SCHEDULES)
def test_options_that_a_schedule_has_no_use_for_are_refused(name: str) -> None:
    unused = {"single": "layout", "ring": "placement", "ulysses": "layout"}.get(name, "kernel")
    value = {"layout": "zigzag", "placement": "ring-inner", "kernel": "standard"}[unused]
    selection = Setup(schedule=name, cluster="hgx-h100", gpus=1, set=(f"schedule.{unused}={value}",), scope="attention")
    with pytest.raises(InputError, match=f"schedule '{name}' has no option {unused}: it takes .*activations"):
        selection.resolved()


def test_the_nearest_lengths_divide() -> None:
    """Ulysses over 3 of a zigzag of 2: 4 chunks, 6 shares."""
    workload = Workload(model=make_model(6, 6), seq=100)
    mesh = Mesh(ulysses=3, ring=2)
    with pytest.raises(LengthError, match="no multiple of 12: the nearest are 96 or 108") as error:
        SCHEDULES["usp"].schedule(workload, mesh)
    assert error.value.above == 108
    check(SCHEDULES["usp"].schedule(msgspec.structs.replace(workload, seq=108), mesh))


def test_padding_is_refused_where_others_would_see_it() -> None:
    with pytest.raises(InputError, match="under a causal mask the last tokens may be padding"):
        Workload(model=make_model(8, 8), seq=48, padding=3, mask="full")
