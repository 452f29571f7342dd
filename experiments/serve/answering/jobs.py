"""What a worker does for a page, by name: each job takes data of its own type and yields parts of its answer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from experiments.evidence.results import Result
from experiments.pages.drawn.tables import table
from experiments.pages.drawn.timeline import busy, of_trace
from experiments.pages.report.report_page import page
from experiments.serve.answering.atlas import Atlas, cells
from experiments.serve.answering.dropped import Drawn, File, drawn, read
from experiments.serve.answering.offers import offers
from experiments.serve.answering.played import Player, all_figures, first_figures
from experiments.serve.answering.question import Question, Variant, said_of, setup_of
from experiments.serve.answering.shown import answered, compared, figures, plain, row_of, whole
from sim.base.errors import InputError, LongstepError, TooLargeError
from sim.base.presets import converted
from sim.base.units import FEW, length, seconds, size
from sim.compare.portions import COLUMNS, Row
from sim.plan.longest import longest
from sim.plan.search.branches import least_limits, least_of
from sim.setup.configuration import Configuration
from sim.setup.effort import Effort, effort_of
from sim.setup.prediction import Prediction
from sim.setup.setup import Setup
from sim.setup.spelled import command_of, python_of

BUDGET_S, BUDGET_BYTES = 10.0, 2.0e9
"""What an answer may take, by its estimate, without being asked for anyway."""
_LONG_S = 0.9
"""From where on a step is first bounded; the estimate has the proof in it, which is left out here. Also up to where a
rank's share of a step is, which is bounded where all of it is refused."""
_NOISE_S = 3.0
"""From where on a step is first played without noise: with it all ranks are played, several times."""
MOST_TOKENS = 2**24
"""Up to which the longest context is looked for."""
MOST_PINNED = 8
_MOST_OPS = 60_000
"""Of a timeline: a page draws no more at once."""
_KEPT_ROWS = 256

Part = dict[str, Any]


