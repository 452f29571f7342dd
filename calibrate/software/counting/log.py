"""A log of what code runs on tensors of one device: every op that launches, and what is allocated meanwhile.

Ops below autograd, as a device gets them. On the meta device nothing is computed, and shapes, strides and storages are
those of any other device.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry


class Operand(NamedTuple):
    """A tensor, or a part of one, that a kernel reads or writes."""

    elements: int
    itemsize: int


class Call(NamedTuple):
    """A launch."""

    kernel: str
    dtype: torch.dtype
    """Of what it writes."""
    reads: tuple[Operand, ...]
    writes: tuple[Operand, ...]
    flops: int | None = None
    """Of a product of matrices or attention; None of any other kernel."""
    scattered: bool = False
    """Whether it is pointwise, and operands lie in memory in different orders, one is broadcast, or one is a part of a
    larger tensor."""


class Allocated(NamedTuple):
    """A storage that came to be while the log was on."""

    operand: Operand
    kernel: str
    """Which made it."""


class Given(NamedTuple):
    """The tensors of an op that are on the device."""

    taken: list[torch.Tensor]
    changed: list[torch.Tensor]
    """Of those, and what it was told to write to."""
    made: list[torch.Tensor]
    """With a storage of their own: views are not among them."""


class Log(TorchDispatchMode):
    """What runs while it is entered."""

    def __init__(self, device: str = "meta") -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.alive: dict[int, Allocated] = {}
        """By storage."""
        self.peak: list[Allocated] = []
        """What was alive when it was most."""
        self._device = device
        self._bytes = self._most = 0

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> object:
        """Run an op, and note what it launches and allocates."""
        result = func(*args, **(kwargs or {}))
        if func.namespace != "aten":
            return result
        given = self._given(func, args, kwargs or {}, result)
        self.calls += _calls(func, given, args, kwargs or {}, result)
        for tensor in given.made:
            self._allocate(tensor, func.overloadpacket.__name__)
        return result

    def launched(self, kernel: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
        """Note a kernel that is no op of ATen."""
        self.calls.append(Call(kernel, writes[0].dtype, tuple(map(operand, reads)), tuple(map(operand, writes))))

    def _given(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: object) -> Given:
        """Return the tensors on the device that an op takes, changes and returns."""
        taken: list[torch.Tensor] = []
        changed: list[torch.Tensor] = []
        for at, argument in enumerate(func._schema.arguments):  # noqa: SLF001 - nothing public says what an op changes
            tensors = self._here(args[at] if at < len(args) else kwargs.get(argument.name))
            if not argument.is_out:
                taken += tensors
            if argument.alias_info is not None and argument.alias_info.is_write:
                changed += tensors
        before = {storage_of(one) for one in (*taken, *changed)}
        return Given(taken, changed, [one for one in self._here(result) if storage_of(one) not in before])

    def _here(self, values: object) -> list[torch.Tensor]:
        return [one for one in tree_leaves(values) if isinstance(one, torch.Tensor) and one.device.type == self._device]

    def _allocate(self, tensor: torch.Tensor, kernel: str) -> None:
        """Note a new storage, until nothing refers to it."""
        key, storage = storage_of(tensor), tensor.untyped_storage()
        if key in self.alive or not storage.nbytes():
            return
        self.alive[key] = Allocated(Operand(storage.nbytes() // tensor.itemsize, tensor.itemsize), kernel)
        self._bytes += storage.nbytes()
        weakref.finalize(storage, self._free, key, storage.nbytes())
        if self._bytes > self._most:
            self._most, self.peak = self._bytes, list(self.alive.values())

    def _free(self, key: int, size: int) -> None:
        del self.alive[key]
        self._bytes -= size


def launch(kernel: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
    """Note a kernel that is no op of ATen in the active log. Without a log, run a small kernel in its place."""
    log = _get_current_dispatch_mode()
    if isinstance(log, Log):
        log.launched(kernel, reads, writes)
    else:
        writes[0].zero_()


def storage_of(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's storage, as long as it is alive."""
    return tensor.untyped_storage()._cdata  # noqa: SLF001 - which data_ptr is not, on the meta device


