"""What every op must satisfy by itself, whatever lies in its buffers: shapes that fit, views that do not collide."""

from __future__ import annotations

import math
from functools import cache, lru_cache
from itertools import chain, combinations

import numpy as np

from sim.base.errors import ScheduleError
from sim.base.kept import kept
from sim.schedule.derive.dependencies import overlap
from sim.schedule.ir import ops
from sim.schedule.ir.declare import operands, views_in
from sim.schedule.ir.forms import Form
from sim.schedule.ir.fragments import Fragment, Port
from sim.schedule.ir.layout import num_tokens
from sim.schedule.ir.masks import FULL, sharing_a_pair
from sim.schedule.ir.program import Header, Program, Schedule
from sim.schedule.ir.tensors import dtype_of
from sim.schedule.ir.views import Buffer, Slices, Split, View, is_contiguous, parts_are_contiguous
from sim.schedule.model.scope import kind_of, tensor_of, with_options
from sim.schedule.proof.contents import FAR, spell
from sim.words.workload import Dtype, ModelSpec, Workload, accumulation_dtype


def check_program(program: Program, schedule: Schedule, sound: set[Form]) -> None:
    """Raise ScheduleError where an op or a port of a program, or of a call, is wrong by itself; forms of ops that
    are not are added to those that are known to be ``sound``.
    """
    header = schedule.header
    workload, streams = header.workload, _streams_of(schedule).get(program.rank, {*ops.STREAMS})
    for buffer in dict.fromkeys(program.buffers):  # of which an op or a port need not use each
        if len(buffer.dims) != len(buffer.shape) or min(buffer.shape, default=1) < 0:
            raise ScheduleError(
                f"rank {program.rank} buffer {buffer.name!r} has dims {buffer.dims!r} and shape {buffer.shape}: a size "
                f"of 0 or more for each"
            )
        if buffer.token_major and not buffer.dims.startswith("bs"):
            named = f"rank {program.rank} buffer {buffer.name!r} of dims {buffer.dims!r}"
            raise ScheduleError(f"{named} has no tokens that could be first in memory")
    for what, ports in (("input", program.inputs), ("output", program.outputs)):
        for port in ports:
            problem = port_problem(port, program, workload.model)
            if header.claims and not problem:
                problem = _port_dtype_problem(port, program, header)
            if problem:
                raise ScheduleError(f"rank {program.rank} {what} {port.name} {problem}")
    kept = {port.view.buffer: port.tensor for port in program.inputs}
    updates = {port.view.buffer for port in program.outputs if kind_of(port.tensor) == "updated"}
    inputs = {buffer: tensor for buffer, tensor in kept.items() if buffer not in updates}
    ops_of, calls = program.ops, program.calls
    for index, form in _distinct_of(calls[0].fragment.shared) if len(calls) == 1 else _distinct(program):
        op = ops_of[index]
        problem = "" if form in sound else _form_problem(op, program, inputs, schedule)
        if not problem:
            sound.add(form)
            problem = _rank_problem(op, program.rank, streams)
        if problem:
            raise ScheduleError(f"rank {program.rank} op {index} ({op.label!r}) {problem}")


def _distinct(program: Program) -> list[tuple[int, Form]]:
    """Return the numbers of ops that have to be looked at, with their forms: the first of each form, and of what names
    peers, which are no part of it, the first of each kind.
    """
    forms, which, _ = program.formed
    looked_at = set(np.unique(which, return_index=True)[1].tolist())
    begin, seen = 0, set[Fragment]()
    for fragment, *_ in program.calls:
        looked_at.update([begin + at for at in fragment.exchanges.first if fragment not in seen])
        seen.add(fragment)
        begin += len(fragment.ops)
    return [(index, forms[which[index]]) for index in sorted(looked_at)]


@kept
def _distinct_of(fragment: Fragment) -> list[tuple[int, Form]]:
    return _distinct(Program.of_fragment(fragment, rank=0))


