"""What eager modules cost the host for each kernel that the simulator issues, in small kernels of ``calibrate.eager``.

    python -m calibrate.software.host > sim/software/issue.toml

Decoder layers with tensors of a few elements on the CPU, and torch's fake process group: what is left is the host's
work, as in front of a GPU. A layer's time, less what profiles have entries of (attention, collectives, other kernels),
is that of its kernels: nn.Module, autograd and its engine, views, and the Python around them. Triton's kernels, which
do not run here, count as a small one each.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from calibrate import eager
from calibrate.software.counting.count import received
from calibrate.software.counting.sizes import Sizes
from calibrate.software.libraries import nanotron, tensor_parallel
from calibrate.software.libraries.transformers_modules import Modules, default_type, layer_of
from calibrate.software.tables import version
from sim.engine.costs.cost import CostModel
from sim.engine.costs.issue import of_module
from sim.schedule.derive.kernels import ATTENTION_KERNELS
from sim.schedule.ir.ops import Collective, Part
from sim.setup.setup import Setup
from sim.software.issue import MARK, PARALLEL, Issued, Layer, Table
from topology.cluster import Cluster
from topology.host import host_facts

_RUNS = 20
_RANKS, _RANK = 4, 1
"""Of tensor parallelism: a rank that has others before and behind it, as most have."""
_SIZES: Sizes = {
    "batch": 1, "sequence": 8, "tokens": 8, "hidden": 32, "ffn": 64, "heads": 4, "kv_heads": 2, "head_dim": 8,
    "vocab": 64, "multiprocessors": 1,
}  # fmt: skip
_PASSES: tuple[Part, Part] = ("forward", "backward")


class _Real(NamedTuple):
    """A layer that runs, and what of it the simulator issues."""

    said: str
    software: str
    ready: Callable[[], tuple[torch.nn.Module, Callable[[], torch.Tensor]]]
    """Returns the layer, and a forward pass of it."""
    parallel: bool = False


def _transformers() -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    with default_type(torch.bfloat16):
        module, x, angles = layer_of(Modules("llama", autocast=False), _SIZES)
    return module, lambda: module(x, position_embeddings=angles)


def _nanotron() -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    return _of_nanotron(torch.nn.functional.linear, torch.nn.functional.linear, 1)


def _nanotron_parallel() -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    group = dist.group.WORLD
    return _of_nanotron(
        lambda x, weight: tensor_parallel.Column.apply(x, weight, group),
        lambda x, weight: tensor_parallel.Row.apply(x, weight, group),
        _RANKS,
    )


def _of_nanotron(
    column: nanotron.Linear, row: nanotron.Linear, ranks: int
) -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    attend = nanotron.Attention(_SIZES, kv_heads="heads", column=column, row=row, flash=_flash)
    module = nanotron.Layer(_SIZES, attend=attend, mlp=nanotron.Mlp(_SIZES, column=column, row=row))
    x = received(torch.bfloat16, _SIZES["sequence"] // ranks, _SIZES["batch"], _SIZES["hidden"])
    return module, lambda: module(x)


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object) -> torch.Tensor:
    """Return attention of one sequence by the CPU's flash kernel."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001 - as in calibrate.eager
    q, k, v = (one.unsqueeze(0).transpose(1, 2) for one in (q, k, v))
    return flash(q, k, v, 0.0, True)[0].transpose(1, 2)


_LAYERS: Mapping[str, _Real] = {
    "transformers": _Real("LlamaDecoderLayer of transformers with SDPA, bf16", "huggingface", _transformers),
    "nanotron": _Real("LlamaDecoderLayer of nanotron 0.4 as its code has it, one tensor rank", "nanotron", _nanotron),
    f"nanotron{PARALLEL}": _Real(
        "the same with column_linear and row_linear, REDUCE_SCATTER and asynchronous", "nanotron", _nanotron_parallel,
        parallel=True,
    ),
}  # fmt: skip


