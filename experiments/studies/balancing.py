"""What planners win on batches of documents: batches of each published distribution at 128K on 32 and 64 GPUs.

Published ranges are held against what comes out. Batches are drawn anew, so that no figure is that of a paper's batch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from itertools import combinations
from statistics import mean, median
from typing import Any, NamedTuple

import longstep
from experiments.evidence.workers import workers
from experiments.pages.study_page import Spread, spreads
from experiments.studies.study import Finding
from sim.balance.balance import LOWER_BOUND
from sim.balance.documents import planned_by
from sim.base.units import seconds
from sim.batches.batch import batch
from sim.batches.lengths import draw, histogram, scaled
from sim.batches.packing import Waiting, by_work, concatenated, imbalance, transformer_work
from sim.batches.planners.static import ring
from sim.batches.statistics import statistics, token_bytes
from sim.schedule.derive.matching import wire_bytes
from topology.host import num_cores

QUESTION = "What do planners win on batches of documents of many lengths?"
ANSWER = 4
SEEDS = 10
"""Batches of each distribution on the page; ``--seeds 1`` draws one, in seven minutes of CPU time."""
_TOKENS = 128 * 1024
_DISTRIBUTIONS = ("magi", "prolong", "wikipedia", "wlb-llm")
_MACHINES = ("dgx-a100", "hgx-h100")
_RANKS = (32, 64)
_PLANNERS = ("ring", "zigzag", "all-gather", "wlb-llm", "dcp", "fcp-style")
_STATIC = ("ring", "zigzag", "all-gather", "ulysses")
_LAYER = longstep.Setup(model="llama3-8b", scope="attention", jitter=0.0)

_PUBLISHED_MS = {
    "forward": {
        "ring": (28.29, 52.48, 26.91, 26.82),
        "zigzag": (37.18, 32.04, 29.45, 28.79),
        "double-ring": (19.44, 14.85, 13.09, 10.42),
        "usp": (24.43, 15.49, 14.53, 11.74),
        "dcp": (8.03, 7.00, 8.47, 8.91),
    },
    "both": {
        "ring": (109.13, 131.05, 103.89, 101.92),
        "zigzag": (118.44, 111.92, 105.82, 105.02),
        "double-ring": (63.66, 50.44, 46.86, 37.54),
        "usp": (58.30, 42.24, 39.55, 34.83),
        "dcp": (24.03, 20.69, 24.10, 27.07),
    },
}
"""DCP, arXiv:2510.10620, Fig. 13: attention on LongDataCollections, lengths times each of ``_FACTORS``, of
RingFlashAttention, LoongTrain, TransformerEngine (heads and sequence) and DCP. 32 A100, 8 heads with 2 of keys. The
second bar of ring, 52.48 ms, looks like an outlier.
"""
_EACH = {"schedule.sharding": "document"}
_VARLEN = {**_EACH, "schedule.halves": "host-mask"}
_AS_PUBLISHED: dict[str, dict[str, Any]] = {
    "ring": {"schedule": "ring", "set": _EACH},
    "zigzag": {"schedule": "zigzag", "set": _VARLEN},
    "double-ring": {"schedule": "double-ring", "set": _VARLEN},
    "usp": {
        "schedule": "usp", "ulysses_degree": 2, "ring_degree": 16,
        "set": {**_EACH, "schedule.ring_backward": "kv-at-hand", "schedule.gradients": "model",
                "schedule.messages": "packed-separate"},
    },
}  # fmt: skip
"""As their code has them: every rank has chunks of each document (ring-flash-attention 0.1.8, *_varlen.py, and
TransformerEngine's thd), whose ring starts backward with the keys at hand and sums in the model's data type. Of
LoongTrain no code for documents was at hand: it is taken to take halves as ring-flash-attention does, which was chosen
with the figure known; the page says what slices would take.
"""
_SLICED = "double-ring of slices"
_OTHERWISE: dict[str, dict[str, Any]] = {_SLICED: {"schedule": "double-ring", "set": _EACH}}
"""What that assumption does: no method of the figure, and in no ratio."""
_FACTORS = (0.5, 1.0, 2.0, 4.0)
_DCP_OPERATOR = {"model.num_heads": 8, "model.num_kv_heads": 2, "model.embed_dim": 1024}
_DCP_NICS = {"cluster.nic.bytes_per_s": 4 * 12.5e9 / 8}
"""4 EFA devices of 100 Gb/s a node (p4de), which 8 GPUs share."""
_STAND_IN = "prolong"
"""LongDataCollections has no published histogram."""
_NEAR = 0.25


class _Case(NamedTuple):
    """One batch: of a distribution on so many ranks, or (``factor``) one of DCP's comparison."""

    ranks: int
    distribution: str
    seed: int
    factor: float | None = None


def find(jobs: int | None, seeds: int = SEEDS) -> Finding:
    """Return times over the lower bound by machine, distribution and planner, with verdicts on published ranges."""
    cases = [_Case(ranks, name, seed) for ranks in _RANKS for name in _DISTRIBUTIONS for seed in range(seeds)]
    cases += [_Case(32, _STAND_IN, seed, factor) for factor in _FACTORS for seed in range(seeds)]
    count = min(num_cores() if jobs is None else jobs, len(cases))
    if count == 1:
        found = [_played(case) for case in cases]
    else:
        with workers(count) as pool:
            found = list(pool.map(_played, cases))
    drawn = [row for case, of in zip(cases, found, strict=True) if case.factor is None for row in of]
    compared = [row for case, of in zip(cases, found, strict=True) if case.factor is not None for row in of]
    rows, bars = _summed_up(drawn)
    picture = spreads(
        bars, about="Attention of one layer over the lower bound, by planner: median, least and most over batches",
        x_label="times the lower bound (logarithmic)",
    )  # fmt: skip
    return Finding(" ".join([_what(seeds), *_verdicts(drawn), _of_packing(packing()), _pairs(compared)]), picture, rows)


def _played(case: _Case) -> list[dict[str, Any]]:
    """Return a row for each planner and machine."""
    if case.factor is not None:
        return _compared(case)
    documents = draw(histogram(case.distribution), _TOKENS, case.seed)
    rows: list[dict[str, Any]] = []
    first, second = _MACHINES
    of_first = longstep.balance(_LAYER.replace(cluster=first, gpus=case.ranks), documents, _PLANNERS)
    setup = _LAYER.replace(cluster=second, gpus=case.ranks)
    of_second = longstep.balance(setup, documents, _PLANNERS, play=False)
    at = {"ranks": case.ranks, "distribution": case.distribution, "seed": case.seed}
    rows += [{"cluster": first, **at, **row} for row in of_first.rows if not row["error"]]
    before = {one.planned.planner: one for one in of_first.found}
    for row in of_second.rows:
        if row["error"]:
            continue
        if row["planner"] != LOWER_BOUND:
            row["attention_s"] = _again(setup, documents, row["planner"], before, of_second.found)
        rows.append({"cluster": second, **at, **row})
    rows += [{"cluster": cluster, **at, **row} for cluster, row in _ulysses(case.ranks, documents).items()]
    return rows


def _again(
    setup: longstep.Setup,
    documents: Sequence[int],
    planner: str,
    before: dict[str, Any],
    found: Sequence[Any],
) -> float:
    """Return the time on another machine; a plan that is the same there is proved once."""
    one = next(of for of in found if of.planned.planner == planner)
    same = before.get(planner)
    if same is not None and same.played is not None and same.planned.plan == one.planned.plan:
        return float(same.played.replace(cluster=setup.cluster).step_time_s)
    return float(longstep.balance(setup, documents, [planner]).rows[0]["attention_s"])


def _ulysses(ranks: int, documents: tuple[int, ...]) -> dict[str, dict[str, Any]]:
    """Return Ulysses by machine, with a zigzag ring over what heads do not divide; its shares are those of the ring."""
    setup = _LAYER.replace(
        schedule="usp", gpus=ranks, ulysses_degree=min(ranks, 32), ring_degree=max(1, ranks // 32), seeds=1,
        seq=_TOKENS, documents=documents, cluster=_MACHINES[0],
    )  # fmt: skip
    packed = batch(documents)
    shares = statistics(ring(packed, max(1, ranks // 32), "zigzag"), packed, token_bytes(32, 8, 128, 2))
    played = setup.predicted()
    forward = setup.replace(passes="forward").predicted().checked
    received = wire_bytes(forward.schedule, forward.matching) // ranks
    return {
        cluster: {"planner": "ulysses", "attention_s": played.replace(cluster=cluster).step_time_s,
                  "skew": shares.skew, "received_bytes": received, "planning_s": None}
        for cluster in _MACHINES
    }  # fmt: skip


def _compared(case: _Case) -> list[dict[str, Any]]:
    """Return the times of the methods of DCP's figure."""
    assert case.factor is not None
    documents = draw(scaled(histogram(case.distribution), case.factor), _TOKENS, case.seed, longest=_TOKENS)
    setup = _LAYER.replace(cluster="dgx-a100", gpus=32, set={**_DCP_OPERATOR, **_DCP_NICS})
    planned = planned_by(setup.replace(schedule="dcp", documents=documents, seq=_TOKENS, seeds=1))
    filled = tuple(-(-size // _MULTIPLE) * _MULTIPLE for size in documents)
    rows = []
    for passes in _PUBLISHED_MS:
        only = {"passes": passes} if passes != "both" else {}
        times = {"dcp": planned.replace(**only).predicted().step_time_s}
        for name, how in (_AS_PUBLISHED | _OTHERWISE).items():
            given = {**how, "set": {**_DCP_OPERATOR, **_DCP_NICS, **how["set"]}, **only}
            played = setup.replace(documents=filled, seq=sum(filled), seeds=1, **given)
            times[name] = played.predicted().step_time_s
        rows.append({"factor": case.factor, "passes": passes, **times})
    return rows


_MULTIPLE = 64
"""Chunks are equal, so that each document is filled up to a multiple of two for each of 32 ranks."""


def _summed_up(drawn: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[Spread]]:
    rows: list[dict[str, Any]] = []
    bars = []
    keys = dict.fromkeys((row["cluster"], row["ranks"], row["distribution"], row["planner"]) for row in drawn)
    of = {key: [row for row in drawn if _key(row) == key] for key in keys}
    for key, mine in of.items():
        cluster, ranks, distribution, planner = key
        bound = {row["seed"]: row["attention_s"] for row in of[*key[:3], LOWER_BOUND]}
        times = [row["attention_s"] for row in mine if row["attention_s"] is not None]
        if not times:
            continue
        over = sorted(row["attention_s"] / bound[row["seed"]] for row in mine if row["attention_s"] is not None)
        skews = [row["skew"] for row in mine]
        planning = [row["planning_s"] for row in mine if row["planning_s"] is not None]
        rows.append(
            {"cluster": cluster, "ranks": ranks, "documents": distribution, "planner": planner,
             "attention_s": median(times), "least_s": min(times), "most_s": max(times), "skew": median(skews),
             "most_skew": max(skews), "received_bytes": median(row["received_bytes"] for row in mine),
             "planning_s": median(planning) if planning else None}
        )  # fmt: skip
        where = f"{ranks} {cluster.split('-')[1].upper()}, {distribution}"
        tip = f"{seconds(median(times))}, slowest over mean {median(skews):.2f}"
        bars.append(Spread(where, planner, (over[0], median(over), over[-1]), tip))
    return rows, bars


def _key(row: dict[str, Any]) -> tuple[str, int, str, str]:
    return row["cluster"], row["ranks"], row["distribution"], row["planner"]


def _what(seeds: int) -> str:
    drawn = "1 batch" if seeds == 1 else f"{seeds} batches"
    return (
        f"Attention of one layer of Llama-3-8B, forward and backward, 128K tokens on 32 and 64 A100 and H100, {drawn} "
        f"of each of {len(_DISTRIBUTIONS)} distributions. Slowest over mean is of kernels' seconds (Ulysses: of pairs)."
    )


def _verdicts(drawn: Sequence[dict[str, Any]]) -> list[str]:
    """Return a sentence for each published range."""
    skew: dict[str, list[float]] = {}
    times: dict[tuple[str, int, str, int], dict[str, float]] = {}
    for row in drawn:
        skew.setdefault(row["planner"], []).append(row["skew"])
        if row["attention_s"] is not None:
            at = row["cluster"], row["ranks"], row["distribution"], row["seed"]
            times.setdefault(at, {})[row["planner"]] = row["attention_s"]
    unbalanced = [value for name in ("ring", "zigzag", "all-gather") for value in skew[name]]
    wlb = skew["wlb-llm"]
    reached = sum(one <= 1.05 for one in wlb)
    unevenness = (
        f"Without balancing slowest over mean is {min(unbalanced):.2f} to {max(unbalanced):.2f}, median "
        f"{median(unbalanced):.2f}; published: slowest over fastest up to 1.44, of whole layers with 16 ranks a "
        f"sequence (WLB-LLM, arXiv:2503.17924), so attention alone on more ranks is {_more(median(unbalanced), 1.44)}."
    )
    of_wlb = (
        f"WLB-LLM's sharding has {median(wlb):.2f} ({min(wlb):.2f} to {max(wlb):.2f}), and {reached} of {len(wlb)} "
        f"batches are within 1.05: at so many ranks its shards of short documents waste tiles of queries, so that it "
        f"mostly keeps shards of the sequence."
    )
    found = [unevenness, of_wlb]
    for name, source, low, high in (
        ("dcp", "DCP, arXiv:2510.10620", 1.19, 2.45),
        ("fcp-style", "FCP", 1.13, 2.21),
    ):
        for what, others in (("zigzag ring", ("zigzag",)), (_BEST, _STATIC)):
            faster = [
                min(of[other] for other in others if other in of) / of[name] for of in times.values() if name in of
            ]
            if not faster:
                continue
            inside = sum(low <= one <= high for one in faster)
            found.append(
                f"{name} is {median(faster):.2f} times as fast as {what} ({min(faster):.2f} to {max(faster):.2f}); "
                f"published {low} to {high} ({source}): {inside} of {len(faster)} batches inside, median "
                f"{'inside' if low <= median(faster) <= high else 'outside'}."
            )
    return found


_BEST = (
    "the best static one (all-gather or Ulysses as a rule, which its messages of whole blocks do not beat over NICs)"
)


class _Packing(NamedTuple):
    """Imbalance of whole micro-batches over data-parallel ranks, and how long packing took."""

    plain: float
    balanced: float
    packing_s: float


def packing(batches: int = 24, warm_up: int = 4) -> _Packing:
    """Return means over global batches of 4 micro-batches of 128K tokens, as WLB-LLM has them (arXiv:2503.17924, Table
    2): documents one after the other, and packed by FLOPs of a 7B Llama with two queues of outliers, which fill first.
    """
    work, number = transformer_work(4096, 11008, 4096), 4
    waiting = Waiting(thresholds=(_TOKENS // 8, _TOKENS // 2))
    plain, balanced, taken = [], [], []
    for seed in range(batches):
        documents = draw(histogram("wlb-llm"), number * _TOKENS, seed, longest=_TOKENS)
        plain.append(imbalance(concatenated(documents, number, _TOKENS), work))
        begin = time.process_time()
        packed = by_work(documents, number, 2 * _TOKENS, work, waiting=waiting, arrived=seed)
        taken.append(time.process_time() - begin)
        waiting = packed.waiting
        balanced.append(imbalance(packed.micro_batches, work))
    return _Packing(*(mean(found[warm_up:]) for found in (plain, balanced, taken)))


def _of_packing(found: _Packing) -> str:
    return (
        f"Over 4 data-parallel ranks WLB-LLM's packing lowers the imbalance of whole micro-batches from "
        f"{found.plain:.2f} to {found.balanced:.2f}, in less than {math.ceil(1e3 * found.packing_s)} ms a batch; "
        f"published 1.44 to 1.05 in 8 to 23 ms (GPU seconds there, FLOPs of a 7B Llama here)."
    )


def _more(value: float, published: float) -> str:
    return "more uneven" if value > published else "within it"


def _pairs(compared: Sequence[dict[str, Any]]) -> str:
    """Return how many ratios between methods of DCP's figure come out near."""
    said = []
    for passes, published in _PUBLISHED_MS.items():
        near = dict.fromkeys(("those without DCP", "all"), 0)
        total = dict.fromkeys(near, 0)
        ours: dict[str, list[float]] = {}
        sliced = []
        for at, factor in enumerate(_FACTORS):
            rows = [row for row in compared if row["factor"] == factor and row["passes"] == passes]
            times = {name: mean(row[name] for row in rows) for name in published if all(name in row for row in rows)}
            for name, time_s in times.items():
                ours.setdefault(name, []).append(1e3 * time_s)
            sliced.append(1e3 * mean(row[_SLICED] for row in rows))
            for one, other in combinations(times, 2):
                wanted = published[one][at] / published[other][at]
                for group in near if "dcp" not in {one, other} else ("all",):
                    near[group] += abs(times[one] / times[other] / wanted - 1) <= _NEAR
                    total[group] += 1
        told = ", ".join(f"{name} {_spelled(of)} for {_spelled(published[name])}" for name, of in ours.items())
        verdict = "reached" if near["all"] >= 0.8 * total["all"] else "missed"
        said.append(
            f"{_PASSES[passes]} {near['all']} of {total['all']} ratios between methods are within 25 % (80 % wanted: "
            f"{verdict}), of those without DCP {near['those without DCP']} of {total['those without DCP']}; "
            f"milliseconds simulated for published ones, lengths times {', '.join(f'{one:g}' for one in _FACTORS)}: "
            f"{told}. That double-ring takes halves by host masks is assumed; by slices it takes {_spelled(sliced)}."
        )
    return (
        f"DCP's comparison on 32 A100 with {_STAND_IN} in place of LongDataCollections, whose lengths are not "
        f"published. {' '.join(said)} {_MISSING}"
    )


_PASSES = {"forward": "Forward", "both": "Forward and backward"}
_MISSING = (
    "What decides the rest is not published where it could be read: the lengths of the batches, of which DCP's times "
    "depend most; LoongTrain's code for documents, whose backward pass takes twice as long as simulated, and more; and "
    "what DCP's executor takes for a block."
)


def _spelled(milliseconds: Sequence[float]) -> str:
    return "/".join(f"{one:.1f}" for one in milliseconds)
