"""The command line itself: one clear line for everything that can be typed wrong, and for what ends a command early."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from experiments.evidence.provenance import command_line
from experiments.verbs.cli import main
from tests.experiments.verbs.typed import ATTENTION, HERE, fails, run, simulate
from tests.helpers import slow_but

ROOT = Path(__file__).parents[3]


@pytest.mark.sweep
def test_what_nobody_named_is_assumed_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    """First of all; what executes is of this machine, and says nothing."""
    step = ("--seq", "16K", "--layers", "1", "--schedule", "ulysses")
    for verb, *options in (
        ("simulate", *step), ("fit", "--seq", "16K", "--schedule", "ulysses", "--layers", "1"),
        ("sweep", *step, "--vary", "seq=16K,32K", "--step-only", "--jobs", "1"), ("roofline", "--seq", "8K"),
    ):  # fmt: skip
        first = run(capsys, verb, *options).splitlines()[0]
        assert first == "assumed: --model llama3-8b --cluster hgx-h100", verb
    assert run(capsys, "simulate", *step, "--cluster", "hgx-h100").startswith("assumed: --model llama3-8b\n")
    named = ("--model", "llama3-8b", "--cluster", "hgx-h100")
    assert "assumed: --" not in run(capsys, "simulate", *step, *named)
    assert simulate(capsys, *step)["assumed"] == {"model": "llama3-8b", "cluster": "hgx-h100"}
    assert "attention of tiny" in run(capsys, "show", "--seq", "1K", "--gpus", "2")


def test_recorded_commands_name_no_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = ["/bin/longstep", "validate", "--out", "/some/folder/a.json", "--html=/some/page.html", "--seq", "1K,2K"]
    monkeypatch.setattr(sys, "argv", typed)
    assert command_line() == "longstep validate --out a.json --html=page.html --seq 1K,2K"


def test_names_are_printed_as_they_are(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Not as markup of the library that prints."""
    path = tmp_path / "mine.toml"
    preset = resources.files("sim").joinpath("models", "tiny.toml").read_text()
    for name in ("[/]", "[red]mine", ":smile:"):
        path.write_text(preset.replace('name = "tiny"', f'name = "{name}"'))
        assert f"attention of {name}, both" in run(capsys, "simulate", "--gpus", "2", *ATTENTION, "--model", str(path))
    path.write_text(preset.replace('name = "tiny"', r'name = "\u001b[31m"'))
    assert "without control characters" in fails(capsys, "simulate", "--model", str(path))


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("simulat",), "unknown command 'simulat' (did you mean 'simulate'?): allowed are list, show"),
        (
            (),
            "expected a command: list, show, simulate, explain, doctor, sweep, crossover, winners, study, fit, ",
        ),
        (("simulate", "--gpu", "4"), "unknown option '--gpu' (did you mean '--gpus'?): allowed are"),
        (("simulate", "--passes=both"), "unknown option '--passes' (did you mean '--pass'?)"),
        (("simulate", "--verify"), "unknown option '--verify'"),
        (("simulate", "ring"), "unexpected 'ring': options of longstep simulate begin with --"),
        (("simulate", "--gpus"), "--gpus: its value is missing"),
        (("simulate", "--gpus", "abc"), "longstep: --gpus 'abc': expected a whole number\n"),
        (("simulate", "--seed", "1.5"), "longstep: --seed '1.5': expected a whole number\n"),
        (("simulate", "--jitter", "x"), "longstep: --jitter 'x': expected a number\n"),
        (("list", "model"), "did you mean 'models'"),
        (("simulate", "--model", "tini"), "did you mean 'tiny'"),
        (("simulate", "--model", "none.toml"), "cannot be read"),
        (("simulate", "--cluster", "hgx"), "allowed are a100-pcie, a10g, a800, dgx-a100"),
        (("simulate", "--schedule", "rign"), "did you mean 'ring'"),
        (("simulate", "--profile", "none"), "unknown profile 'none'"),
        (("simulate", "--profile", "none.json"), "cannot be read"),
        (("simulate", "--mask", "diagonal"), "allowed are causal, full"),
        (("simulate", "--dtype", "fp8"), "allowed are fp64, fp32, bf16, fp16"),
        (("simulate", "--pass", "sideways"), "allowed are forward, backward, both"),
        (("simulate", "--scope", "steps"), "allowed are attention, layer, step"),
        (("simulate", "--layers", "2", *ATTENTION), "--layers 1"),
        (("simulate", "--layers", "0"), "1 or more"),
        (("simulate", "--seq", "0"), "8K or 1M"),
        (("simulate", "--documents", "5.5,3"), "--documents: '5.5' is no length: expected a whole number"),
        (("simulate", "--documents", "5,0"), "--documents: document 1 has 0 tokens"),
        (("simulate", "--documents", "4096", "--seq", "8K"), "--seq 8K, and --documents of 4096 tokens: leave out"),
        (("balance", "--documents", "5,-3"), "--documents: document 1 has -3 tokens"),
        (("balance", "--documents", "9" * 5000), "is no length"),
        (
            ("run", "--documents", "1000000000", "--gpus", "2"),
            "executing it takes 19.65 TiB of memory, and cluster 'host'",
        ),
        (("simulate", "--seq", "1Q"), "8K or 1M"),
        (("simulate", "--seq", "1001", "--gpus", "2"), "the nearest are 1000 or 1002; set --seq"),
        (("simulate", "--seq", "3", "--gpus", "8"), "the nearest are 8; set --seq"),
        (("simulate", "--batch", "0"), "1 or more"),
        (("simulate", "--batch", "two"), "--batch"),
        (("simulate", "--gpus", "0"), "1 or more"),
        (("simulate", "--gpus", "-2"), "1 or more"),
        (("simulate", "--gpus", "3", "--schedule", "ulysses"), "allowed are 1, 2, 4"),
        (("simulate", *HERE, "--gpus", "16", "--schedule", "ulysses"), "num_heads 8"),
        (("simulate", "--gpus", "2", "--schedule", "single"), "set --gpus 1"),
        (("simulate", *HERE, "--gpus", "65"), "64"),
        (("simulate", "--cluster", "hgx-h100", "--gpus", "9", "--nodes", "1"), "1 x 8 = 8"),
        (("simulate", *HERE, "--nodes", "2"), "the host is one machine"),
        (("simulate", "--nodes", "0", "--cluster", "hgx-h100"), "1 or more"),
        (
            ("simulate", "--ulysses-degree", "2", "--gpus", "2"),
            "--ulysses-degree 2: schedule 'ring' has none, only --ring-degree; leave it out",
        ),
        (("simulate", "--ring-degree", "3", "--gpus", "4"), "set --gpus 3"),
        (("simulate", "--ring-degree", "0"), "1 or more"),
        (("simulate", "--set", "cluster.nvlnk.bytes_per_s=1", "--cluster", "hgx-h100"), "did you mean"),
        (
            ("simulate", "--set", "cluster.nvlink.bytes_per_s=-1", "--cluster", "hgx-h100"),
            "bytes_per_s=-1: expected a number > 1e-30",
        ),
        (("simulate", "--set", "cluster.nvlink.bytes_per_s", "--cluster", "hgx-h100"), "KEY=VALUE"),
        (("simulate", "--set", "clusters.nvlink.bytes_per_s=1"), "allowed are cluster, model, schedule"),
        (("simulate", "--set", "cluster.gpu[8].speed=1", "--cluster", "hgx-h100"), "0 to 7"),
        (("simulate", "--set", "model.num_kv_heads=3"), "allowed are 1, 2, 4, 8"),
        (("simulate", "--set", "schedule.layout=zagzig"), "allowed are contiguous, zigzag, striped"),
        (("simulate", "--set", "schedule.overlap=maybe"), "expected true or false"),
        (("simulate", "--window", "0"), "--window 0: expected a positive"),
        (("simulate", "--schedule", "balanced-ring", "--window", "9"), "--mask causal without --window"),
        (("simulate", "--seq", "1001", "--gpus", "2", "--pad", "--mask", "full"), "set --mask causal"),
        (("simulate", "--cluster", "hgx-h100", "--dtype", "fp64"), "has no peak for fp64"),
        (("simulate", "--trace", "/nowhere/trace.json"), "there is no folder"),
        (("simulate", "--gpus", "2147483648"), "2147483648 ranks: expected at most 16384"),
        (
            ("simulate", "--schedule", "usp", "--ring-degree", "99999", "--ulysses-degree", "99999"),
            "ranks: expected at most 16384",
        ),
        (("simulate", "--cluster", "hgx-h100", "--nodes", "2147483648"), "17179869184 ranks: expected at most 16384"),
        (("simulate", "--layers", "1000000", "--scope", "layer"), "--layers 1000000: expected 1 to 1024"),
        (("simulate", "--batch", "1" * 400), "expected 1 to 1048576"),
        (("simulate", "--seq", "9" * 400), "8K or 1M"),
        (("simulate", "--set", "model.num_heads=1e9"), "num_heads=1e9: expected a whole number <= 1024"),
        (("simulate", "--set", "model.head_dim=1e308"), "head_dim=1e308: expected a whole number <= 16777216"),
        (
            ("simulate", "--set", "cluster.socket.per_node=1e8", "--cluster", "hgx-h100"),
            "expected a whole number <= 64",
        ),
        (("simulate", "--model", "/dev/zero"), "it is no regular file"),
        (("simulate", "--model", "\0.json"), "cannot be read"),
        (("simulate", "--cluster", "\0.toml"), "cannot be read"),
        (("simulate", "--profile", "\0.json"), "cannot be read"),
        (("simulate", "--profile", "a" * 300), "unknown profile"),
        (("simulate", "--profile", "a" * 300 + ".json"), "cannot be read"),
        (("simulate", "--model", "x\x1b[31m\n"), r"'x\x1b[31m\n'"),
        (("simulate", "--set", "a\n\x1b[31m"), r"--set a\n\u001b[31m: expected KEY=VALUE"),
        (("simulate", "--schedule", "a" * 300 + ".py:build"), "there is no file"),
        (("simulate", "--schedule", "\0.py:build"), "there is no file"),
        (("validate", "--ranks", "2147483648"), "--ranks 2147483648: expected numbers of processes from 1 to 16384"),
        (("validate", "--ranks", "9" * 5000), "from 1 to 16384"),
        (("validate", "--record", "/dev/zero"), "it is no regular file"),
        (("evaluate", "/dev/zero"), "it is no regular file"),
        (("evaluate",), "name FILE.toml, all, or one or more of bpt_a100"),
        (("evaluate", "usp_l2"), "did you mean 'usp_l20'"),
        (("evaluate", "usp_l20", "--html", "/nowhere/page.html"), "there is no folder"),
        (("show", "--format", "png"), "allowed are grid, json, dot, fabric"),
        (("show", "--ranks", "0,9"), "0 to 1"),
        (("show", "--ranks", "x", "--gpus", "2"), "'x'"),
        (("list", "things"), "allowed are models, clusters, schedules, software, stacks, profiles"),
        (("compare", "--gpus", "2"), "run longstep calibrate --quick"),
        (("compare", "--gpus", "2", "--html", "/nowhere/page.html"), "there is no folder"),
        (("validate", "--ranks", "2,x"), "--ranks x"),
        (("validate", "--schedules", "ring,,x"), "--schedule ring,,x: expected values"),
        (("validate", "--schedules", "rings"), "set it with --schedule"),
        (("validate", "--schedule", "ulysses", "--gpus", "3"), "set --ulysses-degree"),
        (("validate", "--seq", "1K,,2K"), "separated by commas"),
        (("validate", "--seq", "1Q"), "8K or 1M"),
        (("validate", "--scope", "steps"), "allowed are attention, layer, step, both"),
        (("validate", "--target", "0", "--ranks", "2"), "between 0 and 1"),
        (("validate", "--repeats", "0"), "1 or more"),
        (("validate", "--figure", "parity.png"), "ends in .svg"),
        (("validate", "--out", "/nowhere/record.json"), "there is no folder"),
        (("validate", "--cases-out", "cases.json"), "ends in .toml"),
        (("validate", "--record", "none.json"), "cannot be read"),
        (("validate", "--profile", "datasheet", "--seq", "1K", "--ranks", "2"), "run longstep calibrate --quick"),
        (("run", "--cluster", "hgx-h100"), "which has no GPU: executing takes --cluster host"),
        (("calibrate", "--published", "nope"), "set it with --published"),
        (("calibrate", "--published", "h100-sxm", "--cluster", "hgx-h100"), "goes with --out only"),
        (("calibrate", "--published", "h100-sxm", "--quick"), "--published measures nothing"),
        (("count", "transformers"), "unknown software 'transformers' (did you mean"),
        (("count", "torch-losses", "--out", "/nowhere/table.toml"), "there is no folder"),
        (("recheck", "h100-sxm", "--against", "h100"), "set it with --against"),
        (("recheck", "h100-sxm", "--against", "no.json"), "set it with --against"),
        (("recheck", "h100-sxm", "--against", "datasheet"), "--against datasheet: a datasheet has no points"),
        (("recheck", "h100-sxm", "--against", ""), "unknown profile ''"),
        (("recheck", "h100"), "set it with PROFILE of longstep recheck"),
        (("recheck", "no.json", "--against", "h100-sxm"), "set it with PROFILE of longstep recheck"),
        (("recheck", "h100-sxm"), "which has no GPU"),
        (("calibrate", "--cluster", "hgx-h200"), "which has no GPU"),
        (("run", "--attention", "aten-cudnn"), "a CPU has one kernel"),
        (("calibrate", "--attention", "aten-cudnn"), "a CPU has one kernel"),
        (("run", "--repeats", "0"), "1 or more"),
        (("run", "--timeout", "0"), "above 0"),
        (("run", "--verify", "--seq", "64K", "--gpus", "1"), "at most 32768"),
        (("calibrate", "--name", "a/b"), "letters"),
        (("calibrate", "--dtype", "int8"), "allowed are"),
        (("calibrate", "--model", "none"), "unknown model"),
        (("calibrate", "--out", "/nowhere/profile.json"), "there is no folder"),
    ],
)
def test_what_is_typed_wrong(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str) -> None:
    import torch

    if "has no GPU" in message and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    if arguments == ("show", "--ranks", "0,9"):
        arguments = (*arguments, "--gpus", "2")
    assert message in fails(capsys, *arguments)


