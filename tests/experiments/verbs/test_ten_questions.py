"""Ten questions as a new user asks them: one short command each, seconds of CPU time, the answer in the first sentence.

Each starts in a process of its own, in a folder with the configuration of a torchtitan run.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from experiments.verbs.cli import parse

WORDS = 12
"""That a command has at most."""
CPU_S = 3.0
"""That it takes at most on an idle machine; twice as much where many processes share caches. Plans take longer."""
TRAIN = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 1
seq_len = 131072
mixed_precision_param = "bfloat16"
mixed_precision_reduce = "float32"
[parallelism]
data_parallel_shard_degree = -1
context_parallel_degree = 8
[activation_checkpoint]
mode = "full"
"""
"""A step of 128K tokens on 8 GPUs, as torchtitan's llama3_8b.toml has it: all-gather of keys, 9.1 s on H100 with
FlashAttention-2 and eager modules, 6.0 s with FlashAttention-3 and fused ones."""


class Asked(NamedTuple):
    """A question with its command, and what the first sentence has to say."""

    question: str
    command: str
    says: str
    plans: bool = False


QUESTIONS = [
    Asked(
        "Which schedule is fastest for Qwen2.5-32B at 256K on 4 nodes of H100?",
        "longstep plan --model Qwen/Qwen2.5-32B --nodes 4 --seq 256K --limit 5",
        r"^\w+ .*trains fastest, with .* a step .*; fits with [\d.]+ GiB left",
        plans=True,
    ),
    Asked(
        "Does Llama-3.1-8B at 1M fit 8 A100 of 80 GB, and with what?",
        "longstep fit --model llama-3.1-8b --seq 1M --cluster 8xA100-80GB --schedule ulysses",
        r"^Nothing fits: [\d.]+ GiB is missing for ulysses at 1M, switching on chunked loss helps",
    ),
    Asked(
        "What do NICs of 800 Gb/s buy?",
        "longstep simulate --seq 128K --nodes 2 --schedule usp --vary cluster.nic.bytes_per_s=50e9,100e9",
        r"^With nic\.bytes_per_s=100e9 a step takes [\d.]+ s, [\d.]+ % less than with nic\.bytes_per_s=50e9",
    ),
    Asked(
        "Is 9.1 s a step right for my torchtitan file?",
        "longstep doctor --from train.toml --step-time 9.1s",
        r"^Healthy: 9\.1 s a step is as predicted",
    ),
    Asked(
        "Which length fits on 8 H100 with ALST?",
        "longstep fit --stack alst --cluster 8xH100 --seq 2M,4M,8M",
        r"^The longest that fits is 4M, by alst in \d+ s a step",
    ),
    Asked(
        "How many GPUs does it take for 20 s?",
        "longstep plan --gpus 64 --seq 512K --schedule ulysses --fewest-gpus --step-time 20s",
        r"^The fewest GPUs are 32, with ulysses",
        plans=True,
    ),
    Asked(
        "Ring or Ulysses on PCIe?",
        "longstep simulate --seq 128K --cluster 8xL40S --schedule ring,ulysses",
        r"^Ulysses .*trains fastest: [\d.]+ s a step.*; ring .*takes 1\.\d+ times as long",
    ),
    Asked(
        "What does it cost to sum gradients in FP32?",
        "longstep sweep --seq 128K --schedule zigzag --vary schedule.reduce=model,fp32",
        r"\(schedule\.reduce model\) trains fastest: [\d.]+ s a step.*; zigzag \(schedule\.reduce fp32\) is tied",
    ),
    Asked(
        "What fills the memory?",
        "longstep simulate --seq 512K --schedule zigzag --memory",
        r"^47\.5 GiB is allocated, most of it for saved activations \(3\d\.\d GiB\).*; 29\.6 GiB of 80 GiB is left",
    ),
    Asked(
        "What if one GPU is slow?",
        "longstep simulate --seq 128K --schedule zigzag --vary cluster.gpu[3].speed=1,0.8",
        r"^With gpu\[3\]\.speed=0\.8 a step takes 7\.\d+ s, 1\d % more than with gpu\[3\]\.speed=1",
    ),
]


def first_sentence(printed: str) -> str:
    """Return the first line that says more than what was understood."""
    return next(line for line in printed.splitlines() if not line.startswith(("assumed:", "from ")))


@pytest.mark.parametrize("asked", QUESTIONS, ids=lambda asked: asked.question)
def test_a_question_is_one_short_command(asked: Asked) -> None:
    program, *rest = shlex.split(asked.command)
    assert program == "longstep"
    assert 1 + len(rest) <= WORDS
    parse(rest)


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize(
    "asked",
    QUESTIONS,
    ids=lambda asked: asked.question,
)
def test_the_first_sentence_answers_it_in_seconds(asked: Asked, tmp_path: Path) -> None:
    (tmp_path / "train.toml").write_text(TRAIN)
    before = os.times()
    ran = subprocess.run(
        [sys.executable, "-m", "longstep", *shlex.split(asked.command)[1:]],
        cwd=tmp_path, capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
    )  # fmt: skip
    after = os.times()
    assert ran.returncode == 0, ran.stderr
    said = first_sentence(ran.stdout)
    assert re.search(asked.says, said), said
    cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    assert asked.plans or cpu_s < 2 * CPU_S
