"""Documents to micro-batches of training steps: by packers, and what a pipeline makes of each packing, played."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from sim.balance.documents import BY_BLOCKS, planned_by
from sim.balance.planners import Attention
from sim.base.errors import InputError
from sim.base.presets import preset_names
from sim.batches.lengths import FOLDER, draw, histogram
from sim.batches.packing import MicroBatch, Work, by_work, concatenated, fixed_length
from sim.batches.statistics import max_over_mean
from sim.schedule.ir.masks import Span, count_pairs, kept_in
from sim.setup.answers.answer import grounds
from sim.setup.answers.rows import of_packings
from sim.setup.answers.table import Table
from sim.setup.names import kept, lengths_of, micro_batches_of, one_of, texts, tokens
from sim.setup.prediction import Prediction
from sim.setup.setup import Setup

WIDER = 2
"""How many times as long as ``seq`` WLB-LLM's micro-batches may be: there it is what memory allows, not published."""


class Packing(NamedTuple):
    """What packers know of a global batch."""

    documents: Sequence[int]
    micro_batches: int
    seq: int
    """Tokens of a micro-batch, on average."""
    work: Work
    """Predicted seconds of a document."""


PACKERS: dict[str, Callable[[Packing], tuple[MicroBatch, ...]]] = {
    "concatenated": lambda given: concatenated(given.documents, given.micro_batches, given.seq),
    "heaviest-first": lambda given: _heaviest_first(PACKERS["concatenated"](given), given.work),
    "fixed-length": lambda given: fixed_length(given.documents, given.micro_batches, given.seq).micro_batches,
    "wlb-llm": lambda given: by_work(given.documents, given.micro_batches, WIDER * given.seq, given.work).micro_batches,
}
"""By name what puts documents into micro-batches (``sim.batches.packing``); what finds no room is not of this step."""


def _heaviest_first(micro_batches: tuple[MicroBatch, ...], work: Work) -> tuple[MicroBatch, ...]:
    """Return them in the order in which a pipeline waits least for unlike ones: long passes beside long ones."""
    return tuple(sorted(micro_batches, key=lambda documents: -math.fsum([work(one.tokens) for one in documents])))


def packed_by(setup: Setup, packer: str = "concatenated") -> Setup:
    """Return a training step whose micro-batches have documents of their own: those of the setup, which are the global
    batch of a replica, put by a packer into as many micro-batches of ``seq`` tokens as the setup has sequences.

    ``documents`` may be the name of a distribution (magi, prolong, wikipedia, wlb-llm), or its file, of which as many
    tokens are drawn, by the seed. Raises InputError for an unknown packer, without documents, and for more tokens than
    there is room for.

    >>> step = Setup("single", seq="8K", pp_degree=2, batch=4, documents="wlb-llm", set={"schedule.micro_batches": 4})
    >>> [sum(documents) for documents in packed_by(step).documents]
    [8192, 8192, 8192, 8192]
    """
    one_of("pack", packer, PACKERS)
    if setup.documents is None:
        raise InputError(f"`pack` {packer} puts documents into micro-batches: set `documents`")
    whole = setup.replace(documents=None).spelled_out()
    seq = tokens("seq", whole.seq)
    documents = drawn(setup.documents, whole.batch * seq, setup.seed, seq) or lengths_of(setup.documents)
    seconds = cache(lambda: document_seconds(setup))  # which some packers never ask for

    def work(size: int) -> float:
        return seconds()(size)

    return with_micro_batches(whole, PACKERS[packer](Packing(documents, whole.batch, seq, work)))


def with_micro_batches(setup: Setup, micro_batches: Sequence[MicroBatch]) -> Setup:
    """Return a step of these micro-batches, whose documents are those of the sequence where there is one; raises
    InputError where one has no document.
    """
    for number, documents in enumerate(micro_batches):
        if not documents:
            raise InputError(
                f"micro-batch {number} of {len(micro_batches)} has no document: set fewer micro-batches, or give more "
                f"`documents`"
            )
    lengths = tuple([tuple([one.tokens for one in documents]) for documents in micro_batches])
    own = lengths if len(lengths) > 1 else lengths[0]
    return setup.replace(documents=own, batch=len(lengths), pad=setup.mask == "causal")


def is_distribution(documents: object) -> bool:
    """Return whether documents are those of a distribution, by name or in a file."""
    return isinstance(documents, str) and (documents in preset_names(FOLDER) or documents.endswith(".toml"))


def drawn(documents: object, num_tokens: int, seed: int, longest: int | None = None) -> tuple[int, ...]:
    """Return so many tokens of documents of a distribution, each cut at ``longest``; none where it is none."""
    return draw(histogram(str(documents)), num_tokens, seed, longest) if is_distribution(documents) else ()


