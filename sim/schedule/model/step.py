"""What a rank does in a step, as a list: passes of micro-batches through chunks of layers, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from sim.schedule.ir.ops import COMPUTE, Hold, HostSync
from sim.schedule.ir.program import Program
from sim.schedule.model.outside import Entry, Exit
from sim.schedule.model.passes import LayerWriter
from sim.schedule.model.scope import Unit
from sim.schedule.model.weights.params import Params
from sim.schedule.model.write import Values
from sim.schedule.write.builder import ProgramBuilder


class Item(NamedTuple):
    """One pass of a micro-batch through a chunk of layers."""

    kind: Literal["F", "BW", "B", "W"]
    """Forward, or backward: with gradients of inputs and of weights, with those of inputs first and those of weights
    later (arXiv:2401.10241 §2). Gradients at the ends of a step are made with those of inputs."""
    micro: int
    chunk: int
    """Its number in the model."""

    @property
    def onward(self) -> int:
        """How many chunks later the one is that it hands its result to: 0 where it hands on none."""
        return {"F": 1, "BW": -1, "B": -1, "W": 0}[self.kind]


Timetable = Callable[[int, int, int, int], list[Item]]
"""Returns what a stage does, in order: of its number, and how many stages, micro-batches and chunks a stage there
are."""


class Chunk(NamedTuple):
    """Layers that follow each other, of one rank, and what they stand between."""

    layers: tuple[Unit, ...]
    ends: Callable[[], tuple[Entry, Exit]]
    """Makes the ends of a micro-batch, when its forward pass begins."""
    first: tuple[Unit, ...] = ()
    """Weights of the end of the model before these layers, where there is one."""
    last: tuple[Unit, ...] = ()
    """And of the one behind them."""

    def order(self, kinds: str) -> tuple[Unit, ...]:
        """Return which weights passes need, in order: forward all; backward those of layers again, and those of both
        ends where they are one, since what a head needs backward stays.
        """
        backward = (*(one for one in self.last if one in self.first), *self.layers[::-1])
        passed = {"F": (*self.first, *self.layers, *(one for one in self.last if one not in self.first)), "B": backward}
        return tuple([unit for kind in kinds for unit in passed.get(kind, ())])


class StepWriter(NamedTuple):
    """Writes the program of one rank."""

    b: ProgramBuilder
    chunks: Mapping[int, Chunk]
    """Those of this rank, by number."""
    kinds: tuple[tuple[LayerWriter, ...], ...]
    """What writes layers of each of the model's kinds, which take turns; by the forms of sequences."""
    params: Params
    micro_batches: int = 1
    waits: bool = False
    """Whether the host waits before each further micro-batch."""
    rotary_table: bool = False
    before: Callable[[int], None] = lambda _: None
    """Appends what comes before the pass at a position in the timetable."""

    def program(self, items: Sequence[Item]) -> Program:
        """Return the program that does what a timetable says; its passes forward alone where the workload has no
        others.
        """
        b, holds = self.b, self._stays()
        for hold in holds:
            b.add(hold)
        ends: dict[tuple[int, int], tuple[Entry, Exit]] = {}
        left: dict[tuple[int, Unit], Values] = {}
        begins: list[int] = []
        for at, (kind, micro, number) in enumerate(items):
            begins.append(b.num_ops)
            chunk = self.chunks[number]
            self.before(at)
            self._begin(items, at)
            b.take(micro, self.micro_batches, "forward" if kind == "F" else "backward")
            if kind == "F":
                if self.waits and micro:
                    b.add(HostSync(label="wait for the micro-batch", streams=(COMPUTE,)))
                entry, exit_ = ends[micro, number] = chunk.ends()
                view = entry.forward()
                for layer, unit in self._each(chunk.layers):
                    view = layer.forward(micro, unit, view)
                exit_.forward(view)
            elif b.workload.backward:
                if kind == "W":
                    for layer, unit in self._each(chunk.layers[::-1]):
                        layer.backward_of_weights(unit, left.pop((micro, unit)))
                else:
                    entry, exit_ = ends.pop((micro, number))
                    view = exit_.backward()
                    for layer, unit in self._each(chunk.layers[::-1]):
                        if kind == "BW":
                            view = layer.backward(micro, unit, view)
                        else:
                            view, left[micro, unit] = layer.backward_of_inputs(micro, unit, view)
                    entry.backward(view)
                self.params.end_pass()
        begins.append(b.num_ops)
        if b.workload.backward:
            self.params.update()
        for hold in holds:
            b.add(hold)
        return b.build(begins)

    def _stays(self) -> list[Hold]:
        """Return what holds the buffers that are there from the first op to the last."""
        b, found = self.b, list[Hold]()
        if self.rotary_table:
            model = b.workload.model
            shape = (b.workload.seq, model.rotary_dims or model.head_dim)
            table = b.buffer("rotary table", "sd", shape, b.sum_dtype, "other")
            found.append(Hold(label="keep the rotary table", held=(table,)))
        if b.standing:
            found.append(Hold(label="keep what is gathered into", held=tuple(b.standing.values())))
        return found

    def _begin(self, items: Sequence[Item], at: int) -> None:
        """Say which weights a pass needs, and one that turns around the backward pass that follows it at once, too."""
        if at and _turns(*items[at - 1 : at + 1]):
            return
        turns = at + 1 < len(items) and _turns(*items[at : at + 2])
        self.params.begin(self.chunks[items[at].chunk].order("FB" if turns else items[at].kind[0]))

    def _each(self, layers: Iterable[Unit]) -> Iterator[tuple[LayerWriter, Unit]]:
        """Yield layers with the writer of their kind, whose workload the builder has meanwhile."""
        whole, kinds = self.b.workload, self.kinds[self.b.form]
        for unit in layers:
            self.b.workload = whole.of_layer(unit.layer)
            yield kinds[unit.layer % len(kinds)], unit
        self.b.workload = whole


def _turns(item: Item, following: Item) -> bool:
    """Return whether a backward pass follows the forward pass of the same micro-batch at once."""
    return item.kind == "F" and following.kind in {"BW", "B"} and item[1:] == following[1:]
