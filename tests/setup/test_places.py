"""The sentence of several rows: who is fastest where, of what fits, and what is not compared."""

from __future__ import annotations

from typing import Any

from sim.setup.answers.places import best, won


def row(seconds: float, *, gpu_tokens: float = 1000.0, **more: Any) -> dict[str, Any]:
    """Return a row whose GPU trains so many tokens in a step."""
    rate = {"tokens_per_s_per_gpu": gpu_tokens / seconds}
    return {"step_time_s": seconds, **rate, "fits": "yes", "bound_by": "compute", "error": "", **more}


def test_each_place_has_its_winner() -> None:
    """Ring is 3 times as long at 64K, and fits alone at 128K; at 256K nothing fits, 512K is refused."""
    rows = [
        row(1.0, seq="64K", schedule="zigzag"), row(3.0, seq="64K", schedule="ring"),
        row(5.0, seq="128K", schedule="zigzag", fits="no"), row(9.0, seq="128K", schedule="ring"),
        row(9.0, seq="256K", schedule="zigzag", fits="no"), row(1.0, seq="512K", schedule="ring", error="too long"),
    ]  # fmt: skip
    assert best(rows, ["seq", "schedule"], "ring") == (
        "Zigzag trains fastest at 64K (1 s a step), ring at 128K (9 s); nothing fits at 256K; nothing can be played at "
        "512K"
    )
    assert [one.row for one in won(rows, ["seq", "schedule"], "ring")] == [0, 3]


def test_one_place_is_answered_like_one_step() -> None:
    rows = [row(1.0, schedule="zigzag", low_s=0.9, high_s=1.2, free_bytes=2**30), row(3.0, schedule="ring")]
    assert best(rows, ["schedule"], "ring") == (
        "Zigzag trains fastest: 1 s a step (0.90 to 1.20 s), 1000 tokens/s/GPU; fits with 1 GiB left; ring takes 3 "
        "times as long"
    )
    assert best([rows[0]], ["schedule"], "ring").startswith("Zigzag takes 1 s a step (0.90 to 1.20 s), ")
    near = [row(1.0, schedule="zigzag"), row(1.0001, schedule="ring"), row(1.0, schedule="usp", fits="no")]
    assert best(near, ["schedule"], "ring").startswith("Zigzag trains fastest of the 2 that fit: ")
    assert best(near, ["schedule"], "ring").endswith("; ring is tied")


def test_steps_of_other_numbers_of_tokens_are_compared_by_token() -> None:
    """Two replicas train twice as many tokens in 1.5 times the time."""
    rows = [row(1.0, cp=8), row(1.5, gpu_tokens=3000.0, cp=4)]
    said = best(rows, ["cp"], "ring")
    assert said.startswith("Ring (cp 4) needs least GPU time for a token: 1.5 s a step, 2000 tokens/s/GPU")
    assert said.endswith("ring (cp 8) takes 2 times as much")


def test_where_nothing_fits_the_nearest_is_named() -> None:
    rows = [row(1.0, schedule=name, fits="no", free_bytes=-free * 2**30) for name, free in (("ring", 3), ("usp", 2))]
    assert best(rows, ["schedule"], "ring") == "None of 2 fits; nearest comes usp: 2 GiB missing"
    at = [{**one, "seq": "1M"} for one in rows]
    assert best(at, ["seq", "schedule"], "ring").endswith("nearest comes usp at 1M: 2 GiB missing")


def test_many_places_are_ends() -> None:
    rows = [row(float(1 + number), **{"cluster.nic.bytes_per_s": f"*{number}"}) for number in range(8)]
    assert best(rows, ["cluster.nic.bytes_per_s"], "ring") == (
        "Ring takes 1 s a step (at cluster.nic.bytes_per_s *0) to 8 s (at cluster.nic.bytes_per_s *7) over 8 places"
    )