@kept
def _streams_of(schedule: Schedule) -> dict[int, set[str]]:
    """Return the streams that ranks have: one for kernels, the host's, one for each way of copies, and one for each
    communicator that a rank belongs to; of those that belong to any.
    """
    found: dict[int, set[str]] = {}
    for communicator in schedule.header.communicators:
        for rank in chain.from_iterable(communicator.groups):
            found.setdefault(rank, {*ops.STREAMS}).add(communicator.name)
    return found


def _form_problem(op: ops.Op, program: Program, inputs: dict[int, str], schedule: Schedule) -> str:
    """Return what is wrong with an op of a program, and with all of its form; empty if nothing is. ``inputs``: tensors
    by buffer.
    """
    reads, writes, workload = op.reads, op.writes, schedule.header.workload
    for view in (*reads, *writes):
        if problem := _view_problem(view, program):
            return problem
    for view in writes:
        if view.buffer in inputs:
            return f"writes to the input {inputs[view.buffer]!r}; copy it first"
    if isinstance(op, ops.HostCopy):
        return _host_copy_problem(op, program) or _shape_problem(op, program)
    views = (*reads, *writes)
    problem = _place_problem(op, views, program) or _integer_problem(op, program)
    problem = problem or _collision(op, reads, writes, program)
    if isinstance(op, ops.Communication):
        return problem or _message_problem(op, (*reads, *writes), program)
    problem = problem or _shape_problem(op, program)
    if isinstance(op, ops.Kernel | ops.HostAdamW):
        problem = problem or _gap_problem(op, program) or _dtype_problem(op, program, workload)
    if isinstance(op, ops.Kernel):
        problem = problem or _rule_problem(op, program, schedule)
    return problem


def _view_problem(view: View, program: Program) -> str:
    """Return where a view is not inside a buffer of the program."""
    if not 0 <= view.buffer < len(program.buffers):
        return f"uses buffer {view.buffer} of {len(program.buffers)}"
    buffer = program.buffers[view.buffer]
    if len(buffer.dims) == len(buffer.shape) and _is_inside(view.slices, buffer.shape):
        return ""
    return f"uses {view.slices} of buffer {buffer.name!r}, which has dims {buffer.dims!r} and shape {buffer.shape}"


@lru_cache(maxsize=65536)
def _is_inside(slices: Slices, shape: tuple[int, ...]) -> bool:
    """Return whether a box has the dimensions of a shape, and lies in it."""
    return len(slices) == len(shape) and all(
        0 <= start < stop <= extent for (start, stop), extent in zip(slices, shape, strict=True)
    )


def _place_problem(op: ops.Op, views: tuple[View, ...], program: Program) -> str:
    """Return where an op that runs on the GPU uses memory of its host, or one of the host that of the GPU."""
    wrong, on_host = ("GPU", False) if isinstance(op, ops.HostAdamW) else ("host", True)
    buffers = [program.buffers[view.buffer] for view in views]
    found = [buffer.name for buffer in buffers if (buffer.place != "hbm") == on_host]
    return f"uses buffer {found[0]!r}, which is in {wrong} memory; copy it first" if found else ""


def _host_copy_problem(op: ops.HostCopy, program: Program) -> str:
    """Return where a copy engine would have to do more than to move bytes between a GPU and its host."""
    source, target = (program.buffers[view.buffer] for view in (op.source, op.target))
    if [source.place, target.place].count("hbm") != 1:
        return f"copies from {source.place} to {target.place}: takes one of them in hbm; use a Copy inside one memory"
    if source.dtype != target.dtype:
        return f"takes {source.dtype} for {target.dtype}"
    if not (is_contiguous(op.source, source) and is_contiguous(op.target, target)):
        return "copies a view with gaps; copy it into a buffer first"
    if source.lies != target.lies:
        return f"copies from {source.lies} to {target.lies}: copy engines move bytes in their order"
    stream = ops.FETCH if target.place == "hbm" else ops.OFFLOAD
    return "" if op.stream == stream else f"is on stream {op.stream!r}: copies to {target.place} take {stream!r}"


