"""Software by name: kernels that were counted in the place of fused ones, and what it has of the schedule."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import longstep
from sim.base.errors import InputError
from sim.engine.costs.cost import CostModel
from sim.engine.intervals.interval import interval
from sim.schedule.derive.kernels import KernelUse, kernel_uses
from sim.schedule.derive.workspace import workspace_bytes
from sim.schedule.ir.ops import CrossEntropy, Pack, RmsNorm
from sim.setup.answers.answer import rests_on
from sim.setup.setup import Setup
from sim.setup.unnamed_software import SLOWEST, slowest
from sim.software.counted import load_counted
from sim.software.kernels import Attended, running, runs_of
from sim.software.software import Kernels, Software, load_software, software_names
from sim.words.profile import load_profile
from sim.words.workload import DTYPE_BYTES
from tests.helpers import slow_but, sweep_but
from tests.schedule.model.test_step import make_step, step
from topology.cluster import Cluster, load_cluster

STEP = {"model": "tiny", "seq": "4K", "cluster": "hgx-h100", "gpus": 2, "seeds": 1}
NORM = Kernels(norm="transformers-llama:norm")
MINE = """
said = "mine"
[kernels]
norm = "transformers-llama:norm"
[schedule]
zero_stage = 1
loss = "torch"
checkpoint = "none"
overlap = false
[sources]
"kernels.norm" = "assumed"
"schedule.zero_stage" = "assumed"
"schedule.checkpoint" = "assumed"
"schedule.loss" = "assumed"
"schedule.overlap" = "assumed"
"""


def mine(folder: Path, **replaced: str) -> str:
    text = MINE
    for old, new in replaced.items():
        assert old in text
        text = text.replace(old, new)
    path = folder / "mine.toml"
    path.write_text(text)
    return str(path)


@pytest.mark.sweep
@pytest.mark.parametrize("name", software_names())
def test_what_ships_is_played_and_every_field_has_its_source(name: str) -> None:
    software = load_software(name)
    played = longstep.predict("zigzag", **STEP, software=name)
    assert played.profile is not None
    assert played.profile.software == software.said
    assert f"; software: {software.said}" in rests_on(played)[0]
    options = played.checked.schedule.header.options
    assert {key: options[key] for key in software.schedule if key in options} == {
        key: value for key, value in software.schedule.items() if key in options
    }


def test_kernels_of_a_norm_take_what_their_bytes_take_at_the_rate_of_the_memory() -> None:
    """36 bytes an element in 8 kernels of which 6 pass over all elements, the other two over one number a row. Casts
    and the product with weights, 16 of these bytes, read one element at a time. Each of the 6 waits in a queue.
    """
    profile = load_profile("h100-sxm")
    eager = running(profile, NORM, "eager", "H100-SXM")
    assert eager is running(profile, NORM, "eager", "H100-SXM")
    assert eager is not None
    cluster = load_cluster("hgx-h100")
    cost = CostModel(Cluster(cluster), eager)
    use = KernelUse("rms_norm", "", "bf16", (2**24,), 4 * 2**24, 4 * 2**24)
    seconds, note = cost.kernel_seconds(0, use)
    longer = 20 + 16 * profile.elementwise["scattered"]
    moved_s = longer * 2**24 / (cluster.hbm.bytes_per_s * profile.memory_efficiency)
    assert seconds == pytest.approx(moved_s + 6 * (profile.replayed_s or 0))
    assert "elementwise" in note
    launches = sum(one.launches for one in runs_of(NORM)["rms_norm"])
    assert launches == 6
    norm = next(op for op in make_step("zigzag", 2, step()).schedule.program(0).ops if isinstance(op, RmsNorm))
    assert cost.issue_s(norm, use) == pytest.approx(launches * CostModel(Cluster(cluster), profile).issue_s(norm, use))


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("kv_share", [1.0, 0.25])
def test_copies_of_queries_keys_and_values_are_all_made(kv_share: float, alone: bool) -> None:
    """By hand, bytes of nanotron's passes by element of queries: with as many keys all three are copied (12), keys and
    values joined (8) and transposed (8), on the way back joined (8), all three stacked (12) and transposed (12). With
    fewer, queries are copied (4), both others each (8), joined and transposed (16), and back joined (8), with queries
    (4 and 8). Both embeddings are 4 each way, and one of several sequences has a copy of 4 each way at o_proj.
    """
    kernels = Kernels(rotary="nanotron:rotary+nanotron:attention")
    copied = 60 if kv_share == 1 else 8 + 40 * kv_share
    rotated, output = 8 + 8 * kv_share, 0 if alone else 8
    runs = runs_of(kernels, Attended(kv_share, alone))["rope"]
    each_way = (1 + kv_share) * sum(one.launches * one.bytes_per_element for one in runs)
    assert 2 * each_way == pytest.approx(copied + rotated + output)
    launches = (4 + 3 + 3 if kv_share == 1 else 4 + 5 + 2) + (0 if alone else 2)
    assert 4 * sum(one.launches for one in runs) == pytest.approx(launches)


def test_the_step_of_an_optimiser_with_its_clipping() -> None:
    """Fused AdamW reads and writes 28 bytes a parameter; clipping before it reads 4 for the norm, and scales, 8."""
    kernels = Kernels(optimiser="torch-optimisers:adamw-fused-fp32", clipping="torch-optimisers:clip-fp32")
    bytes_each = {name: [one.bytes_per_element for one in run] for name, run in runs_of(kernels).items()}
    assert bytes_each == {"adamw": [28], "square_sum": [4, 8]}
    with pytest.raises(ValueError, match="clipping=x without optimiser"):
        Kernels(clipping="x")


@pytest.mark.parametrize(("reduce", "packed", "run"), [("model", 4, 12), ("fp32", 6, 22)])
def test_what_gradients_go_through_before_they_are_summed(reduce: str, packed: int, run: int) -> None:
    """Three of DeepSpeed in the place of the copy that packs all of a unit: 12 bytes of each element, or 22 where
    it widens them, one at a time. A copy of something else stays as it is.
    """
    kernels = load_software("deepspeed").kernels
    assert [one.bytes_per_element for one in runs_of(kernels)["pack"]] == [4, 4, 4]
    assert [one.bytes_per_element for one in runs_of(kernels)["pack wide"]] == [6, 8, 8]
    filling = Kernels(buckets=kernels.buckets, wide_buckets=kernels.wide_buckets)
    profile = running(load_profile("h100-sxm"), filling, "deepspeed", "H100-SXM")
    assert profile is not None
    costs = CostModel(Cluster(load_cluster("hgx-h100")), profile)
    longer = (run + 6 * (profile.elementwise["scattered"] - 1) * (reduce == "fp32")) / packed
    queued_s = profile.replayed_s or 0
    program = make_step("single", 1, step(dtype="bf16"), reduce=reduce).schedule.program(0)
    packs = [(op, use) for op, use in zip(program.ops, kernel_uses(program), strict=True) if isinstance(op, Pack)]
    assert packs
    for op, use in packs:
        assert use is not None
        assert use.kernel == "copy"
        alone = use._replace(packs=("", 0))
        assert use.hbm_bytes == alone.hbm_bytes == packed * op.flat.shape[0]
        moved_s, alone_s = (costs.kernel_seconds(0, one)[0] for one in (use, alone))
        assert moved_s - 3 * queued_s == pytest.approx(longer * (alone_s - queued_s))
        assert costs.issue_s(op, use) == pytest.approx(3 * costs.issue_s(op, alone))


def test_what_a_step_casts_is_told_from_what_it_copies() -> None:
    """nanotron's step casts logits to fp32 and their gradient back, sums gradients in fp32, and copies new weights to
    those in 16 bits; sums of the residual stream and what DDP copies to its buckets stay in 16 bits.
    """
    replicas = {"gpus": 2, "dp_degree": 2, "batch": 2, "set": {"schedule.micro_batches": 2}}
    asked = {"model": "tiny", "cluster": "hgx-h100", "seq": "256", "scope": "step", "seeds": 1, "dtype": "bf16"}
    program = longstep.predict("single", **asked | replicas, software="nanotron-ddp").checked.schedule.program(0)
    cast = {True: set[str](), False: set[str]()}
    for op, use in zip(program.ops, kernel_uses(program), strict=True):
        if use is not None and use.kernel in {"copy", "accumulate"}:
            cast[use.casts].add(type(op).__name__ + " " * bool(getattr(op, "adds", False)))
            assert use.casts == (len({program.dtype(view) for view in (*op.reads, *op.writes)}) > 1)
    assert {"Copy", "Unpack", "Pack ", "Accumulate"} <= cast[True]
    assert "Accumulate" in cast[False]


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_loss_of_torch_is_what_was_counted(dtype: str) -> None:
    """Of a model in bf16 14 bytes a logit forward and 22 backward, and 12 held at once."""
    program = make_step("zigzag", 2, step(dtype=dtype), loss="torch").schedule.program(0)
    number, op = next((n, op) for n, op in enumerate(program.ops) if isinstance(op, CrossEntropy))
    use = kernel_uses(program)[number]
    assert use is not None
    counted = load_counted("torch-losses").part("loss")
    kernels = [*counted.forward.kernels, *counted.backward.kernels]
    each = {
        one.kernel: one.reads.get("tokens*vocab", 0) + one.writes.get("tokens*vocab", 0)
        for one in kernels
        if dtype == "bf16" or one.kernel != "_to_copy"
    }
    casts = sum(one.kernel == "_to_copy" for one in kernels) if dtype == "bf16" else 0
    elements = use.shape[0]
    assert use.hbm_bytes == elements * sum(count * (2 if name == "_to_copy" else 1) for name, count in each.items())
    assert len(use.loop) == casts + sum(1 for name, count in each.items() if count and name != "_to_copy")
    tokens = op.labels.shape[0] * op.labels.shape[1]
    assert 12 * elements <= workspace_bytes(op, program) <= 12 * elements + (9 + DTYPE_BYTES["fp32"]) * tokens
    assert counted.peak["tokens*vocab"] == 12


@pytest.mark.parametrize("loss", ["torch"])
def test_a_step_is_proved_and_played_alike_by_both_engines(loss: str) -> None:
    plays = [
        longstep.predict("zigzag", **STEP, software="huggingface", engine=engine, set={"schedule.loss": loss})
        for engine in ("simpy", "native")
    ]
    assert plays[0].trace.rows == plays[1].trace.rows


ACCUMULATED = {
    "huggingface": ("last", "reduce-scatter", "whole", "micro-batch"),
    "huggingface-liger": ("last", "reduce-scatter", "whole", "micro-batch"),
    "ms-swift": ("last", "reduce-scatter", "whole", "micro-batch"),
    "deepspeed": ("every", "all-reduce", "whole", "micro-batch"),
    "alst": ("every", "all-reduce", "whole", "never"),
    "torchtitan": ("every", "reduce-scatter", "full", "micro-batch"),
    "torchtune": ("every", "reduce-scatter", "full", "micro-batch"),
}
"""By preset when gradients are summed and by what, what is computed again, and when the host waits: as its sources."""


@pytest.mark.parametrize("stage", slow_but({1, 3}, [0, 1, 2, 3]))
@pytest.mark.parametrize("name", sweep_but({"huggingface", "deepspeed"}, list(ACCUMULATED)))
def test_what_trainer_and_deepspeed_do_with_micro_batches(name: str, stage: int) -> None:
    """At any stage, gradients add up in the model's data type, but for what is summed in fp32."""
    wanted = STEP | {"schedule": "zigzag", "software": name, "batch": 2, "scope": "step"}
    given = {"schedule.zero_stage": str(stage), "schedule.micro_batches": "2"}
    options = Setup(**wanted, set=given).resolved().options
    assert (options.sync, options.reduce_by, options.checkpoint, options.host_waits) == ACCUMULATED[name]
    assert options.adds_narrow == (name not in {"alst", "torchtitan"})
    assert longstep.predict("zigzag", **STEP | {"batch": 2}, software=name, set=given).step_time_s > 0


