"""Shares of weights that configurations say: files of each framework that has them, and what of these is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from sim.base.errors import InputError
from sim.setup import names
from sim.setup.imports.frameworks import frameworks
from sim.setup.imports.imported import imported
from tests.setup.test_imports import FILES, changed
from tests.setup.test_stages import ARGUMENTS, BRIDGE, MEGATRON, NANOTRON, SWIFT, TITAN

File = tuple[str, list[tuple[str, str]]]


def titan(*more: str) -> File:
    lines = "\n".join(["tensor_parallel_degree = 2", *more])
    return TITAN, [
        ("tensor_parallel_degree = 1", lines),
        ("context_parallel_degree = 8", "context_parallel_degree = 4"),
    ]


def megatron(*flags: str) -> File:
    return MEGATRON, [("--tensor-model-parallel-size 1", " ".join(["--tensor-model-parallel-size 4", *flags])),
                      ("CP_SIZE=8", "CP_SIZE=2")]  # fmt: skip


def swift(*more: tuple[str, str]) -> File:
    return SWIFT, [("expert_model_parallel_size: 4", "expert_model_parallel_size: 1"), *more]


def nanotron(*changes: tuple[str, str]) -> File:
    return NANOTRON, [("tp: 1", "tp: 4"), ("dp: 16", "dp: 2"), *changes]


def bridge(*keys: str) -> File:
    return BRIDGE, [("model.context_parallel_size=8", " ".join(["model.context_parallel_size=2", *keys]))]


PLAYED: dict[str, tuple[File, dict[str, Any], str]] = {
    "torchtitan": (titan(), {}, "TP 2 R 4"),
    "torchtitan in stages": (titan("pipeline_parallel_schedule = \"1F1B\""), {"gpus": 16, "pp_degree": 2, "batch": 8},
        "TP 2 R 4 PP 2"),
    "Megatron-LM": (megatron("--sequence-parallel"), {}, "TP 4 R 2 DP 2"),
    "Megatron-LM's arguments": ((ARGUMENTS, [(". selective", ". none")]), {}, "TP 4 R 2 PP 2 DP 4"),
    "Megatron-SWIFT": (swift(), {"model": "llama3-8b"}, "TP 2 R 4"),
    "Megatron-Bridge": (bridge("model.tensor_model_parallel_size=4", "model.sequence_parallel=true"),
        {"model": "llama3-8b"}, "TP 4 U 2"),
    "nanotron": (nanotron(), {}, "TP 4 DP 2"),
    "typed": ((TITAN, []), {"tp_degree": 2, "gpus": 16}, "TP 2 R 8"),
    "typed before the file": (nanotron(), {"tp_degree": 1}, "DP 2"),
}  # fmt: skip
"""Files with what is changed in them, what is typed beside them, and the mesh."""


@pytest.mark.parametrize("name", PLAYED)
def test_a_file_says_its_shares(name: str, tmp_path: Path) -> None:
    """Ranks of a group are neighbours, outside of which are those that share a sequence, replicas and stages."""
    (file, changes), given, expected = PLAYED[name]
    found = imported(changed(tmp_path, file, *changes)).setup(**given)
    mesh = found.resolved().mesh
    assert mesh.named() == expected
    assert mesh.groups("tp")[0] == tuple(range(mesh.tp))
    assert mesh.order == ("pp", "dp", "ring", "ulysses", "tp")
    assert found.gpus == mesh.size
    loss = dict(names.pairs(found.set)).get("schedule.loss")
    assert loss == ("unfused" if mesh.tp > 1 and file == TITAN else loss)
    found.replace(yes=True).resolved().built(ranks=1)


REFUSED: dict[str, tuple[File, dict[str, Any], str]] = {
    "saved in parts": (megatron("--sequence-parallel", "--distribute-saved-activations"), {},
        "it is of tensor parallelism without sequence parallelism"),
    "kept": (nanotron(("SCATTER", "SCATTER\n  tp_recompute_allgather: false")), {}, "is gathered again"),
    "a whole loss": (titan("disable_loss_parallel = true"), {}, "the loss is taken of shares of the vocabulary"),
    "GPUs": (megatron("--sequence-parallel"), {"gpus": 12},
        "`gpus` 12 is no multiple of the 2 ranks that share a sequence x 4 that share out weights: set `gpus` to 8"),
    "heads": (titan(), {"tp_degree": 3, "gpus": 24}, "`tp_degree` 3 does not divide num_heads 32 of llama3-8b"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_shares_that_are_not_played_are_refused(name: str, tmp_path: Path) -> None:
    (file, changes), given, says = REFUSED[name]
    with pytest.raises(InputError, match=re.escape(says)):
        imported(changed(tmp_path, file, *changes)).setup(**given).resolved().built(ranks=1)


SENT: dict[str, tuple[File, dict[str, Any], bool, str]] = {
    "no flag": (megatron(), {}, False, "gradients"),
    "a flag": (megatron("--sequence-parallel"), {}, True, "gradients"),
    "all-reduce": (nanotron(("  tp_mode: REDUCE_SCATTER\n", "")), {}, False, "none"),
    "asynchronous": (nanotron(("communication: false", "communication: true")), {}, True, "shards"),
    "userbuffers": (megatron("--sequence-parallel --tp-comm-overlap"), {}, True, "chunks"),
    "async TP": (titan("enable_async_tensor_parallel = true"), {}, True, "chunks"),
    "switched off": (titan("enable_sequence_parallel = false"), {}, False, "none"),
    "left out": (swift(("sequence_parallel: true", "packing_cache: none")), {"model": "llama3-8b"}, False, "gradients"),
    "switched off in a recipe": (bridge("model.tensor_model_parallel_size=4", "model.sequence_parallel=false"),
        {"model": "llama3-8b"}, False, "gradients"),
}  # fmt: skip


@pytest.mark.parametrize("name", SENT)
def test_a_file_says_what_is_sent_between_shares(name: str, tmp_path: Path) -> None:
    """With sequence parallelism or without, and beside which products."""
    (file, changes), given, sequence, overlap = SENT[name]
    options = imported(changed(tmp_path, file, *changes)).setup(**given).resolved().options
    assert (options.tp_sequence, options.tp_overlap) == (sequence, overlap)


def test_keys_of_shares_mean_nothing_where_weights_are_whole(tmp_path: Path) -> None:
    """And nothing is taken for those that are missing."""
    asked = "tensor_parallel_degree = 1\nenable_async_tensor_parallel = true\n"
    path = changed(tmp_path, TITAN, ("tensor_parallel_degree = 1\n", asked))
    found = imported(path)
    (row,) = [row for row in found.rows() if "async_tensor" in row.key]
    assert (row.state, row.means) == ("ignored", "of tensor parallelism, and ranks have whole weights")
    assert found.setup() == imported(FILES / TITAN).setup()
    assert found.setup(tp_degree=2, gpus=16).resolved().options.tp_overlap == "chunks"
    alone = imported(FILES / MEGATRON)
    assert not [row for row in alone.rows() if row.key == "sequence_parallel"]
    assert [row.value for row in alone.rows(tp_degree=2) if row.key == "sequence_parallel"] == ["(false)"]


@pytest.mark.parametrize("name", ["accelerate", "axolotl", "deepspeed", "hugging-face", "ms-swift"])
def test_shares_by_modules_are_refused(name: str) -> None:
    """Hugging Face and DeepSpeed gather behind some modules, as a plan of each model says."""
    whys = [key.why for each, key in frameworks()[name].keys.items() if re.search("tp_size|tensor_parallel", each)]
    assert whys == [
        "ranks that share out weights gather heads or logits there, as modules say one by one: not simulated"
    ]