def _integer_problem(op: ops.Op, program: Program) -> str:
    """Return where an op computes with integers, or casts to or from them: those are looked up, cut and moved only."""
    sums = isinstance(op, ops.Collective) and isinstance(op.taken, View)
    if not (sums or isinstance(op, ops.Kernel | ops.HostAdamW)):
        return ""
    for name, mark in operands(type(op)).items():
        for view in views_in(getattr(op, name)):
            dtype, named = program.dtype(view), f"of buffer {program.buffers[view.buffer].name!r}"
            if dtype == "int64" and mark.numbers not in {"any", "int64"}:
                return f"computes with integers, {named}: {_TAKE_FLOATS}"
            given = program.dtype(op.reads[0]) if mark.numbers == "any" and mark.is_written else dtype
            if (given == "int64") != (dtype == "int64"):
                return f"casts {given} to {dtype}, {named}: numbers stay integers, or none"
    return ""


_TAKE_FLOATS = "take fp64, fp32, bf16 or fp16"


_DIMS = {"q": "s", "k": "st", "g": "h", "h": "he", "d": "di", "e": "eio", "o": "oi", "f": "io", "n": "i"}
"""What a buffer may call the dimension of a letter, where not by the letter itself."""


@cache
def _declared(kind: type[ops.Op], form: ops.GemmForm | None) -> list[tuple[str, str]]:
    """Return the operands of a kind of op with their dimensions, if it declares any."""
    if form:
        bias = [("bias", "o")] if kind is ops.BiasedGemm else []
        return [*zip(("a", "b", "out"), ops.Gemm.letters[form], strict=True), *bias]
    return [(name, mark.letters) for name, mark in operands(kind).items() if mark.letters]


def _shape_problem(op: ops.Op, program: Program) -> str:
    """Return where an operand has not the dimensions that its op declares, or another extent than the others have."""
    extents: dict[str, int] = {}
    anything: tuple[str, tuple[int, ...]] | None = None
    for name, letters in _declared(type(op), op.form if isinstance(op, ops.Gemm) else None):
        view: View | None = getattr(op, name)
        if view is None:
            continue
        dims, shape = program.buffers[view.buffer].dims, view.shape
        if letters == "...":
            anything = anything or (dims, shape)
            if (dims, shape) != anything:
                return f"takes {name} {dims} {shape} where {anything[0]} {anything[1]} is needed"
            continue
        outer, folded, last = letters.partition("*")
        if folded:
            dims, shape = dims[: len(outer)] + last, (*shape[: len(outer)], math.prod(shape[len(outer) :]))
        wanted = outer + last
        fits = len(dims) == len(wanted) and all(
            dim in _DIMS.get(letter, letter) for dim, letter in zip(dims, wanted, strict=True)
        )
        if not fits:
            return f"takes {wanted} for {dims} of buffer {program.buffers[view.buffer].name!r}"
        needed = tuple(extents.setdefault(letter, extent) for letter, extent in zip(wanted, shape, strict=True))
        if shape != needed:
            return f"has {name} of shape {shape} where {needed} is needed"
    return ""


def _gap_problem(op: ops.Kernel | ops.HostAdamW, program: Program) -> str:
    """Return where a view does not lie in one piece for a kernel that needs it so, or in the order of others."""
    first: Buffer | None = None
    for name, mark in operands(type(op)).items():
        for view in views_in(getattr(op, name)) if mark.contiguous else ():
            buffer = program.buffers[view.buffer]
            if not is_contiguous(view, buffer):
                return f"takes for {name} a view of buffer {buffer.name!r} with gaps; copy it into a buffer first"
            first = first or buffer
            if buffer.token_major != first.token_major:
                return f"takes {name} as {buffer.lies} beside {first.lies}: copy it into a buffer of one order first"
    return ""


