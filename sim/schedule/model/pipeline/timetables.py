"""What each stage of a pipeline does, in order: passes of micro-batches through its chunks of layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from sim.schedule.model.step import Item, Timetable


def gpipe(stage: int, _stages: int, micros: int, _chunks: int) -> list[Item]:
    """All micro-batches forward, then all backward, the last one first (arXiv:1811.06965)."""
    forward = [Item("F", micro, stage) for micro in range(micros)]
    return forward + [Item("BW", micro, stage) for micro in reversed(range(micros))]


def one_f_one_b(stage: int, stages: int, micros: int, _chunks: int) -> list[Item]:
    """Forward and backward in turn, once later stages have a micro-batch each (PipeDream-Flush, arXiv:2006.09503;
    arXiv:2104.04473 §2.2.1).
    """
    return _in_turn(
        [Item("F", micro, stage) for micro in range(micros)],
        [Item("BW", micro, stage) for micro in range(micros)],
        stages - stage - 1,
    )


def interleaved(stage: int, stages: int, micros: int, chunks: int) -> list[Item]:
    """Take turns likewise with several chunks a stage, for as many micro-batches at a time as there are stages
    (arXiv:2104.04473 §2.2.2; Megatron-LM core/pipeline_parallel/schedules.py,
    forward_backward_pipelining_with_interleaving).
    """
    at = [
        (turn * stages + micro, chunk)
        for turn in range(micros // stages)
        for chunk in range(chunks)
        for micro in range(stages)
    ]
    return _in_turn(
        [Item("F", micro, chunk * stages + stage) for micro, chunk in at],
        [Item("BW", micro, (chunks - 1 - chunk) * stages + stage) for micro, chunk in at],
        2 * (stages - stage - 1) + (chunks - 1) * stages,
    )


def zero_bubble(stage: int, stages: int, micros: int, chunks: int) -> list[Item]:
    """As 1F1B, with gradients of weights later, by as many micro-batches as there are stages before this one: so they
    fill its wait at the end, and no stage holds more than the first one does (arXiv:2401.10241 §2.1, ZB-H1).
    """
    found: list[Item] = []
    for item in one_f_one_b(stage, stages, micros, chunks):
        found.append(item._replace(kind="B") if item.kind == "BW" else item)
        if item.kind == "BW" and item.micro >= stage:
            found.append(Item("W", item.micro - stage, stage))
    return found + [Item("W", micro, stage) for micro in range(max(micros - stage, 0), micros)]


def _in_turn(forward: list[Item], backward: list[Item], ahead: int) -> list[Item]:
    """Return passes of which so many forward ones are ahead, and then one follows the other."""
    ahead = min(ahead, len(forward))
    pairs = zip(forward[ahead:], backward, strict=False)
    found = [*forward[:ahead], *(item for pair in pairs for item in pair)]
    return found + backward[len(forward) - ahead :]


def in_a_loop(chunk: int, stages: int) -> int:
    """Return which stage a chunk is on where stages take chunks in turn (arXiv:2104.04473 §2.2.2)."""
    return chunk % stages


class Pipeline(NamedTuple):
    """A pipeline schedule by name."""

    timetable: Timetable
    paper: str
    chunks: int | None = 1
    """How many chunks of layers a stage has; None where an option says it."""
    stage_of: Callable[[int, int], int] = in_a_loop
    """Returns which stage a chunk is on: of its number, and of how many stages there are."""
    rounds: bool = False
    """Whether micro-batches go in rounds of as many as there are stages, and so have to divide by these."""

    def last_stage(self, stages: int) -> int:
        """Return which stage the last chunk is on."""
        return self.stage_of((self.chunks or 1) * stages - 1, stages)


PIPELINES: dict[str, Pipeline] = {
    "1f1b": Pipeline(one_f_one_b, "arXiv:2104.04473 §2.2.1"),
    "gpipe": Pipeline(gpipe, "arXiv:1811.06965"),
    "interleaved": Pipeline(interleaved, "arXiv:2104.04473 §2.2.2", chunks=None, rounds=True),
    "zb-h1": Pipeline(zero_bubble, "arXiv:2401.10241 §2.1"),
}
