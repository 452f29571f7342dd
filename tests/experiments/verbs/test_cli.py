"""The command line: the contract of its JSON, and one clear line for everything that can be typed wrong."""

from __future__ import annotations

import html
import importlib
import itertools
import json
import os
import re
import subprocess
import sys
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from experiments.evidence.provenance import command_line
from experiments.verbs.cli import main
from experiments.verbs.validate import Validate, validate
from longstep import predict, table
from sim.base.errors import InputError
from sim.base.presets import preset_names
from sim.engine.results.report import Report
from sim.schedule.ir.program import Schedule
from sim.words.profile import Machine, MeasuredJitter, Profile, load_profile, save_profile
from tests.helpers import slow_but, traces_in
from topology.cluster import load_cluster

ROOT = Path(__file__).parents[3]
OWN = """
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


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return what a command prints; it has to succeed, silently on stderr."""
    main(list(arguments))
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the one line that a command complains with."""
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    captured = capsys.readouterr()
    assert stop.value.code == 2
    assert captured.err.startswith("longstep: ")
    assert captured.err.count("\n") == 1, captured.err
    assert "Traceback" not in captured.err
    return captured.err


def simulate(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(capsys, "simulate", "--json", *arguments))
    return found


ATTENTION = ("--scope", "attention")
HERE = ("--model", "tiny", "--cluster", "host")
H100 = ("--cluster", "hgx-h100", "--model", "llama3-8b", "--seq", "128K", *ATTENTION)


def test_simulate_prints_one_object_with_all_figures(capsys: pytest.CaptureFixture[str]) -> None:
    found = simulate(capsys, *H100)
    said = ["assumed", "answer", "rests_on"]
    assert [*found, "room", "training"] == [*said, *Report.__struct_fields__], "the last are of training steps"
    assert {
        "step_time_s", "tokens_per_s_per_gpu", "mfu", "peak_hbm_bytes", "fits", "memory", "breakdown", "bound_by",
        "floors", "schedule_hash", "evidence",
    } <= found.keys()  # fmt: skip
    assert found["fits"] is None
    assert found["floors"].keys() == {"compute", "nvlink"}
    assert found["evidence"]["profile"] == "h100-sxm"
    assert found["step_time_s"] >= max(found["floors"].values())


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


@pytest.mark.sweep
def test_an_answer_is_a_sentence_with_what_it_rests_on(capsys: pytest.CaptureFixture[str]) -> None:
    """The same in a terminal, as JSON, in Python and in a notebook."""
    step = ("--cluster", "hgx-h100", "--model", "llama3-8b", "--seq", "512K", "--layers", "1", "--schedule", "ulysses")
    first, *printed = run(capsys, "simulate", *step).splitlines()
    assert re.fullmatch(
        r"Ulysses takes [\d.]+ s a step \([\d.]+ to [\d.]+ s\), \d+ tokens/s/GPU; fits with [\d.]+ GiB left", first
    )
    kernels, transfers, right = printed[-3:]
    assert "of their time is attention_backward of 512K tokens, 16 times the largest measured" in kernels
    assert "reduce_scatter of" in transfers
    assert re.search(r"of \d+ measured ones 90 % were within \d+ %", right)
    found = simulate(capsys, *step)
    assert (found["answer"], found["rests_on"]) == (first, printed[-3:])
    p = predict("ulysses", seq="512K", layers=1)
    assert repr(p).startswith(first)
    for line in (first, *printed[-3:]):
        assert html.escape(line) in p._repr_html_()
    assert "<tr><th>bound by</th><td>compute</td></tr>" in p._repr_html_()
    assert "<table><tr><th>schedule</th>" in table(p)._repr_html_()
    everything = run(capsys, "simulate", *step, "--evidence")
    assert "beyond the measured range: " not in "".join(printed)
    assert "beyond the measured range: " in everything


@pytest.mark.sweep
def test_the_sentence_is_of_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    step = ("simulate", "--cluster", "hgx-h100", "--model", "llama3-8b", "--seq", "64K", "--layers", "1")
    several = (*step, "--schedule", "ring,zigzag")
    both = run(capsys, *several).splitlines()[0]
    assert re.search(r"^Zigzag trains fastest: .*; fits with .* left; ring takes [\d.]+ times as long$", both)
    found = json.loads(run(capsys, *several, "--json"))
    rows = found["rows"]
    assert found["answer"] == both
    assert rows[0]["answer"].startswith("Ring takes")
    small = f"cluster.hbm.capacity_bytes={rows[0]['peak_hbm_bytes'] // 2}"
    none = run(capsys, *several, "--set", small).splitlines()[0]
    assert re.search(r"^None of 2 fits; nearest comes (ring|zigzag): .*; does not fit: .* missing$", none)


def test_without_a_profile_the_first_line_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """Where the cluster names none, and where the user asks for none."""
    for cluster in (("--cluster", "l20-pcie"), ("--cluster", "hgx-h100", "--profile", "datasheet")):
        options = ("--model", "tiny", *cluster)
        printed = run(capsys, "simulate", *options, "--gpus", "2")
        assert "(at datasheet rates)" in printed.splitlines()[0]
        assert "real kernels are 1.4 to 2 times slower" in printed
        notes = simulate(capsys, *options, "--gpus", "2")["evidence"]["notes"]
        assert "datasheet rates" in notes[0]


def test_several_schedules_are_a_table_with_the_fastest_first(capsys: pytest.CaptureFixture[str]) -> None:
    main(["simulate", *H100, "--model", "llama3-8b", "--seq", "128K", "--schedule", "ring,zigzag,ulysses"])
    printed = capsys.readouterr().out
    assert printed.index("zigzag ") < printed.index("ring ")
    assert "buffers yes, rest not known" in printed
    rows = simulate(capsys, *H100, "--schedule", "ring,ulysses")["rows"]
    assert [(row["schedule"], row["degrees"]) for row in rows] == [("ring", "R 8"), ("ulysses", "U 8")]
    assert "--trace is of one step: leave it out, or all but one --schedule" in fails(
        capsys, "simulate", "--schedule", "ring,ulysses", "--trace", "t.json"
    )


@pytest.mark.sweep
def test_a_training_step_is_the_default_and_says_what_saves_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """With FSDP and full checkpointing; where it does not fit also what to switch on, and where nothing helps that."""
    options = ("simulate", "--model", "tiny", "--cluster", "hgx-h100", "--seq", "1K", "--gpus", "2")
    printed = run(capsys, *options)
    assert "step of 2 layers of tiny" in printed
    assert "FSDP (zero_stage=3), checkpointing (checkpoint=full)" in printed
    assert "switch on" not in printed
    tight = (*options, "--set", "cluster.hbm.capacity_bytes=1.5e9")
    assert "to make it fit, switch on: no technique is enough" in run(capsys, *tight)
    kept = (*options, "--set", "schedule.checkpoint=none", "--set", "cluster.hbm.capacity_bytes=8e9", "--seq", "64K")
    printed = run(capsys, *kept)
    assert "FSDP (zero_stage=3)" in printed
    assert "checkpoint=" not in printed
    assert "to make it fit, switch on: " in printed
    assert "no technique" not in printed
    several = run(capsys, *options, "--schedule", "ring,ulysses")
    assert "techniques: FSDP (zero_stage=3), checkpointing (checkpoint=full)" in several


@pytest.mark.sweep
def test_a_step_says_what_its_memory_goes_to_and_what_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    """The constant is 2.93 GiB, known to 1.367 GiB; a memory that is exceeded is named, with how much."""
    options = ("simulate", "--cluster", "hgx-h100", "--model", "tiny", "--seq", "1K", "--gpus", "2", "--scope", "step")

    def printed(*overrides: str) -> str:
        main([*options, *(word for override in overrides for word in ("--set", override))])
        return capsys.readouterr().out

    one = simulate(capsys, *options[1:])
    needed, room = one["peak_hbm_bytes"], one["room"]
    assert one["fits"] is True
    assert sum(room["terms"].values()) == needed
    assert [limit["memory"] for limit in room["limits"]] == ["GPU"]
    said = re.sub(r"[\s│]+", " ", printed())
    for words in ("by term", "optimiser 149 MiB", "more or less 1.367 GiB", "measured by others: context"):
        assert words in said
    reserved = room["limits"][0]["reserved_bytes"]
    assert "yes: 2 GiB left of GPU" in printed(f"cluster.hbm.capacity_bytes={needed + reserved + 2**31}")
    near = printed(f"cluster.hbm.capacity_bytes={needed + reserved - 2**30}")
    assert "at the limit: 1 GiB too little of GPU, known to 1.367 GiB" in near
    small = ("cluster.socket.dram.capacity_bytes=1000", "schedule.activations=host")
    assert "no: 1.999 MiB too little of host" in printed(*small)
    assert "no: 2 GiB too little of GPU" in printed(f"cluster.hbm.capacity_bytes={needed + reserved - 2**31}")


def test_a_step_says_what_training_takes(capsys: pytest.CaptureFixture[str]) -> None:
    """MFU is of the model's FLOPs. Full checkpointing runs layers again but for their last product, w_down, and fused
    attention its scores: HFU is of these, too. Matrix products take 2 FLOPs a weight forward and 4 backward.
    """
    options = ("--cluster", "hgx-h100", "--model", "tiny", "--seq", "1K", "--gpus", "2", "--scope", "step")
    hardware = {}
    for checkpoint in ("none", "full"):
        found = simulate(capsys, *options, "--set", f"schedule.checkpoint={checkpoint}")
        training, step_s = found["training"], found["step_time_s"]
        assert training["gpu_hours_per_billion_tokens"] == 2 * training["hours_per_billion_tokens"]
        assert 3600 * training["hours_per_billion_tokens"] == pytest.approx(step_s / 1024 * 1e9)
        hardware[checkpoint] = training["hfu"] * step_s, found["mfu"] * step_s
    again, head = 2 * (2 * 512**2 + 2 * 512 * 256 + 2 * 512 * 1536), 512 * 32000
    attention = 2 * 4 * 512 * (1024 * 1025 // 2) / 1024  # forward, a token
    model = 6 * (again + 2 * 512 * 1536 + head) + 3 * attention
    executed = {"none": model + attention / 2, "full": model + attention / 2 + 2 * again + attention}
    for checkpoint, flops in executed.items():
        hfu, mfu = hardware[checkpoint]
        assert hfu / mfu == pytest.approx(flops / model)
    main(["simulate", *options])
    printed = capsys.readouterr().out
    assert "HFU, with what is computed again" in printed
    assert "GPU-hours" in printed


@pytest.mark.slow
def test_degrees_losses_and_what_cannot_be_played_stand_beside_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    """USP of one ring is Ulysses, which its degrees say; 28 heads are no multiple of 8."""
    step = ("simulate", "--model", "llama3-8b", "--cluster", "hgx-h100", "--layers", "1", "--seq", "32K")
    printed = run(capsys, *step, "--schedule", "ulysses,usp")
    assert re.search(r"│ usp U 8 R 1 +│", printed)
    assert re.search(r"│ ulysses U 8 +│", printed)
    assert "logits of all tokens (loss=whole), fp32 states (optimiser_states=fp32)" in printed
    assert "chunked loss (loss=chunked)" in run(capsys, *step, "--set", "schedule.loss=chunked")
    assert "chunked loss" not in run(capsys, *step, "--set", "schedule.loss=unfused")
    heads = (*step, "--set", "model.num_heads=28", "--set", "model.num_kv_heads=4", "--schedule", "zigzag,ulysses")
    printed = run(capsys, *heads)
    assert re.search(r"│ zigzag R 8 +│ [\d.]+ ms", printed)
    assert re.search(r"│ ulysses +│ +│", printed)
    rows = json.loads(run(capsys, *heads, "--json"))["rows"]
    assert [(row["schedule"], bool(row["error"])) for row in rows] == [("zigzag", False), ("ulysses", True)]
    assert "28" in rows[1]["error"]
    assert "28" in fails(capsys, *heads[:-1], "ulysses,fpdt")
    assert "(did you mean 'hgx-h200'" in fails(capsys, "simulate", "--cluster", "h2000")


def test_buffers_that_exceed_the_memory_do_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    """On a GPU, and on a host, whose ranks share one memory; what is below it is not known to fit."""
    options = (*H100, "--model", "llama3-8b", "--schedule", "ulysses", "--set")
    needed = simulate(capsys, *options, "cluster.nodes=1")["peak_hbm_bytes"]
    assert simulate(capsys, *options, f"cluster.hbm.capacity_bytes={needed}")["fits"] is None
    assert simulate(capsys, *options, f"cluster.hbm.capacity_bytes={needed - 1}")["fits"] is False
    here = (*HERE, "--gpus", "2", *ATTENTION)
    needed = simulate(capsys, *here)["peak_hbm_bytes"]
    assert simulate(capsys, *here, "--set", f"cluster.hbm.capacity_bytes={needed}")["fits"] is False
    main(["simulate", *H100, "--model", "llama3-8b", "--seq", "16M", "--schedule", "ulysses"])
    assert "no: buffers alone exceed the memory" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.gloo
def test_simulating_is_the_same_in_every_process() -> None:
    """Whatever the hash seed of Python."""
    options = ["simulate", "--json", "--cluster", "hgx-h100", "--gpus", "16", "--dtype", "bf16"]
    code = f"from experiments.verbs.cli import main; main({options})"
    printed = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, cwd=ROOT, capture_output=True, check=True
        ).stdout
        for seed in ("0", "1", "77")
    }
    assert len(printed) == 1


def test_overrides_change_the_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    base = simulate(capsys, *H100)["step_time_s"]
    assert simulate(capsys, *H100, "--set", "cluster.gpu.peak_flops_per_s.bf16=*2")["step_time_s"] < 0.6 * base
    assert simulate(capsys, *H100, "--set", "cluster.nvlink.bytes_per_s=1e9")["step_time_s"] > 2 * base
    slow = simulate(capsys, *H100, "--set", "cluster.gpu[7].speed=0.5")["step_time_s"]
    assert slow == pytest.approx(2 * base, rel=0.05)
    fewer = simulate(capsys, *H100, "--set", "model.num_kv_heads=1")
    assert fewer["peak_hbm_bytes"] < simulate(capsys, *H100)["peak_hbm_bytes"]


def test_more_gpus_take_more_nodes_and_the_nic(capsys: pytest.CaptureFixture[str]) -> None:
    found = simulate(capsys, *H100, "--gpus", "16")
    assert found["floors"].keys() == {"compute", "nic", "nvlink", "pcie"}
    assert simulate(capsys, *H100, "--nodes", "2")["schedule_hash"] == found["schedule_hash"]


@pytest.mark.sweep
@pytest.mark.parametrize(
    "cluster",
    slow_but({"hgx-h100", "l20-pcie"}, [name for name in preset_names("topology/hardware") if name != "host"]),
)
def test_every_cluster_plays_rings_and_all_to_alls(capsys: pytest.CaptureFixture[str], cluster: str) -> None:
    spec = load_cluster(cluster)
    profiles = [
        name for name in preset_names("sim/profiles", ".json") if load_profile(name).machine.gpu == spec.gpu.name
    ]
    for profile in ("datasheet", *profiles):
        for schedule in ("zigzag", "ulysses"):
            gpus = "16" if spec.nic else str(spec.gpus_per_node)
            options = ("--model", "tiny", "--cluster", cluster, "--gpus", gpus)
            options = (*options, "--dtype", "bf16", "--schedule", schedule, "--scope", "layer")
            found = simulate(capsys, *options, "--set", "model.num_heads=16", "--profile", profile)
            assert found["step_time_s"] > 0


@pytest.mark.slow
def test_a_faster_nic_is_never_slower(capsys: pytest.CaptureFixture[str]) -> None:
    """Also where the way to it limits then: the measured efficiency is kept."""
    options = (
        "--model",
        "tiny",
        "--cluster",
        "dgx-a100",
        "--gpus",
        "16",
        "--dtype",
        "bf16",
        "--seq",
        "64K",
        "--layers",
        "1",
    )
    times = [
        simulate(capsys, *options, "--set", f"cluster.nic.bytes_per_s=*{factor}")["step_time_s"]
        for factor in (1, 1.2, 2, 4)
    ]
    assert times == sorted(times, reverse=True)
    assert times[-1] > 0.75 * times[0], "PCIe is only a quarter faster than the NIC"


def test_batch_mask_pass_and_dtype_are_taken(capsys: pytest.CaptureFixture[str]) -> None:
    ideal = (*H100, "--profile", "datasheet", "--schedule", "ulysses")
    base = simulate(capsys, *ideal)
    for options, factor in (
        (("--batch", "2"), 2),
        (("--mask", "full"), 2),
        (("--pass", "forward"), 1 / 3.5),
        (("--pass", "backward"), 2.5 / 3.5),
    ):
        found = simulate(capsys, *ideal, *options)
        assert found["step_time_s"] == pytest.approx(factor * base["step_time_s"], rel=0.05)
    assert simulate(capsys, *ideal, "--dtype", "fp32")["step_time_s"] > 5 * base["step_time_s"]


def test_titles_say_what_is_played(capsys: pytest.CaptureFixture[str]) -> None:
    for options, title in (
        (("--set", "schedule.layout=zigzag"), "ring (layout zigzag), attention of tiny"),
        (("--seq", "1001", "--pad"), "S 1002 (1 of them padding), B 1"),
        (("--seq", "1K", "--window", "100"), "causal with a window of 100"),
    ):
        assert title in run(capsys, "simulate", *HERE, "--gpus", "2", *ATTENTION, *options)


def test_degrees_are_chosen_for_the_model_as_it_was_changed(capsys: pytest.CaptureFixture[str]) -> None:
    usp = ("simulate", *H100, "--schedule", "usp")
    assert "usp, attention" in run(capsys, *usp), "eight KV heads: all ranks trade heads, there is no ring"
    assert "usp (U 4 x R 2" in run(capsys, *usp, "--set", "model.num_kv_heads=4")


@pytest.mark.sweep
def test_padding_is_no_throughput(capsys: pytest.CaptureFixture[str]) -> None:
    """1025 tokens padded to 1056 for 32 chunks of a zigzag of 16, which takes as long as 1056 real ones."""
    options = ("--model", "tiny", "--cluster", "hgx-h100", "--gpus", "16", "--schedule", "zigzag", "--pad", *ATTENTION)
    options = (*options, "--dtype", "bf16")
    real, padded = (simulate(capsys, *options, "--seq", seq) for seq in ("1056", "1025"))
    assert padded["step_time_s"] == real["step_time_s"]
    for figure, share in (("tokens_per_s_per_gpu", 1025 / 1056), ("mfu", (1025 / 1056) ** 2)):
        assert padded[figure] == pytest.approx(share * real[figure], rel=1e-3)


def test_recorded_commands_name_no_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = ["/bin/longstep", "validate", "--out", "/some/folder/a.json", "--html=/some/page.html", "--seq", "1K,2K"]
    monkeypatch.setattr(sys, "argv", typed)
    assert command_line() == "longstep validate --out a.json --html=page.html --seq 1K,2K"


def test_simulate_writes_a_trace(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "trace.json"
    run(capsys, "simulate", *H100, "--trace", str(target))
    (trace,) = traces_in(target.read_bytes())
    assert trace.num_ranks == 8
    assert any(event["ph"] == "C" for event in json.loads(target.read_bytes())["traceEvents"])


def test_show_in_all_forms(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = ("show", "--cluster", "hgx-h100", "--gpus", "4", "--seq", "1K", "--dtype", "bf16")
    grid = run(capsys, *options)
    assert "rank 3" in grid
    assert "A:kv3" in grid
    schedule = Schedule.from_json(run(capsys, *options, "--format", "json").encode())
    assert schedule.num_ranks == 4
    graph = run(capsys, *options, "--format", "dot", "--ranks", "0,2")
    assert graph.startswith("digraph")
    assert "cluster_1" not in graph
    target = tmp_path / "schedule.json"
    run(capsys, *options, "--format", "json", "--out", str(target))
    assert Schedule.from_json(target.read_bytes()).hash == schedule.hash


@pytest.mark.parametrize("changes", [*itertools.permutations(("model.num_heads=6", "model.num_kv_heads=3"))])
def test_what_is_set_may_come_in_any_order(changes: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    found = simulate(capsys, "--gpus", "3", "--seq", "3K", *(word for change in changes for word in ("--set", change)))
    assert found["step_time_s"] > 0


def test_list_names_everything(capsys: pytest.CaptureFixture[str]) -> None:
    printed = run(capsys, "list")
    for name in ("tiny", "llama3-8b", "hgx-h100", "host", "ring", "ulysses", "single", "datasheet"):
        assert name in printed
    assert "hgx-h100" not in run(capsys, "list", "models")


def test_one_profile_that_is_broken_hides_no_others(capsys: pytest.CaptureFixture[str], own_profiles: Path) -> None:
    own_profiles.mkdir(parents=True)
    whole = resources.files("sim").joinpath("profiles", "h100-sxm.json").read_bytes()
    (own_profiles / "host.json").write_bytes(whole[:1000])
    (own_profiles / "none.json").symlink_to("nowhere")
    (own_profiles / "folder.json").mkdir()
    os.mkfifo(own_profiles / "pipe.json")
    (own_profiles / "not utf-8\udcff.json").write_bytes(b"\xff")
    (own_profiles / "[red]\x1b[31m.json").write_bytes(whole)
    printed = run(capsys, "list", "profiles")
    for name in ("host", "none", "folder", "pipe", r"not utf-8\udcff"):
        assert re.search(rf"│ {re.escape(name)} +│ profile ", printed), name
    assert "truncated" in printed, "the reason, in lines that break anywhere"
    assert re.search(r"\[red\]\\u001b\[31m +│ H100-SXM-80GB", printed), "as it is named"
    assert "h200-sxm" in printed


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
def test_what_a_model_has_and_predictions_leave_out_is_evidence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = json.loads((ROOT / "tests" / "words" / "hugging_face" / "qwen3-8b.json").read_text())
    config = tmp_path / "config.json"
    config.write_text(json.dumps(found | {"of_theirs": 3}))
    note = "model: ignored, as asked, of its config.json: 'of_theirs'"
    options = ("--cluster", "hgx-h100", "--model", str(config), "--set", "model.ignore=of_theirs")
    options = (*options, "--layers", "1", "--gpus", "2")
    for profile in ("datasheet", "h100-sxm"):
        assert note in simulate(capsys, *options, "--profile", profile)["evidence"]["notes"]
    assert f"note: {note}" in run(capsys, "simulate", *options)
    assert not any("model" in note for note in simulate(capsys, *H100, "--profile", "h100-sxm")["evidence"]["notes"])


def test_a_schedule_of_ones_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "my_module.py"
    path.write_text(OWN.format(body="pass"))
    found = simulate(capsys, *H100, "--schedule", f"{path}:build")
    assert found["schedule_hash"] == simulate(capsys, *H100)["schedule_hash"]


@pytest.mark.parametrize("name", ["torch", "queue"])
def test_a_schedule_of_ones_own_hides_no_module(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    module, path = importlib.import_module(name), tmp_path / f"{name}.py"
    path.write_text(OWN.format(body="pass"))
    simulate(capsys, *H100, "--schedule", f"{path}:build")
    assert importlib.import_module(name) is module


@pytest.mark.gloo
def test_a_schedule_of_ones_own_that_is_wrong(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "my_module.py"
    dropped = """import msgspec
    programs = schedule.programs
    programs[1] = programs[1].replace(ops=programs[1].ops[:1] + programs[1].ops[2:])
    schedule._build, schedule._programs = programs.__getitem__, {}"""
    path.write_text(OWN.format(body=dropped))
    own = ("--schedule", f"{path}:build", *H100)
    assert "rank 1 op" in fails(capsys, "simulate", *own)
    with pytest.raises(SystemExit):
        main(["show", *own])
    assert ">>>" in capsys.readouterr().out, "the place is shown"
    path.write_text(OWN.format(body="1 / 0"))
    assert "my_module.py:9: ZeroDivisionError" in fails(capsys, "simulate", *own)
    assert "my_module.py:9: ZeroDivisionError" in fails(capsys, "simulate", *own, "--pad")
    assert "its builder returned NoneType" in fails(capsys, "simulate", "--schedule", f"{path}:nothing", *H100)
    assert "did you mean 'build'" in fails(capsys, "simulate", "--schedule", f"{path}:bild", *H100)
    assert "unknown function 'NUMBER'" in fails(capsys, "simulate", "--schedule", f"{path}:NUMBER", *H100)
    assert "unknown function 'dict'" in fails(capsys, "simulate", "--schedule", f"{path}:dict", *H100)
    assert "or a function build(workload, mesh)" in fails(capsys, "simulate", "--schedule", f"{path}:Workload", *H100)
    path.write_text(OWN.format(body="raise SystemExit(0)"))
    assert "my_module.py:9: SystemExit: 0" in fails(capsys, "simulate", *own)
    path.write_text("import sys; sys.exit(0)")
    assert "importing" in fails(capsys, "simulate", *own)
    path.write_text("import nothing_of_that_name")
    assert "importing" in fails(capsys, "simulate", *own)
    assert "there is no file" in fails(capsys, "simulate", "--schedule", "none.py:build")


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
        (("validate", "--cases", "/dev/zero"), "it is no regular file"),
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
        (("validate", "--cases", "usp_l20", "--cases-out", "cases.toml"), "--cases-out writes what was executed"),
        (("validate", "--cases", "usp_l20", "--out", "record.json"), "--html or --markdown only"),
        (("validate", "--cases", "usp_l20", "--record", "record.json"), "only where --markdown writes both"),
        (("validate", "--markdown", "chapter.md"), "name some, such as --cases all"),
        (("validate", "--cases", "usp_l20", "--markdown", "a.md", "--html", "a.html"), "a command of their own"),
        (("validate", "--record", "none.json"), "cannot be read"),
        (("validate", "--profile", "datasheet", "--seq", "1K", "--ranks", "2"), "run longstep calibrate --quick"),
        (("run", "--cluster", "hgx-h100"), "which has no GPU: executing takes --cluster host"),
        (("calibrate", "--published", "nope"), "set it with --published"),
        (("calibrate", "--published", "h100-sxm", "--cluster", "hgx-h100"), "goes with --out only"),
        (("calibrate", "--check", "--against", "h100-sxm"), "choose one"),
        (("calibrate", "--software", "transformers"), "unknown software 'transformers' (did you mean"),
        (("calibrate", "--software", "torch-losses", "--quick"), "--software measures nothing"),
        (("calibrate", "--software", "torch-losses", "--published", "h100-sxm"), "choose one"),
        (("calibrate", "--software", "torch-losses", "--out", "/nowhere/table.toml"), "there is no folder"),
        (("calibrate", "--quick", "--against", "h100-sxm"), "--against measures nothing"),
        (("calibrate", "--quick", "--check"), "--check repeats points as they were measured"),
        (("calibrate", "--name", "h100-sxm", "--against", "h100"), "set it with --against"),
        (("calibrate", "--name", "h100-sxm", "--against", "no.json"), "set it with --against"),
        (("calibrate", "--name", "h100-sxm", "--against", "datasheet"), "--against datasheet: a datasheet has no poin"),
        (("calibrate", "--name", "h100-sxm", "--against", ""), "unknown profile ''"),
        (("calibrate", "--name", "h100", "--against", "h100-sxm"), "set it with --name"),
        (("calibrate", "--name", "h100", "--check"), "set it with --name"),
        (("calibrate", "--out", "no.json", "--against", "h100-sxm"), "set it with --out"),
        (
            ("calibrate", "--cluster", "hgx-h200", "--against", "h200-sxm"),
            "there is no profile 'hgx-h200' yet: longstep calibrate --cluster hgx-h200 makes one, or name one with",
        ),
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


def test_a_profile_of_another_machine(capsys: pytest.CaptureFixture[str], tmp_path: Path, own_profiles: Path) -> None:
    spec = load_cluster("host")
    machine = Machine(gpu="a CPU of another make, 7 cores, 1 per rank", cores=7, threads_per_rank=1, software={})
    foreign = Profile(
        name="host",
        created="2026-01-01",
        command="",
        complete=True,
        machine=machine,
        cluster=msgspec.to_builtins(spec, str_keys=True),
        points=(),
    )
    save_profile(foreign, tmp_path / "foreign.json")
    there = simulate(capsys, *HERE, "--profile", str(tmp_path / "foreign.json"))  # named, it is what is simulated
    assert there["evidence"]["measured_on"] == machine.gpu
    message = fails(capsys, "run", "--gpus", "1", "--profile", str(tmp_path / "foreign.json"))
    assert "is of another machine: 'a CPU of another make" in message
    assert "longstep calibrate" in message
    message = fails(capsys, "simulate", *H100, "--profile", str(tmp_path / "foreign.json"))
    assert "but cluster 'hgx-h100' has 'H100-SXM-80GB'" in message
    save_profile(foreign, own_profiles / "host.json")
    assert "is of another machine" in fails(capsys, "simulate", *HERE)
    assert simulate(capsys, *HERE, "--profile", "datasheet")["evidence"]["profile"] == "datasheet"


def test_kernels_scatter_as_measured(capsys: pytest.CaptureFixture[str], own_profiles: Path) -> None:
    spec = load_cluster("host")
    profile = Profile(
        name="host",
        created="2026-01-01",
        command="",
        complete=True,
        machine=Machine(gpu=spec.gpu.name, cores=spec.gpus_per_node, threads_per_rank=spec.gpu.sms, software={}),
        cluster=msgspec.to_builtins(spec, str_keys=True),
        points=(),
        jitter=MeasuredJitter(share=0.1, correlation=0.0, runs=100),
    )
    save_profile(profile, own_profiles / "host.json")
    measured, chosen, steady = (
        simulate(capsys, *HERE, *option) for option in ((), ("--jitter", "0.1"), ("--jitter", "0"))
    )
    assert measured == chosen
    assert measured["step_time_s"] > steady["step_time_s"]
    assert any("scatter" in note for note in measured["evidence"]["notes"])
    assert not any("scatter" in note for note in steady["evidence"]["notes"])


def test_nothing_half_written_stays(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "trace.json"
    fails(capsys, "simulate", "--trace", str(target), "--seq", "1001", "--gpus", "2")
    assert not list(tmp_path.glob("*.json*"))
    assert not list(tmp_path.glob(".*"))


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
@pytest.mark.parametrize("name", ["execute", "verify", "compare"])
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


@pytest.mark.sweep
def test_validate_does_not_calibrate_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    world: Any = object()
    monkeypatch.setattr("experiments.verbs.validate.calibrate", None)
    with pytest.raises(InputError, match="run longstep calibrate first, without torchrun"):
        validate(Validate(), Console(), world)


@pytest.mark.sweep
def test_plan_prints_the_best_that_fits_and_why_others_lose(capsys: pytest.CaptureFixture[str]) -> None:
    """With what a billion tokens cost; where nothing fits what is missing least."""
    small = ("plan", "--model", "tiny", "--gpus", "2", "--seq", "4K", "--global-batch", "1", "--schedule", "ulysses")
    small = (*small, "--layers", "2")
    small = (
        *small,
        "--ulysses-degree",
        "2",
        "--vary",
        "mlp=whole",
        "--vary",
        "activations=hbm",
        "--vary",
        "optimiser=gpu",
    )
    printed = run(capsys, *small, "--price", "2.5", "--most", "1")
    assert "ulysses (U 2)" in printed
    assert re.search(r"\nUlysses \(U 2\) trains fastest, with checkpoint none, .*: .* m?s a step \(", printed)
    assert re.search(r", [\d.]+ for a billion tokens; fits with [\d.]+ GiB left\n", printed)
    assert printed.index("\n└") < printed.index("\nkernels: ") < printed.index("\nsteps bound by ")
    once = (*small, "--most", "1", "--vary", "checkpoint=full", "--vary", "loss=whole")
    assert "why it loses" not in printed
    everything = run(capsys, *once, "--evidence")
    assert all(told in everything for told in ("why it loses", "the fastest", "doubling one figure of the machine"))
    found = json.loads(run(capsys, *once, "--json"))
    assert next(iter(found)) == "answer"
    assert found["answer"] in everything
    assert len(found["rests_on"]) == 3
    assert found["evidence"]["profile"] == "h100-sxm"
    assert found["best"][0]["options"].startswith("checkpoint full")
    assert found["slack"] == 0
    tight = ("--set", "cluster.hbm.capacity_bytes=1e9", "--vary", "checkpoint=full")
    assert "\nNothing fits: ulysses (U 2) with " in run(capsys, *small, *tight)
    assert "no schedule has it" in fails(capsys, *small, "--vary", "chunkk=1")
    assert "--vary loss: expected OPTION=VALUE" in fails(capsys, *small, "--vary", "loss")
    assert "--stack, --dp-degree" in fails(capsys, *small, "--stack", "fsdp")


@pytest.mark.sweep
def test_plan_says_which_global_batch_it_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    """In its first line; what is typed stays, replicas of ``any`` number train as many sequences as they are."""
    small = ("plan", "--model", "tiny", "--gpus", "2", "--seq", "128K", "--schedule", "ulysses", "--layers", "1")
    for kept in ("checkpoint=full", "mlp=whole", "activations=hbm", "optimiser=gpu"):
        small = (*small, "--vary", kept)
    printed = run(capsys, *small)
    assert printed.startswith("assumed: --cluster hgx-h100 --global-batch 4\n")
    assert "4 sequences (512K tokens) a step: 2 configurations" in printed
    printed = run(capsys, *small, "--global-batch", "256K")
    assert printed.startswith("assumed: --cluster hgx-h100\n")
    assert "2 sequences (256K tokens) a step: 2 configurations" in printed
    rows = json.loads(run(capsys, *small, "--global-batch", "any", "--json"))["best"]
    assert {row["schedule"]: row["sequences"] for row in rows} == {"ulysses (U 2)": 1, "ulysses (2 replicas)": 2}
    assert "for 2 sequences" in run(capsys, *small, "--global-batch", "any")
    assert "--global-batch 1M is in tokens" in fails(capsys, *small, "--longest", "--global-batch", "1M")


def test_simulate_takes_a_global_batch(capsys: pytest.CaptureFixture[str]) -> None:
    """As replicas, their sequences and micro-batches, spelled out."""
    step = ("simulate", "--model", "tiny", "--layers", "1", "--seq", "4K", "--schedule", "ulysses", "--gpus", "4")
    step = (*step, "--ulysses-degree", "2", "--jitter", "0")
    spelled = ("--dp-degree", "2", "--batch", "2", "--set", "schedule.micro_batches=2")
    printed = run(capsys, *step, "--global-batch", "16K")
    assert "for 4 sequences (16K tokens)" in printed
    assert printed == run(capsys, *step, *spelled) == run(capsys, *step, "--global-batch", "4")
    assert "set it to 2 or 4 (sequences)" in fails(capsys, *step, "--global-batch", "3")
