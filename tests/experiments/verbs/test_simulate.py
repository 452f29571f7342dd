"""Simulating on the command line: the contract of its JSON, what it prints, and what its options change."""

from __future__ import annotations

import html
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from experiments.verbs.cli import main
from longstep import predict, table
from sim.base.presets import preset_names
from sim.engine.results.report import Report
from sim.words.profile import Machine, MeasuredJitter, Profile, load_profile, save_profile
from tests.experiments.verbs.typed import ATTENTION, H100, HERE, fails, run, simulate
from tests.helpers import slow_but, traces_in
from topology.cluster import load_cluster

ROOT = Path(__file__).parents[3]


def test_simulate_prints_one_object_with_all_figures(capsys: pytest.CaptureFixture[str]) -> None:
    found = simulate(capsys, *H100)
    said = ["assumed", "answer", "rests_on"]
    later = ["room", "training", "stages", "uneven", "peak_reserved"]
    assert [*found, *later] == [*said, *Report.__struct_fields__], (
        "the last are of training steps, of pipelines, and of software whose allocator is known"
    )
    assert {
        "step_time_s", "tokens_per_s_per_gpu", "mfu", "peak_hbm_bytes", "fits", "memory", "breakdown", "bound_by",
        "floors", "schedule_hash", "evidence",
    } <= found.keys()  # fmt: skip
    assert found["fits"] is None
    assert found["floors"].keys() == {"compute", "nvlink"}
    assert found["evidence"]["profile"] == "h100-sxm"
    assert found["step_time_s"] >= max(found["floors"].values())


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


@pytest.mark.sweep
def test_without_a_profile_the_first_line_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """Where the cluster names none, and where the user asks for none."""
    for cluster in (("--cluster", "l20-pcie"), ("--cluster", "hgx-h100", "--profile", "datasheet")):
        options = ("--model", "tiny", *cluster)
        printed = run(capsys, "simulate", *options, "--gpus", "2")
        assert "(at datasheet rates)" in printed.splitlines()[0]
        assert "real kernels are 1.4 to 2 times slower" in printed
        notes = simulate(capsys, *options, "--gpus", "2")["evidence"]["notes"]
        assert "datasheet rates" in notes[0]


@pytest.mark.sweep
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


@pytest.mark.sweep
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


@pytest.mark.sweep
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


@pytest.mark.sweep
def test_overrides_change_the_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    base = simulate(capsys, *H100)["step_time_s"]
    assert simulate(capsys, *H100, "--set", "cluster.gpu.peak_flops_per_s.bf16=*2")["step_time_s"] < 0.6 * base
    assert simulate(capsys, *H100, "--set", "cluster.nvlink.bytes_per_s=1e9")["step_time_s"] > 2 * base
    slow = simulate(capsys, *H100, "--set", "cluster.gpu[7].speed=0.5")["step_time_s"]
    assert slow == pytest.approx(2 * base, rel=0.05)
    fewer = simulate(capsys, *H100, "--set", "model.num_kv_heads=1")
    assert fewer["peak_hbm_bytes"] < simulate(capsys, *H100)["peak_hbm_bytes"]


@pytest.mark.sweep
def test_more_gpus_take_more_nodes_and_the_nic(capsys: pytest.CaptureFixture[str]) -> None:
    found = simulate(capsys, *H100, "--gpus", "16")
    assert found["floors"].keys() == {"compute", "nic", "nvlink", "pcie"}
    assert simulate(capsys, *H100, "--nodes", "2")["schedule_hash"] == found["schedule_hash"]


