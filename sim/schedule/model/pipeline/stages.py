"""The stages of a model: which layers each has, and what hands activations and their gradients on between them."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from functools import cached_property, partial
from itertools import product
from typing import NamedTuple

from sim.base.errors import InputError, unknown
from sim.schedule.ir.layout import num_tokens
from sim.schedule.ir.masks import Tokens
from sim.schedule.ir.ops import COMPUTE, Exchange, HostSync, Message
from sim.schedule.ir.program import Communicator
from sim.schedule.ir.tensors import Tensor, d
from sim.schedule.ir.views import View
from sim.schedule.model.outside import Entry, Exit
from sim.schedule.model.pipeline.account import held
from sim.schedule.model.pipeline.files import read_pipeline, to_csv
from sim.schedule.model.pipeline.messages import received_before
from sim.schedule.model.pipeline.timetables import PIPELINES, Pipeline
from sim.schedule.model.scope import ADAPTERS, EMBEDDED, LAYER, ROOT, Unit
from sim.schedule.model.step import Item
from sim.schedule.model.tensor.group import Group
from sim.schedule.write.builder import ProgramBuilder
from sim.words.mesh import Mesh
from sim.words.options import LayerOptions
from sim.words.stage_layers import layers_text
from sim.words.workload import DTYPE_BYTES, Workload

FORWARD, BACK = (tuple([f"{way} {number}" for number in range(64)]) for way in ("forward", "back"))
"""The communicators between chunks: see ``Stages.links``."""
LINKS = frozenset((*FORWARD, *BACK))
_SENDS, _RECEIVES = 8, 20
"""Eager calls of the host around each tensor that stages hand on with headers of their own: of who sends them, two
copies to the GPU, two sends and two asserts; of who receives them two receives and 17 figures that the host copies from
the GPU one by one (nanotron 0.4 parallel/pipeline_parallel/p2p.py, _send_meta, _recv_meta, create_empty_storage)."""
_HEADERS_FORWARD, _HEADERS_BACK = 2, 1
"""Tensors with headers: activations and the mask of their sequences, of which only the former have gradients (nanotron
0.4 models/llama.py, module_output_keys)."""
_SHOWN = 16
"""Chunks that an example in a message has at most."""


class Stages:
    """Chunks of a model's layers on the axis pp of a mesh: the model cut into as many as stages have together.

    With one stage there is one chunk, which goes forward and backward with each micro-batch in turn.
    """

    def __init__(self, mesh: Mesh, workload: Workload, options: LayerOptions) -> None:
        """Cut it; raises InputError for a cut that is none of the layers, and for micro-batches that a pipeline cannot
        take.
        """
        self._mesh, self._options = mesh, options
        self._tied = workload.model.tied_embeddings and not workload.model.is_frozen
        self._pipeline = _pipeline(mesh, workload, options)
        per_stage = self._pipeline.chunks or options.pipeline_chunks
        self.split = _split(options.pipeline_layers, workload.layers, mesh.pp, per_stage)
        """How many layers each chunk has, in the order of the model."""
        self.items(0)  # which says of micro-batches that they do not go

    @cached_property
    def link_of(self) -> dict[tuple[int, int], int]:
        """Which communicator borders have, by the stages before and behind them: no other border of these stages has
        it, so that none waits until something else is received.
        """
        found: dict[tuple[int, int], int] = {}
        for number, micro in product(range(len(self.split) - 1), self._ways):
            own = (self.stage_of(number, micro), self.stage_of(number + 1, micro))
            beside = {link for other, link in found.items() if other != own and {*other} & {*own}}
            free = [link for link in range(len(FORWARD)) if link not in beside]
            if not free:
                raise InputError(
                    f"`set` schedule.pipeline_schedule={self._options.pipeline_schedule}: expected stages that hand on "
                    f"to fewer others, by a communicator each: there are {len(FORWARD)} of them"
                )
            found[own] = free[0]
        return found

    @cached_property
    def links(self) -> tuple[Communicator, ...]:
        """The communicators of all borders."""
        lines, count = self._mesh.groups("pp"), max(self.link_of.values(), default=-1) + 1
        return tuple([Communicator(name=name, groups=lines) for names in (FORWARD, BACK) for name in names[:count]])

    @property
    def both_ends(self) -> Communicator | None:
        """What sums gradients of weights that are at both ends of the model (megatron-core 0.16.1
        distributed/finalize_model_grads.py, _allreduce_embedding_grads); None where no stages share any.
        """
        if self._mesh.pp == 1 or not self._tied:
            return None
        ends = [self.stage_of(0), self.stage_of(len(self.split) - 1)]
        groups = tuple([tuple([line[stage] for stage in ends]) for line in self._mesh.groups("pp")])
        return Communicator(name="both ends", groups=groups)

    @property
    def copies(self) -> int:
        """How many stages have a copy of each chunk, whose gradients these sum up."""
        return self._pipeline.copies

    @property
    def splits_backward(self) -> bool:
        """Whether some stage makes gradients of weights later than those of inputs."""
        return any(item.kind == "W" for stage in range(self._mesh.pp) for item in self.items(stage))

    @property
    def rounds(self) -> tuple[int, int] | None:
        """How many micro-batches there are before rounds of passes repeat, and how many each further round has; None
        where rounds do not repeat, or are not whole.
        """
        before, each = self.rounds_over(self._mesh.pp) or (0, 0)
        return None if not each or self._options.micro_batches % each else (before, each)

    def rounds_over(self, stages: int) -> tuple[int, int] | None:
        """Return the same of another number of stages, whole or not."""
        rounds = self._pipeline.rounds
        return rounds.of(stages) if rounds else None

    @property
    def _ways(self) -> range:
        """The first micro-batch of each way through the stages."""
        return range(0, self.micro_batches, max(self.micro_batches // self.copies, 1))

    def layers(self, number: int) -> range:
        """Return the layers of a chunk."""
        start = sum(self.split[:number])
        return range(start, start + self.split[number])

    def chunks_of(self, stage: int) -> list[int]:
        """Return the chunks of a stage, in the order of the model."""
        return self._chunks_of[stage]

    @cached_property
    def _chunks_of(self) -> list[list[int]]:
        found = [list[int]() for _ in range(self._mesh.pp)]
        for number in range(len(self.split)):
            for stage in {self.stage_of(number, micro) for micro in self._ways}:
                found[stage].append(number)
        return found

    def items(self, stage: int) -> list[Item]:
        """Return what a stage does, in order."""
        per_stage = len(self.split) // self._mesh.pp
        return self._pipeline.timetable(stage, self._mesh.pp, self._options.micro_batches, per_stage)

    def to_csv(self) -> bytes:
        """Return the file that says what all stages do, as torch's pipelining reads it; raises InputError where it
        cannot.
        """
        return to_csv(self._pipeline, self._mesh.pp, self._options.micro_batches, len(self.split) // self._mesh.pp)

    def tokens_apart(self, workload: Workload) -> int:
        """Return of how many tokens gradients of weights are made apart from those of inputs, over all layers."""
        each = workload.batch // self.micro_batches
        items = [item for stage in range(self._mesh.pp) for item in self.items(stage) if item.kind == "W"]
        return sum(self.split[item.chunk] * each * workload.of_sequence(item.micro).seq for item in items)

    @property
    def micro_batches(self) -> int:
        """How many pass all stages."""
        return self._options.micro_batches

    @cached_property
    def received_before(self) -> list[dict[int, list[Item]]]:
        """What each stage receives before the pass that needs it, by positions in its timetable."""
        return received_before([self.items(stage) for stage in range(self._mesh.pp)])

    def layers_in_flight(self, stage: int) -> int:
        """Return of how many layers a stage keeps what a micro-batch needs backward, at most."""
        return held(self.items(stage), self.split.__getitem__).activations

    def is_last(self, number: int) -> bool:
        """Return whether a chunk is the last one of the model."""
        return number == len(self.split) - 1

    def owns(self, stage: int, unit: Unit) -> bool:
        """Return whether weights are those of a stage: of its layers, or of an end of the model that it has."""
        chunks = self.chunks_of(stage)
        if unit.name in {LAYER, ADAPTERS}:
            return any(unit.layer in self.layers(number) for number in chunks)
        ends = {EMBEDDED.name: [0], ROOT.name: [0, len(self.split) - 1]}.get(unit.name, [len(self.split) - 1])
        return any(number in chunks for number in ends)

    def borders(self, b: ProgramBuilder, shared: Sequence[tuple[Tokens, Group | None]], x: Tensor) -> Borders:
        """Return what is between the chunks of a builder's rank and those before and behind them; ``shared`` are the
        tokens of the rank by the forms of sequences, and the group that has all.
        """
        (line,) = [group for group in self._mesh.groups("pp") if b.rank in group]
        parts = self._options.tp_hands == "parts"
        waits = self._options.host_waits == "messages"
        return Borders(self, b, [(tokens, group if parts else None) for tokens, group in shared], x, line, waits=waits)

    def stage_of(self, number: int, micro: int = 0) -> int:
        """Return which stage a chunk is on, of two copies the one that a micro-batch passes."""
        stage = self._pipeline.stage_of(number, self._mesh.pp)
        return stage if micro < self.micro_batches // self.copies else self._mesh.pp - 1 - stage

    def beside(self, number: int, step: int, stage: int) -> int:
        """Return which stage the chunk has that is so many behind one of a stage, on the same way."""
        (micro,) = (micro for micro in self._ways if self.stage_of(number, micro) == stage)
        return self.stage_of(number + step, micro)

    def handed_bytes(self, workload: Workload) -> int:
        """Return what stages of one replica send each other: B S E elements over each border, forward and back; or from
        each rank of a tensor-parallel group, where all have all tokens (megatron-core 0.16.1
        pipeline_parallel/schedules.py, get_tensor_shapes), or what is gathered in their place where each hands on a
        part.
        """
        borders = sum(self.stage_of(number) != self.stage_of(number + 1) for number in range(len(self.split) - 1))
        of_one = workload.num_tokens * workload.model.embed_dim * DTYPE_BYTES[workload.dtype]
        of_one *= 1 if self._options.tp_sequence else self._mesh.tp
        return borders * of_one * (workload.forward + workload.backward)


def _pipeline(mesh: Mesh, workload: Workload, options: LayerOptions) -> Pipeline:
    """Return the pipeline that options name; raises InputError for options of one where there is none."""
    name = options.pipeline_schedule
    if name not in PIPELINES and not name.endswith(".csv"):
        raise unknown("pipeline", name, [*PIPELINES, "FILE.csv"], "`set` schedule.pipeline_schedule")
    found = PIPELINES.get(name) or read_pipeline(name)
    if options.pipeline_chunks < 1 or (options.pipeline_chunks > 1 and found.chunks is not None):
        several = ", ".join(one for one, pipeline in PIPELINES.items() if pipeline.chunks is None)
        raise InputError(
            f"`set` schedule.pipeline_chunks={options.pipeline_chunks}: expected 1 or more, and above 1 only where "
            f"`set` schedule.pipeline_schedule is one of several chunks a stage: {several}"
        )
    if mesh.pp > 1 and workload.scope != "step":
        raise InputError(f"`pp_degree` {mesh.pp}: pipelines are of training steps; set `scope` step")
    both_ends = found.copies > 1 or found.stage_of(0, mesh.pp) == found.last_stage(mesh.pp)
    if mesh.pp > 1 and workload.model.tied_embeddings and both_ends:
        raise InputError(
            f"`set` schedule.pipeline_schedule={name} has both ends of a model on one stage, which is not played of an "
            f"embedding that is the head, too: choose another one, or `set` model.tied_embeddings=false"
        )
    if mesh.tp > 1 and options.tp_hands == "parts" and options.tp_sequence:
        raise InputError(
            "`set` schedule.tp_hands=parts: with sequence parallelism a rank has its part of the tokens alone, and "
            "hands these on: leave it out, or set schedule.tp_sequence=false"
        )
    if mesh.pp == 1 and (options.pipeline_chunks > 1 or options.pipeline_layers):
        raise InputError(
            f"`set` schedule.pipeline_chunks={options.pipeline_chunks} and schedule.pipeline_layers="
            f"{options.pipeline_layers or 'equal'} are of pipelines: leave them out, or set `pp_degree` 2 or more"
        )
    return found if mesh.pp > 1 else PIPELINES["1f1b"]


def nearly_equal(layers: int, chunks: int) -> tuple[int, ...]:
    """Return how many layers each chunk has where they do not divide: those at the ends of the model have one fewer
    first, since they have its head and its embedding, too (Llama 3, arXiv:2407.21783 §3.3.2).

    >>> nearly_equal(30, 4), nearly_equal(9, 4)
    ((7, 8, 8, 7), (2, 3, 2, 2))
    """
    most = -(-layers // chunks)
    split = [most] * chunks
    for number in range(most * chunks - layers):
        split[number // 2 if number % 2 else -1 - number // 2] -= 1
    return tuple(split)


def _split(given: str, layers: int, pp: int, per_stage: int) -> tuple[int, ...]:
    """Return how many layers each chunk has: as many as others, or as a text says: 15,16,16,15."""
    chunks = pp * per_stage
    if not given:
        if layers % chunks:
            example = f", such as {','.join(map(str, nearly_equal(layers, chunks)))}" if chunks <= _SHOWN else ""
            raise InputError(
                f"`layers` {layers} do not divide over {chunks} chunks ({pp} stages with {per_stage} each): `set` "
                f"schedule.pipeline_layers to how many each has{example}, or set another `pp_degree`"
            )
        return (layers // chunks,) * chunks
    try:
        found = tuple([int(one) for one in given.split(",")])
    except ValueError:
        found = ()
    if len(found) != chunks or sum(found) != layers or min(found) < 0:
        raise InputError(
            f"`set` schedule.pipeline_layers={layers_text(found) or given}: expected {chunks} numbers with commas that "
            f"add up to {layers}: how many layers each chunk has, in the order of the model; 2*4 is 2,2,2,2"
        )
    return found


class Borders:
    """What is between the chunks of one rank and those before and behind them."""

    def __init__(
        self,
        stages: Stages,
        b: ProgramBuilder,
        handed: Sequence[tuple[Tokens, Group | None]],
        x: Tensor,
        line: tuple[int, ...],
        *,
        waits: bool,
    ) -> None:
        """``handed`` are tokens by the forms of sequences, and the group whose members hand on a part of them each, if
        they do; ``x`` is what layers hand on, ``line`` the ranks of all stages. ``waits`` as of ``Border``.
        """
        self._stages, self._b, self._handed, self._x, self._line = stages, b, handed, x, line
        self._waits = waits
        self._stage = line.index(b.rank)
        self._turns: defaultdict[int, Turn] = defaultdict(Turn)

    def come(self, position: int) -> None:
        """Append what receives, before the pass at a position of its stage's timetable, what is for later ones."""
        for kind, micro, number in self._stages.received_before[self._stage].get(position, ()):
            self._b.take(micro, self._stages.micro_batches, "forward" if kind == "F" else "backward")
            if kind == "F":
                border = self._border_before(number)
                border.came.forward.append(border.received(border.forward, border.x))
            elif self._b.workload.backward:
                border = self._border_behind(number)
                border.came.back.append(border.received(border.back, d(border.x)))

    def before(self, number: int) -> Entry:
        """Return the entry of a chunk that is not the first one."""
        if self._turns_at(number - 1):
            return FromTurn(self._turns[number - 1])
        return FromStage(self._border_before(number))

    def behind(self, number: int) -> Exit:
        """Return the exit of a chunk that is not the last one."""
        if self._turns_at(number):
            return ToTurn(self._turns[number])
        return ToStage(self._border_behind(number))

    def _turns_at(self, before: int) -> bool:
        return self._stages.stage_of(before) == self._stages.stage_of(before + 1)

    def _border_before(self, number: int) -> Border:
        before = self._stages.beside(number, -1, self._stage)
        return self._border(number - 1, before, self._stages.link_of[before, self._stage])

    def _border_behind(self, number: int) -> Border:
        behind = self._stages.beside(number, 1, self._stage)
        return self._border(number, behind, self._stages.link_of[self._stage, behind])

    def _border(self, before: int, stage: int, link: int) -> Border:
        """Return the border behind a chunk, beyond which is a stage."""
        x, handed = self._x.later(self._stages.layers(before).stop), self._handed[self._b.form]
        names = FORWARD[link], BACK[link]
        return Border(self._b, *handed, x, self._line[stage], *names, self._turns[before], self._waits)


