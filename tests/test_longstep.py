"""The public interface: its names, what importing them costs, and that it works from a built wheel."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import os
import re
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import longstep
from sim.base.errors import InputError

ROOT = Path(__file__).parents[1]
WORKLOAD = longstep.workload("tiny", 256)


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
    block, _ = (node for node in ast.parse((ROOT / "longstep.py").read_text()).body if isinstance(node, ast.If))
    seen = {(node.module, name.name) for node in block.body if isinstance(node, ast.ImportFrom) for name in node.names}
    assert seen == {(module, name) for module, names in longstep._HOMES.items() for name in names}
    assert sorted(name for _, name in seen) == sorted(longstep.__all__)
    for module, name in seen:
        assert getattr(longstep, name) is getattr(importlib.import_module(str(module)), name)
    with pytest.raises(AttributeError, match="has no attribute 'predikt': it has .*predict"):
        _ = longstep.predikt  # type: ignore[attr-defined]


SLOW_TO_IMPORT = ("torch", "networkx", "jinja2", "matplotlib", "hypothesis", "typeguard", "asyncio", "email")
"""What a first prediction does without."""


@pytest.mark.gloo
@pytest.mark.parametrize(
    "code",
    [
        "import longstep; longstep.predict('ring', model='llama3-8b', seq='8K', cluster='hgx-h100', layers=2).report",
        "from experiments.verbs.cli import main; main(['simulate', '--model', 'llama3-8b', '--gpus', '8'])",
    ],
)
def test_a_first_prediction_imports_little(tmp_path: Path, code: str) -> None:
    after = f"import sys; print(*sorted({{*{SLOW_TO_IMPORT}}} & set(sys.modules)), 'is imported')"
    assert python(f"{code}\n{after}", tmp_path).stdout.splitlines()[-1] == "is imported"


@pytest.mark.gloo
def test_importing_loads_neither_torch_nor_simpy(tmp_path: Path) -> None:
    code = (
        "import sys, longstep; print(sorted({'torch', 'simpy', 'networkx', 'numpy'} & set(sys.modules)));"
        "p = longstep.predict('zigzag', model='llama3-8b', seq='1M', cluster='hgx-h100', scope='attention');"
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


@pytest.mark.gloo
def test_python_m_longstep_is_the_command() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "longstep", "list", "models"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "llama3-8b" in ended.stdout


def test_wrong_types_are_input_errors() -> None:
    for fields, named in (
        ({"schedule": 3}, "schedule"), ({"model": None}, "model"), ({"gpus": "8"}, "gpus"), ({"pad": 1}, "pad"),
        ({"seq": 2.5}, "seq"), ({"batch": True}, "batch"), ({"set": 5}, "set"),
        ({"set": [("a", 1)]}, "set"), ({"jitter": "x"}, "jitter"),
    ):  # fmt: skip
        with pytest.raises(InputError) as error:
            longstep.predict(**fields)  # type: ignore[arg-type]
        assert named in error.value.fields


@pytest.mark.sweep
def test_paths_clusters_and_numbers_of_numpy_are_taken(tmp_path: Path) -> None:
    wide = longstep.cluster("hgx-h100", nodes=np.int64(2))
    fields = {"model": "llama3-8b", "seq": "16K", "gpus": 16}
    named = longstep.predict("ring", cluster="hgx-h100", jitter=0, scope="attention", **fields)  # type: ignore[arg-type]
    model = ROOT / "sim/models/llama3-8b.toml"
    profile = ROOT / "sim/profiles/h100-sxm.json"
    given = longstep.predict(
        "ring",
        model=model,
        seq=np.int64(2**14),
        cluster=wide,
        gpus=np.int32(16),
        jitter=np.float32(0),
        profile=profile,
        scope="attention",
    )
    assert given.step_time_s == named.step_time_s
    assert longstep.simulate(given.checked, wide, profile, jitter=0).step_time_s == named.step_time_s
    assert longstep.cluster(wide).spec == wide.spec
    assert longstep.build("ring", longstep.workload(model, np.int64(256)), np.int64(4)).schedule.num_ranks == 4
    assert str(longstep.table(named)) == str(longstep.table([named]))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: longstep.predict("ring", gpu=8), r"unknown argument 'gpu' \(did you mean 'gpus'\?\): allowed are"),
        (lambda: longstep.predict("ring", **{"pass": "forward"}), r"did you mean 'passes'\?"),
        (lambda: longstep.Setup().replace(shedule="ring"), r"did you mean 'schedule'\?"),
        (lambda: longstep.Setup().replace(set=None), "`set` None: expected a mapping, or a list of texts KEY=VALUE"),
        (lambda: longstep.predict(set=[3]), "`set` 3: expected KEY=VALUE such as"),
        (lambda: longstep.predict(set={"cluster": {}}), "`set` cluster: expected a key below it, such as cluster.nvl"),
        (lambda: longstep.predict(lambda *_: None), "`schedule`: its builder returned NoneType"),
        (lambda: _built().replace(seq=3), "unknown argument 'seq': allowed are cluster, profile, placement, jitter"),
        (lambda: longstep.simulate("ring", "host"), "str is no schedule that was proved: expected what longstep.build"),
        (lambda: longstep.simulate(_built().checked, None), "`cluster` None: expected ClusterSpec or a name"),
        (lambda: longstep.simulate(_built().checked, "host", jitter="x"), "`jitter` x: expected a share between"),
        (lambda: longstep.build("ring", "tiny", 2), "`workload` 'tiny': expected what longstep.workload returns"),
        (lambda: longstep.build("ring", WORKLOAD, None), "`mesh` None: expected a whole number"),
        (lambda: longstep.build("ring", WORKLOAD, 2, lay=1), "'ring' has no option lay: "),
        (lambda: longstep.build("ring", WORKLOAD, 2, layout=1), "the option layout=1: "),
        (lambda: longstep.workload(None, 8), "`model` None: expected ModelSpec or a name"),
        (lambda: longstep.workload("tiny", 8, seed="a"), "`seed` 'a': expected int"),
        (lambda: longstep.mesh(ring=2.0), "`ring` 2.0: expected a whole number of 1 or more"),
        (lambda: longstep.table(["ring"]), "'ring' is no prediction: expected those that longstep.predict returns"),
        (lambda: longstep.compare(_built().checked), "Checked is no prediction: expected what longstep.predict or"),
        (lambda: longstep.verify("ring"), "str is no schedule that was proved"),
        (lambda: longstep.execute(_built().checked, "2"), "`repeats` 2: expected a whole number of 1 or more"),
        (lambda: longstep.execute(_built().checked, timeout=None), "`timeout` None: expected seconds above 0"),
        (lambda: longstep.execute(_built(longstep.mesh(dp=65)).checked), "`gpus` 65: cluster 'host' takes at most 64"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_one_line(call: Callable[[], object], said: str) -> None:
    with pytest.raises(InputError, match=said) as error:
        call()
    assert "\n" not in str(error.value)


def _built(ranks: Any = 2) -> longstep.Prediction:
    checked = longstep.build("ring", WORKLOAD, ranks)
    return longstep.simulate(checked, longstep.cluster("host", set={"gpus_per_node": 128}), "datasheet")


def test_the_signature_is_that_of_a_setup() -> None:
    signature = inspect.signature(longstep.predict)
    assert list(signature.parameters) == list(inspect.signature(longstep.Setup).parameters)
    assert signature.return_annotation == "Prediction"


def test_what_ifs_start_from_what_was_asked() -> None:
    """A key that is set again is set anew; other fields stay; what is kept is not computed twice."""
    first = longstep.predict("ring", model="llama3-8b", seq="16K", cluster="hgx-h100", gpus=2, scope="attention")
    faster = first.replace(set={"cluster.nvlink.bytes_per_s": "*2"})
    again = faster.replace(set={"cluster.nvlink.bytes_per_s": "*2"}, seq="16K")
    assert again.step_time_s == faster.step_time_s < first.step_time_s
    assert faster.cluster.spec.nvlink
    assert first.cluster.spec.nvlink
    assert faster.cluster.spec.nvlink.bytes_per_s == 2 * first.cluster.spec.nvlink.bytes_per_s
    assert first.report is first.report
    assert first.interval == first.report.interval_s
    assert first.to_dict()["step_time_s"] == first.step_time_s
    assert faster.checked is first.checked, "the same schedule is not proved again"
    assert first.replace(set={"schedule.layout": "zigzag"}).checked is not first.checked
    played = longstep.simulate(first.checked, "hgx-h100")
    assert played.step_time_s == first.step_time_s
    assert played.replace(profile="datasheet").step_time_s < played.step_time_s


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
    fresh, own = tmp_path / "fresh" / "bin", {"PATH": os.environ["PATH"]}
    subprocess.run([fresh / "pip", "install", "--quiet", "--no-deps", "--no-index", wheel], check=True)
    assert (packages / "sim" / "py.typed").exists()
    code = (
        "import longstep; print(longstep.__file__);"
        "print(longstep.predict('zigzag', model='llama3-8b', seq='64K', cluster='hgx-h100', layers=2).step_time_s > 0)"
    )
    ran = subprocess.run(
        [fresh / "python", "-c", code], cwd=tmp_path, env=own, capture_output=True, text=True, check=True
    )
    assert ran.stdout.splitlines() == [str(packages / "longstep.py"), "True"]
    listed = subprocess.run(
        [fresh / "longstep", "list"], cwd=tmp_path, env=own, capture_output=True, text=True, check=True
    )
    assert "hgx-h100" in listed.stdout


@pytest.mark.sweep
def test_a_sweep_is_the_same_in_any_number_of_processes() -> None:
    """And each row is what a prediction of its own says, with the same noise; what cannot be played says why."""
    first = longstep.predict("zigzag", model="llama3-8b", seq="16K", cluster="hgx-h100", gpus=4, scope="attention")
    vary = {"cluster.nvlink.bytes_per_s": ["/8", "*1", 900e9], "cluster.gpu.name": ["H100-SXM-80GB", "X1"]}
    told: list[tuple[int, int]] = []
    alone = longstep.sweep(first, vary, processes=1)
    forked = longstep.sweep(first, vary, processes=2, progress=lambda done, count, _: told.append((done, count)))
    assert alone.rows == forked.rows
    assert told == [(done, 6) for done in range(1, 7)]
    for row in alone.rows:
        changes = {key: row[key] for key in vary}
        if row["error"]:
            assert "profile 'h100-sxm' is of 'H100-SXM-80GB'" in row["error"]
            assert row["step_time_s"] is None
            continue
        one = first.replace(set=changes, seed=first.simulation.noise.seed, seeds=1)
        assert (row["step_time_s"], row["low_s"], row["high_s"]) == (one.step_time_s, *one.interval)
        assert row["bound_by"] == one.bound_by
    assert {bool(row["error"]) for row in alone.rows} == {False, True}
    assert len(alone.to_dict()["step_time_s"]) == 6
    assert alone[0] == next(iter(alone)) == alone.rows[0]


@pytest.mark.parametrize(
    ("vary", "said"),
    [
        ({}, "`vary` is empty"),
        ({"model.num_kv_heads": [4]}, "`vary` model.num_kv_heads: expected a figure of the cluster"),
        ({"cluster.nvlink.bytes_per_s": "*2"}, "expected a list of values"),
        ({"cluster.nvlink.bytes_per_s": ["*2", -1]}, "`vary` cluster.nvlink.bytes_per_s=-1"),
        ({"cluster.nvlink.speed": ["*2"]}, "speed"),
    ],
)
def test_what_cannot_be_varied_is_refused_before_anything_is_played(vary: dict[str, Any], said: str) -> None:
    first = longstep.predict("zigzag", model="llama3-8b", seq="16K", cluster="hgx-h100", gpus=4, scope="attention")
    with pytest.raises(longstep.InputError, match=re.escape(said)):
        longstep.sweep(first, vary)
