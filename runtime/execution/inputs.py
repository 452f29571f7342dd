"""Inputs of a run, made from global positions.

They depend on the seed, the tensor's name and the global position of each token only, so that every number of ranks and
every layout sees the same global tensors. They have the workload's data type; what checks them takes the same numbers
to fp64.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import msgspec
import torch

from runtime.execution.reference import Sequences, adamw, attention, layers, linear_attention, step
from runtime.execution.tensors import TORCH_DTYPE, Storage
from sim.schedule.ir.fragments import Port
from sim.schedule.ir.masks import Span, mask_of
from sim.schedule.ir.ops import NO_LABEL
from sim.schedule.ir.shares import Share
from sim.schedule.ir.tensors import Tensor
from sim.schedule.ir.views import View
from sim.schedule.model.block import BIASES
from sim.schedule.model.scope import ADAPTERS, tensor_of, together, trained, units, updated
from sim.words.workload import Workload

_BLOCK = 64
"""Tokens that are drawn from one seed."""
_PERIOD = 4_194_301
"""Numbers of a weight that are drawn; then they repeat, since billions would take minutes on a CPU. It is prime, so
that rows and shards differ.
"""
_CPU = torch.device("cpu")


def global_tokens(name: str, span: Span, heads: int, workload: Workload) -> torch.Tensor:
    """Return some tokens, with all ``heads``, of a global input: (B, tokens, heads, D), standard normal."""
    return _tokens(name, span, (heads, workload.model.head_dim), workload)


def global_activations(name: str, span: Span, workload: Workload) -> torch.Tensor:
    """Return some tokens of what goes into, or comes back to, a stack of layers: (B, tokens, E)."""
    return _tokens(name, span, (workload.model.embed_dim,), workload)


def global_ids(span: Span, workload: Workload) -> torch.Tensor:
    """Return the ids of some tokens: (B, tokens), each as likely; 0 of padding."""
    draw = partial(torch.randint, workload.model.vocab_size)
    return _drawn("ids", span, (), workload, draw)


def global_labels(span: Span, workload: Workload) -> torch.Tensor:
    """Return the labels of some tokens: (B, tokens), the id of the next one; none of last ones and padding."""
    behind = global_ids(Span(span.start + 1, span.stop + 1, span.step), workload)
    positions, ends = torch.arange(*span), torch.tensor(workload.document_lengths).cumsum(0)
    last = (positions >= workload.real_seq - 1) | torch.isin(positions, ends - 1)
    return behind.masked_fill(last, NO_LABEL)


def global_weight(name: str, layer: int, workload: Workload, device: torch.device = _CPU) -> torch.Tensor:
    """Return a weight of a layer: (fan in, fan out), normal / sqrt(fan in); (E,), of norms around one, of biases around
    zero.
    """
    tensor = tensor_of(name, workload.model)
    shape = tensor.shape(workload.model)
    drawn = _normal(f"{name} of {layer}", shape, workload, device)
    if len(shape) == 2:
        drawn.mul_(shape[0] ** -0.5)
    else:
        drawn.mul_(0.1).add_(0 if tensor in BIASES else 1)
    return drawn.to(TORCH_DTYPE[workload.dtype])


def global_state(name: str, layer: int, workload: Workload, device: torch.device = _CPU) -> torch.Tensor:
    """Return a weight, or a flat tensor of a unit: its weights one behind the other, or moments as of gradients of
    about 1e-3. The ``device`` that makes it changes no bit: nothing is divided, since CUDA multiplies by a reciprocal.
    """
    tensor = tensor_of(name, workload.model)
    if tensor.kind == "moment":
        drawn = _normal(f"{name} of {layer}", tensor.shape(workload.model), workload, device)
        return drawn.mul_(1e-3) if name.startswith("first") else drawn.abs_().add_(1).mul_(1e-3).square_()
    parts = [global_weight(part.name, layer, workload, device) for part in tensor.parts or (tensor,)]
    return torch.cat([part.flatten() for part in parts]) if tensor.parts else parts[0]


def flat_share(whole: torch.Tensor, tensor: Tensor, share: Share) -> torch.Tensor:
    """Return what a member of a tensor-parallel group has of a flat tensor of whole weights, or of an optimiser's state
    of them: of each its rows and columns, one behind the other.
    """
    found, shapes = [], [part.shape(share.model) for part in tensor.parts]
    for part, shape, values in zip(tensor.parts, shapes, whole.split([math.prod(s) for s in shapes]), strict=True):
        rows, columns = share.rows(part), share.columns(part)
        of_rows = values.view(shape)[slice(*rows)]
        found.append((of_rows if columns is None else of_rows[:, slice(*columns)]).flatten())
    return torch.cat(found)


def _normal(what: str, shape: tuple[int, ...], workload: Workload, device: torch.device) -> torch.Tensor:
    """Return normal numbers in fp32, drawn on the CPU, so that every device has the same, then repeated on one."""
    count = math.prod(shape)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{workload.seed} {what}".encode()))
    drawn = torch.randn(min(count, _PERIOD), generator=generator).to(device)
    return drawn.repeat(-(-count // _PERIOD))[:count].view(shape)


def _tokens(name: str, span: Span, width: tuple[int, ...], workload: Workload) -> torch.Tensor:
    """Return (B, tokens, *width), drawn in fp32, which is several times as fast as in fp64."""
    return _drawn(name, span, width, workload, torch.randn).to(TORCH_DTYPE[workload.dtype])


def _drawn(
    name: str, span: Span, width: tuple[int, ...], workload: Workload, draw: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """Return (B, tokens, *width), drawn block by block; zeros for padding."""
    blocks = []
    for block in range(span.start // _BLOCK, (span.stop - 1) // _BLOCK + 1):
        generator = torch.Generator().manual_seed(zlib.crc32(f"{workload.seed} {name} {block}".encode()))
        drawn = draw((workload.batch, _BLOCK, *width), generator=generator)
        low, high = block * _BLOCK, (block + 1) * _BLOCK
        drawn[:, max(workload.real_seq - low, 0) :] = 0
        begin = max(span.start, low + (span.start - low) % span.step)
        blocks.append(drawn[:, begin - low : min(span.stop, high) - low : span.step])
    return torch.cat(blocks, dim=1)


def shard_of(weight: torch.Tensor, port: Port, workload: Workload, members: int) -> torch.Tensor:
    """Return what a port holds of a weight or its gradient; of a flat tensor some rows of what one of so many members
    of a tensor-parallel group has of it.
    """
    tensor = tensor_of(port.tensor, workload.model)
    if tensor.parts and members > 1:
        weight = flat_share(weight, tensor, Share(workload.model, port.heads.start, members))
    parts = [weight[slice(*span)] for span in port.tokens]
    rows = parts[0] if len(parts) == 1 else torch.cat(parts)
    return rows if port.features is None else rows[:, slice(*port.features)]


def fill_inputs(
    ports: Iterable[Port],
    workload: Workload,
    storage: Storage,
    advance: Callable[[], None] = lambda: None,
    members: int = 1,
) -> None:
    """Put into a rank's input ports what they hold of the global tensors; out and lse are computed in fp64. ``advance``
    is called after every port. ``members`` are those of a tensor-parallel group.
    """
    model, whole = workload.model, Span(0, workload.seq)
    scale, cap = model.attention_scale or None, model.attention_softcap or None
    weights: dict[tuple[object, ...], View] = {}
    for port in ports:
        advance()
        if tensor_of(port.tensor, workload.model).of_weight:
            first = weights.setdefault((port.name, port.tokens, port.heads, port.features), port.view)
            if first == port.view:
                whole_weight = global_state(port.tensor, port.layer, workload, storage.device)
                storage.write(first).copy_(shard_of(whole_weight, port, workload, members))
            else:  # that of another rank on this device
                storage.write(port.view).copy_(storage.read(first))
            continue
        alone = workload.of_sequence(port.batch.start)
        own, drawn = slice(*port.batch[:2]), msgspec.structs.replace(alone, batch=port.batch.stop)
        if port.tensor in {"ids", "labels"}:
            read = global_ids if port.tensor == "ids" else global_labels
            storage.write(port.view).copy_(torch.cat([read(span, drawn) for span in port.tokens], dim=1)[own])
            continue
        if port.tensor in {"x", "dx"}:
            tokens = [global_activations(port.tensor, span, drawn) for span in port.tokens]
            storage.write(port.view).copy_(torch.cat(tokens, dim=1)[own])
            continue
        if port.tensor not in {"out", "lse"}:
            total = model.num_kv_heads if port.tensor in {"k", "v"} else model.num_heads
            value = torch.cat([global_tokens(port.tensor, span, total, drawn) for span in port.tokens], dim=1)
            storage.write(port.view).copy_(value[own, :, port.heads.start : port.heads.stop])
            continue
        heads = range(model.num_heads)[port.heads.start : port.heads.stop : port.heads.step]
        group = model.num_heads // model.num_kv_heads
        k, v = (
            global_tokens(name, whole, model.num_kv_heads, drawn).double()[own, :, [head // group for head in heads]]
            for name in ("k", "v")
        )
        parts = []
        for span in port.tokens:
            q = global_tokens("q", span, model.num_heads, drawn).double()[own, :, list(heads)]
            part = attention(q, k, v, None, mask_of(workload.of_layer(0)), range(*span), scale=scale, cap=cap)
            parts.append(part.out if port.tensor == "out" else part.lse)
        storage.write(port.view).copy_(torch.cat(parts, dim=1 if port.tensor == "out" else 2))


def reference(workload: Workload) -> dict[tuple[str, int], torch.Tensor]:
    """Return outputs and gradients of all tokens but the padding by (tensor, layer), in fp64, from one process."""
    whole, model, linear = Span(0, workload.real_seq), workload.model, workload.attention == "linear"
    kinds = [(one.model, mask_of(one)) for one in map(workload.of_layer, range(workload.layers))]
    used = [together(unit, model) for unit in units(workload) if unit.name != ADAPTERS]
    weights = [
        {
            weight.name: global_weight(weight.name, unit.layer, workload).double()
            for unit in some
            for weight in unit.weights
        }
        for some in used
    ]
    if workload.scope == "layer":
        x, dx = (global_activations(name, whole, workload).double() for name in ("x", "dx"))
        return layers(weights, x, dx if workload.backward else None, kinds, linear=linear)
    if workload.scope == "step":
        losses, gradients = step(weights, _batches(workload), linear=linear)
        return {("loss", workload.layers): losses} | _updates(workload, gradients)
    q, dout = (global_tokens(name, whole, model.num_heads, workload).double() for name in ("q", "dout"))
    k, v = (global_tokens(name, whole, model.num_kv_heads, workload).double() for name in ("k", "v"))
    if linear:
        found = linear_attention(q, k, v, dout, kinds[0][1])
    else:
        scale, cap = model.attention_scale or None, model.attention_softcap or None
        found = attention(q, k, v, dout, kinds[0][1], scale=scale, cap=cap)._asdict()
    return {(tensor, 0): value for tensor, value in found.items()}


def _batches(workload: Workload) -> Iterator[Sequences]:
    """Yield what a step has to learn from: all sequences at once, or one by one where they have documents of their
    own.
    """
    for number in range(workload.batch if workload.sequences else 1):
        alone = workload.of_sequence(number)
        drawn = msgspec.structs.replace(alone, batch=number + 1) if workload.sequences else workload
        whole, kinds = Span(0, alone.real_seq), [alone.of_layer(layer) for layer in range(alone.layers)]
        ids, labels = (read(whole, drawn)[number:] for read in (global_ids, global_labels))
        yield Sequences(ids, labels, [(one.model, mask_of(one)) for one in kinds])


def _updates(workload: Workload, gradients: list[torch.Tensor]) -> dict[tuple[str, int], torch.Tensor]:
    """Return what the optimiser makes of each unit's flat weights and moments, and the weights by themselves."""
    states = [
        [global_state(state.name, unit.layer, workload).double() for state in unit.states] for unit in trained(workload)
    ]
    found: dict[tuple[str, int], torch.Tensor] = {}
    for unit, after in zip(trained(workload), adamw(states, gradients), strict=True):
        names = [updated(state).name for state in unit.states]
        found |= {(name, unit.layer): tensor for name, tensor in zip(names, after, strict=True)}
        found[updated(unit.working).name, unit.layer] = after[0]
        shapes = [weight.shape(workload.model) for weight in unit.weights]
        parts = after[0].split([math.prod(shape) for shape in shapes])
        found |= {
            (updated(weight).name, unit.layer): part.view(shape)
            for weight, part, shape in zip(unit.weights, parts, shapes, strict=True)
        }
    return found
