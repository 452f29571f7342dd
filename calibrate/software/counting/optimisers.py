"""Steps of torch's optimisers."""

from __future__ import annotations

from typing import Literal

import torch
from torch.optim.adam import adam

from calibrate.software.counting.count import Ready, Run, run
from calibrate.software.counting.sizes import Sizes

How = Literal["for-loop", "foreach", "fused"]
HOWS: tuple[How, ...] = ("for-loop", "foreach", "fused")


def adamw(how: How, dtype: torch.dtype, sizes: Sizes) -> Run:
    """Return what a step of AdamW runs: of one parameter in a loop, else of two of half the size, to see lists of them.

    The function that AdamW.step calls; states have the type of the parameters, as it makes them.
    """

    def build(sizes: Sizes) -> Ready:
        shares = [sizes["parameters"]] if how == "for-loop" else 2 * [sizes["parameters"] // 2]
        parameters, gradients, means, squares = ([torch.empty(n, dtype=dtype) for n in shares] for _ in range(4))
        steps = [
            torch.empty((), dtype=torch.float32) if how == "fused" else torch.ones((), device="cpu") for _ in shares
        ]

        def step() -> tuple[torch.Tensor, ...]:
            with torch.no_grad():
                adam(
                    parameters, gradients, means, squares, [], steps, foreach=how == "foreach", fused=how == "fused",
                    amsgrad=False, beta1=0.9, beta2=0.95, lr=1e-4, weight_decay=0.1, eps=1e-8, maximize=False,
                    decoupled_weight_decay=True,
                )  # fmt: skip
            return ()

        return Ready(step)

    return run(build, sizes)


def clip(dtype: torch.dtype, sizes: Sizes) -> Run:
    """Return what clip_grad_norm_ runs on two gradients of half the size."""

    def build(sizes: Sizes) -> Ready:
        parameters = [torch.nn.Parameter(torch.empty(sizes["parameters"] // 2, dtype=dtype)) for _ in range(2)]
        for one in parameters:
            one.grad = torch.empty_like(one)
        return Ready(lambda: (torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True),))

    return run(build, sizes, fake=True)