@pytest.mark.sweep
@pytest.mark.parametrize(
    "cluster",
    slow_but({"l20-pcie"}, [name for name in preset_names("topology/hardware") if name != "host"]),
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


@pytest.mark.sweep
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


def test_simulate_writes_a_trace(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "trace.json"
    run(capsys, "simulate", *H100, "--trace", str(target))
    (trace,) = traces_in(target.read_bytes())
    assert trace.num_ranks == 8
    assert any(event["ph"] == "C" for event in json.loads(target.read_bytes())["traceEvents"])


@pytest.mark.sweep
@pytest.mark.parametrize("changes", [*itertools.permutations(("model.num_heads=6", "model.num_kv_heads=3"))])
def test_what_is_set_may_come_in_any_order(changes: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    found = simulate(capsys, "--gpus", "3", "--seq", "3K", *(word for change in changes for word in ("--set", change)))
    assert found["step_time_s"] > 0


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


@pytest.mark.sweep
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


@pytest.mark.sweep
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


@pytest.mark.sweep
def test_simulate_takes_a_global_batch(capsys: pytest.CaptureFixture[str]) -> None:
    """As replicas, their sequences and micro-batches, spelled out."""
    step = ("simulate", "--model", "tiny", "--layers", "1", "--seq", "4K", "--schedule", "ulysses", "--gpus", "4")
    step = (*step, "--ulysses-degree", "2", "--jitter", "0")
    spelled = ("--dp-degree", "2", "--batch", "2", "--set", "schedule.micro_batches=2")
    printed = run(capsys, *step, "--global-batch", "16K")
    assert "for 4 sequences (16K tokens)" in printed
    assert printed == run(capsys, *step, *spelled) == run(capsys, *step, "--global-batch", "4")
    assert "set it to 2 or 4 (sequences)" in fails(capsys, *step, "--global-batch", "3")


@pytest.mark.sweep
def test_sensitivity_is_printed_beside_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    printed = run(capsys, "simulate", *H100, "--sensitivity")
    assert "doubling saves" in printed
    assert re.search(r"compute +│ -0\.\d{3}", printed)
    rows = json.loads(run(capsys, "simulate", *H100, "--sensitivity", "--json"))
    assert rows[0].keys() == {"figure", "elasticity", "bound_changes_nearby"}
    assert [row["figure"] for row in rows if row["elasticity"] < -0.5] == ["compute"]
    for several in (("--schedule", "ring,zigzag"), ("--vary", "cluster.nvlink.bytes_per_s=*1,*2")):
        assert "--sensitivity is of one step" in fails(capsys, "simulate", *H100, "--sensitivity", *several)


@pytest.mark.sweep
def test_memory_is_told_in_a_sentence_and_by_terms(capsys: pytest.CaptureFixture[str]) -> None:
    """The terms, what lies beside them and what is left are all of the memory, or more than all by what is missing."""
    step = ("simulate", "--model", "tiny", "--cluster", "hgx-h100", "--gpus", "2", "--layers", "1", "--seq", "4K")
    printed = run(capsys, *step, "--memory")
    assert re.search(r"^[\d.]+ MiB is allocated, most of it for .* of 80 GiB is left$", printed, re.MULTILINE)
    found = json.loads(run(capsys, *step, "--memory", "--json"))
    assert found["answer"] in printed
    assert sum(row["share"] for row in found["rows"]) == pytest.approx(1)
    sizes = [row["bytes"] for row in found["rows"] if row["is"] == "allocated"]
    assert sizes == sorted(sizes, reverse=True)
    tight = json.loads(run(capsys, *step, "--memory", "--json", "--set", "cluster.hbm.capacity_bytes=4e9"))
    *shares, missing = (row["share"] for row in tight["rows"])
    assert sum(shares) == pytest.approx(1 + (missing if "is missing" in tight["answer"] else -missing))
    assert "set --scope step" in fails(capsys, *step, "--scope", "layer", "--memory")
    assert "--memory is of one step" in fails(capsys, *step, "--memory", "--vary", "cluster.nvlink.bytes_per_s=*1,*2")


@pytest.mark.sweep
def test_what_ifs_of_one_figure_begin_with_what_it_changes(capsys: pytest.CaptureFixture[str]) -> None:
    vary = ("simulate", *H100, "--processes", "1", "--vary")
    slow = run(capsys, *vary, "cluster.gpu[0].speed=1,0.5").splitlines()
    assert re.match(r"With gpu\[0\]\.speed=0\.5 a step takes .* more than with gpu\[0\]\.speed=1 \(", slow[0]), slow[0]
    found = json.loads(run(capsys, *vary, "cluster.gpu[0].speed=1,0.5", "--json"))
    assert found["answer"] == slow[0]
    assert found["rests_on"]
    assert [row["cluster.gpu[0].speed"] for row in found["rows"]] == ["1", "0.5"]
    same = run(capsys, *vary, "cluster.nic.bytes_per_s=*1,*2").splitlines()
    assert "as long as with nic.bytes_per_s=*1" in same[0], "one node has no traffic over NICs"


@pytest.mark.slow
def test_the_price_of_memory_is_printed_for_training_steps(capsys: pytest.CaptureFixture[str]) -> None:
    """With 16 GB and 692 MiB more nothing is computed again (``tests/plan/test_memory_price.py`` compares all ways)."""
    step = (
        "simulate", "--model", "tiny", "--cluster", "hgx-h100", "--gpus", "2", "--layers", "3", "--schedule", "zigzag",
        "--seq", "256K",
    )  # fmt: skip
    step = (*step, "--set", "cluster.hbm.capacity_bytes=16000000000", "--sensitivity")
    printed = " ".join(run(capsys, *step).split())
    assert re.search(r"GPU memory of 14\.9 GiB: elasticity -\d", printed)
    assert "host memory of 931.3 GiB: elasticity 0, it does not bind the fastest way that fits" in printed
    rows = {row["figure"]: row for row in json.loads(run(capsys, *step, "--json"))}
    assert rows["GPU memory"]["elasticity"] < 0 == rows["host memory"]["elasticity"]
    assert rows["GPU memory"]["more_step_time_s"] < rows["GPU memory"]["step_time_s"]