def _dtype_problem(op: ops.Kernel | ops.HostAdamW, program: Program, workload: Workload) -> str:
    """Return where an operand has not the data type that its kernel takes beside that of the first one; copies cast
    between the workload's and that of sums.
    """
    first: Dtype | None = None
    for name, mark in operands(type(op)).items():
        dtypes = {program.dtype(view): None for view in views_in(getattr(op, name))}
        first = first or next(iter(dtypes), None)
        if first is None:
            continue
        own = workload.dtype if mark.numbers == "any" else first
        wide = accumulation_dtype(own)
        allowed = {
            "alike": (own,),
            "wide": (wide,),
            "alike or wide": (own, wide),
            "any": (own, wide, "int64"),
            "int64": ("int64",),
        }
        for dtype in dtypes:
            if dtype not in allowed[mark.numbers]:
                spelled = " or ".join(dict.fromkeys(allowed[mark.numbers]))
                return f"takes {dtype} for {name}: beside {own} allowed is {spelled}"
    return ""


def _parts_of_documents(op: ops.Attend | ops.AttendBackward) -> str:
    """Return what does not fit of the parts of several documents."""
    for part in op.documents or ():
        for span, size in ((part.rows, op.q.shape[1]), (part.columns, op.k.shape[1])):
            if span.step != 1 or not 0 <= span.start < span.stop <= size:
                return f"has a part {part} that is none of {op.q.shape[1]}x{op.k.shape[1]} queries and keys"
    if shared := sharing_a_pair(op.documents or ()):
        spelled = " and ".join(f"rows {spell(part.rows)} x columns {spell(part.columns)}" for part in shared)
        return f"attends to {spelled}, which have a pair in common: it would count twice"
    if op.documents and (op.kernel != "flash" or op.band != FULL):
        return f"has several documents under {op.band} for the kernel {op.kernel!r}: allowed are FULL and flash"
    return ""


def _parts_of_blocks(op: ops.Attend | ops.AttendBackward) -> str:
    """Return what does not fit of the parts of a block-sparse mask: no column is in two runs of a row."""
    parts = op.sparse
    if not parts:
        return ""
    rows, columns = op.q.shape[1], op.k.shape[1]
    if sum(part.rows for part in parts) != rows or any(part.rows < 1 for part in parts):
        return f"has parts of {sum(part.rows for part in parts)} rows for {rows} queries"
    for number, part in enumerate(parts):
        at = 0
        for run in part.runs:
            if not (at <= run.start and run.columns >= 1 and run.start + run.columns <= columns):
                return f"has runs {part.runs} in part {number}: expected rising ones within {columns} keys"
            at = run.start + run.columns
    if op.kernel != "flash" or op.band != FULL or op.documents:
        return f"has blocks under {op.band} for the kernel {op.kernel!r}: allowed are FULL and flash, no documents"
    return ""


def _joined_problem(op: ops.JoinedGemm, program: Program, schedule: Schedule) -> str:
    """Return where a product of several layers has not one of each for each, or what one of them may not be."""
    count, given, made = len(op.b), len(op.a), len(op.out)
    wanted = (count, 1) if op.form == "nt" else (1, count)
    if (given, made) != wanted or len(op.bias) not in {0, count} or not count:
        return f"takes {given} times {count} for {made} with {len(op.bias)} biases in form {op.form}: of one side one"
    if op.bias and (op.form != "nn" or op.accumulate):
        return f"adds a bias in form {op.form}: allowed is nn, alone"
    problems = (
        _shape_problem(product, program) or _rule_problem(product, program, schedule) for product in op.products
    )
    return next(filter(None, problems), "")


