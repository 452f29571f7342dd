from __future__ import annotations

import pytest

from sim.base.errors import InputError
from sim.schedule.methods.catalog import SCHEDULES
from sim.words.mesh import AXES, Axis, Mesh
from sim.words.workload import Workload
from tests.helpers import RING_INNER, make_model


def test_a_mesh_numbers_its_ranks_from_the_innermost_axis() -> None:
    """dp 2 x ring 2 x ulysses 3: rank 10 = 1 * 6 + 1 * 3 + 1."""
    mesh = Mesh(dp=2, ring=2, ulysses=3)
    assert mesh.size == 12
    assert mesh.place(10) == {"pp": 0, "dp": 1, "ring": 1, "ulysses": 1, "tp": 0}
    assert mesh.groups("ulysses") == ((0, 1, 2), (3, 4, 5), (6, 7, 8), (9, 10, 11))
    assert mesh.groups("ring") == ((0, 3), (1, 4), (2, 5), (6, 9), (7, 10), (8, 11))
    assert mesh.groups("dp") == ((0, 6), (1, 7), (2, 8), (3, 9), (4, 10), (5, 11))
    assert mesh.groups("ring", "ulysses") == (tuple(range(6)), tuple(range(6, 12)))
    assert mesh.groups() == tuple((rank,) for rank in range(12))
    assert mesh.groups(*AXES) == (tuple(range(12)),)


def test_the_order_of_axes_says_which_ranks_are_neighbours() -> None:
    mesh = Mesh(ring=2, ulysses=3, order=RING_INNER)
    assert mesh.groups("ring") == ((0, 1), (2, 3), (4, 5))
    assert mesh.groups("ulysses") == ((0, 2, 4), (1, 3, 5))
    assert mesh.place(3)["ring"] == mesh.place(3)["ulysses"] == 1


@pytest.mark.parametrize("order", [AXES[1:], (*AXES, "dp"), ("pp", "dp", "ring", "ring", "tp")])
def test_an_order_has_every_axis_once(order: tuple[Axis, ...]) -> None:
    with pytest.raises(InputError, match="expected each of pp, dp, ring, ulysses, tp once"):
        Mesh(order=order)


def test_degrees_are_at_least_one() -> None:
    with pytest.raises(InputError, match="ring 0: expected a degree of 1 or more"):
        Mesh(ring=0)


@pytest.mark.parametrize("name", SCHEDULES)
def test_axes_that_a_schedule_does_not_take_are_refused(name: str) -> None:
    entry, workload = SCHEDULES[name], Workload(model=make_model(8, 8), seq=48)
    refused = {Mesh(ring=2): "ring", Mesh(ulysses=2): "ulysses"}
    for mesh, axis in refused.items():
        if axis not in entry.degrees:
            with pytest.raises(InputError, match=f"^{axis} 2: schedule .* allowed are pp, dp.*; set {axis} to 1"):
                entry.schedule(workload, mesh)
    with pytest.raises(
        InputError, match="^`tp_degree` 2 divides the weights of layers, and scope 'attention' has none"
    ):
        entry.schedule(workload, Mesh(tp=2))
    with pytest.raises(InputError, match="^`pp_degree` 4: pipelines are of training steps; set `scope` step"):
        entry.schedule(workload, Mesh(pp=4))
