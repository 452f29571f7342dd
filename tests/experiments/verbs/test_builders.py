"""Builders of the user's: what they are given beside workload and mesh, and what is said of those that are wrong."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path

import pytest

import longstep
from experiments.verbs.cli import main
from sim.base.errors import InputError
from sim.engine.play.simulate import simulate
from sim.setup.names import OwnSchedule
from sim.setup.setup import Setup
from tests.experiments.verbs import typed
from tests.experiments.verbs.typed import H100, fails
from topology.cluster import Cluster

OWN = """
from dataclasses import dataclass
from typing import Literal

import msgspec

from sim.words.mesh import Mesh
from sim.schedule.methods import ring, ulysses
from sim.schedule.methods.ring import RingOptions
from sim.schedule.derive.kernels import kernel_uses


@dataclass(frozen=True, kw_only=True)
class Options(RingOptions):
    heads: Literal["together", "apart"] = "together"


class Bare(msgspec.Struct, frozen=True, kw_only=True):
    apart: bool = False


def build(workload, mesh, options=Options(layout="zigzag")):
    if options.heads == "apart":
        return ulysses.build(workload, Mesh(ulysses=mesh.ring))
    return ring.build(workload, mesh, options)


def bare(workload, mesh, options=Bare()):
    return ulysses.build(workload, Mesh(ulysses=mesh.ring)) if options.apart else ring.build(workload, mesh)


def undeclared(workload, mesh, options):
    return ring.build(workload, mesh, options)


def cheapest(workload, mesh, hints):
    '''Take the layout whose last rank, which has most to do, has least.'''
    def seconds(schedule):
        return sum(hints.seconds(use) for use in kernel_uses(schedule.program(mesh.size - 1)) if use)

    return min((ring.build(workload, mesh, RingOptions(layout=x)) for x in ("contiguous", "zigzag")), key=seconds)
"""


@pytest.mark.sweep
@pytest.mark.parametrize("function", ["build", "bare"])
def test_a_plan_takes_a_schedule_of_ones_own(tmp_path: Path, function: str) -> None:
    """Whose options know nothing of pipelines, if it has any."""
    setup = own(tmp_path, function, model="tiny", gpus=2, layers=2, seq="4K", scope="step")
    found = longstep.plan(setup, limit_s=5, jobs=1)
    assert found.best
    assert all("own.py" in row["schedule"] for row in found.best)


def own(tmp_path: Path, function: str, *set_: str, **fields: object) -> Setup:
    (tmp_path / "own.py").write_text(OWN)
    selection = Setup(
        schedule=OwnSchedule(f"{tmp_path}/own.py:{function}"), cluster="hgx-h100", gpus=4, set=set_, scope="attention"
    )
    return dataclasses.replace(selection, **fields)  # type: ignore[arg-type]


@pytest.mark.sweep
def test_options_of_ones_own_are_set_as_those_that_ship(tmp_path: Path) -> None:
    for overrides, name, options in (
        ((), "ring", {"layout": "zigzag", "heads": "together"}),
        (("schedule.layout=striped", "schedule.overlap=false"), "ring", {"layout": "striped", "overlap": False}),
        (("schedule.heads=apart",), "ulysses", {}),
    ):
        header = own(tmp_path, "build", *overrides).resolved().checked().schedule.header
        assert header.name == name
        assert options.items() <= header.options.items()
    assert own(tmp_path, "bare", "schedule.apart=true").resolved().built().header.name == "ulysses"
    chosen = own(tmp_path, "build", "schedule.layout=striped").resolved()
    assert ":build (layout striped), attention" in chosen.title


@pytest.mark.parametrize(
    ("function", "override", "message"),
    [
        (
            "build",
            "schedule.kernel=flash",
            "has no option kernel: it takes .*layout.*heads.*; leave out",
        ),
        ("build", "schedule.heads=none", "heads=none: .*allowed are together, apart"),
        ("cheapest", "schedule.layout=zigzag", "has no option layout: it takes placement"),
        ("undeclared", "schedule.layout=zigzag", "give it a struct or a dataclass, such as options=MyOptions"),
    ],
)
def test_options_that_it_has_not_are_refused(tmp_path: Path, function: str, override: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        own(tmp_path, function, override).resolved()


def test_a_builder_that_plans_by_cost_asks_the_cost_model_of_the_cluster(tmp_path: Path) -> None:
    """Under a causal mask the last rank of contiguous slices attends to all keys, one of a zigzag to half of them: by
    their FLOPs it takes the zigzag. Without a mask both have the same kernels, and the first one stays.
    """
    for mask, layout in (("causal", "zigzag"), ("full", "contiguous")):
        selection = own(tmp_path, "cheapest", mask=mask, seq="64K")
        chosen = selection.resolved()
        schedule = chosen.built()
        assert schedule.header.options["layout"] == layout
        use = next(use for use in chosen.checked().kernels[3] if use)
        alone = simulate(chosen.checked(), Cluster(chosen.spec), chosen.profile).cost.kernel_seconds(0, use)
        assert chosen.hints.seconds is not None
        assert chosen.hints.seconds(use) == alone[0] > 0


@pytest.mark.parametrize(("per_node", "width"), [(1, 1), (4, 4), (6, 4), (8, 8), (32, 32)])
def test_inner_rings_are_those_of_a_node(per_node: int, width: int) -> None:
    """Of 32 ranks: the largest divisor that fits into a node, all of which are one ring where they do."""
    overrides = (f"cluster.gpus_per_node={per_node}",)
    selection = Setup(schedule="double-ring", cluster="hgx-h100", gpus=32, set=overrides, scope="attention")
    communicators = {one.name: one.groups for one in selection.resolved().built().header.communicators}
    assert [len(group) for group in communicators.get("outer kv", ())] == ([32 // width] * width if width < 32 else [])
    assert width == 1 or communicators["inner kv"][0] == tuple(range(width))


WITH_BODY = """
from sim.words.mesh import Mesh
from sim.schedule.methods import ring
from sim.words.workload import Workload