def _attention_problem(op: ops.AttentionKernel | ops.LinearKernel, workload: Workload) -> str:
    """Return what does not fit of a kernel of attention."""
    computes = "linear" if workload.attention == "linear" else "softmax"
    if isinstance(op, ops.LinearKernel) != (computes == "linear"):
        return f"is no kernel of the workload's {computes} attention"
    if isinstance(op, ops.LinearKernel):
        return _linear_problem(op)
    if isinstance(op, ops.Delta | ops.Merge):
        return ""
    model = workload.model
    if problem := _number_problem("scale", op.scale, "attention_scale of the model", model.attention_scale):
        return problem
    if problem := _number_problem("softcap", op.softcap, "attention_softcap of the model", model.attention_softcap):
        return problem
    if op.softcap and op.kernel != "flash":
        return f"has a soft-cap for the kernel {op.kernel!r}: allowed is flash"
    if (op.kernel == "standard") != (op.probs is not None):
        return f"has probabilities {op.probs} for the kernel {op.kernel!r}: those of a standard one are kept"
    if problem := _parts_of_documents(op) or _parts_of_blocks(op):
        return problem
    if isinstance(op, ops.AttendBackward) and (op.out is None) == (op.delta is None):
        return f"has out {op.out} and delta {op.delta}: give one of them"
    heads, kv_heads = op.q.shape[2], op.k.shape[2]
    return "" if heads % kv_heads == 0 else f"has {heads} heads for {kv_heads} key/value heads"


def _rule_problem(op: ops.Kernel, program: Program, schedule: Schedule) -> str:
    """Return what else does not fit, of kinds with a rule of their own."""
    workload = schedule.header.workload
    model = workload.model
    if isinstance(op, ops.AttentionKernel | ops.LinearKernel):
        return _attention_problem(op, workload)
    if isinstance(op, ops.Rope):
        count = num_tokens(op.tokens)
        if count != op.x.shape[1]:
            return f"rotates {op.x.shape[1]} tokens by {count} positions"
        kinds = [one.model for one, _ in workload.kinds()]
        rotated = _number_problem(
            "rotated", op.rotated, "rotary_dims of the model", *[one.rotary_dims for one in kinds]
        )
        return rotated or _number_problem(
            "theta", op.theta, "rope_theta of the model", *[one.rope_theta for one in kinds]
        )
    if isinstance(op, ops.JoinedGemm):
        return _joined_problem(op, program, schedule)
    if isinstance(op, ops.BiasedGemm):
        return "" if op.form == "nn" and not op.accumulate else f"adds a bias in form {op.form}: allowed is nn, alone"
    if isinstance(op, ops.RmsNorm | ops.EagerNorm):
        return _number_problem("epsilon", op.epsilon, "norm_epsilon of the model", model.norm_epsilon)
    if isinstance(op, ops.TiledKernel):
        return "" if op.tile >= 1 else f"has tiles of {op.tile} tokens: allowed is 1 or more"
    if isinstance(op, ops.LargestLogit | ops.ExpSum):
        return _bending_problem(op, model)
    if isinstance(op, ops.CrossEntropy | ops.LogitLoss):
        labels = schedule.whole.header.mesh.dp * workload.num_labels
        return _number_problem("count", op.count, "the number of labels", labels) or _bending_problem(op, model)
    if isinstance(op, ops.Hold):
        return "" if op.held else "holds nothing: expected one view or more"
    if isinstance(op, ops.Pack | ops.Unpack | ops.SquareSum):
        return _flat_problem(op)
    if isinstance(op, ops.Copy | ops.Fold):
        wanted, target = (program.buffers[split.view.buffer] for split in (op.source, op.target))
        if target.dims != wanted.dims:
            return f"takes {wanted.dims} for {target.dims} of buffer {target.name!r}"
        return _parts_problem(op)
    return ""


def _bending_problem(op: ops.CrossEntropy | ops.LogitKernel, model: ModelSpec) -> str:
    """Return where logits are scaled or bent otherwise than the model's are."""
    return _number_problem("scale", op.scale, "logit_scale of the model", model.logit_scale) or _number_problem(
        "softcap", op.softcap, "logit_softcap of the model", model.logit_softcap
    )


