"""Configurations of frameworks: two files of each kind, made after public ones, wrong keys, and hostile values."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import msgspec
import pytest

import longstep
from experiments.verbs.cli import main, parse
from experiments.verbs.shared.selection import FileSelection
from experiments.verbs.simulate import Simulate
from sim.base.errors import InputError
from sim.base.overrides import override
from sim.schedule.methods.catalog import NAMED
from sim.setup import names
from sim.setup.imports.facts import FACTS, facts_of
from sim.setup.imports.frameworks import Framework, frameworks
from sim.setup.imports.imported import imported
from sim.setup.imports.reading import read
from sim.setup.imports.stages import CUTS
from sim.setup.names import Assumed, Untold
from sim.setup.spelled import command_of, python_of
from sim.software.software import Kernels

FILES = Path(__file__).parent / "imports"
TE = {"schedule.ring_backward": "kv-at-hand", "schedule.gradients": "model", "schedule.messages": "packed-separate"}
"""How Transformer Engine's rings differ from ours."""


def setup_of(*files: str, **given: Any) -> dict[str, Any]:
    found = imported(*(FILES / file for file in files)).setup(**given)
    found.resolved()
    kept = ("model", "schedule", "gpus", "seq", "batch", "ulysses_degree", "ring_degree", "dp_degree")
    return {name: getattr(found, name) for name in kept} | {"set": dict(names.pairs(found.set))}