class Ask(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A question; ``anyway`` also where it takes longer than the budget."""

    question: Question
    anyway: bool = False


class Timeline(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A question, and how many of its ranks are drawn."""

    question: Question
    ranks: Annotated[int, Meta(ge=1, le=16)] = 2


class Compare(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Variants to be laid side by side."""

    variants: Annotated[tuple[Variant, ...], Meta(min_length=1, max_length=MOST_PINNED + 1)]


class Jobs:
    """Does jobs one after the other, and keeps what the last ones came to."""

    def __init__(self) -> None:
        self._player = Player()
        self._rows: OrderedDict[bytes, Row] = OrderedDict()

    def parts(self, job: str, payload: object) -> Iterator[Part]:
        """Yield the parts of an answer; what is wrong with a question is a part, too."""
        try:
            one = JOBS[job]
            asked = converted(payload, one.takes, "the question", "change it on the page", strict=True)
            yield from one.run(self, asked)
        except LongstepError as error:
            yield _wrong(error)
        except MemoryError:
            yield _broken("this machine has too little memory for it")
        except Exception as error:  # noqa: BLE001 - whatever a question breaks, the next one is answered
            yield _broken(
                f"Longstep broke on this question, which is a fault of its own: {type(error).__name__}: {error}"
            )

    def forget(self) -> None:
        """Keep no schedule but the latest."""
        self._player.forget()

    def ask(self, asked: Ask) -> Iterator[Part]:
        """Yield the parts of an answer: bounds of what takes long and its step without noise, then figures, the
        sentence, what bounds the step, and what else may be chosen. A question that is refused gets its bounds, where
        one rank does not take long, and choices.
        """
        setup = setup_of(asked.question, yes=asked.anyway)
        yield {"part": "spelled", **_spelled(asked.question)}
        found = setup.resolved()
        yield from self._told(asked, setup, found)
        yield from ({"part": "offers", **some} for some in offers(setup, found))

    def _told(self, asked: Ask, setup: Setup, found: Configuration) -> Iterator[Part]:
        """Yield all that is said of the question itself."""
        taken = effort_of(found.asked)
        is_step = found.workload.scope == "step"
        if taken and not asked.anyway and not _is_in_budget(taken):
            yield {"part": "refused", **_refused(found, taken)}
            if is_step and taken.seconds < _LONG_S * found.mesh.size:
                with suppress(InputError):  # then it says nothing of a rank
                    yield {"part": "bounded", **_draft(setup, taken)}
            return
        if taken and is_step and taken.seconds > _LONG_S and not self._player.has(found):
            yield {"part": "draft", **_draft(setup, taken)}
        try:
            if taken and is_step and taken.seconds > _NOISE_S and found.jitter.share:
                yield {"part": "near", **_near(self._player.steady_s(found), len(found.jitter.each()))}
            prediction = self._player.prediction(found)
        except InputError as error:
            yield _wrong(error)
            return
        first = first_figures(prediction)
        yield {"part": "figures", **figures(prediction, first)}
        yield {"part": "answer", **answered(prediction)}
        last = all_figures(prediction, first)
        yield {"part": "whole", **whole(prediction, last)}
        self._keep(asked.question, row_of(prediction, last))

    def longest(self, asked: Ask) -> Iterator[Part]:
        """Yield the longest context that fits, as ``ladder`` finds it."""
        setup = setup_of(asked.question, yes=asked.anyway)
        if setup.scope != "step" or setup.documents is not None:
            why = "of training steps without documents alone"
            yield {"part": "longest", "tokens": None, "said": f"the longest context is known {why}"}
            return
        tokens = longest(setup, MOST_TOKENS)
        said = length(tokens) if tokens else "none"
        yield {"part": "longest", "tokens": tokens, "said": f"{said}{' or more' * (tokens == MOST_TOKENS)}"}

    def timeline(self, asked: Timeline) -> Iterator[Part]:
        """Yield the ops of some ranks over time, as far as a page can draw them."""
        prediction = self._player.prediction(setup_of(asked.question).resolved())
        trace = prediction.trace
        ranks, ops = list[int](), 0
        for rank, (begin, end) in enumerate(zip(trace.ops.starts, trace.ops.starts[1:], strict=False)):
            ops += end - begin
            if len(ranks) == asked.ranks or (ranks and ops > _MOST_OPS):
                break
            ranks.append(rank)
        found = of_trace(trace, ranks)
        rows = [{"op_kind": name, "ops": count, "work_s": spent} for name, count, (spent,) in busy(found)]
        yield {
            "part": "timeline", "timeline": found, "table": plain(table("op kinds of these ranks", rows)),
            "ranks": len(ranks), "of": trace.num_ranks,
        }  # fmt: skip

    def compare(self, asked: Compare) -> Iterator[Part]:
        """Yield variants side by side."""
        yield {"part": "compared", **compared([self._row(one) for one in asked.variants])}

    def export(self, asked: Compare) -> Iterator[Part]:
        """Yield the report page of some variants: all of them side by side, then each by itself."""
        rows = [{"schedule": one.name, **_without(self._row(one), "variant")} for one in asked.variants]
        results = [Result("pinned", "rows", rows)]
        for one in asked.variants:
            with_figures = self._whole(one.question)
            if with_figures:
                command = command_of(said_of(one.question))
                results.append(Result(one.name, "simulate", _simulated(with_figures), command, with_figures.answer))
        yield {"part": "page", "page": page("Pinned questions", results)}

    def atlas(self, asked: Atlas) -> Iterator[Part]:
        """Yield the cells of a map as they are found, coarse to fine."""
        for cell in cells(asked):
            yield {"part": "cell", **cell}

    def read(self, file: File) -> Iterator[Part]:
        """Yield the question that a dropped file makes of the present one."""
        yield {"part": "read", **read(file)}

    def drawn(self, asked: Drawn) -> Iterator[Part]:
        """Yield the question with documents of a distribution."""
        yield {"part": "read", **drawn(asked)}

    def _row(self, variant: Variant) -> Row:
        """Return the row of a variant, which is played where it is not kept; what cannot be played says why."""
        row = self._rows.get(_key(variant.question))
        if row is None:
            try:
                self._whole(variant.question)
                row = self._rows[_key(variant.question)]
            except InputError as error:
                row = {**dict.fromkeys(COLUMNS), "error": str(error)}
        return {"variant": variant.name, **row}

    def _whole(self, question: Question) -> Prediction | None:
        """Return the prediction of a question with all of its figures, and keep its row; None where it takes longer
        than the budget.
        """
        found = setup_of(question).resolved()
        taken = effort_of(found.asked)
        if taken and not _is_in_budget(taken):
            raise TooLargeError(_refused(found, taken)["said"])
        prediction = self._player.prediction(found)
        self._keep(question, row_of(prediction, all_figures(prediction, first_figures(prediction))))
        return prediction

    def _keep(self, question: Question, row: Row) -> None:
        self._rows[_key(question)] = row
        while len(self._rows) > _KEPT_ROWS:
            self._rows.popitem(last=False)


class _Job(NamedTuple):
    """What a job takes, and who does it."""

    takes: Any
    run: Callable[[Jobs, Any], Iterator[Part]]


JOBS: Mapping[str, _Job] = {
    "ask": _Job(Ask, Jobs.ask),
    "longest": _Job(Ask, Jobs.longest),
    "timeline": _Job(Timeline, Jobs.timeline),
    "compare": _Job(Compare, Jobs.compare),
    "export": _Job(Compare, Jobs.export),
    "atlas": _Job(Atlas, Jobs.atlas),
    "read": _Job(File, Jobs.read),
    "drawn": _Job(Drawn, Jobs.drawn),
}


def _wrong(error: LongstepError) -> Part:
    return {"part": "error", "error": str(error), "fields": list(getattr(error, "fields", ()))}


def _broken(said: str) -> Part:
    return {"part": "error", "error": said, "fields": []}


def _spelled(question: Question) -> dict[str, str]:
    """Return a question as a command and as Python."""
    setup = said_of(question)
    return {"command": command_of(setup), "python": python_of(setup)}


def _is_in_budget(taken: Effort) -> bool:
    return taken.seconds <= BUDGET_S and taken.memory_bytes <= BUDGET_BYTES


def _refused(found: Configuration, taken: Effort) -> dict[str, str]:
    what = f"{found.schedule} of {found.mesh.size} ranks: about {taken}"
    budget = f"beyond the {BUDGET_S:g} s or {BUDGET_BYTES / 1e9:g} GB that a page spends without being told to"
    return {"said": f"{what}, {budget}", "estimate": str(taken)}


def _draft(setup: Setup, taken: Effort) -> dict[str, Any]:
    """Return what one rank says of a step that takes long to play: what it cannot be below, and its memory."""
    least_s, limits = least_of(setup).step_s, least_limits(setup)
    tightest = min(limits, key=lambda limit: limit.free_bytes)
    free = f"{size(abs(tightest.free_bytes), FEW)} of the {tightest.memory} {_left(tightest.free_bytes)}"
    ranks = "one rank" if setup.pp_degree == 1 else "one rank a stage"
    said = f"At least {seconds(least_s, FEW)} a step, by the kernels and transfers of {ranks}; about {free}"
    return {"least_s": least_s, "said": said, "takes": f"all of it takes about {seconds(taken.seconds, 2)} of a core"}


def _near(steady_s: float, plays: int) -> dict[str, Any]:
    """Return what a play without noise says of a step."""
    said = f"About {seconds(steady_s, FEW)} a step, by a play without noise"
    return {"steady_s": steady_s, "said": said, "takes": f"{plays} plays with noise follow"}


def _left(nbytes: int) -> str:
    return "left" if nbytes >= 0 else "missing"


def _simulated(prediction: Prediction) -> dict[str, Any]:
    data: dict[str, Any] = msgspec.to_builtins(prediction.report)
    return data


def _key(question: Question) -> bytes:
    return msgspec.json.encode(question, order="deterministic")


def _without(row: Row, key: str) -> Row:
    return {name: value for name, value in row.items() if name != key}