def longstep(*arguments: str, code: str = "", **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, after some ``code``."""
    start = f"{code}; import sys; from experiments.verbs.__main__ import main; sys.argv[1:] = {arguments}; main()"
    options = {"stdout": subprocess.PIPE, **options}
    return subprocess.run(
        [sys.executable, "-c", start.lstrip("; ")], cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False, **options
    )


@pytest.mark.parametrize("module", ["signal", "rich", "numpy", "experiments.verbs.show"])
@pytest.mark.gloo
@pytest.mark.usefixtures("hearing")
def test_an_interrupt_while_importing(module: str) -> None:
    """Even one that whoever imports would take for a failure of its own."""
    code = f"""
import importlib.abc, os, sys
class Interrupting(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), 2)
sys.modules.pop({module!r}, None)
sys.meta_path.insert(0, Interrupting())
""".strip()
    ended = longstep("list", code=f"exec({code!r})")
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "longstep: interrupted\n")


@pytest.mark.parametrize("verb", ["simulate", "run", "show", "compare", "validate", "calibrate"])
def test_help_names_what_an_option_takes(capsys: pytest.CaptureFixture[str], verb: str) -> None:
    """Not how it is left out: that is its default."""
    with pytest.raises(SystemExit) as stop:
        main([verb, "--help"])
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    assert "{None}" not in printed
    assert re.search(r"--[a-z-]+ (INT|STR) ", printed)


@pytest.mark.gloo
def test_a_reader_that_has_seen_enough_is_no_failure() -> None:
    for arguments in (("list",), ("--version",), ("simulate", "--help")):
        read, write = os.pipe()
        os.close(read)
        ended = longstep(*arguments, stdout=write)
        os.close(write)
        assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.gloo
def test_a_disk_that_is_full() -> None:
    with Path("/dev/full").open("w") as full:
        ended = longstep("list", stdout=full)
    assert (ended.returncode, ended.stderr.count("\n")) == (1, 1)
    assert "cannot be written (No space left on device)" in ended.stderr


@pytest.mark.gloo
def test_nothing_to_print_on() -> None:
    ended = longstep("list", "models", code="import os; os.close(1); import sys; sys.stdout = None")
    assert (ended.returncode, ended.stderr) == (0, "")


def test_memory_that_ends_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def simulates(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("experiments.verbs.simulate.simulate", simulates)
    with pytest.raises(SystemExit) as stop:
        main(["simulate"])
    assert stop.value.code == 1
    assert capsys.readouterr().err.startswith("longstep: this machine has too little memory")


@pytest.mark.gloo
def test_the_version() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "experiments.verbs", "--version"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert ended.stdout == f"longstep {version('longstep')}\n"


BLOCK = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names}:
            raise ModuleNotFoundError(f"{{name}} is blocked", name=name)
sys.meta_path.insert(0, Blocked())
{code}
"""


