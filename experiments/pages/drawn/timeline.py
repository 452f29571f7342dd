"""Ops by rank and stream over time, as ``templates/timeline.js.j2`` draws them; of one player, or of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.pages.drawn.charts import Chart, memory
from experiments.pages.drawn.plots import HUES
from sim.accounts.trace import Trace
from sim.base.errors import InputError
from sim.schedule.ir.ops import KINDS, Family

FAMILY_HUES: dict[Family, str] = {
    "attention": "blue",
    "matrix product": "green",
    "norm, rope, SwiGLU": "sky",
    "merge, accumulate": "purple",
    "copy": "orange",
    "transfer": "vermilion",
    "synchronisation": "grey",
    "other": "yellow",
}
"""More hues than these cannot be told apart by everyone."""
DIGITS = 10
"""Decimals of a second in a timeline: finer than any clock, and half the size of all digits."""
_MOST_MOMENTS = 4000
"""Of a memory chart: more cannot be told apart, and each has its text."""


def family_colours() -> dict[str, tuple[int, ...]]:
    """Return the pure colour of each family of op kinds: red, green and blue."""
    return {family: tuple(bytes.fromhex(HUES[hue][0][1:])) for family, hue in FAMILY_HUES.items()}


def of_chrome(name: str, events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the timeline of a Chrome trace that Longstep wrote; raises InputError for another one, with its name."""
    ops = [event["args"] for event in events if event.get("ph") == "X" and "player" in event.get("args", {})]
    if not ops:
        raise InputError(
            f"{name!r} is a Chrome trace that Longstep did not write: expected one of simulate, run or compare "
            f"--trace; what other profilers write is for longstep doctor --trace"
        )
    try:
        return _timeline(ops)
    except KeyError as missing:
        raise InputError(f"{name!r} is a trace of another version, without {missing}: write it again") from None


def of_trace(trace: Trace, ranks: Sequence[int]) -> dict[str, Any]:
    """Return the timeline of some of the ranks that a trace has."""
    return _timeline([{"player": trace.player, **row._asdict()} for rank in ranks for row in trace.of_rank(rank)])


def _timeline(ops: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    players = [player for player in ("simulated", "executed") if any(op["player"] == player for op in ops)]
    found = {player: {(op["rank"], op["op"]): op for op in ops if op["player"] == player} for player in players}
    first = found[players[0]]
    labels = sorted({op["label"] for op in first.values()})
    kinds = sorted({(op["kind"], op["part"]) for op in first.values()})
    label_of = {label: number for number, label in enumerate(labels)}
    kind_of = {kind: number for number, kind in enumerate(kinds)}
    lanes: dict[tuple[int, bool, str], list[tuple[int, int]]] = {}
    for key, op in first.items():
        if all(key in of for of in found.values()):
            lanes.setdefault((op["rank"], op["stream"] != "compute", op["stream"]), []).append(key)
    return {
        "players": players,
        "end_s": max(op["end_s"] for op in ops),
        "kinds": [
            {"name": f"{kind} {part}", "family": KINDS[kind].meta.family if kind in KINDS else "other", "part": part}
            for kind, part in kinds
        ],
        "labels": labels,
        "lanes": [
            {
                "rank": rank,
                "stream": stream,
                "ops": [op for _, op in keys],
                "labels": [label_of[first[key]["label"]] for key in keys],
                "kinds": [kind_of[first[key]["kind"], first[key]["part"]] for key in keys],
                **{player: [_span(found[player][key]) for key in keys] for player in players},
            }
            for (rank, _, stream), keys in sorted(lanes.items())
        ],
    }


def _span(op: Mapping[str, Any]) -> list[float]:
    return [round(op[name], DIGITS) for name in ("posted_s", "begin_s", "end_s")]


def busy(timeline: Mapping[str, Any]) -> list[tuple[str, int, list[float]]]:
    """Return of every op kind how many ops it has, and its seconds at work on all ranks by each player."""
    found = [(kind["name"], [0], [0.0] * len(timeline["players"])) for kind in timeline["kinds"]]
    for lane in timeline["lanes"]:
        for place, kind in enumerate(lane["kinds"]):
            _, count, spent = found[kind]
            count[0] += 1
            for number, player in enumerate(timeline["players"]):
                _, begin, end = lane[player][place]
                spent[number] += end - begin
    return [(name, count[0], spent) for name, count, spent in found]


def memory_charts(events: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """Return a chart for each player with the memory of the rank that needs most, if a trace has counters."""
    process = {event["pid"]: event["args"]["name"] for event in events if event.get("name") == "process_name"}
    samples: dict[tuple[str, str], list[tuple[float, Mapping[str, int]]]] = {}
    for event in events:
        if event.get("ph") == "C":
            key = (process.get(event["pid"], ""), event["name"])
            samples.setdefault(key, []).append((event["ts"] * 1e-6, event["args"]))
    most: dict[tuple[str, str], tuple[int, str]] = {}
    for (rank, name), found in samples.items():
        peak = max(sum(held.values()) for _, held in found)
        player = rank.rpartition(" ")[2]
        most[player, name] = max(most.get((player, name), (-1, "")), (peak, rank), key=lambda one: one[0])
    charts = []
    for (_, name), (peak, rank) in most.items():
        if peak > 0:
            found = _thinned(samples[rank, name])
            kinds = dict.fromkeys(kind for _, held in found for kind in held)
            held = {kind: [int(held.get(kind, 0)) for _, held in found] for kind in kinds}
            about = f"Bytes in use over a step, of the rank that needs most: {rank}"
            charts.append(memory([at for at, _ in found], held, title=f"{name} of {rank}", about=about))
    return charts


def _thinned(samples: list[tuple[float, Mapping[str, int]]]) -> list[tuple[float, Mapping[str, int]]]:
    """Return as many moments as a chart can show: of each group of neighbours the one with most in use."""
    wide = -(-len(samples) // _MOST_MOMENTS)
    groups = (samples[start : start + wide] for start in range(0, len(samples), wide))
    return [max(group, key=lambda sample: sum(sample[1].values())) for group in groups]