@pytest.mark.sweep
def test_what_is_set_comes_before_a_stack_and_that_before_software(tmp_path: Path) -> None:
    path = mine(tmp_path)

    def options(**fields: object) -> dict[str, object]:
        return dict(longstep.predict("zigzag", **STEP, software=path, **fields).checked.schedule.header.options)

    assert (options()["zero_stage"], options()["checkpoint"], options()["overlap"]) == (1, "none", False)
    assert options()["loss"] == "torch"
    assert options(stack="alst")["loss"] == "chunked"
    assert options(stack="alst", set={"schedule.loss": "whole"})["loss"] == "whole"
    alone = longstep.predict("ulysses", **STEP, software=path, scope="layer")
    assert "zero_stage" not in alone.checked.schedule.header.options


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"transformers-llama:norm"', '"transformers-llama"', "kernels.norm=transformers-llama: expected TABLE:PART"),
        ('"transformers-llama:norm"', '"nothing:norm"', "unknown software 'nothing'"),
        ('"transformers-llama:norm"', '"transformers-llama:nor"', "unknown part 'nor' .did you mean 'norm'"),
        (
            '"transformers-llama:norm"',
            '"torch-losses:loss"',
            "runs nothing that passes over tokens.hidden",
        ),
        ('"kernels.norm" = "assumed"', "", "sources: 'kernels.norm' is missing"),
        ("zero_stage = 1\n", "", "'schedule.zero_stage' is stated nowhere"),
        ("zero_stage = 1", "zero_stage = 4", "zero_stage"),
        ("[kernels]", "[kernels]\nnorms = 1", "norms"),
    ],
)
def test_what_is_wrong_is_refused_by_name(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        longstep.predict("zigzag", **STEP, software=mine(tmp_path, **{old: new}))


@pytest.mark.sweep
def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    table = Path("sim/software/counted/liger.toml").read_text()
    (tmp_path / "table.toml").write_text(table)
    path = mine(tmp_path, **{"transformers-llama:norm": f"{tmp_path}/table.toml:norm"})
    before = longstep.predict("zigzag", **STEP, software=path).step_time_s
    (tmp_path / "table.toml").write_text(table.replace('"tokens*hidden" = 2', '"tokens*hidden" = 200000'))
    assert longstep.predict("zigzag", **STEP, software=path).step_time_s > before


def test_software_is_of_gpus_and_needs_measured_rates() -> None:
    with pytest.raises(InputError, match="at datasheet rates all kernels are alike"):
        longstep.predict("zigzag", **STEP, profile="datasheet", set={"software.norm": "transformers-llama:norm"})
    plain = longstep.predict("zigzag", **STEP, software="huggingface", profile="datasheet")
    assert plain.checked.schedule.header.options["loss"] == "torch"
    with pytest.raises(InputError, match="ranks are threads of a host"):
        longstep.predict("ring", **STEP | {"cluster": "host"}, profile="datasheet", set={"software.norm": "liger:norm"})


def test_where_nobody_names_it_the_interval_reaches_to_the_slowest() -> None:
    """And naming any software narrows it."""
    unnamed = longstep.predict("zigzag", **STEP)
    assert unnamed.slowest is not None
    assert unnamed.interval is not None
    narrow = interval(unnamed.simulation)
    assert narrow is not None
    assert unnamed.slowest.seconds > unnamed.step_time_s
    longer = unnamed.slowest.seconds / unnamed.step_time_s
    assert unnamed.interval == (narrow.low_s, pytest.approx(narrow.high_s * longer))
    assert "software: not named" in rests_on(unnamed)[0]
    named = longstep.predict("zigzag", **STEP, software="huggingface")
    assert named.slowest is None
    assert named.interval == interval(named.simulation)
    attention = longstep.predict("zigzag", **STEP, scope="attention")
    assert attention.slowest is None


@pytest.mark.sweep
@pytest.mark.parametrize("seq", ["1K", "64K"])
def test_the_slowest_is_the_slowest_of_those_that_ship(seq: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all layers of the model that is asked by default."""
    simulation = longstep.predict("ulysses", seq=seq, seeds=1).simulation
    seconds = {}
    for name in software_names():
        monkeypatch.setattr("sim.setup.unnamed_software.SLOWEST", name)
        found = slowest(simulation)
        assert found is not None
        seconds[name] = found.seconds
    assert seconds[SLOWEST] == max(seconds.values())


@pytest.mark.parametrize(
    ("name", "overlap"), [("megatron", "gradients"), ("nanotron", "shards"), ("torchtitan", "none")]
)
def test_what_it_sends_beside_products_where_ranks_have_shares_of_weights(name: str, overlap: str) -> None:
    setup = Setup("single", **STEP, software=name, tp_degree=2)
    assert setup.resolved().options.tp_overlap == overlap
    assert setup.replace(set={"schedule.tp_overlap": "none"}).resolved().options.tp_overlap == "none"
    assert setup.replace(tp_degree=1, gpus=1).resolved().options.tp_overlap == "none"


def test_a_description_of_python() -> None:
    software = Software(said="eager norms", kernels=NORM, sources={"kernels.norm": "assumed"})
    setup = longstep.Setup("zigzag", **STEP, software=software)
    assert setup.predicted().step_time_s > dataclasses.replace(setup, software=None).predicted().step_time_s


def test_an_eager_mlp_alone_keeps_more_and_runs_what_was_counted() -> None:
    """nanotron keeps the activated gate, 2 bytes a token and feature, and in backward a gradient of it; its kernels are
    those that were counted.
    """
    small = {"schedule.checkpoint": "none", "model.num_layers": "4", "model.vocab_size": "1024"}
    setup = Setup("single", gpus=1, seq="32K", scope="step", software="nanotron-ddp", set=small)
    own, fused = (setup.replace(set={**small, **one}).predicted() for one in ({}, {"schedule.modules": "fused"}))
    tokens, features, layers = 32768, 14336, 4
    assert own.peak_hbm_bytes - fused.peak_hbm_bytes == 2 * tokens * features * (layers + 1)
    assert own.step_time_s == pytest.approx(fused.step_time_s, rel=0.005)
