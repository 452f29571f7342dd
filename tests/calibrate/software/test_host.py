"""What eager modules cost the host: as many kernels as the simulator issues, and times that come out again."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from calibrate.software import host
from calibrate.software.libraries import tensor_parallel
from calibrate.software.tables import version
from sim.base.presets import from_toml
from sim.software.issue import PARALLEL, Table, table

LAYERS = table().layers


@pytest.mark.sweep
@pytest.mark.parametrize("name", LAYERS)
def test_kernels_are_those_that_the_simulator_issues(name: str) -> None:
    layer, parallel = LAYERS[name], name.endswith(PARALLEL)
    counts = [host.issues(layer.software, part, parallel=parallel)["module"] for part in ("forward", "backward")]
    assert counts == [layer.forward.kernels, layer.backward.kernels]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not there: longstep[software] has it")
@pytest.mark.filterwarnings("default")  # of transformers' own imports
def test_what_ships_is_what_is_measured() -> None:
    """In small kernels, since CPUs differ; what else runs beside it may cost a half."""
    shipped = table()
    for package, of in shipped.versions.items():
        if version(package) != of:
            pytest.skip(f"measured with {package} {of}, and {version(package)} is here")
    found = from_toml(host.encoded(host.measured()).encode(), Table, "table", "issue", "")
    assert found.layers.keys() == LAYERS.keys()
    for name, layer in found.layers.items():
        for one, other in ((layer.forward, LAYERS[name].forward), (layer.backward, LAYERS[name].backward)):
            assert 1 / 1.5 < one.takes / other.takes < 1.5, name


@pytest.mark.sweep
@pytest.mark.parametrize("of", [tensor_parallel.Column, tensor_parallel.Row])
def test_products_among_ranks_are_those_of_one(of: Any) -> None:
    """A group of one rank, which has the whole sequence: outputs and gradients are those of a linear layer."""
    torch.manual_seed(0)
    x, weight = (torch.randn(*shape, requires_grad=True) for shape in ((6, 2, 4), (3, 4)))
    gradient = torch.randn(6, 2, 3)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        found = of.apply(x, weight, dist.group.WORLD)
        ours = (found, *torch.autograd.grad(found, (x, weight), gradient))
    finally:
        dist.destroy_process_group()
    expected = torch.nn.functional.linear(x, weight)
    theirs = (expected, *torch.autograd.grad(expected, (x, weight), gradient))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)