SAYABLE: dict[tuple[str, ...], tuple[dict[str, Any], dict[str, Any]]] = {
    ("torchtitan-llama3-8b.toml",): (
        {}, {"schedule": "zigzag", "gpus": 8, "seq": 131072, "batch": 8, "ring_degree": 8, "set": {
            "schedule.rotary_table": "true", "schedule.micro_batches": "8"}},
    ),
    ("megatron-llama3-8b.sh",): (
        {}, {"schedule": "zigzag", "gpus": 16, "seq": 131072, "batch": 4, "ring_degree": 8, "dp_degree": 2, "set": {
            "schedule.loss": "whole", "schedule.zero_stage": "1", **TE, "schedule.micro_batches": "4",
            "schedule.checkpoint": "whole"}},
    ),
    ("trainer-alst.json", "deepspeed-zero3.json"): (
        {"model": "llama3-8b"}, {"schedule": "ulysses", "gpus": 8, "seq": 131072, "batch": 4, "ulysses_degree": 8,
            "set": {
                "schedule.checkpoint": "whole", "schedule.loss": "chunked", "schedule.reduce": "fp32",
                "schedule.optimiser": "host", "schedule.micro_batches": "4",
                "software.attention": "flash-attention-2"}},
    ),
    ("trainer-fsdp.json",): (
        {"model": "llama3-8b"}, {"schedule": "single", "gpus": 8, "seq": 8192, "batch": 4, "dp_degree": 8, "set": {
            "schedule.checkpoint": "full",
            "schedule.micro_batches": "2"}},
    ),
    ("accelerate-cp.yaml",): (
        {"model": "llama3-8b", "seq": "64K"}, {"schedule": "zigzag", "gpus": 8, "seq": "64K", "batch": 1,
            "ring_degree": 8, "set": {"schedule.checkpoint": "full"}},
    ),
    ("axolotl-cp.yaml",): (
        {"model": "llama3-8b"}, {"schedule": "allgather", "gpus": 8, "seq": 131072, "batch": 2, "ring_degree": 8,
            "set": {
                "schedule.checkpoint": "full", "schedule.mlp": "tiled",
                "schedule.loss": "chunked", "schedule.layout": "contiguous",
                "schedule.micro_batches": "2"}},
    ),
    ("ms-swift-sft.yaml",): (
        {"model": "llama3-8b"}, {"schedule": "usp", "gpus": 8, "seq": 131072, "batch": 2, "set": {
            "schedule.checkpoint": "whole",
            "schedule.loss": "chunked", "schedule.micro_batches": "2", "software.attention": "flash-attention-2"}},
    ),
    ("axolotl-lora.yaml",): (
        {"model": "llama3-8b"}, {"schedule": "single", "gpus": 8, "seq": 8192, "batch": 8, "dp_degree": 8, "set": {
            "schedule.checkpoint": "full",
            "schedule.micro_batches": "4", "model.lora_rank": "32", "model.lora_alpha": "16",
            "model.lora_targets": "q+k+v+o"}},
    ),
    ("trainer-fsdp.json", "peft-adapter_config.json"): (
        {"model": "llama3-8b"}, {"schedule": "single", "gpus": 8, "seq": 8192, "batch": 4, "dp_degree": 8, "set": {
            "schedule.checkpoint": "full",
            "schedule.micro_batches": "2", "model.lora_rank": "16", "model.lora_alpha": "32"}},
    ),
    ("ms-swift-lora.sh",): (
        {"model": "llama3-8b"}, {"schedule": "usp", "gpus": 8, "seq": 32768, "batch": 2, "dp_degree": 2, "set": {
            "schedule.checkpoint": "whole",
            "schedule.micro_batches": "2", "model.lora_rank": "8", "model.lora_alpha": "32"}},
    ),
    ("llama-factory-lora.yaml",): (
        {"model": "llama3-8b"}, {"schedule": "single", "gpus": 8, "seq": 16384, "batch": 2, "dp_degree": 8, "set": {
            "schedule.checkpoint": "whole",
            "schedule.micro_batches": "2", "model.lora_rank": "8", "model.lora_alpha": "16"}},
    ),
    ("nanotron-llama3-8b.yaml",): (
        {}, {"schedule": "single", "gpus": 16, "seq": 8192, "batch": 4, "dp_degree": 16, "set": {
            "schedule.zero_stage": "1", "schedule.loss": "subtracted", "schedule.micro_batches": "4"}},
    ),
    ("megatron-bridge-overrides.sh",): (
        {"model": "llama3-8b"}, {"schedule": "ulysses", "gpus": 8, "seq": 65536, "batch": 4, "ulysses_degree": 8,
            "set": {"schedule.zero_stage": "1", "schedule.loss": "unfused", "schedule.micro_batches": "4",
                "schedule.checkpoint": "whole"}},
    ),
    ("nanotron-3d.yaml",): (
        {"model": "llama3-8b"}, {"schedule": "single", "gpus": 256, "seq": 8192, "batch": 4, "dp_degree": 16, "set": {
            "schedule.zero_stage": "1", "schedule.tp_overlap": "none", "schedule.loss": "subtracted",
            "schedule.micro_batches": "4", "schedule.pipeline_layers": "18,14"}},
    ),
}  # fmt: skip
"""Files, what is typed beside them, and what to predict."""
REFUSED = {
    "torchtitan-llama3-405b.toml": {"model.converters"},
    "megatron-arguments.txt": {"recompute_granularity"},
    "deepspeed-zeropp.json": {
        "zero_optimization.zero_hpz_partition_size", "zero_optimization.zero_quantized_weights",
        "zero_optimization.zero_quantized_gradients", "zero_optimization.offload_param.device",
    },
    "accelerate-tp.yaml": {
        "fsdp_config.fsdp_sharding_strategy", "mixed_precision",
        "parallelism_config.parallelism_config_tp_size",
    },
    "axolotl-qlora.yaml": {"load_in_4bit", "adapter", "optimizer", "deepspeed"},
    "peft-dora.json": {"bias", "lora_dropout", "modules_to_save", "rank_pattern.q_proj", "use_dora"},
    "llama-factory-qlora.yaml": {"quantization_bit", "lora_dropout"},
    "ms-swift-megatron.yaml": {"expert_model_parallel_size"},
    "megatron-bridge-70b.yaml": {"mixed_precision"},
}  # fmt: skip
"""Files, and the keys that are not sayable where model and length are given."""


@pytest.mark.parametrize("files", SAYABLE, ids=lambda files: files[0])
def test_a_file_says_what_to_predict(files: tuple[str, ...]) -> None:
    given, expected = SAYABLE[files]
    assert setup_of(*files, **given) == {
        "model": "llama3-8b", "ulysses_degree": None, "ring_degree": None, "dp_degree": 1, **expected
    }  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("adapter: lora", {"model.lora_rank": "8", "model.lora_alpha": "8", "model.lora_targets": "q+v"}),
        ("adapter: lora\nlora_r: 4\nlora_target_linear: true", {"model.lora_rank": "4", "model.lora_alpha": "8"}),
        ("lora_r: 4\nlora_alpha: 16", {}),
        ("adapter: qlora", "adapter lora is simulated, no other"),
        ("adapter: lora\nlora_dropout: 0.05", "dropout of what an adapter is given is not simulated"),
        ("adapter: lora\nlora_r: 0", "lora_r = '0': expected a whole number of 1 or more"),
        ("adapter: lora\nlora_alpha: -1", "expected a number above 0"),
        ("adapter: lora\nlora_target_modules: [q_proj, lm_head]", "'lm_head' is none of q_proj, k_proj"),
        ("adapter: lora\nlora_modules_to_save: [lm_head]", "all other weights are frozen"),
    ],
)
def test_adapters_are_read_or_refused(tmp_path: Path, keys: str, expected: dict[str, str] | str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"base_model: llama3-8b\nsequence_len: 8192\ngradient_checkpointing: true\n{keys}\n")
    found = imported(path, framework="axolotl")
    if isinstance(expected, str):
        with pytest.raises(InputError, match=re.escape(expected)):
            found.setup()
        assert found.not_sayable()
        return
    said = dict(names.pairs(found.setup().set))
    assert {key: value for key, value in said.items() if key.startswith("model.")} == expected


