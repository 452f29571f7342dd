"""Stages of a pipeline that configurations say: files of each framework with two and with four, and what is refused."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from experiments.verbs.cli import parse
from sim.base.errors import InputError
from sim.setup import names
from sim.setup.imports.imported import imported
from sim.setup.imports.layouts import layers_of_layout
from sim.setup.imports.stages import CUTS, Asked
from sim.setup.spelled import command_of
from tests.setup.test_imports import FILES, TE, changed

TITAN, MEGATRON, NANOTRON = "torchtitan-llama3-8b.toml", "megatron-llama3-8b.sh", "nanotron-llama3-8b.yaml"
ARGUMENTS, BRIDGE, BRIDGE_70B = "megatron-arguments.txt", "megatron-bridge-overrides.sh", "megatron-bridge-70b.yaml"
SWIFT = "ms-swift-megatron.yaml"


def titan(stages: int, *more: str, local: int = 8) -> tuple[str, list[tuple[str, str]]]:
    """A file of torchtitan with stages, each of whose replicas has so many sequences at once."""
    lines = "\n".join([f"pipeline_parallel_degree = {stages}", *more])
    return TITAN, [("pipeline_parallel_degree = 1", lines), ("local_batch_size = 1", f"local_batch_size = {local}")]


def megatron(stages: int, cp: int, *flags: str, layers: int = 32) -> tuple[str, list[tuple[str, str]]]:
    more = " ".join([f"--pipeline-model-parallel-size {stages}", *flags])
    return MEGATRON, [
        ("--tensor-model-parallel-size 1", f"--tensor-model-parallel-size 1 {more}"),
        ("CP_SIZE=8", f"CP_SIZE={cp}"), ("--num-layers 32", f"--num-layers {layers}"),
    ]  # fmt: skip


def nanotron(stages: int, engine: str, dp: int, *more: tuple[str, str]) -> tuple[str, list[tuple[str, str]]]:
    return NANOTRON, [("pp: 1\n  pp_engine: 1f1b", f"pp: {stages}\n{engine}"), ("dp: 16", f"dp: {dp}"), *more]


def swift(stages: int, *more: str) -> tuple[str, list[tuple[str, str]]]:
    lines = "\n".join([f"pipeline_model_parallel_size: {stages}", *more])
    return SWIFT, [
        ("tensor_model_parallel_size: 2", lines), ("expert_model_parallel_size: 4", "expert_model_parallel_size: 1"),
    ]  # fmt: skip


def of(what: tuple[str, list[tuple[str, str]]], tmp_path: Path) -> Path:
    """The file with what is changed in it."""
    file, changes = what
    return changed(tmp_path, file, *changes)


NAMES_SINCE_2026 = [
    ("local_batch_size = 8", "num_tokens_per_microbatch_per_dp_rank = 262144"), ("seq_len", "max_context_length"),
    ("global_batch_size = 8", "num_tokens_per_train_step = 1048576"),
]  # fmt: skip
"""Two sequences in each micro-batch, eight in a step."""
TITAN_HAS = {"schedule.rotary_table": "true", "schedule.zero_stage": "2", "schedule.sync": "last"}
MEGATRON_HAS = {"schedule.checkpoint": "whole", "schedule.zero_stage": "1", **TE}
BF16 = [("tensor_model_parallel_size: 4", "tensor_model_parallel_size: 1"), ("fp8_current", "bf16_mixed")]
DENSE = [
    (f"tensor_model_parallel_size {'.' * 22} 4", f"tensor_model_parallel_size {'.' * 22} 1"),
    (f"recompute_granularity {'.' * 27} selective", f"recompute_granularity {'.' * 27} None"),
]
PLAYED: dict[str, tuple[tuple[str, list[tuple[str, str]]], dict[str, Any], dict[str, Any]]] = {
    "torchtitan, 2": (titan(2), {}, {
        "schedule": "zigzag", "gpus": 16, "pp_degree": 2, "ring_degree": 8, "batch": 8,
        "set": {**TITAN_HAS, "schedule.micro_batches": "8"}}),
    "torchtitan, 4 of two chunks, two sequences at once": (
        titan(4, 'pipeline_parallel_schedule = "Interleaved1F1B"', "pipeline_parallel_microbatch_size = 2"), {}, {
            "schedule": "zigzag", "gpus": 32, "pp_degree": 4, "ring_degree": 8, "batch": 8,
            "set": {**TITAN_HAS, "schedule.micro_batches": "4", "schedule.pipeline_schedule": "interleaved",
                "schedule.pipeline_chunks": "2", "schedule.pipeline_layers": "4,5,4,4,4,4,4,3"}}),
    "torchtitan, 4 by modules, gathered again": (
        (TITAN, [*titan(4, 'pipeline_parallel_schedule = "gpipe"', "num_pp_microbatches = 4",
            "module_fqns_per_model_part = " + str([
                ["tok_embeddings", *(f"layers.{n}" for n in range(5))], [f"layers.{n}" for n in range(5, 15)],
                [f"layers.{n}" for n in range(15, 25)], [*(f"layers.{n}" for n in range(25, 32)), "norm", "output"],
            ]))[1], ('forward = "default"', 'forward = "always"'), *NAMES_SINCE_2026]), {}, {
            "schedule": "zigzag", "gpus": 32, "pp_degree": 4, "ring_degree": 8, "batch": 8,
            "set": {"schedule.rotary_table": "true", "schedule.sync": "last", "schedule.micro_batches": "4",
                "schedule.pipeline_schedule": "gpipe", "schedule.pipeline_layers": "5,10,10,7"}}),
    "Megatron-LM, 2": (megatron(2, 4), {}, {
        "schedule": "zigzag", "gpus": 16, "pp_degree": 2, "ring_degree": 4, "dp_degree": 2, "batch": 4,
        "set": {**MEGATRON_HAS, "schedule.loss": "whole", "schedule.micro_batches": "4"}}),
    "Megatron-LM, 4 of chunks of two": (megatron(4, 2, "--num-layers-per-virtual-pipeline-stage 2"), {}, {
        "schedule": "zigzag", "gpus": 16, "pp_degree": 4, "ring_degree": 2, "dp_degree": 2, "batch": 4,
        "set": {**MEGATRON_HAS, "schedule.loss": "whole", "schedule.micro_batches": "4",
            "schedule.pipeline_schedule": "interleaved", "schedule.pipeline_chunks": "4"}}),
    "Megatron-LM's arguments, 2 of five chunks": ((ARGUMENTS, DENSE), {"model": "llama3-70b"}, {
        "model": "llama3-70b", "schedule": "zigzag", "gpus": 64, "pp_degree": 2, "ring_degree": 2, "dp_degree": 16,
        "seq": 8192, "batch": 8, "set": {**MEGATRON_HAS, "schedule.checkpoint": "none", "schedule.loss": "unfused",
            "schedule.micro_batches": "8", "schedule.pipeline_schedule": "interleaved",
            "schedule.pipeline_chunks": "5"}}),
    "Megatron-Bridge, 2": ((BRIDGE, [("model.pipeline_model_parallel_size=1",
        "model.pipeline_model_parallel_size=2 model.num_layers_in_first_pipeline_stage=15"),
        ("context_parallel_size=8", "context_parallel_size=4")]), {"model": "llama3-8b"}, {
            "schedule": "ulysses", "gpus": 8, "pp_degree": 2, "ulysses_degree": 4, "seq": 65536, "batch": 4,
            "set": {"schedule.checkpoint": "whole", "schedule.zero_stage": "1", "schedule.loss": "unfused",
                "schedule.micro_batches": "4", "schedule.pipeline_layers": "15,17"}}),
    "Megatron-Bridge, 4 of five chunks": ((BRIDGE_70B, BF16), {"model": "llama3-70b", "gpus": 64}, {
        "model": "llama3-70b", "schedule": "zigzag", "gpus": 64, "pp_degree": 4, "ring_degree": 2, "dp_degree": 8,
        "seq": 8192, "batch": 32, "set": {**MEGATRON_HAS, "schedule.checkpoint": "none", "schedule.loss": "unfused",
            "schedule.micro_batches": "32", "schedule.pipeline_schedule": "interleaved",
            "schedule.pipeline_chunks": "5"}}),
    "Megatron-SWIFT, 2 by their ends": (swift(2, "account_for_embedding_in_pipeline_split: true",
        "account_for_loss_in_pipeline_split: true"), {"model": "llama3-8b"}, {
            "schedule": "zigzag", "gpus": 8, "pp_degree": 2, "ring_degree": 4, "seq": 32768, "batch": 16,
            "set": {**MEGATRON_HAS, "schedule.loss": "unfused", "schedule.micro_batches": "16"}}),
    "Megatron-SWIFT, 4 by a layout": (swift(4, "pipeline_model_parallel_layout: Et*7|(t*9,|)*2t*7,L"),
        {"model": "llama3-8b"}, {
            "schedule": "zigzag", "gpus": 16, "pp_degree": 4, "ring_degree": 4, "seq": 32768, "batch": 16,
            "set": {**MEGATRON_HAS, "schedule.loss": "unfused", "schedule.micro_batches": "16",
                "schedule.pipeline_layers": "7,9,9,7"}}),
    "nanotron, 2": (nanotron(2, "  pp_engine: 1f1b", 8), {}, {
        "schedule": "single", "gpus": 16, "pp_degree": 2, "dp_degree": 8, "seq": 8192, "batch": 4,
        "set": {"schedule.zero_stage": "1", "schedule.loss": "subtracted", "schedule.micro_batches": "4",
            "schedule.pipeline_layers": "18,14"}}),
    "nanotron, 4": (nanotron(4, "  pp_engine: afab", 4), {}, {
        "schedule": "single", "gpus": 16, "pp_degree": 4, "dp_degree": 4, "seq": 8192, "batch": 4,
        "set": {"schedule.zero_stage": "1", "schedule.loss": "subtracted", "schedule.micro_batches": "4",
            "schedule.pipeline_schedule": "gpipe", "schedule.pipeline_layers": "9,9,8,6"}}),
}  # fmt: skip
"""Files with what is changed in them, what is typed beside them, and what to predict."""


@pytest.mark.sweep
@pytest.mark.parametrize("name", PLAYED)
def test_a_file_says_its_stages(name: str, tmp_path: Path) -> None:
    what, given, expected = PLAYED[name]
    found = imported(of(what, tmp_path)).setup(**given)
    usual = {"model": "llama3-8b", "seq": 131072, "dp_degree": 1, "ring_degree": None, "ulysses_degree": None}
    said = {key: getattr(found, key) for key in {**usual, **expected} if key != "set"}
    assert said | {"set": dict(names.pairs(found.set))} == {**usual, **expected}
    mesh = found.resolved().mesh
    assert mesh.order[:2] == ("pp", "dp")
    assert found.gpus == mesh.size == mesh.pp * mesh.dp * mesh.ring * mesh.ulysses
    _, command = parse(shlex.split(command_of(found))[1:])
    assert command.selection.setup().resolved() == found.resolved()


ONLY_1F1B = "of torch's schedules 1F1B, GPipe and Interleaved1F1B are simulated"
REFUSED: dict[str, tuple[tuple[str, list[tuple[str, str]]], str]] = {
    "another schedule": (titan(2, 'pipeline_parallel_schedule = "DualPipeV"'), ONLY_1F1B),
    "a file": (titan(2, 'pipeline_parallel_schedule_csv = "a.csv"'), "an order from a file is not read"),
    "split points": (titan(2, 'pipeline_parallel_split_points = ["layers.16"]'), "points where layers are split"),
    "chunks of one stage": (titan(2, "pipeline_parallel_layers_per_stage = 3"),
        "pipeline_parallel_layers_per_stage 3 makes 12 chunks of 34 layers, the ends counted: expected 1 for each"),
    "a heavy head": (titan(8, "pipeline_parallel_last_stage_less_layers = 6"), "leave 4 for each of 8 chunks, fewer"),
    "parts of three": (titan(2, "pipeline_parallel_microbatch_size = 3"),
        "pipeline_parallel_microbatch_size 3 does not divide the 8 sequences of training.local_batch_size"),
    "turns": (titan(2, local=4), "each of 2 turns of 4 sequences fills the pipeline and empties it"),
    "turns by tokens": ((TITAN, [*titan(2, "num_pp_microbatches = 2")[1], *NAMES_SINCE_2026]),
        "turns of 4 sequences fills the pipeline and empties it, which is not played: set parallelism.num_pp_microb"),
    "no number of micro-batches": ((TITAN, [*titan(2)[1], *NAMES_SINCE_2026]),
        "no key says how many go through the pipeline: set parallelism.num_pp_microbatches, or `accumulate`"),
    "modules out of order": (titan(2, 'module_fqns_per_model_part = [["tok_embeddings", "layers.1"], ["layers.0",'
        '"norm", "output"]]'), "layers are not in the order of the model"),
    "too few modules": (titan(2, 'module_fqns_per_model_part = [["tok_embeddings", "layers.0"], ["norm", "output"]]'),
        "has 1 layers in 2 chunks: expected 32 layers"),
    "layers that do not divide": (megatron(4, 2, layers=30), "30 layers leave 30 for 4 stages"),
    "a first stage of all": (megatron(2, 2, "--decoder-first-pipeline-num-layers 32"),
        "with decoder_first_pipeline_num_layers 32 leave 0 for 1 stages"),
    "ends counted twice": (megatron(4, 2, "--decoder-last-pipeline-num-layers 5 --account-for-loss-in-pipeline-split"),
        "decoder_last_pipeline_num_layers 5, account_for_loss_in_pipeline_split 1: leave out"),
    "chunks that do not divide": (megatron(2, 2, "--num-virtual-stages-per-pipeline-rank 3"),
        "num_virtual_stages_per_pipeline_rank 3 do not cut stages of 16, 16 layers"),
    "groups of micro-batches": (megatron(2, 2, "--num-virtual-stages-per-pipeline-rank 2 "
        "--microbatch-group-size-per-virtual-pipeline-stage 4"),
        "microbatch_group_size_per_virtual_pipeline_stage 4: chunks take one"),
    "a layout of other layers": (megatron(2, 2, "--pipeline-model-parallel-layout 'Et*9|t*9L'"), "has 18 layers in 2"),
    "predicted tokens": (megatron(2, 2, "--pipeline-model-parallel-layout 'Et*16|t*16,mL'"), "several tokens is not"),
    "a head of its own": (megatron(2, 2, "--pipeline-model-parallel-layout 'Et*16|t*16Lt'"), "to end with the head"),
    "stages in replicas": (megatron(2, 2, "--use-tp-pp-dp-mapping"), "stages lie outside of replicas here"),
    "a part that is none": (megatron(2, 2, "--pipeline-model-parallel-layout 'Ex'"), "expected a text such as Et|"),
    "GPUs": (megatron(16, 8), "no multiple of the 8 ranks that share a sequence x 16 stages: set `gpus` to 128"),
    "an engine": (nanotron(2, "  pp_engine: dualpipe", 8), "nanotron has no other"),
    "a head before the last stage": (nanotron(16, "", 1, ("vocab_size: 128256", "vocab_size: 4000000")),
        "nanotron puts norm, head and loss on stages"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_stages_that_are_not_played_are_refused(name: str, tmp_path: Path) -> None:
    what, says = REFUSED[name]
    with pytest.raises(InputError, match=re.escape(says)):
        imported(of(what, tmp_path)).setup()


def test_an_embedding_that_is_the_head_is_on_both_ends(tmp_path: Path) -> None:
    tied = nanotron(2, "  pp_engine: 1f1b", 8, ("tie_word_embeddings: false", "tie_word_embeddings: true"))
    found = imported(of(tied, tmp_path)).setup(layers=4, seq="1K")
    assert found.resolved().workload.model.tied_embeddings
    assert dict(names.pairs(found.set))["schedule.pipeline_layers"] == "4,0"  # the head computes as much as 2.2 layers
    assert "both ends" in {one.name for one in found.resolved().built().header.communicators}


def test_stages_that_are_not_played_have_a_nearest(tmp_path: Path) -> None:
    """A schedule with chunks where chunks are meant, layers as alike as can be, and one turn."""
    found = imported(of(REFUSED["another schedule"][0], tmp_path), anyway=True).setup()
    said = dict(names.pairs(found.set))
    assert (said["schedule.pipeline_schedule"], said["schedule.pipeline_layers"]) == ("interleaved", "8,9,8,7")
    answer = imported(of(REFUSED["chunks that do not divide"][0], tmp_path), anyway=True).answer()
    assert dict(names.pairs(answer.setup.set))["schedule.pipeline_layers"] == "6,6,5,5,5,5"
    assert any("do not cut stages of 16, 16 layers" in one for one in answer.assumptions)
    answer = imported(of(REFUSED["turns"][0], tmp_path), anyway=True).answer()
    assert dict(names.pairs(answer.setup.set))["schedule.micro_batches"] == "8"
    assert any("one turn of 8 sequences" in one for one in answer.assumptions)


def test_keys_of_pipelines_mean_nothing_where_there_is_one_stage(tmp_path: Path) -> None:
    """And nothing is taken for those that are missing."""
    found = imported(of(titan(1, 'pipeline_parallel_schedule = "DualPipeV"', local=1), tmp_path))
    (row,) = [row for row in found.rows() if "pipeline_parallel_schedule" in row.key]
    assert (row.state, row.means) == ("ignored", "of a pipeline, and there is one stage")
    assert found.setup() == imported(FILES / TITAN).setup()
    assert {row.key for row in found.rows(pp_degree=2)} - {row.key for row in found.rows()} == {
        "parallelism.pipeline_parallel_microbatch_size", "parallelism.pipeline_parallel_first_stage_less_layers",
        "parallelism.pipeline_parallel_last_stage_less_layers",
    }  # fmt: skip
    with pytest.raises(InputError, match=ONLY_1F1B):
        found.setup(pp_degree=2)


def test_stages_that_are_typed_come_before_those_of_files(tmp_path: Path) -> None:
    """And are cut as the framework cuts."""
    found = imported(of(nanotron(2, "", 8), tmp_path))
    said = found.setup(pp_degree=4, gpus=16)
    assert (said.pp_degree, said.dp_degree) == (4, 4)
    assert dict(names.pairs(said.set))["schedule.pipeline_layers"] == "9,9,8,6"
    alone = found.setup(pp_degree=1)
    assert (alone.pp_degree, alone.dp_degree) == (1, 8)
    assert not {key for key, _ in names.pairs(alone.set) if "pipeline" in key}
    typed = dict(names.pairs(found.setup(set=["schedule.pipeline_layers=20,12"]).set))
    assert typed["schedule.pipeline_layers"] == "20,12"
    assert found.setup(layers=8, set=["schedule.pipeline_schedule=1f1b"]).resolved().options.pipeline_layers == "6,2"
    tokens = imported(of(REFUSED["no number of micro-batches"][0], tmp_path)).setup(accumulate=3)
    assert (tokens.batch, dict(names.pairs(tokens.set))["schedule.micro_batches"]) == (6, "3")
    with pytest.raises(InputError, match="`pp_degree` 0"):
        found.setup(pp_degree=0)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("pp", [2, 3, 4, 8])
def test_a_cut_has_all_layers(cut: str, pp: int) -> None:
    """In as many chunks for each stage, whatever the number of layers; or it is refused."""
    played = 0
    for layers in range(1, 65):
        for facts in ({}, {"first_less": "1", "last_less": "1"}, {"first_layers": "2"}):
            asked = Asked(names.model("llama3-8b"), layers, pp, "1f1b", facts, str)
            try:
                found = CUTS[cut](asked)
            except InputError:
                continue
            played += 1
            assert (sum(found), len(found), min(found) >= 0) == (layers, pp, True)
    assert played > 15


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("EttL", (2,)),
        ("Et|tL", (1, 1)),
        ("E|t*3|L", (0, 3, 0)),
        ("Ettt|(tt|)*29,L", (3, *[2] * 29, 0)),
        ("(Et)*1|(t,|t)*2,L", (1, 1, 2, 1)),
        ("embedding decoder decoder | decoder loss", (2, 1)),
        ("tok_embeddings | layers.0 layers.1 norm output", (0, 2)),
        ("E" + "t*9999" * 2 + "L", "at most 16384 parts"),
        ("E" + "(t*9999|)*9999" + "L", "at most 16384 parts"),
        ("|EtL", "begin with the embedding"),
        ("Et|L|", "end with the head"),
        ("tok_embeddings layers.0 norm | output", "end with the head"),
        ("EEtL", "begin with the embedding"),
        ("E((t)*2)*2L", "expected a text such as"),
        ("", "expected"),
    ],
)
def test_a_layout_says_the_layers_of_chunks(text: str, expected: tuple[int, ...] | str) -> None:
    if isinstance(expected, tuple):
        assert layers_of_layout(text) == expected
        return
    with pytest.raises(InputError, match=re.escape(expected)):
        layers_of_layout(text)
