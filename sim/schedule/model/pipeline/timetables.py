"""What each stage of a pipeline does, in order: passes of micro-batches through its chunks of layers."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Literal, NamedTuple

from sim.base.errors import InputError
from sim.schedule.model.step import Item, Timetable


def gpipe(stage: int, stages: int, micros: int, _chunks: int) -> list[Item]:
    """All micro-batches forward, then all backward, the last one first (arXiv:1811.06965)."""
    return looped_bfs(stage, stages, micros, 1)


def looped_bfs(stage: int, stages: int, micros: int, chunks: int) -> list[Item]:
    """As GPipe, with several chunks a stage: all micro-batches pass one before the next (breadth first,
    arXiv:2211.05953 §4; torch's ScheduleLoopedBFS).
    """
    forward = [Item("F", micro, chunk) for chunk in range(stage, chunks * stages, stages) for micro in range(micros)]
    return forward + [item._replace(kind="BW") for item in reversed(forward)]


def one_f_one_b(stage: int, stages: int, micros: int, _chunks: int) -> list[Item]:
    """Forward and backward in turn, once later stages have a micro-batch each (PipeDream-Flush, arXiv:2006.09503;
    arXiv:2104.04473 §2.2.1).
    """
    return _in_turn(stage, stages, micros, 1, stages - stage - 1)


def interleaved(stage: int, stages: int, micros: int, chunks: int) -> list[Item]:
    """Do the same with several chunks a stage, in rounds of as many micro-batches as there are stages (arXiv:2104.04473
    §2.2.2; Megatron-LM core/pipeline_parallel/schedules.py, forward_backward_pipelining_with_interleaving).

    Raises InputError where micro-batches do not make equal rounds.
    """
    return _in_turn(stage, stages, micros, chunks, 2 * (stages - stage - 1))


def zero_bubble(stage: int, stages: int, micros: int, _chunks: int) -> list[Item]:
    """As 1F1B, with gradients of weights later, by as many micro-batches as there are stages before this one: so they
    fill its wait at the end, and no stage holds more than the first one does (arXiv:2401.10241 §2.1, ZB-H1).
    """
    return interleaved_zero_bubble(stage, stages, micros, 1)


def zero_bubble_h2(stage: int, stages: int, micros: int, _chunks: int) -> list[Item]:
    """As ZB-H1, with another forward pass ahead for each later stage, which fill the wait for the first gradient, and
    gradients of weights by two micro-batches later for each stage before this one, which fill the wait for the last
    gradients. So stages end one after the other, as they begin, and none waits where forward passes, gradients of
    inputs and those of weights take equally long (arXiv:2401.10241 §2.2, ZB-H2).
    """
    return _weights_later(_in_turn(stage, stages, micros, 1, 2 * (stages - stage - 1)), 2 * stage)


def interleaved_zero_bubble(stage: int, stages: int, micros: int, chunks: int) -> list[Item]:
    """ZB-H1 with several chunks a stage, in the order of interleaved 1F1B (torch's ScheduleInterleavedZeroBubble).

    Raises InputError as ``interleaved`` does, where there are several chunks.
    """
    return _weights_later(_in_turn(stage, stages, micros, chunks, stages - stage - 1), stage)


def zero_bubble_v(stage: int, stages: int, micros: int, _chunks: int) -> list[Item]:
    """Two chunks a stage, which a micro-batch passes down and up again: the first stage has the loss (arXiv:2401.10241
    §6, ZB-V; torch's ScheduleZBVZeroBubble). No stage waits, and none holds more than the first one of 1F1B, where
    forward passes, gradients of inputs and those of weights take equally long.
    """
    before, behind, filled = stage, stages - stage - 1, max(micros, 2 * stages - 1)
    order = (
        "F0 " * (2 * behind + 1)
        + "F1 F0 " * before
        + "F1 B1 W1 " * (behind + 1)
        + "F0 B0 W0 F1 B1 W1 " * (filled - stages - behind)
        + "B0 W0 F1 B1 W1 " * behind
        + "B0 B1 " * before
        + "B0 W0 " * (behind + 1)
        + "W1 " * before
        + "W0 " * before
    )
    return [item for item in _numbered(order, stage, stages) if item.micro < micros]


def dual_pipe_v(stage: int, stages: int, micros: int, _chunks: int) -> list[Item]:
    """DualPipe (arXiv:2412.19437 §3.2.1) cut in half: chunks as ZB-V has them, passes of both ways side by side
    (DualPipeV of deepseek-ai/DualPipe; torch's ScheduleDualPipeV). Such a pair is forward, then backward here.

    Raises InputError for fewer micro-batches than chunks.
    """
    _require_both_ways("dualpipe-v", stages, micros)
    before, behind = stage + 1, stages - stage - 1
    order = (
        "F0 " * (2 * behind)
        + "F0 F1 " * before
        + "B1 W F1 " * behind
        + "F0 BW1 F1 BW0 " * (micros - 2 * stages + before)
        + "BW1 F1 BW0 " * behind
        + "BW1 BW0 " * (before // 2)
        + "BW1 B0 " * (before % 2)
        + "B1 B0 " * (before // 2)
        + "W B0 " * behind
        + "W " * before
    )
    return _numbered(order, stage, stages)


def dual_pipe(stage: int, stages: int, micros: int, _chunks: int) -> list[Item]:
    """Two copies of each chunk, on stages that mirror each other, so that half of all micro-batches go each way: those
    of the first half begin at the first stage, the others at the last one. Each half of the stages is a V of the
    chunks of both ways (arXiv:2412.19437 §3.2.1; deepseek-ai/DualPipe dualpipe.py, step). A pair is as in DualPipeV.

    Raises InputError for an odd number of stages or of micro-batches, and for fewer of these than two a stage.
    """
    if stages % 2 or micros % 2:
        raise InputError(
            f"dualpipe over {stages} stages with {micros} micro-batches: expected even numbers of both, as half of the "
            f"micro-batches go each way through stages that mirror each other: set `pp_degree` {stages + stages % 2} "
            f"and `set` schedule.micro_batches={micros + micros % 2}, or choose dualpipe-v"
        )
    _require_both_ways("dualpipe", stages, micros)
    items = dual_pipe_v(min(stage, stages - stage - 1), stages // 2, micros // 2, 2)
    return [item if item.chunk == stage else item._replace(micro=item.micro + micros // 2) for item in items]


def _require_both_ways(name: str, stages: int, micros: int) -> None:
    """Raise InputError for fewer micro-batches than fill stages both ways."""
    if micros < 2 * stages:
        raise InputError(
            f"{name} over {stages} stages takes {2 * stages} micro-batches or more, not {micros}: `set` "
            f"schedule.micro_batches={2 * stages}, or fewer stages"
        )


def _in_turn(stage: int, stages: int, micros: int, chunks: int, ahead: int) -> list[Item]:
    """Return passes in which backward follows forward in turn, once so many forward passes through the last chunk are
    ahead.
    """
    size = _round(stages, micros) if chunks > 1 else micros
    at = [
        (first + micro, chunk) for first in range(0, micros, size) for chunk in range(chunks) for micro in range(size)
    ]
    forward = [Item("F", micro, chunk * stages + stage) for micro, chunk in at]
    backward = [Item("BW", micro, (chunks - 1 - chunk) * stages + stage) for micro, chunk in at]
    ahead = min((chunks - 1) * size + ahead, len(forward))
    pairs = zip(forward[ahead:], backward, strict=False)
    found = [*forward[:ahead], *(item for pair in pairs for item in pair)]
    return found + backward[len(forward) - ahead :]


def _round(stages: int, micros: int) -> int:
    """Return how many micro-batches pass a chunk before the first of them goes on to the next one: as many as there are
    stages, or a few more where those do not divide all (torch's ScheduleInterleaved1F1B).
    """

    def whole(many: int) -> bool:
        return many % max(many // stages, 1) == 0

    if not whole(micros):
        below = next(many for many in range(micros, 0, -1) if whole(many))
        above = next(many for many in itertools.count(micros) if whole(many))
        raise InputError(
            f"{micros} micro-batches over {stages} stages: expected equal rounds of {stages} or more where a stage has "
            f"several chunks: the nearest are {below} or {above}; `set` schedule.micro_batches={above}"
        )
    return micros // max(micros // stages, 1)


def _weights_later(items: list[Item], late: int) -> list[Item]:
    """Return passes whose gradients of weights follow those of inputs that are so many micro-batches later."""
    found: list[Item] = []
    left: list[Item] = []
    for item in items:
        if item.kind == "BW":
            found.append(item._replace(kind="B"))
            left.append(item._replace(kind="W"))
            if len(left) > late:
                found.append(left.pop(0))
        else:
            found.append(item)
    return found + left


def _numbered(order: str, stage: int, stages: int) -> list[Item]:
    """Return passes that a text lists by kind and chunk, 0 on the way down and 1 on the way up: each is of the next
    micro-batch. W alone is of that micro-batch, of both chunks, which waits longest for it.
    """
    chunks = {"0": stage, "1": 2 * stages - 1 - stage}
    found: list[Item] = []
    left: list[Item] = []
    seen = Counter[str]()
    for word in order.split():
        if word[0] == "W":
            item = next(item for item in left if word == "W" or item.chunk == chunks[word[1]])
            left.remove(item)
        else:
            which = word[0] + word[-1]
            item = Item("F", seen[which], chunks[word[-1]])
            seen[which] += 1
            if word[:-1] == "B":
                item = item._replace(kind="B")
                left.append(item._replace(kind="W"))
            elif word[:-1] == "BW":
                item = item._replace(kind="BW")
        found.append(item)
    return found


def in_a_loop(chunk: int, stages: int) -> int:
    """Return which stage a chunk is on where stages take chunks in turn (arXiv:2104.04473 §2.2.2)."""
    return chunk % stages


def as_v(chunk: int, stages: int) -> int:
    """Return which stage a chunk is on where chunks go down the stages, and up again (arXiv:2401.10241 §6)."""
    return min(chunk, 2 * stages - 1 - chunk)


class Rounds(NamedTuple):
    """Passes that repeat while all stages are busy, so that each further round takes as long as the one before.

    That passes repeat follows from their order (``tests/schedule/model/test_timetables.py``). Where micro-batches go
    two ways, or chunk by chunk, waits between stages change for some rounds more. With these factors steps that were
    tried are told within 1e-12; of looped-bfs and of ZB-V over two stages within 2e-3
    (``tests/plan/test_pipelines.py``).
    """

    before: int = 1
    """How many micro-batches there are for each stage before rounds repeat."""
    each: int | None = 1
    """How many micro-batches a round has; None for as many as there are stages."""

    def of(self, stages: int) -> tuple[int, int]:
        """Return how many micro-batches come before rounds repeat, and how many each has."""
        return self.before * stages, self.each or stages


class Pipeline(NamedTuple):
    """A pipeline schedule by name."""

    timetable: Timetable
    paper: str
    chunks: int | None = 1
    """How many chunks of layers a stage has; None where an option says it."""
    stage_of: Callable[[int, int], int] = in_a_loop
    """Returns which stage a chunk is on: of its number, and of how many stages there are."""
    copies: Literal[1, 2] = 1
    """How many copies of each chunk there are: a second one is on the stage that mirrors the first one's, for the
    second half of the micro-batches."""
    rounds: Rounds | None = Rounds()
    """Those that repeat; None where nothing is known of them."""

    def last_stage(self, stages: int) -> int:
        """Return which stage the last chunk is on."""
        return self.stage_of((self.chunks or 1) * stages - 1, stages)


PIPELINES: dict[str, Pipeline] = {
    "1f1b": Pipeline(one_f_one_b, "arXiv:2104.04473 §2.2.1"),
    "gpipe": Pipeline(gpipe, "arXiv:1811.06965"),
    "looped-bfs": Pipeline(looped_bfs, "arXiv:2211.05953 §4", None, rounds=Rounds(2)),
    "interleaved": Pipeline(interleaved, "arXiv:2104.04473 §2.2.2", None, rounds=Rounds(each=None)),
    "zb-h1": Pipeline(zero_bubble, "arXiv:2401.10241 §2.1"),
    "zb-h2": Pipeline(zero_bubble_h2, "arXiv:2401.10241 §2.2", rounds=Rounds(3)),
    "interleaved-zb": Pipeline(interleaved_zero_bubble, "arXiv:2401.10241 §2.1", None, rounds=Rounds(each=None)),
    "zb-v": Pipeline(zero_bubble_v, "arXiv:2401.10241 §6", 2, as_v, rounds=Rounds(3)),
    "dualpipe": Pipeline(dual_pipe, "arXiv:2412.19437 §3.2.1", copies=2, rounds=Rounds(3, 2)),
    "dualpipe-v": Pipeline(dual_pipe_v, "arXiv:2412.19437 §3.2.1", 2, as_v, rounds=Rounds(3)),
}
"""Those that ship, by name."""
