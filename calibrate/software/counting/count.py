"""Running a part of some software forward and backward, and what that takes."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from calibrate.software.counting.log import Allocated, Call, Log, Operand, storage_of
from calibrate.software.counting.sizes import Sizes
from sim.base.errors import InputError


class Ready(NamedTuple):
    """A part of one size, before it runs."""

    run: Callable[[], tuple[torch.Tensor, ...]]
    """Returns the outputs whose gradients come from outside."""
    inputs: tuple[torch.Tensor, ...] = ()
    """What was computed before it, and may be kept."""


Build = Callable[[Sizes], Ready]


class Run(NamedTuple):
    """What ran."""

    forward: list[Call]
    backward: list[Call]
    kept: list[Operand]
    peak: list[Allocated]

    def without(self, *others: Run) -> Run:
        """Return what is left of a whole without some of its parts; raises ValueError if one is not in it.

        The peak stays that of the whole.
        """
        return Run(
            _left(self.forward, [call for one in others for call in one.forward]),
            _left(self.backward, [call for one in others for call in one.backward]),
            _left(self.kept, [kept for one in others for kept in one.kept]),
            self.peak,
        )

    def without_products(self) -> Run:
        """Return the other kernels, without what is kept."""
        forward, backward = ([call for call in calls if call.flops is None] for calls in (self.forward, self.backward))
        return Run(forward, backward, [], [])


def run(build: Build, sizes: Sizes, *, fake: bool = False) -> Run:
    """Return what a part runs at a size: forward, and backward of its outputs if they have a gradient.

    On the meta device; or, where that knows no autocast or no lists of tensors, on ``fake`` tensors of the CPU, which
    hold nothing either.
    """
    device = "cpu" if fake else "meta"
    with FakeTensorMode() if fake else contextlib.nullcontext(), torch.device(device):
        return _run(build(sizes), Log(device))


def _run(ready: Ready, log: Log) -> Run:
    kept = dict[int, Operand]()
    inputs = {storage_of(one): Operand(one.numel(), one.itemsize) for one in ready.inputs}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        key = storage_of(tensor)
        if key in log.alive:
            kept[key] = log.alive[key].operand
        elif key in inputs:
            kept[key] = inputs[key]
        return tensor

    with log:
        with saved_tensors_hooks(keep, lambda tensor: tensor), FlashAttention():
            outputs = [one for one in ready.run() if one.requires_grad]
        forward = len(log.calls)
    given = [torch.empty_like(one) if one.dim() else None for one in outputs]
    if outputs:
        with log:
            torch.autograd.backward(outputs, given)
    return Run(log.calls[:forward], log.calls[forward:], list(kept.values()), log.peak)


class _Received(torch.autograd.Function):
    """What was computed before, as products compute it: it takes its gradient, where a leaf would add or copy it, and
    autocast would remember what it was cast to.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ARG004 - the form is torch's
        """Return the same."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> None:
        """Return no gradient."""


def received(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return an input of a part: a tensor that needs a gradient, and is no leaf."""
    return _Received.apply(torch.empty(shape, dtype=dtype, requires_grad=True))


def missing(package: str) -> InputError:
    """Return the error for a package that is not installed."""
    return InputError(f"{package} is not installed, and its modules are what is counted; install longstep[software]")


class FlashAttention(TorchFunctionMode):
    """Takes the flash kernel for ``scaled_dot_product_attention``, as torch does on a GPU where nothing forbids it."""

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        """Call the kernel, which has key/value heads of their own number."""
        given = kwargs or {}
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **given)
        if given.get("attn_mask") is not None or given.get("dropout_p"):
            raise InputError("attention with a mask or dropout is not counted: the flash kernel has neither")
        if torch.is_autocast_enabled("cpu"):
            args = tuple(one.to(torch.get_autocast_dtype("cpu")) for one in args)
        flash = torch.ops.aten._scaled_dot_product_flash_attention  # noqa: SLF001 - what the public function dispatches to
        return flash(*args, 0.0, given["is_causal"], scale=given["scale"])[0]


def _left(whole: list[Any], part: list[Any]) -> list[Any]:
    """Return a list without the first equal of each element of another one. Where operands lie in memory does not
    count, because a part alone is given others than in the whole.
    """

    def like(one: Any) -> Any:
        return one._replace(scattered=False) if isinstance(one, Call) else one

    gone = Counter(map(like, part))
    left = []
    for one in whole:
        if gone[like(one)]:
            gone[like(one)] -= 1
        else:
            left.append(one)
    if +gone:
        raise ValueError(f"no part of the whole: {+gone}")
    return left