def _flat_problem(op: ops.Pack | ops.Unpack | ops.SquareSum) -> str:
    """Return what does not fit of a flat tensor."""
    if isinstance(op, ops.SquareSum):
        return "" if op.square.shape == (1,) else f"sums up to {op.square.shape} numbers: allowed is 1"
    if isinstance(op, ops.Pack) and op.by_products and not op.adds:
        return "adds nothing, but products are to have added: allowed is by_products with adds"
    parts = op.gradients if isinstance(op, ops.Pack) else op.weights
    elements = sum(math.prod(part.shape) for part in parts)
    return "" if elements == op.flat.shape[0] else f"has {elements} elements in parts, and {op.flat.shape[0]} flat"


def _linear_problem(op: ops.LinearKernel) -> str:
    """Return what does not fit of a kernel of linear attention."""
    if isinstance(op, ops.LinearAttend | ops.LinearAttendBackward):
        if op.chunk < 1:
            return f"has chunks of {op.chunk} tokens: allowed is 1 or more"
        kv_heads = op.k.shape[2]
    else:
        kv_heads = op.state.shape[1]
    heads = op.reads[0].shape[2]
    return "" if heads % kv_heads == 0 else f"has {heads} heads for {kv_heads} key/value heads"


def _number_problem(name: str, given: object, what: str, *wanted: object) -> str:
    """Return where an op computes with another number than its workload, or than any of its kinds of layers."""
    allowed = " or ".join(map(repr, dict.fromkeys(wanted)))
    return "" if given in wanted else f"has {name} {given!r}: {what} is {allowed}"


def _parts_problem(op: ops.Copy | ops.Fold) -> str:
    """Return where parts of one shape do not fall to parts of the other side."""
    source, target = op.source, op.target
    for split in (source, target):
        known = 0 <= split.dim < min(3, len(split.view.shape)) and split.parts >= 1
        each = len(split.sizes) in {0, split.parts} and min(split.sizes, default=1) >= 1
        if not (known and each and split.starts[-1] == split.view.shape[split.dim]):
            return f"cuts {split.view.shape} along dimension {split.dim} into {split.sizes or split.parts} parts"
    if source.sizes or target.sizes:
        return _sizes_problem(op)
    if source.part_shape != target.part_shape:
        return f"takes parts {source.part_shape} for parts {target.part_shape}"
    if isinstance(op, ops.Fold):
        return "" if source.parts % target.parts == 0 else f"sums {source.parts} parts into {target.parts}"
    order = op.order or range(source.parts)
    fits = len(order) == target.parts and all(0 <= part < source.parts for part in order)
    return "" if fits else f"takes parts {tuple(order)} of {source.parts} for {target.parts}"


def _sizes_problem(op: ops.Copy | ops.Fold) -> str:
    """Return where parts of several sizes do not fall to parts of the same size."""
    source, target = op.source, op.target
    if source.dim != target.dim:
        along = f"dimension {source.dim} for parts along dimension {target.dim}"
        return f"takes parts of sizes {source.sizes or target.sizes} along {along}: give both one dimension"
    order = op.order if isinstance(op, ops.Copy) and op.order else tuple(range(source.parts))
    if isinstance(op, ops.Fold) or not all(0 <= part < source.parts for part in order):
        return f"takes parts {order} of sizes {source.sizes}: a copy does, of parts that there are"
    shapes = source.part_shapes
    if [shapes[part] for part in order] != target.part_shapes:
        return f"takes parts {order} of sizes {source.sizes} for sizes {target.sizes}"
    return ""