@pytest.mark.parametrize(
    ("framework", "text", "expected"),
    [
        ("accelerate", "fsdp_config: {fsdp_offload_params: true}", {"optimiser": "host", "weights": "host-states"}),
        ("axolotl", "fsdp_version: 2\nfsdp_config: {offload_params: true}",
            {"optimiser": "host", "weights": "host-states"}),
        ("hugging-face", "fsdp: full_shard auto_wrap offload", {"optimiser": "host", "weights": "host-states"}),
        ("ms-swift", "train_type: full\ndeepspeed: zero3_offload", {"optimiser": "host", "weights": "host"}),
        ("deepspeed", "zero_optimization: {stage: 3, offload_optimizer: {device: cpu}, offload_param: {device: cpu}}",
            {"optimiser": "host", "weights": "host"}),
    ],
)  # fmt: skip
def test_weights_on_the_host_are_read(tmp_path: Path, framework: str, text: str, expected: dict[str, str]) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"{text}\n")
    setup = imported(path, framework=framework).setup(model="llama3-8b", seq="8K", gpus=8)
    said = dict(names.pairs(setup.set))
    assert {name: said.get(f"schedule.{name}") for name in expected} == expected
    assert ("software.host_optimiser" in said) == (expected["weights"] == "host-states")
    setup.resolved()


