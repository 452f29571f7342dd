"""How evenly a batch of documents is attended: what each planner gives every rank, and predicted seconds of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.balance.planners import MOST_TASKS, PLANNERS, Attention, asked_of, playing
from sim.base.errors import InputError
from sim.batches.batch import Batch, batch
from sim.batches.lower_bound import lower_bound
from sim.batches.planned import Planned
from sim.batches.planners.static import permuted
from sim.batches.seconds import Floats, attention_seconds
from sim.batches.statistics import Statistics, TokenBytes, max_over_mean, statistics
from sim.setup.answers.answer import Grounds, as_html, as_text, grounds
from sim.setup.answers.rows import of_balance
from sim.setup.answers.table import Table
from sim.setup.effort import require_few
from sim.setup.names import kept, one_of
from sim.setup.prediction import Prediction
from sim.setup.setup import Setup

OWN = "own layout"
"""What a layout of the user's is called."""
LOWER_BOUND = "lower bound"


class Balanced(NamedTuple):
    """What a planner gives every rank. P ranks, T divisions (hops of a ring)."""

    planned: Planned
    statistics: Statistics
    seconds: Floats
    """(P, T): predicted seconds of attention kernels, forward and backward, one launch a division each."""
    played: Prediction | None
    """Forward and backward with all transfers, by the schedule of that name or the one that plays plans; None where it
    was not asked for.
    """

    @property
    def row(self) -> dict[str, Any]:
        """Its main figures."""
        per_rank = self.seconds.sum(axis=1)
        return {
            "planner": self.planned.planner,
            "attention_s": self.played and self.played.step_time_s,
            "slowest_s": float(per_rank.max()),
            "mean_s": float(per_rank.mean()),
            "skew": max_over_mean(per_rank),
            "pairs_skew": self.statistics.skew,
            "token_skew": self.statistics.token_skew,
            "received_bytes": int(self.statistics.received_bytes.max()),
            "planning_s": self.planned.planning_s,
            "error": "",
        }

    @property
    def by_rank(self) -> list[dict[str, Any]]:
        """A row for every rank: tokens, pairs, bytes received forward, seconds."""
        found = self.statistics
        columns = (found.tokens, found.pairs.sum(axis=1), found.received_bytes, self.seconds.sum(axis=1))
        names = ("tokens", "pairs", "received_bytes", "seconds")
        return _rows("rank", names, columns)

    @property
    def by_hop(self) -> list[dict[str, Any]]:
        """A row for every division: pairs and bytes of all ranks, seconds of the slowest and of the mean one."""
        found = self.statistics
        received = (found.kv_bytes + found.query_bytes + found.out_bytes).sum(axis=0)
        columns = (found.pairs.sum(axis=0), received, self.seconds.max(axis=0), self.seconds.mean(axis=0))
        return _rows("hop", ("pairs", "received_bytes", "slowest_s", "mean_s"), columns)


def _rows(what: str, names: Sequence[str], columns: Sequence[NDArray[Any]]) -> list[dict[str, Any]]:
    return [
        {what: number, **dict(zip(names, values, strict=True))}
        for number, values in enumerate(zip(*(column.tolist() for column in columns), strict=True))
    ]


class Balance(NamedTuple):
    """One batch by several planners."""

    batch: Batch
    mask: str
    """What each document keeps of itself."""
    ranks: int
    found: list[Balanced]
    rows: Table
    """Of every planner, in the order asked, with ``error`` where one refuses the batch; then the lower bound. Times in
    seconds: ``attention_s`` with all transfers, ``slowest_s`` and ``mean_s`` of kernels; ``skew`` is the slowest rank
    over the mean, of seconds, pairs and tokens; bytes are those that the rank receives forward that receives most."""
    notes: list[str]
    """How much the batch was padded, and which plans are too large to be simulated."""
    extrapolated: list[str]
    """What the predicted seconds of kernels rest on, where the profile has nothing near."""
    grounds: Grounds | None = None
    """What the step of the fastest planner rests on; None where none was simulated."""

    @property
    def answer(self) -> str:
        """What it says in one sentence: which planner attends the batch fastest, and how far others are behind."""
        return of_balance(self.rows.rows, OWN, LOWER_BOUND)

    @property
    def rests_on(self) -> list[str]:
        """What that rests on, in three lines at most."""
        return self.grounds.lines if self.grounds else []

    def __repr__(self) -> str:
        return as_text(self.answer, str(self.rows), self.rests_on)

    def _repr_html_(self) -> str:
        return as_html(self.answer, self.rows._repr_html_(), self.rests_on)


def of_several(batches: int, rows: Sequence[dict[str, Any]]) -> str:
    """Return the same sentence of several batches, by the medians of their rows."""
    medians = []
    for planner in dict.fromkeys(row["planner"] for row in rows):
        mine = [row for row in rows if row["planner"] == planner and not row["error"]]
        figures = {name: [row[name] for row in mine if row[name] is not None] for name in _FIGURES}
        middle = {name: float(np.median(values)) if values else None for name, values in figures.items()}
        medians.append({"planner": planner, "error": "" if mine else "of all batches", **middle})
    return of_balance(medians, OWN, LOWER_BOUND, batches)