def build(workload: Workload, mesh: Mesh):
    schedule = ring.build(workload, mesh)
    {body}
    return schedule


def nothing(workload, mesh):
    return None


NUMBER = 1
"""


@pytest.mark.sweep
def test_a_schedule_of_ones_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "my_module.py"
    path.write_text(WITH_BODY.format(body="pass"))
    found = typed.simulate(capsys, *H100, "--schedule", f"{path}:build")
    assert found["schedule_hash"] == typed.simulate(capsys, *H100)["schedule_hash"]


@pytest.mark.parametrize("name", ["torch", "queue"])
def test_a_schedule_of_ones_own_hides_no_module(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    module, path = importlib.import_module(name), tmp_path / f"{name}.py"
    path.write_text(WITH_BODY.format(body="pass"))
    typed.simulate(capsys, *H100, "--schedule", f"{path}:build")
    assert importlib.import_module(name) is module


@pytest.mark.gloo
def test_a_schedule_of_ones_own_that_is_wrong(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "my_module.py"
    dropped = """import msgspec
    programs = schedule.programs
    programs[1] = programs[1].replace(ops=programs[1].ops[:1] + programs[1].ops[2:])
    schedule._build, schedule._programs = programs.__getitem__, {}"""
    path.write_text(WITH_BODY.format(body=dropped))
    own = ("--schedule", f"{path}:build", *H100)
    assert "rank 1 op" in fails(capsys, "simulate", *own)
    with pytest.raises(SystemExit):
        main(["show", *own])
    assert ">>>" in capsys.readouterr().out, "the place is shown"
    path.write_text(WITH_BODY.format(body="1 / 0"))
    assert "my_module.py:9: ZeroDivisionError" in fails(capsys, "simulate", *own)
    assert "my_module.py:9: ZeroDivisionError" in fails(capsys, "simulate", *own, "--pad")
    assert "its builder returned NoneType" in fails(capsys, "simulate", "--schedule", f"{path}:nothing", *H100)
    assert "did you mean 'build'" in fails(capsys, "simulate", "--schedule", f"{path}:bild", *H100)
    assert "unknown function 'NUMBER'" in fails(capsys, "simulate", "--schedule", f"{path}:NUMBER", *H100)
    assert "unknown function 'dict'" in fails(capsys, "simulate", "--schedule", f"{path}:dict", *H100)
    assert "or a function build(workload, mesh)" in fails(capsys, "simulate", "--schedule", f"{path}:Workload", *H100)
    path.write_text(WITH_BODY.format(body="raise SystemExit(0)"))
    assert "my_module.py:9: SystemExit: 0" in fails(capsys, "simulate", *own)
    path.write_text("import sys; sys.exit(0)")
    assert "importing" in fails(capsys, "simulate", *own)
    path.write_text("import nothing_of_that_name")
    assert "importing" in fails(capsys, "simulate", *own)
    assert "there is no file" in fails(capsys, "simulate", "--schedule", "none.py:build")