def without(names: set[str], code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process in which some packages cannot be imported."""
    whole = BLOCK.format(names=names, code=code)
    return subprocess.run([sys.executable, "-c", whole], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.gloo
def test_the_base_install_simulates_without_torch() -> None:
    play = "from experiments.verbs.cli import main; main(['simulate', '--cluster', 'hgx-h100', '--dtype', 'bf16'])"
    ended = without({"torch"}, play)
    assert ended.returncode == 0, ended.stderr
    assert "step time" in ended.stdout


@pytest.mark.gloo
def test_the_words_need_neither_torch_nor_simpy() -> None:
    words = (
        "import sim, sim.schedule.methods.catalog, sim.schedule.proof.check, sim.words.profile, sim.accounts.memory, "
        "sim.accounts.breakdown, topology.cluster"
    )
    ended = without({"torch", "simpy"}, words)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.gloo
def test_executing_without_torch_says_what_to_install() -> None:
    ended = without({"torch"}, "from experiments.verbs.cli import main; main(['run', '--gpus', '2'])")
    assert ended.returncode == 2
    assert "longstep[runtime]" in ended.stderr
    assert ended.stderr.count("\n") == 1


@pytest.mark.gloo
@pytest.mark.parametrize("name", slow_but({"compare"}, ["execute", "verify", "compare"]))
def test_the_library_without_torch_says_what_to_install(name: str) -> None:
    code = f"""
import longstep
try:
    longstep.{name}(longstep.predict("ring", model="llama3-8b", seq="1K", gpus=2, cluster="hgx-h100"))
except longstep.InputError as error:
    print(error)
"""
    ended = without({"torch"}, code)
    assert ended.stdout == "executing on real hardware needs torch: pip install 'longstep[runtime]'\n", ended.stderr


# In the processes that torchrun starts

WORLD = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}


STORE = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def as_rank(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "x", **WORLD, **STORE, "RANK": str(rank)}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.sweep
@pytest.mark.parametrize("missing", ["TORCHELASTIC_RUN_ID", *WORLD, *STORE])
def test_a_process_that_torchrun_has_not_started_runs_commands(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    as_rank(monkeypatch, 1)
    monkeypatch.delenv(missing)
    assert "llama3-8b" in run(capsys, "list", "models")


@pytest.mark.parametrize("verb", ["run", "compare", "validate"])
def test_verbs_that_execute_do_so_over_what_torchrun_has_started(monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    given: list[object] = []
    monkeypatch.setattr("runtime.processes.torchrun.under_torchrun", given.append)
    for rank in (0, 1):
        as_rank(monkeypatch, rank)
        main([verb, "--gpus", "2"])
    assert len(given) == 2


def test_all_other_verbs_run_in_rank_0_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.processes.torchrun.under_torchrun", None)
    as_rank(monkeypatch, 1)
    for words in (["list", "models"], ["calibrate"], ["nonsense"], []):
        assert run(capsys, *words) == ""
    as_rank(monkeypatch, 0)
    assert "llama3-8b" in run(capsys, "list", "models")
    assert "calibrate runs without torchrun" in fails(capsys, "calibrate", "--quick")