def balance(
    setup: Setup,
    documents: Sequence[int],
    planners: Sequence[str] = tuple(PLANNERS),
    *,
    mask: str | None = None,
    order: Sequence[int] | None = None,
    play: bool = True,
) -> Balance:
    """Return how evenly ranks attend documents of these lengths, packed in this order into one sequence.

    Model, data type, cluster, GPUs and profile are those of the setup, whose length is that of the batch. ``mask`` is
    what each document keeps of itself, as ``Setup.mask`` is, by default that of the setup. ``order`` is a layout of
    your own: all positions of the sequence as a framework shards them. With ``play`` each plan is simulated: ring,
    zigzag, striped and all-gather by the schedules of these names, WLB-LLM and layouts of your own over gathered keys
    (``methods/allgather``), others by messages of the blocks that their tasks need (``methods/planned``). But for an
    ``order`` of your own, the batch is padded to a multiple of two tokens for each rank. Raises
    InputError for documents without tokens, an ``order`` that is no permutation, an unknown planner, or a mask that is
    none.

    >>> found = balance(Setup(model="llama3-8b", cluster="hgx-h100", gpus=4), [6144, 1024, 1024], ["ring", "zigzag"])
    >>> [round(row["pairs_skew"], 2) for row in found.rows]
    [2.11, 1.68, 1.0]
    """
    for name in planners:
        one_of("planner", name, PLANNERS)
    if mask is not None:
        setup = setup.replace(mask=mask, window=None)
    keeps = kept(setup.mask, setup.window)
    size = setup.replace(schedule="ring", stack=None).resolved().mesh.size
    require_few(planners, len(documents), size, plays=play, yes=setup.yes)
    packed = batch(list(documents), keeps.keeps)
    asked = asked_of(setup, packed)
    padding = 0 if order is not None else -packed.num_tokens % (2 * asked.ranks)
    if padding:
        packed = batch([*documents, padding], keeps.keeps)
        asked = asked_of(setup, packed)
    ranks, per_token, attention = asked.ranks, asked.per_token, asked.attention
    plans: list[tuple[str, Callable[[], Planned]]] = [
        (name, partial(PLANNERS[name], packed, asked)) for name in planners
    ]
    if order is not None:
        own = permuted(packed, order, ranks)._replace(planner=OWN)
        plans.insert(0, (OWN, lambda: own))
    balanced, rows, unplayed = [], [], list[str]()
    if padding:
        unplayed.append(
            f"{padding} tokens of padding, a document by themselves, make {packed.num_tokens}: a multiple of two "
            f"for each of {ranks} ranks"
        )
    for name, plan in plans:
        try:
            planned = plan()
        except InputError as refused:
            rows.append({"planner": name, **dict.fromkeys(_FIGURES), "error": str(refused)})
            continue
        why = _too_large(planned, packed)
        if play and why:
            unplayed.append(why)
        played = _played(setup, planned, packed) if play and not why else None
        balanced.append(
            Balanced(
                planned,
                statistics(planned, packed, per_token),
                attention_seconds(planned, packed, attention.seconds),
                played,
            )
        )
        rows.append(balanced[-1].row)
    rows.append(_bound(packed, ranks, per_token, attention))
    steps = [one.played for one in balanced if one.played]
    of_fastest = grounds(min(steps, key=lambda one: one.step_time_s)) if steps else None
    return Balance(packed, keeps.name, ranks, balanced, Table(rows), unplayed, attention.notes, of_fastest)


_FIGURES = (
    "attention_s",
    "slowest_s", "mean_s", "skew", "pairs_skew", "token_skew", "received_bytes", "planning_s",
)  # fmt: skip


def _too_large(planned: Planned, packed: Batch) -> str:
    """Return why a plan is not simulated, which would take minutes to build; empty where it is."""
    if planned.planner == "striped":  # each rank has some of every rectangle, and meets those of every other
        count, what = len(packed.rectangles) * len(planned.plan.layout) ** 2, "rectangles that stripes meet"
    elif planned.planner in _SCHEDULES:
        return ""
    else:
        count, what = sum(map(len, planned.plan.tasks)), "tasks"
    if count <= MOST_TASKS:
        return ""
    return f"{planned.planner} has {count} {what}: counted and not simulated; at most {MOST_TASKS} are"


def _played(setup: Setup, planned: Planned, packed: Batch) -> Prediction:
    """Return one step of attention by a plan."""
    return setup.replace(
        schedule=_SCHEDULES.get(planned.planner) or playing(planned), stack=None, scope="attention", pad=False,
        documents=packed.documents, seeds=setup.seeds or 1,
    ).predicted()  # fmt: skip


_SCHEDULES = {"ring": "ring", "zigzag": "zigzag", "striped": "striped", "all-gather": "allgather"}
"""Planners that are schedules, too, by their names there."""


def _bound(packed: Batch, ranks: int, per_token: TokenBytes, attention: Attention) -> dict[str, Any]:
    """Return the row of what no plan can beat: an equal share of the pairs in one block without a mask."""
    least = lower_bound(packed, ranks, per_token)
    side = max(1, math.isqrt(int(least.pairs)))
    square = np.array([side])
    seconds = attention.seconds(square, square, square * square)
    figures = {
        "attention_s": seconds,
        "slowest_s": seconds,
        "mean_s": seconds,
        "skew": 1.0,
        "pairs_skew": 1.0,
        "token_skew": 1.0,
    }
    return {
        "planner": LOWER_BOUND,
        **figures,
        "received_bytes": int(least.received_bytes),
        "planning_s": None,
        "error": "",
    }