def operand(tensor: torch.Tensor) -> Operand:
    """Return a tensor as a kernel reads or writes it: what is expanded, once."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return Operand(math.prod(sizes), tensor.itemsize)


def _calls(func: Any, given: Given, args: Sequence[Any], kwargs: Mapping[str, Any], result: object) -> Iterator[Call]:
    """Yield what an op launches: nothing where it makes a view, allocates, or fetches a number."""
    name = func.overloadpacket.__name__
    if name in _NO_KERNEL or not (given.changed or given.made):
        return
    if name in _SEVERAL:
        yield from _SEVERAL[name](name, given)
        return
    changed = {id(one) for one in given.changed if name in _OVERWRITE}
    taken = [] if name in _SHAPE_ALONE else given.taken
    read = {_place(one): one for one in taken if id(one) not in changed and one.numel()}
    written = [one for one in (*given.changed, *given.made) if one.numel()]
    flops = flop_registry.get(func.overloadpacket)
    yield Call(
        name,
        written[0].dtype,
        tuple(map(operand, read.values())),
        tuple(map(operand, written)),
        None if flops is None else flops(*args, **kwargs, out_val=result),
        (name in _COPIES or torch.Tag.pointwise in func.tags) and _scattered([*read.values(), *written]),
    )


def _scattered(operands: Sequence[torch.Tensor]) -> bool:
    """Return whether tensors do not all have the same elements in the same order, without gaps."""
    layouts = {tuple((n, step) for n, step in zip(one.shape, one.stride(), strict=True) if n > 1) for one in operands}
    return len(layouts) > 1 or not all(_dense(layout) for layout in layouts)


def _dense(layout: tuple[tuple[int, int], ...]) -> bool:
    """Return whether sizes and strides leave no gap, whatever the order of dimensions."""
    elements = 1
    for step, size in sorted((step, size) for size, step in layout):
        if step != elements:
            return False
        elements *= size
    return True


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return what is equal of tensors that are the same elements."""
    return storage_of(tensor), tensor.storage_offset(), tensor.shape, tensor.stride()


def _filled(name: str, given: Given) -> Iterator[Call]:
    """Yield zeros, and then what writes a part of them: gradients of slices and of losses by class, and padding."""
    (whole,) = given.made
    yield Call("zeros", whole.dtype, (), (operand(whole),))
    few = given.taken[_PART.get(name, 0)].numel()
    if not few:
        return
    read = [operand(one) for one in given.taken if one.numel() <= few]
    yield Call(name, whole.dtype, tuple(read), (Operand(few, whole.itemsize),))


def _picked(name: str, given: Given) -> Iterator[Call]:
    """Yield a kernel that reads as many elements or rows of a tensor as a second one names, and writes a new one."""
    whole, index, *_ = given.taken
    rows = index.numel() * math.prod(whole.shape[1:] if name == "embedding" else ())
    read = Operand(rows, whole.itemsize), operand(index)
    yield Call(name, whole.dtype, read, tuple(map(operand, given.made)))


def _indexed(name: str, given: Given) -> Iterator[Call]:
    """Yield a kernel that reads the elements of a tensor that others point to, and writes a new one."""
    whole, *indices = given.taken
    (made,) = given.made
    yield Call(name, made.dtype, (Operand(made.numel(), whole.itemsize), *map(operand, indices)), (operand(made),))


def _put(name: str, given: Given) -> Iterator[Call]:
    """Yield a kernel that writes the elements of a tensor that others point to, or, by a mask, all of them."""
    whole, *others = given.taken
    masked = any(one.dtype == torch.bool for one in others[:-1])
    written = operand(whole) if masked else Operand(max(one.numel() for one in others[:-1]), whole.itemsize)
    yield Call(name, whole.dtype, (*([written] if masked else []), *map(operand, others)), (written,))


def _fused(name: str, given: Given) -> Iterator[Call]:
    """Yield a fused step: of gradients its signature says that they change, which they do with a scale alone."""
    tensors = [one for one in given.taken if one.dim()]
    each = len(tensors) // 4
    written = [*tensors[:each], *tensors[2 * each :]]
    yield Call(name, written[0].dtype, tuple(map(operand, given.taken)), tuple(map(operand, written)))


_NO_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh"}
_OVERWRITE = {"fill_", "zero_", "copy_", "_foreach_zero_", "_foreach_copy_"}
"""What changes a tensor that it does not read."""
_SHAPE_ALONE = {"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"}
"""What takes no more of a tensor than its shape."""
_COPIES = {"_to_copy", "copy_", "clone"}
"""Pointwise, too, but not tagged so."""
_SEVERAL = {
    "slice_backward": _filled, "select_backward": _filled, "constant_pad_nd": _filled,
    "nll_loss_backward": _filled, "embedding_dense_backward": _filled,
    "nll_loss_forward": _picked, "embedding": _picked, "index": _indexed, "index_put_": _put,
    "_fused_adamw_": _fused, "_fused_adam_": _fused,
}  # fmt: skip
"""What launches several kernels on CUDA, or touches a part of its operands, by the code of ATen."""
_PART = {"nll_loss_backward": 2}
"""Which tensor has as many elements as are written after the zeros, where it is not the first: here, the classes."""