def _collision(op: ops.Op, reads: tuple[View, ...], writes: tuple[View, ...], program: Program) -> str:
    """Return where an op writes to what it also reads or writes: the order within an op is undefined.

    What is updated in place, the same view read and written, is what some ops are for.
    """
    if len({view.buffer for view in (*reads, *writes)}) == len(reads) + len(writes):
        return ""
    updated = [
        getattr(op, name) for name, mark in operands(type(op)).items() if mark.is_written and mark.is_read_by(op)
    ]
    in_place = {view for value in updated for view in views_in(value)}
    pairs = [*combinations(writes, 2), *((a, b) for a in reads for b in writes if not (a == b and a in in_place))]
    for a, b in pairs:
        if a.buffer == b.buffer and overlap(a.slices, b.slices):
            return f"uses overlapping parts of buffer {program.buffers[a.buffer].name!r}; give it another buffer"
    return ""


def _message_problem(op: ops.Communication, views: tuple[View, ...], program: Program) -> str:
    """Return where a message does not lie in one piece, or goes over what is no communicator; matching compares both
    sides.
    """
    if op.communicator in ops.STREAMS:
        return f"is on stream {op.communicator!r}: a communicator's ops take its own"
    for view in views:
        if not is_contiguous(view, program.buffers[view.buffer]):
            return "sends or receives a view with gaps; copy it into a buffer first"
    if isinstance(op, ops.Collective):
        for side in (op.given, op.taken):
            if isinstance(side, Split) and not 0 <= side.dim < len(side.view.shape):
                return f"cuts {side.view.shape} along dimension {side.dim}"
            if isinstance(side, Split) and not parts_are_contiguous(side, program.buffers[side.view.buffer]):
                return f"cuts its view along dimension {side.dim}, which leaves gaps; copy first"
    return ""


def _rank_problem(op: ops.Op, rank: int, streams: set[str]) -> str:
    """Return where an op of a rank is on a stream that the rank does not have, waits for one that nothing runs on, or
    sends to its own rank. Which of its streams an op may take follows from its kind.
    """
    if op.stream not in streams:
        own = ", ".join(sorted(streams.difference(ops.STREAMS))) or "none"
        return f"is on communicator {op.stream!r}, which rank {rank} has no part in: it has {own}"
    if isinstance(op, ops.Exchange) and rank in [peer for peer, _ in (*op.sends, *op.recvs)]:
        return "exchanges with its own rank; use a Copy"
    if isinstance(op, ops.HostSync):
        for stream in op.streams:
            if stream not in streams or stream == ops.HOST:
                others = ", ".join(sorted(streams - {ops.HOST}))
                return f"waits for stream {stream!r}, on which nothing runs: allowed are {others}"
    return ""


def port_problem(port: Port, program: Program, model: ModelSpec) -> str:
    """Return where a port's view has not the shape of what it says it holds; empty if it has."""
    if problem := _view_problem(port.view, program):
        return problem
    for span in (port.batch, port.heads, *port.tokens, *((port.features,) if port.features else ())):
        if not (0 <= span.start <= span.stop < FAR // 2 and span.step >= 1):
            return f"says that it holds {span}: positions begin at 0 and rise"
    dims, tensor = program.buffers[port.view.buffer].dims, tensor_of(port.tensor, model)
    if dims != tensor.dims:
        return f"has dims {dims!r}: those of {port.tensor} are {tensor.dims!r}"
    width = port.features.size if port.features else tensor.features(model)
    tokens, sequences, heads = num_tokens(port.tokens), port.batch.size, port.heads.size
    wanted = {"b": sequences, "s": tokens, "i": tokens, "h": heads, "d": model.head_dim, "e": width, "o": width}
    for dim, extent in zip(dims, port.view.shape, strict=True):
        if extent != wanted[dim]:
            return f"holds {extent} along {dim!r} where {wanted[dim]} is needed"
    return ""


def _port_dtype_problem(port: Port, program: Program, header: Header) -> str:
    """Return where a port is in another data type than its tensor."""
    tensor = with_options(tensor_of(port.tensor, header.workload.model), header.options.get("optimiser_states", ""))
    given, wanted = program.dtype(port.view), dtype_of(tensor, header.workload.dtype)
    return "" if given == wanted else f"is in {given}: it has to be in {wanted}"