def document_seconds(setup: Setup) -> Work:
    """Return what predicts the seconds of a document in a layer, as WLB-LLM profiles them (arXiv:2503.17924 §4.2):
    attention of its tokens by the length, all else by their number, at the rate of as many as a rank has of ``seq``.
    """
    alone = setup.replace(
        schedule="single", stack=None, scope="layer", layers=1, documents=None, gpus=1, nodes=None, cp=None, batch=1,
        ulysses_degree=None, ring_degree=None, dp_degree=1, pp_degree=1, tp_degree=1, global_batch=None, jitter=0.0,
        pad=False,
    )  # fmt: skip
    alone = dataclasses.replace(alone, set=[text for text in texts(setup.set) if not text.startswith("schedule.")])
    sharing = setup.replace(documents=None).resolved().mesh.sharing
    rows = max(1, tokens("seq", setup.seq) // sharing)
    attention, keeps = Attention(alone.resolved()), kept(setup.mask, setup.window).keeps

    def attends(size: int) -> float:
        queries, keys, pairs = (np.array(column) for column in zip(*_blocks(size, keeps), strict=True))
        return attention.seconds(queries, keys, pairs)

    layer_s = alone.replace(seq=rows).predicted().step_time_s
    of_token_s = max(0.0, layer_s - attends(rows)) / rows
    return lambda size: attends(size) + of_token_s * size


def _blocks(size: int, keeps: Any) -> list[tuple[int, int, int]]:
    """Return queries, keys and pairs of what a document keeps of itself."""
    blocks = kept_in(Span(0, size), keeps)
    return [(one.queries.size, one.keys.size, count_pairs(one.band, one.queries, one.keys)) for one in blocks]


class Played(NamedTuple):
    """One packing of the documents of a step, played."""

    packer: str
    planner: str
    """Of each micro-batch's documents over the ranks that share a sequence."""
    prediction: Prediction
    imbalance: float
    """Of the micro-batches' predicted seconds, the most over the mean (WLB-LLM, Table 2)."""

    @property
    def row(self) -> dict[str, Any]:
        """Its main figures."""
        found, workload = self.prediction.report, self.prediction.checked.schedule.header.workload
        bubbles = [stage.bubbles for stage in found.stages]
        return {
            "packer": self.packer,
            "planner": self.planner,
            "step_time_s": found.step_time_s,
            "tokens_per_s_per_gpu": found.tokens_per_s_per_gpu,
            "imbalance": self.imbalance,
            "bubbles": sum(bubbles) / len(bubbles) if bubbles else 0.0,
            "uneven": found.uneven or 0.0,
            "tokens": workload.num_real_tokens,
            "longest": workload.seq,
            "peak_hbm_bytes": found.peak_hbm_bytes,
            "error": "",
        }


def balance_micro_batches(
    setup: Setup, packers: Sequence[str] = tuple(PACKERS), planners: Sequence[str] = ("all-gather",)
) -> Table:
    """Return what a pipeline makes of the documents of a step by several packers, each played: see ``packed_by``.

    Rows are of every packer, and every planner of documents over the ranks that share a sequence (those of ``balance``;
    none where there is one rank), with ``error`` where one refuses: seconds of a step, tokens a second and GPU, the
    ``imbalance`` of micro-batches, what stages wait for each other (``bubbles``) and how much of that is because
    micro-batches are ``uneven``, both as shares of the step, tokens of the step and of the longest micro-batch, and
    bytes of the rank that needs most.

    >>> step = Setup("ring", layers=2, gpus=2, pp_degree=2, seq="4K", batch=2, documents=(2500, 2500, 1500, 1500))
    >>> step = step.replace(set={"schedule.micro_batches": 2}, seeds=1)
    >>> [(row["tokens"], row["longest"]) for row in balance_micro_batches(step, ["concatenated", "wlb-llm"])]
    [(8000, 4096), (8000, 4000)]
    """
    rows: list[dict[str, Any]] = []
    played: list[Prediction] = []
    work = document_seconds(setup)
    for packer in packers:
        for planner in planners:
            try:
                found = _played(packed_by(setup, packer), packer, planner, work)
            except InputError as refused:
                rows.append({"packer": packer, "planner": planner, **dict.fromkeys(_FIGURES), "error": str(refused)})
                continue
            rows.append(found.row)
            played.append(found.prediction)
    table = Table(rows)
    table.require_any()
    fastest = max(played, key=lambda one: one.figures.tokens_per_s_per_gpu)
    return table.answering(of_packings(rows), grounds(fastest))


_FIGURES = (
    "step_time_s", "tokens_per_s_per_gpu", "imbalance", "bubbles", "uneven", "tokens", "longest", "peak_hbm_bytes",
)  # fmt: skip


def _played(setup: Setup, packer: str, planner: str, work: Work) -> Played:
    assert setup.documents is not None, "packers give each micro-batch some"
    turns = micro_batches_of(setup.documents) or (lengths_of(setup.documents),)
    costs = {size: work(size) for size in {size for documents in turns for size in documents}}
    works = [math.fsum([costs[size] for size in documents]) for documents in turns]
    return Played(packer, planner, sharded_by(setup, planner).predicted(), max_over_mean(works))


def sharded_by(setup: Setup, planner: str) -> Setup:
    """Return a step whose ranks share each micro-batch's documents as a planner of ``balance`` says."""
    if planner in BY_BLOCKS:
        return planned_by(setup.replace(schedule=planner))
    name = {"all-gather": "allgather"}.get(planner, planner)
    return setup.replace(schedule=name)
