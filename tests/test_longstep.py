"""The public interface: its names, what importing them costs, and that it works from a built wheel."""

from __future__ import annotations

import ast
import doctest
import importlib
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

import longstep
from sim.errors import InputError

ROOT = Path(__file__).parents[1]


def python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a folder, with what lies in it first in the path, as a script or a notebook there has it."""
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("name", longstep.__all__)
def test_every_name_has_an_example(name: str) -> None:
    found = getattr(longstep, name)
    assert found.__doc__
    assert doctest.DocTestFinder(recurse=False).find(found, name)[0].examples, "doctests run with the module"
    assert name in dir(longstep)


def test_names_come_from_where_type_checkers_see_them() -> None:
    (block,) = (node for node in ast.parse((ROOT / "longstep.py").read_text()).body if isinstance(node, ast.If))
    seen = {(node.module, name.name) for node in block.body if isinstance(node, ast.ImportFrom) for name in node.names}
    assert seen == {(module, name) for module, names in longstep._HOMES.items() for name in names}
    assert sorted(name for _, name in seen) == sorted(longstep.__all__)
    for module, name in seen:
        assert getattr(longstep, name) is getattr(importlib.import_module(str(module)), name)
    with pytest.raises(AttributeError, match="has no attribute 'predikt': it has .*predict"):
        _ = longstep.predikt  # type: ignore[attr-defined]


@pytest.mark.gloo
def test_importing_loads_neither_torch_nor_simpy(tmp_path: Path) -> None:
    code = (
        "import sys, longstep; print(sorted({'torch', 'simpy', 'networkx', 'numpy'} & set(sys.modules)));"
        "p = longstep.predict('zigzag', model='llama3-8b', seq='1M', cluster='hgx-h100');"
        "print(p.step_time_s > 0, p.report.fits, 'torch' in sys.modules)"
    )
    assert python(code, tmp_path).stdout == "[]\nTrue None False\n"


@pytest.mark.parametrize("name", ["sim", "runtime"])
@pytest.mark.gloo
def test_a_module_of_the_users_that_hides_a_package_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / f"{name}.py").write_text("x = 1\n")
    ended = python("import longstep; longstep.predict('ring')", tmp_path)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == (
        f"ImportError: {tmp_path / name}.py hides the package {name!r} of Longstep: rename it"
    )


@pytest.mark.gloo
def test_a_folder_of_the_users_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / "experiments").mkdir()
    assert python("import longstep; print(longstep.names('models'))", tmp_path).returncode == 0


def test_wrong_types_are_input_errors() -> None:
    for fields, named in (
        ({"schedule": 3}, "schedule"), ({"model": None}, "model"), ({"gpus": "8"}, "gpus"), ({"pad": 1}, "pad"),
        ({"seq": 2.5}, "seq"), ({"batch": True}, "batch"), ({"set": 5}, "set"), ({"jitter": "x"}, "jitter"),
    ):  # fmt: skip
        with pytest.raises(InputError) as error:
            longstep.predict(**fields)  # type: ignore[arg-type]
        assert named in error.value.fields


def test_what_ifs_start_from_what_was_asked() -> None:
    """A key that is set again is set anew; other fields stay; what is kept is not computed twice."""
    first = longstep.predict("ring", model="llama3-8b", seq="16K", cluster="hgx-h100", gpus=2)
    faster = first.replace(set={"cluster.nvlink.bytes_per_s": "*2"})
    again = faster.replace(set={"cluster.nvlink.bytes_per_s": "*2"}, seq="16K")
    assert again.step_time_s == faster.step_time_s < first.step_time_s
    assert faster.cluster.spec.nvlink
    assert first.cluster.spec.nvlink
    assert faster.cluster.spec.nvlink.bytes_per_s == 2 * first.cluster.spec.nvlink.bytes_per_s
    assert first.report is first.report
    assert first.interval == first.report.interval_s
    assert first.to_dict()["step_time_s"] == first.step_time_s
    played = longstep.simulate(first.checked, "hgx-h100")
    assert played.step_time_s == first.step_time_s
    assert played.replace(profile="datasheet").step_time_s < played.step_time_s


def test_a_trace_replaces_traces_only(tmp_path: Path) -> None:
    predicted = longstep.predict("ring", seq=256, gpus=2, profile="datasheet")
    trace, notes = tmp_path / "trace.json", tmp_path / "notes.txt"
    notes.write_text("mine")
    predicted.save_trace(trace)
    predicted.save_trace(str(trace))
    assert trace.read_bytes().startswith(b'{"traceEvents"')
    with pytest.raises(InputError, match="it is not a Chrome trace that Longstep wrote.*`force`"):
        predicted.save_trace(notes)
    assert notes.read_text() == "mine"
    with pytest.raises(InputError, match="there is no folder"):
        predicted.save_trace(tmp_path / "none" / "trace.json")
    predicted.save_trace(notes, force=True)
    assert notes.read_bytes() == trace.read_bytes()


def test_the_data_type_is_the_models() -> None:
    assert longstep.workload("llama3-8b", "8K").dtype == "bf16"
    assert longstep.workload("tiny", "8K").dtype == "fp32"
    assert longstep.workload("llama3-8b", "8K", dtype="fp32").dtype == "fp32"


@pytest.mark.slow
@pytest.mark.gloo
def test_the_wheel_works_in_an_environment_of_its_own(tmp_path: Path) -> None:
    """Outside the checkout. What it depends on is that of the environment that runs the tests."""
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "--wheel-dir", tmp_path, ROOT], check=True
    )
    (wheel,) = tmp_path.glob("*.whl")
    venv.create(tmp_path / "fresh", with_pip=True)
    (packages,) = (tmp_path / "fresh").glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    fresh = tmp_path / "fresh" / "bin"
    subprocess.run([fresh / "pip", "install", "--quiet", "--no-deps", "--no-index", wheel], check=True)
    assert (packages / "sim" / "py.typed").exists()
    code = (
        "import longstep; print(longstep.__file__);"
        "print(longstep.predict('zigzag', model='llama3-8b', seq='64K', cluster='hgx-h100').step_time_s > 0)"
    )
    ran = subprocess.run([fresh / "python", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == [str(packages / "longstep.py"), "True"]
    listed = subprocess.run([fresh / "longstep", "list"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "hgx-h100" in listed.stdout