class Border(NamedTuple):
    """What is between two chunks, for the one on this side: activations go over it forward, their gradients back."""

    b: ProgramBuilder
    tokens: Tokens
    group: Group | None
    """The one whose members hand on a part of these each; None where each hands on all."""
    x: Tensor
    """What is handed on forward."""
    peer: int
    """The rank on the other side."""
    forward: str
    """Names of the communicators of both directions."""
    back: str
    came: Turn
    """What has been received before the pass that needs it."""
    waits: bool
    """Whether the host waits for what it sends and receives, as a header says what each tensor is."""

    def sent(self, by: str, tensor: Tensor, view: View) -> None:
        """Append what sends a tensor to the other side, in a call of its own, as nothing else meets that side then.
        What the host waits for before it is in another one.
        """
        if self.waits:
            label, calls = f"send the header of {tensor.name}", _SENDS * self._num_headers(by)
            self.b.call(f"{label} by {by}", tensor.layer, partial(self._wait, label, COMPUTE, calls))

        def send(view: View) -> None:
            sends = (Message(self.peer, self.group.sent_part(self.b, tensor, view) if self.group else view),)
            self.b.add(Exchange(label=f"send {tensor.name}", communicator=by, sends=sends, recvs=()))

        self.b.call(f"send {tensor.name} {self.peer - self.b.rank} ranks on by {by}", tensor.layer, send, view)

    def received(self, by: str, tensor: Tensor) -> View:
        """Append what receives a tensor from there, in a call of its own; return it."""

        def receive() -> View:
            members = len(self.group.over.groups[0]) if self.group else 1
            view = self.b.new(tensor, num_tokens(self.tokens) // members)
            recvs = (Message(self.peer, view),)
            self.b.add(Exchange(label=f"receive {tensor.name}", communicator=by, sends=(), recvs=recvs))
            if self.waits:
                self._wait(f"read the header of {tensor.name}", by, _RECEIVES * self._num_headers(by))
            return self.group.of_parts(self.b, tensor, view) if self.group else view

        return self.b.call(f"receive {tensor.name} {self.peer - self.b.rank} ranks on by {by}", tensor.layer, receive)

    def _num_headers(self, by: str) -> int:
        return _HEADERS_FORWARD if by == self.forward else _HEADERS_BACK

    def _wait(self, label: str, stream: str, calls: int) -> None:
        """Append that the host waits for a stream, and then has so many calls of its own."""
        self.b.add(HostSync(label=label, streams=(stream,)))
        self.b.add(HostSync(label=label, streams=(stream,), calls=calls))


class FromStage(NamedTuple):
    """What comes in is what the stage before hands on."""

    border: Border

    def forward(self) -> View:
        """See Entry."""
        border = self.border
        return border.came.forward.popleft() if border.came.forward else border.received(border.forward, border.x)

    def backward(self, first: View, /) -> None:
        """See Entry."""
        self.border.sent(self.border.back, d(self.border.x), first)


class ToStage(NamedTuple):
    """What leaves is handed on to the stage behind."""

    border: Border

    def forward(self, last: View, /) -> None:
        """See Exit."""
        self.border.sent(self.border.forward, self.border.x, last)

    def backward(self) -> View:
        """See Exit."""
        border = self.border
        return border.came.back.popleft() if border.came.back else border.received(border.back, d(border.x))


class Turn:
    """What is between two chunks and waits for one of them, which takes it in the order in which it has come: what it
    has received, or what a chunk of the same stage has left, as at the tip of a V.
    """

    def __init__(self) -> None:
        self.forward: deque[View] = deque()
        self.back: deque[View] = deque()


class FromTurn(NamedTuple):
    """What comes in is what the chunk before, of the same stage, has left."""

    turn: Turn

    def forward(self) -> View:
        """See Entry."""
        return self.turn.forward.popleft()

    def backward(self, first: View, /) -> None:
        """See Entry."""
        self.turn.back.append(first)


class ToTurn(NamedTuple):
    """What leaves is taken by the chunk behind, of the same stage."""

    turn: Turn

    def forward(self, last: View, /) -> None:
        """See Exit."""
        self.turn.forward.append(last)

    def backward(self) -> View:
        """See Exit."""
        return self.turn.back.popleft()
