"""What frameworks print, as figures: one line of each, lines of a file, and what is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.base.errors import InputError
from sim.explain.logs import read_log

GIB = 2.0**30
LINES: dict[str, dict[str, float]] = {
    "26s/it, 71GiB": {"step_time_s": 26.0, "memory_bytes": 71 * GIB},
    "2.5it/s": {"step_time_s": 0.4},
    "step time: 26.1": {"step_time_s": 26.1},
    "step_time=350ms": {"step_time_s": 0.35},
    "26s": {"step_time_s": 26.0},
    "26 sec/step": {"step_time_s": 26.0},
    "71.2 GB": {"memory_bytes": 71.2e9},
    "71234MiB / 81559MiB": {"memory_bytes": 71234 * 2.0**20},
    "tps: 4,321": {"tokens_per_s_per_gpu": 4321.0},
    "4.3k tgs": {"tokens_per_s_per_gpu": 4300.0},
    "512 tokens/s/gpu": {"tokens_per_s_per_gpu": 512.0},
    "4,321 tok/s": {"tokens_per_s": 4321.0},
    "mfu: 38%": {"mfu": 0.38},
    "MFU 0.38": {"mfu": 0.38},
    "0.3 samples/s": {"samples_per_s": 0.3},
    # torchtitan, with its colours
    "[rank0]:2025-01-01 12:00:00,123 - root - INFO - \x1b[31mstep: 10  \x1b[32mloss:  4.5  grad_norm:  1.2  "
    "memory: 62.50GiB(78.1%)  tps: 4,321  tflops: 123.45  \x1b[35mmfu: 38.2%": {
        "memory_bytes": 62.5 * GIB, "tokens_per_s_per_gpu": 4321.0, "mfu": 0.382,
    },
    # Megatron-LM
    " iteration        5/     100 | consumed samples:         1280 | elapsed time per iteration (ms): 26012.3 | "
    "throughput per GPU (TFLOP/s/GPU): 400.1 | learning rate: 1.0E-05 | global batch size:   256 | lm loss: 1.1E+01 | "
    "loss scale: 1.0 | grad norm: 5.0 | number of skipped iterations:   0 |": {"step_time_s": 26.0123},
    "[Rank 0] (after 2 iterations) memory (MB) | allocated: 12000.0 | max allocated: 64000.0 | reserved: 66000.0 | "
    "max reserved: 66000.0": {"memory_bytes": 64000 * 2.0**20},
    # Hugging Face and what builds on it
    "  5%|▌         | 5/100 [02:10<41:10, 26.01s/it]": {"step_time_s": 26.01},
    "{'train_runtime': 2601.2, 'train_samples_per_second': 0.3, 'train_steps_per_second': 0.04}": {
        "samples_per_s": 0.3, "step_time_s": 25.0,
    },
    "{'loss': 1.2, 'learning_rate': 1e-05, 'epoch': 0.1, 'memory(GiB)': 71.2, 'train_speed(iter/s)': 0.04}": {
        "memory_bytes": 71.2 * GIB, "step_time_s": 25.0,
    },
    "{'memory/max_active (GiB)': 62.3, 'memory/device_reserved (GiB)': 64.1, 'tokens/train_per_sec_per_gpu': 1234.5}": {
        "memory_bytes": 62.3 * GIB, "tokens_per_s_per_gpu": 1234.5,
    },
    # DeepSpeed
    "epoch=0/micro_step=10/global_step=10, RunningAvgSamplesPerSec=0.3, CurrSamplesPerSec=0.31, MemAllocated=12.3GB, "
    "MaxMemAllocated=45.6GB": {"samples_per_s": 0.3, "memory_bytes": 45.6 * GIB},
    # nanotron
    "[INFO|DP=0]: iteration: 5 / 100 | consumed_tokens: 10.5M | elapsed_time_per_iteration_ms: 26.1K | tokens_per_sec: "
    "40.3K | tokens_per_sec_per_gpu: 5.04K | global_batch_size: 8 | lm_loss: 11.3 | lr: 1e-05 | model_tflops_per_gpu: "
    "250 | cuda_max_memory_reserved: 62.1G": {
        "step_time_s": 26.1, "tokens_per_s": 40300.0, "tokens_per_s_per_gpu": 5040.0, "memory_bytes": 62.1e9,
    },
}  # fmt: skip


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[:24])
def test_a_line_says_what_was_measured(line: str) -> None:
    found = read_log(line)
    assert found.figures == pytest.approx(LINES[line])
    assert found.unknown == ()


def test_what_is_not_understood_is_said_by_name() -> None:
    assert read_log("26s/it, 5 apples; watts 700").unknown == ("5 apples", "watts 700")


@pytest.mark.parametrize("text", ["", "hello", "0 s/it", "26,5s/it", "-5s/it", "9" * 5000, "\x00", "5 apples"])
def test_a_text_of_which_nothing_is_understood_is_refused_in_a_line(text: str) -> None:
    with pytest.raises(InputError, match="`log` .*nothing of it is understood; expected such as 26s/it") as refused:
        read_log(text)
    assert "\n" not in str(refused.value)


def test_of_a_file_the_median_of_its_later_steps_counts(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    times, bar = (90.0, 40.0, 30.0, 26.0, 27.0, 26.5), "\r" * 3
    lines = [f"step: {step}  loss: 4.5  memory: {60 + step}.0GiB(78%)  step time: {s}s" for step, s in enumerate(times)]
    log.write_text(f"2026-11-26 08:00:01 compiled in 600s{bar}" + "\n".join(lines))
    found = read_log(str(log))
    assert found.figures == {"step_time_s": 26.5, "memory_bytes": 65 * GIB}
    assert (found.steps, found.unknown) == (3, ())


def test_a_file_that_is_no_log_is_refused_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="log file 'missing.log' cannot be read"):
        read_log("missing.log")
    with pytest.raises(InputError, match="cannot be read .it is no regular file"):
        read_log(str(tmp_path))
    other = tmp_path / "other"
    other.write_bytes(b"\xff\xfe" * 3000)
    with pytest.raises(InputError, match="nothing of it is understood"):
        read_log(str(other))