def main() -> None:
    """Print the table as TOML."""
    sys.stdout.write(encoded(measured()))


def measured() -> Table:
    """Return what each layer takes here, with the versions that are installed; raises InputError where a package is
    missing.
    """
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=_RANK, world_size=_RANKS)
    try:
        # oneDNN looks for a kernel of 16 bits at each call, which takes longer than a launch of cuBLAS.
        with warnings.catch_warnings(action="ignore"), torch.backends.mkldnn.flags(enabled=False):
            alone_s = {name: eager.seconds(call) for name, call in eager.calls().items() if name in _ALONE}
            layers = {name: _layer(real, alone_s) for name, real in _LAYERS.items()}
    finally:
        dist.destroy_process_group()
    return Table(
        created=datetime.now(UTC).date().isoformat(),
        cpu=host_facts().cpu,
        versions={package: version(package) for package in ("torch", "transformers")},
        small_kernel_us=round(1e6 * alone_s["kernel"], 2),
        layers=layers,
    )


_ALONE = ("kernel", "collective", *ATTENTION_KERNELS)
"""What profiles have entries of, as ``calibrate.eager`` calls it."""


def _layer(real: _Real, alone_s: Mapping[str, float]) -> Layer:
    module, forward = real.ready()
    weights, gradient = [*module.parameters()], torch.ones_like(forward())

    def both() -> None:
        for weight in weights:
            weight.grad = None
        torch.autograd.backward(forward(), gradient)

    forward_s = eager.seconds(forward, _RUNS)
    passes_s = forward_s, eager.seconds(both, _RUNS) - forward_s
    issued = []
    for part, pass_s in zip(_PASSES, passes_s, strict=True):
        others = issues(real.software, part, parallel=real.parallel)
        kernels = others.pop("module")
        rest_s = pass_s - sum(alone_s[name] * n for name, n in others.items())
        issued.append(Issued(takes=round(rest_s / alone_s["kernel"], 1), kernels=kernels))
    return Layer(real.said, real.software, *issued)


def issues(software: str, part: Part, *, parallel: bool) -> dict[str, float]:
    """Return how many of each kind the simulator issues for a pass of a layer with the kernels of some software, on the
    rank that is timed: of modules, and of what ``_ALONE`` names.
    """
    ranks, rank = (_RANKS, _RANK) if parallel else (1, 0)
    found = Setup(
        "single", model="llama3-8b", cluster="hgx-h100", gpus=ranks, tp_degree=ranks, seq="4K", scope="layer", layers=1,
        software=software,
    ).resolved()  # fmt: skip
    checked, counts = found.checked(), defaultdict[str, float](float)
    runs = CostModel(Cluster(found.spec), found.profile).run
    for op, use in zip(checked.schedule.programs[rank].ops, checked.kernels[rank], strict=True):
        if op.part != part:
            continue
        if isinstance(op, Collective):
            counts["collective"] += 1
        elif use:
            name = "module" if of_module(op) else use.kernel if use.kernel in ATTENTION_KERNELS else "kernel"
            counts[name] += sum(n for _, n in runs(use)) or 1
    return counts


def encoded(table: Table) -> str:
    """Return a table as TOML."""
    lines = [MARK, f"created = {json.dumps(table.created)}", f"cpu = {json.dumps(table.cpu)}"]
    lines += [f"small_kernel_us = {table.small_kernel_us:g}", "", "[versions]"]
    lines += [f"{package} = {json.dumps(one)}" for package, one in table.versions.items()]
    for name, layer in table.layers.items():
        lines += ["", f"[layers.{name}]", f"said = {json.dumps(layer.said)}"]
        lines += [f"software = {json.dumps(layer.software)}"]
        for part in _PASSES:
            one = getattr(layer, part)
            lines.append(f"{part} = {{ takes = {one.takes:g}, kernels = {one.kernels:g} }}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