@pytest.mark.parametrize(
    ("framework", "text", "expected"),
    [
        ("hugging-face", "gradient_checkpointing: true", {"checkpoint": "whole"}),
        ("hugging-face", "gradient_checkpointing: true\ngradient_checkpointing_kwargs: {use_reentrant: true}",
            {"checkpoint": "whole"}),
        ("hugging-face", "gradient_checkpointing: true\ngradient_checkpointing_kwargs: {use_reentrant: false}",
            {"checkpoint": "full"}),
        ("hugging-face", "gradient_checkpointing: false\ngradient_checkpointing_kwargs: {use_reentrant: false}",
            {"checkpoint": "none"}),
        ("llama-factory", "use_reentrant_gc: false\ncutoff_len: 4096", {"checkpoint": "full"}),
        ("hugging-face", "fsdp: full_shard\nfsdp_config: {backward_prefetch: no_prefetch}",
            {"backward_prefetch": "never"}),
        ("accelerate", "distributed_type: FSDP\nfsdp_config: {fsdp_backward_prefetch: NO_PREFETCH}",
            {"backward_prefetch": "never"}),
        ("deepspeed", "zero_optimization: {stage: 2, use_multi_rank_bucket_allreduce: false}",
            {"reduce_by": "reduce-scatter"}),
        ("deepspeed", "zero_optimization: {stage: 2}", {"sum_waits": "below-3", "prefetch": 1}),
        ("deepspeed", "zero_optimization: {stage: 0, overlap_comm: true}", {"sum_waits": "below-3", "sync": "every"}),
        ("deepspeed", "zero_optimization: {stage: 1, overlap_comm: true}", {"sum_waits": "never", "sync": "last"}),
        ("deepspeed", "zero_optimization: {stage: 2, overlap_comm: true}", {"sum_waits": "never", "prefetch": 1}),
        ("deepspeed", "zero_optimization: {stage: 3, overlap_comm: false}", {"sum_waits": "always", "prefetch": 0}),
        ("deepspeed", "zero_optimization: {stage: 1}\ndata_types: {grad_accum_dtype: fp32}",
            {"accumulate_in": "fp32", "reduce": "fp32"}),
        ("deepspeed", "sequence_parallel_size: 8", {"reduce": "fp32"}),
        ("deepspeed", "sequence_parallel_size: 8\nseq_parallel_communication_data_type: bf16", {"reduce": "model"}),
        ("deepspeed", "sequence_parallel_size: 1", {"reduce": "model"}),
    ],
)  # fmt: skip
def test_how_layers_and_gradients_are_handled_is_read(
    tmp_path: Path, framework: str, text: str, expected: dict[str, str]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"{text}\n")
    options = imported(path, framework=framework).setup(model="llama3-8b", seq="8K", gpus=8).resolved().options
    assert {name: getattr(options, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("files", "software"),
    [
        (("torchtitan-llama3-8b.toml",), "torchtitan-compiled"),
        (("megatron-llama3-8b.sh",), "megatron"),
        (("trainer-alst.json", "deepspeed-zero3.json"), "huggingface-liger"),
        (("trainer-fsdp.json",), "huggingface"),
        (("accelerate-cp.yaml",), "huggingface"),
        (("ms-swift-sft.yaml",), "huggingface-liger"),
        (("nanotron-llama3-8b.yaml",), "nanotron"),
    ],
)
def test_a_file_says_which_software_runs(files: tuple[str, ...], software: str) -> None:
    """And where kernels have no measured rates, none does."""
    by_key = {"huggingface-liger", "torchtitan-compiled"}
    given = {"model": "llama3-8b", "seq": "64K"}
    found = imported(*(FILES / file for file in files))
    answer = found.answer(**given)
    assert answer.setup.software == software
    assert any(f"software {software}: " in said for said in answer.assumptions) == (software not in by_key)
    assert found.setup(**given, software="fused").software == "fused"
    assert found.setup(**given, cluster="8xL40S").software is None


def test_a_key_may_name_the_kernel_of_attention(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text('{"attn_implementation": "flash_attention_3", "per_device_train_batch_size": 1, "fsdp": ""}')
    found = imported(path, framework="hugging-face")
    given = {"model": "llama3-8b", "seq": "8K", "gpus": 1, "schedule": "single"}
    assert "software.attention=flash-attention-3" in found.setup(**given).set
    assert "software.attention=flash-attention-3" not in found.setup(**given, cluster="dgx-a100").set


@pytest.mark.parametrize("file", REFUSED)
def test_what_is_not_sayable_is_refused_by_its_key(file: str) -> None:
    found = imported(FILES / file)
    given = {"model": "llama3-8b", "seq": "8K"}
    assert {row.key for row in found.not_sayable(**given)} == REFUSED[file]
    with pytest.raises(InputError, match="not sayable: .*`anyway`") as refused:
        found.setup(**given)
    assert sum(key in str(refused.value) for key in REFUSED[file]) >= min(4, len(REFUSED[file]))


@pytest.mark.parametrize("file", sorted({"megatron-arguments.txt", "ms-swift-megatron.yaml"}))
def test_it_is_left_out_where_one_goes_on_anyway(file: str) -> None:
    found = imported(FILES / file, anyway=True).setup(model="llama3-8b", seq="8K")
    assert found.resolved().mesh.size == found.gpus


def test_there_are_two_files_of_each_kind() -> None:
    kinds = [name for file in FILES.iterdir() for name in imported(file).frameworks]
    assert {"torchtitan", "megatron-lm", "deepspeed", "hugging-face", "accelerate", "axolotl", "nanotron"} <= {*kinds}
    assert [kind for kind in {*kinds} if kinds.count(kind) < 2 and not kind.startswith("ms-swift")] == []


def changed(tmp_path: Path, file: str, *changes: tuple[str, str]) -> Path:
    """A copy of a file with some of its text replaced."""
    text = (FILES / file).read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path = tmp_path / file
    path.write_text(text)
    return path


CHANGES: dict[str, tuple[str, list[tuple[str, str]], dict[str, Any]]] = {
    "Ulysses": ("megatron-llama3-8b.sh", [("--cp-comm-type p2p", "--cp-comm-type a2a")], {
        "schedule": "ulysses", "ulysses_degree": 8, "ring_degree": None}),
    "USP": ("megatron-llama3-8b.sh", [("--cp-comm-type p2p",
        "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 4 2")], {
        "schedule": "usp", "ulysses_degree": 4, "ring_degree": 2}),
    "a variable": ("megatron-llama3-8b.sh", [("NUM_NODES:-2", "NUM_NODES:-4")], {
        "gpus": 32, "dp_degree": 4, "batch": 2}),
    "another model": ("megatron-llama3-8b.sh", [("--num-layers 32", "--num-layers 30")], {"model": "llama3-8b"}),
    "no context parallelism": ("torchtitan-llama3-8b.toml", [("parallel_degree = 8", "parallel_degree = 1")], {
        "schedule": "single", "gpus": 8, "dp_degree": 8, "batch": 1}),
    "kept weights": ("torchtitan-llama3-8b.toml", [('forward = "default"', 'forward = "never"')], {
        "schedule": "zigzag"}),
    "copies": ("torchtitan-llama3-8b.toml", [("replicate_degree = 1", "replicate_degree = 2")], {
        "gpus": 16, "dp_degree": 2, "batch": 4}),
    "gathered": ("torchtitan-llama3-8b.toml", [('"alltoall"', '"allgather"')], {"schedule": "allgather"}),
    "names since 2026": ("torchtitan-llama3-8b.toml", [("local_batch_size = 1",
        "num_tokens_per_microbatch_per_dp_rank = 262144"), ("global_batch_size = 8",
        "num_tokens_per_train_step = 1048576"), ("seq_len", "max_context_length")], {"batch": 8}),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_key_means_what_it_says(name: str, tmp_path: Path) -> None:
    file, changes, expected = CHANGES[name]
    found = imported(changed(tmp_path, file, *changes)).setup()
    assert {key: getattr(found, key) for key in expected} == expected
    said = dict(names.pairs(found.set))
    assert said.get("model.num_layers") == ("30" if name == "another model" else None)
    assert said.get("schedule.zero_stage", "3") == {"megatron-llama3-8b.sh": "1"}.get(
        file, "2" if name == "kept weights" else "3"
    )
    assert said.get("schedule.shards") == ("replica" if name == "copies" else None)
    assert said.get("schedule.micro_batches") == {
        "a variable": "2", "names since 2026": "4", "no context parallelism": None, "copies": "4",
    }.get(name, "4" if file.endswith("sh") else "8")  # fmt: skip
    found.resolved()


@pytest.mark.sweep
def test_a_global_batch_that_is_typed_is_shared_as_files_say() -> None:
    """In as many sequences at once as a file has; its turns follow."""
    found = imported(FILES / "torchtitan-llama3-8b.toml")  # one replica of 8, of 128K
    said = found.setup(global_batch="512K")
    assert (said.batch, said.global_batch, dict(names.pairs(said.set))["schedule.micro_batches"]) == (4, None, "4")
    assert found.setup(gpus=16, global_batch=2).batch == 1
    small: dict[str, Any] = {"model": "tiny", "layers": 1, "seq": "8K"}
    step_s = [found.setup(**more, **small).predicted().step_time_s for more in ({"global_batch": 8}, {})]
    assert step_s[0] == step_s[1]
    with pytest.raises(InputError, match="`global_batch` 3 is not 1 sequences at once x 2 replicas"):
        found.setup(gpus=16, global_batch=3)


BLOCKS: dict[str, tuple[str, list[tuple[str, str]], dict[str, Any]]] = {
    "Qwen2.5's biases": ("megatron-llama3-8b.sh", [("--disable-bias-linear", "--disable-bias-linear --add-qkv-bias")], {
        "biases": ("qkv",)}),
    "Qwen3's norms": ("megatron-llama3-8b.sh", [("--swiglu", "--swiglu --qk-layernorm")], {"qk_norm": "head"}),
    "all biases": ("megatron-llama3-8b.sh", [("--disable-bias-linear", "")], {"biases": ("qkv", "out", "mlp")}),
    "no gate": ("megatron-llama3-8b.sh", [("--swiglu", ""), ("--ffn-hidden-size 14336", "")], {
        "mlp": "gelu", "ffn_dim": 4 * 4096}),
    "GeGLU and biases": ("nanotron-llama3-8b.yaml", [("hidden_act: silu",
        "hidden_act: gelu\n    attention_bias: true")], {"mlp": "geglu", "biases": ("qkv",)}),
}  # fmt: skip


@pytest.mark.parametrize("name", BLOCKS)
def test_lines_of_a_block_are_taken(name: str, tmp_path: Path) -> None:
    file, changes, expected = BLOCKS[name]
    found = imported(changed(tmp_path, file, *changes)).setup()
    model = found.resolved().workload.model
    assert {field: getattr(model, field) for field in expected} == expected
    others = {"biases", "qk_norm", "mlp", "norms"} - expected.keys()
    assert {getattr(model, field) for field in others} == {msgspec.UNSET}
    _, command = parse(shlex.split(command_of(found))[1:])
    assert command.selection.setup().resolved() == found.resolved()


def test_the_405b_of_torchtitan_is_that_of_llama_3_1() -> None:
    assert imported(FILES / "torchtitan-llama3-405b.toml", anyway=True).setup().model == "llama3.1-405b"


def test_what_is_typed_comes_before_what_a_file_says() -> None:
    found = imported(FILES / "torchtitan-llama3-8b.toml")
    assert found.setup(gpus=64).dp_degree == 8
    assert found.setup(batch=1).batch == 1
    assert found.setup(model="tiny", seq="8K", cluster="dgx-a100").resolved().spec.name == "dgx-a100"
    assert found.setup(schedule="ulysses").ulysses_degree == 8
    assert found.setup(schedule="single").dp_degree == 8
    assert found.setup(ring_degree=4).dp_degree == 2
    assert found.setup(dp_degree=2).gpus == 16
    assert found.setup(nodes=2).gpus == 16
    assert found.setup(set=["schedule.checkpoint=none"]).resolved().options.checkpoint == "none"
    assert found.setup(stack="alst").resolved().options.mlp == "tiled"
    assert found.setup(scope="attention").resolved().workload.scope == "attention"
    assert {row.state for row in found.rows(model="tiny") if row.key.startswith("model.")} == {"ignored"}
    with pytest.raises(InputError, match="`gpus` 12 is no multiple of the 8 ranks"):
        found.setup(gpus=12)
    with pytest.raises(InputError, match="global_batch_size 8 is not .*16 replicas.* divisors 1, 2, 4, 8 replicas"):
        found.setup(gpus=128)


def test_two_files_that_differ_are_told(tmp_path: Path) -> None:
    other = changed(tmp_path, "deepspeed-zero3.json", ('"gradient_accumulation_steps": "auto"',
        '"gradient_accumulation_steps": 2'))  # fmt: skip
    found = imported(FILES / "trainer-alst.json", other)
    (row,) = found.not_sayable(model="llama3-8b")
    assert (row.key, row.means) == (
        "gradient_accumulation_steps", "gradient_accumulation_steps says 4 of the same: leave one out"
    )  # fmt: skip
    alone = imported(FILES / "trainer-alst.json").not_sayable(model="llama3-8b")
    assert [row.key for row in alone] == ["deepspeed"]


HSDP = [("replicate_degree = 1", "replicate_degree = 2"), ("shard_degree = -1", "shard_degree = 4")]


def test_shards_over_some_replicas_are_not_sayable(tmp_path: Path) -> None:
    path = changed(tmp_path, "torchtitan-llama3-8b.toml", *HSDP)
    with pytest.raises(InputError, match="data_parallel_replicate_degree 2 of 8 replicas"):
        imported(path).setup()
    assert imported(path, anyway=True).setup().gpus == 64


def test_a_mark_of_byte_order_is_no_part_of_a_file(tmp_path: Path) -> None:
    for name in ("torchtitan-llama3-8b.toml", "trainer-fsdp.json"):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + (FILES / name).read_bytes())
        assert read(str(tmp_path / name)).given == read(str(FILES / name)).given


HOSTILE = {
    "deep.yaml": ("a: " + "[" * 600, "recursion"),
    "deeper.yaml": ("\n".join("[" * 1000 for _ in range(100)), "recursion"),
    "deep.json": ('{"a":\n' * 100_000, r"bytes|recursion|truncated"),
    "list.json": ('{"train_batch_size":' + "[" * 950 + "]" * 950 + "}", "recursion|has no key"),
    "bomb.yaml": ("a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n", "an alias"),
    "object.yaml": ("base_model: !!python/object/apply:os.getcwd []\n", "could not determine a constructor"),
    "no-number.yaml": ('base_model: !!int ""\n', "not what its tag says"),
    "no-truth.yaml": ("base_model: !!bool x\n", "not what its tag says"),
    "no-date.yaml": ("base_model: !!timestamp x\n", "not what its tag says"),
    "twice.yaml": ("base_model: a\nbase_model: b\n", "stands twice"),
    "date.yaml": ("base_model: 2001-13-45\n", "month must be in 1..12"),
    "text.yaml": ("hello", "expected a table"),
    "empty.yaml": ("", "expected a table"),
    "empty.sh": ("", "0 keys"),
    "quote.sh": ("run --num-layers 'x\n", "No closing quotation"),
    "nan.json": ('{"train_batch_size": NaN}', "invalid"),
    "long.sh": ("run " + "x" * 5000, "lines of at most 4096"),
    "unknown.yaml": ("a: 1\n", "no key of one that is known; say with `framework`"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_configuration_is_refused_in_a_line(name: str, tmp_path: Path) -> None:
    text, says = HOSTILE[name]
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(InputError, match=f"configuration .*{re.escape(name)}.*({says})") as refused:
        imported(path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("asked", "where"),
    [(["simulate", "--from"], "--from"), (["import"], "the argument FILE"), (["explain"], "the argument FILE")],
)
def test_a_file_that_is_not_there_is_told_with_where_it_is_set(
    asked: list[str], where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*asked, "nothing.toml"])
    assert capsys.readouterr().err.rstrip().endswith(f"; set it with {where}")
    with pytest.raises(InputError, match="set it with `paths`"):
        longstep.imported("nothing.toml")


@pytest.mark.parametrize(
    "value",
    [
        ".nan",
        ".inf",
        "-1",
        "0",
        "1.5",
        "1e400",
        "true",
        "[1, 2]",
        "{a: 1}",
        "2001-01-01",
        "9" * 4000,
        "0x" + "f" * 4000,
    ],
)
def test_a_value_that_is_no_count_is_refused_by_its_key(value: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"base_model: llama3-8b\nsequence_len: {value}\nmicro_batch_size: 1\n")
    wrong = imported(path).not_sayable()
    assert {row.key.partition(".")[0] for row in wrong} == {"sequence_len", "seq"}
    assert all(len(row.value) < 100 for row in wrong)


@pytest.mark.parametrize("key", ["micro_batch_size", "gradient_accumulation_steps", "dp_shard_size"])
def test_a_number_beyond_what_anybody_trains_is_refused_before_it_is_built(key: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    lines = {"base_model": "llama3-8b", "sequence_len": "8192", key: "999999999999"}
    path.write_text("\n".join(f"{name}: {value}" for name, value in lines.items()))
    with pytest.raises(InputError):
        imported(path).setup().predicted()


def test_a_shell_script_is_read_and_not_run(tmp_path: Path) -> None:
    script, made = tmp_path / "run.sh", tmp_path / "made"
    lines = [
        f"run --num-layers $(touch {made}) --seq-length $((8 * 1024)) --micro-batch-size $UNSET --swiglu",
        "A=1234567890", *["A=$A$A"] * 60, "run --hidden-size $A --global-batch-size=7",
    ]  # fmt: skip
    script.write_text("\n".join(lines))
    found = read(str(script)).given
    assert not made.exists()
    assert found["swiglu"] == "true"
    assert found["global_batch_size"] == "7"
    assert "$" in found["num_layers"] + found["seq_length"] + found["micro_batch_size"]
    assert len(found["hidden_size"]) <= 1024
    means = {row.key: row.means for row in imported(script).not_sayable()}
    assert "a shell variable that the file does not set" in means["micro_batch_size"]


def test_a_recipe_in_python_is_read_and_not_run(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text(
        "def recipe():\n    cfg = base()\n    cfg.model.tensor_model_parallel_size = 1\n"
        "    cfg.model.context_parallel_size = 4  # ranks\n    cfg.model.seq_length = 8192\n"
        '    cfg.mixed_precision = "bf16_mixed"\n    cfg.train.micro_batch_size = 1\n    1 / 0\n'
    )
    found = imported(recipe).setup(model="llama3-8b")
    assert (found.ring_degree, found.gpus, found.dp_degree) == (4, 8, 2)


def included(one: Framework) -> list[Framework]:
    """A framework, and those whose keys it has, too."""
    return [one, *(frameworks()[name] for name in one.includes.values())]


@pytest.mark.parametrize("name", frameworks())
def test_tables_say_what_there_is(name: str) -> None:
    """Facts that are known, options that schedules have, at values that these take."""
    one = frameworks()[name]
    methods = [method for each in frameworks().values() for method in each.methods]
    for method in one.methods.values():
        options = NAMED[method.schedule].options
        assert override(options, list(method.options.items()), "")
        assert method.degree in {"", *NAMED[method.schedule].degrees}
    said = [fact for key in one.keys.values() for text in (*key.values.values(), key.also, key.instead)
            for fact in facts_of(text).items()]  # fmt: skip
    said += [(fact, each.value) for fact, each in one.assumed.items()]
    for fact, value in said:
        root, dot, option = fact.partition(".")
        if dot:
            with_it = (one.options for one in NAMED.values() if option in msgspec.to_builtins(one.options))
            of = {"schedule": next(with_it, None), "software": Kernels()}[root]
            assert override(of, [(option, value)], "")
        else:
            assert fact in FACTS
        assert fact != "method" or value in methods
    if one.stages:
        assert one.stages.cut in CUTS
        assert override(NAMED["ring"].options, list(one.stages.options.items()), "")
    assert bool(one.stages) == any("pp" in {key.fact for key in each.keys.values()} for each in included(one))
    for key, meaning in one.keys.items():
        assert meaning.fact in {"", *FACTS}, key
        assert meaning.fact or meaning.values or meaning.why or meaning.file, key
        assert meaning.file in {"", *frameworks()}
    assert set(one.includes.values()) <= frameworks().keys()
    assert len(one.source) > 20


@pytest.mark.sweep
@pytest.mark.parametrize("files", SAYABLE, ids=lambda files: files[0])
def test_the_command_and_the_python_are_what_was_read(files: tuple[str, ...]) -> None:
    found = imported(*(FILES / file for file in files)).setup(**SAYABLE[files][0])
    _, simulate = parse(shlex.split(command_of(found))[1:])
    assert isinstance(simulate, Simulate)
    assert simulate.selection.setup().resolved() == found.resolved()
    asked = dict[str, Any]()
    exec(python_of(found).replace("longstep.predict(", "dict(").removeprefix("import longstep"), asked)
    assert longstep.Setup(**asked["p"]).resolved() == found.resolved()


def test_what_is_typed_is_told_from_what_is_not() -> None:
    """Also where it is what is taken by default."""
    file = str(FILES / "torchtitan-llama3-8b.toml")
    _, command = parse(["simulate", "--from", file])
    assert command.selection.typed() == {}
    _, command = parse(["simulate", "--from", file, "--seq", "8K", "--batch", "1", "--dp-degree", "1", "--model",
        "tiny", "--cluster", "host", "--pad", "--gpus", "8"])  # fmt: skip
    assert command.selection.typed() == {
        "seq": "8K", "batch": 1, "dp_degree": 1, "model": "tiny", "cluster": "host", "pad": True, "gpus": 8,
    }  # fmt: skip
    found = FileSelection().setup()
    assert found == longstep.Setup(scope="step")
    assert {type(value) for value in vars(found).values()} <= {str, Assumed, int, Untold, bool, tuple, type(None)}


@pytest.mark.sweep
def test_import_prints_keys_and_refuses_what_is_not_sayable(capsys: pytest.CaptureFixture[str]) -> None:
    main(["import", str(FILES / "megatron-llama3-8b.sh")])
    told = capsys.readouterr().out
    assert "longstep simulate --schedule zigzag --model llama3-8b" in told
    assert "p = longstep.predict(" in told
    with pytest.raises(SystemExit) as stop:
        main(["import", str(FILES / "megatron-arguments.txt")])
    printed = capsys.readouterr()
    assert stop.value.code == 2
    assert "attention's inside alone computed again has no counterpart" in printed.out
    assert "longstep simulate" not in printed.out
    assert "--anyway" in printed.err
    main(["import", str(FILES / "megatron-arguments.txt"), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["setup"] is None
    assert {row["state"] for row in found["keys"]} == {"taken", "ignored", "not sayable"}
    main(["import", str(FILES / "megatron-arguments.txt"), "--json", "--anyway"])
    assert json.loads(capsys.readouterr().out)["setup"]["gpus"] == 64


@pytest.mark.sweep
def test_verbs_take_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    file = FILES / "torchtitan-llama3-8b.toml"
    small: dict[str, Any] = {"model": "tiny", "layers": 1, "seq": "8K", "gpus": 2, "ring_degree": 2}
    setup = imported(file).setup(**small)
    typed = [word for name, value in small.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    given = ["--from", str(file), *typed]
    main(["simulate", *given, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["step_time_s"] == setup.predicted().step_time_s
    main(["simulate", *given, "--schedule", "ring,allgather"])
    told = capsys.readouterr().out
    assert "12 taken, 21 ignored, 0 not sayable" in told
    assert re.search(r"allgather .*\n│ ring", told)
    main(["fit", *given])
    assert "│ zigzag R 2 │" in capsys.readouterr().out
    main(["fit", *given, "--stack", "fsdp", "--schedule", "ring", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["answer"].startswith("The longest that fits is 8K, by ")
    assert len(found["rests_on"]) == 3
    assert [row["row"] for row in found["rows"]] == ["ring", "fsdp"]
    _, doctor = parse(["doctor", *given])
    assert doctor.selection.setup() == setup
    with pytest.raises(SystemExit):
        main(["simulate", "--from", str(FILES / "megatron-arguments.txt")])
    assert "not sayable: " in capsys.readouterr().err
