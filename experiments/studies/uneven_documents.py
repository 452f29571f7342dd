"""What uneven documents cost a pipeline: training steps of drawn documents, by how these come into micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from contextlib import nullcontext
from functools import cache
from typing import Any, NamedTuple

import longstep
from experiments.evidence.workers import workers
from experiments.pages.study_page import Line, lines
from experiments.studies.study import Finding
from sim.balance.micro_batches import PACKERS, WIDER, Packing, document_seconds, with_micro_batches
from sim.batches.lengths import draw, histogram
from sim.batches.packing import MicroBatch, Waiting, Work, by_work, imbalance
from topology.host import num_cores

QUESTION = "What do uneven documents cost a pipeline, and what do packers win?"
_SEQ = 2**17
_STEP = longstep.Setup(
    "ulysses", model="llama3-8b", cluster="hgx-h100", seq=_SEQ, ulysses_degree=2, layers=16, jitter=0.0, yes=True,
    set={"model.vocab_size": "32768"},
)  # fmt: skip
_COUNTS = {4: (4, 8, 16, 32), 8: (8, 16, 32)}
"""Micro-batches of a step, by stages."""
_PACKERS = ("concatenated", "heaviest-first", "fixed-length", "WLB-LLM")
_DISTRIBUTION, _WARM_UP, _BATCHES = "wlb-llm", 4, 24
_PLAYED = 32
"""Micro-batches that are played of each cell at least, in steps of consecutive global batches, two or more."""


class _Cell(NamedTuple):
    packer: str
    stages: int
    micro_batches: int


class _Step(NamedTuple):
    """A step to play, and how often it comes."""

    micro_batches: tuple[MicroBatch, ...]
    weight: int


def find(jobs: int | None) -> Finding:
    """Return what stages wait longer than for equal micro-batches, against their number, by packer and stages."""
    cells = [_Cell(packer, stages, count) for stages in _COUNTS for packer in _PACKERS for count in _COUNTS[stages]]
    count = num_cores() if jobs is None else jobs
    with workers(count) if count > 1 else nullcontext() as pool:
        rows = list(pool.map(_row, cells)) if isinstance(pool, Executor) else list(map(_row, cells))
    named = [(f"{packer}, {stages} stages", packer, stages) for stages in _COUNTS for packer in _PACKERS]
    series = [
        Line(name, [_point(row) for row in rows if (row["packer"], row["stages"]) == (packer, stages)])
        for name, packer, stages in named
    ]
    picture = lines(
        series, about="Share of a step that a pipeline waits longer than for equal micro-batches",
        x_label="micro-batches of a step", y_label="lost to uneven ones, %", x_name=lambda number: f"{number:.0f}",
    )  # fmt: skip
    return Finding(_conclusion(rows), picture, rows)


def _point(row: dict[str, Any]) -> tuple[float, float, str]:
    lost = 100 * row["uneven"]
    tip = f"{row['micro_batches']} micro-batches, slowest over mean {row['imbalance']:.2f}: {lost:.1f} % of the step"
    return float(row["micro_batches"]), max(0.0, lost), tip


def _row(cell: _Cell) -> dict[str, Any]:
    """Return the means over the steps of a cell, each as often as it comes."""
    packer, stages, count = cell
    setup = _STEP.replace(pp_degree=stages, gpus=2 * stages, batch=count, set={"schedule.micro_batches": count})
    work = cache(document_seconds(setup))
    steps = _steps(packer, count, work)
    taken_s = tokens = work_s = uneven_s = bubbles_s = heaviest = 0.0
    for micro_batches, weight in steps:
        report = with_micro_batches(setup, micro_batches).predicted().figures
        stages_s = [stage.bubbles * report.step_time_s for stage in report.stages]
        taken_s += weight * report.step_time_s
        lengths = [one.tokens for documents in micro_batches for one in documents]
        tokens, work_s = tokens + weight * sum(lengths), work_s + weight * sum(map(work, lengths))
        uneven_s += weight * (report.uneven or 0.0) * report.step_time_s
        bubbles_s += weight * sum(stages_s) / len(stages_s)
        heaviest += weight * imbalance(micro_batches, work)
    return {
        "packer": packer, "stages": stages, "micro_batches": count,
        "tokens_per_s_per_gpu": tokens / taken_s / 2 / stages, "work_per_s": work_s / taken_s,
        "imbalance": heaviest / sum(step.weight for step in steps), "uneven": uneven_s / taken_s,
        "bubbles": bubbles_s / taken_s,
    }  # fmt: skip


def _steps(packer: str, count: int, work: Work) -> list[_Step]:
    """Return steps of consecutive global batches behind some whose outliers fill WLB-LLM's queues; of that packer one
    of those that have outliers and one of those that have none, each as often as there are such.
    """
    batches = [draw(histogram(_DISTRIBUTION), count * _SEQ, seed, longest=_SEQ) for seed in range(_BATCHES)]
    if packer != "WLB-LLM":
        some = batches[_WARM_UP : _WARM_UP + max(2, _PLAYED // count)]
        return [_Step(PACKERS[packer](Packing(documents, count, _SEQ, work)), 1) for documents in some]
    by_outliers: dict[bool, list[tuple[MicroBatch, ...]]] = {True: [], False: []}
    waiting = Waiting(thresholds=(_SEQ // 8, _SEQ // 2))  # two queues, as in its Table 2
    for number, documents in enumerate(batches):
        packed = by_work(documents, count, WIDER * _SEQ, work, waiting=waiting, arrived=number)
        waiting = packed.waiting
        if number >= _WARM_UP:
            longest = max(one.tokens for micro_batch in packed.micro_batches for one in micro_batch)
            by_outliers[longest > _SEQ // 2].append(packed.micro_batches)
    return [_Step(of[0], len(of)) for of in by_outliers.values() if of]


def _conclusion(rows: Sequence[dict[str, Any]]) -> str:
    of = {(row["packer"], row["stages"], row["micro_batches"]): row for row in rows}
    few, many = min(_COUNTS), max(_COUNTS)

    def span(packer: str, name: str, scale: float = 1.0) -> str:
        values = [scale * row[name] for row in rows if row["packer"] == packer]
        digits = 1 if scale > 1 else 2
        return f"{min(values):.{digits}f} to {max(values):.{digits}f}"

    def times(packer: str, stages: int, count: int) -> float:
        """Return how many times as fast it does the same work: other documents are cut, or wait."""
        own, other = (of[one, stages, count]["work_per_s"] for one in (packer, "concatenated"))
        return float(own / other)

    def all_times(packer: str) -> str:
        ratios = [times(packer, stages, count) for stages, counts in _COUNTS.items() for count in counts]
        return f"{min(ratios):.2f} to {max(ratios):.2f}"

    lost = {packer: f"{span(packer, 'uneven', 100)} %" for packer in _PACKERS}
    least, most = _COUNTS[few][0], _COUNTS[few][-1]
    at_most = {stages: f"{100 * of['concatenated', stages, most]['uneven']:.1f} %" for stages in _COUNTS}
    begin = _COUNTS[many][0]
    first_of = {count: f"{100 * of['heaviest-first', many, count]['uneven']:.1f} %" for count in (begin, most)}
    return (
        f"Half of Llama-3-8B's layers with a vocabulary of 32K, in {few} and {many} stages of two H100 (Ulysses), "
        f"1F1B, {least} to {most} micro-batches of 128K tokens, documents as WLB-LLM has them. Documents one behind "
        f"the other cost {lost['concatenated']} of a step, at {most} micro-batches {at_most[few]} of {few} stages "
        f"and {at_most[many]} of {many}; packed by WLB-LLM {lost['WLB-LLM']}, and the same work is done "
        f"{all_times('WLB-LLM')} times as fast. The heaviest micro-batch takes {span('concatenated', 'imbalance')} "
        "times the mean, since attention to one long document takes longer than all else; with WLB-LLM, by "
        "predicted seconds, of unlike lengths, and with long documents that wait until each micro-batch has one, "
        f"{span('WLB-LLM', 'imbalance')} times. The same micro-batches with the heaviest first cost "
        f"{first_of[begin]} of {many} stages at {begin} of them and {first_of[most]} at {most}, "
        f"{all_times('heaviest-first')} times as fast: long passes then run beside long ones. Whole documents, "
        f"balanced at a fixed length, cost {lost['fixed-length']}: no cut makes a long one lighter "
        f"({span('fixed-length', 'imbalance')} times the mean), but they come the longest first, too. Of {few} "
        f"stages and micro-batches WLB-LLM is {times('WLB-LLM', few, least):.2f} times as fast; published 1.28, of a"
        " 7B model with as many (arXiv:2503.17924, Fig. 13). Its longest micro-batches have twice as many tokens, "
        "which memory has to hold, and tokens of long documents come some steps late."
    )


ANSWER = 1
