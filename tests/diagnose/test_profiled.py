"""Traces of the torch profiler and of Longstep's own players, read and laid beside the simulated run."""

from __future__ import annotations

import gzip
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import longstep
from longstep import InputError, Measured, Setup
from sim.accounts.memory import walks
from sim.accounts.trace import CHROME_TRACE
from sim.diagnose.kernel_names import KERNELS, kind_of_name, kind_of_op
from sim.diagnose.profiled import one_after_the_other, ranks_of_rows, read_traces
from sim.diagnose.traced import kinds_s, traced
from sim.schedule.ir.ops import KINDS, TiledMlp
from sim.setup.prediction import write_trace

SETUP = Setup("zigzag", model="llama3-8b", cluster="hgx-h100", gpus=2, seq="32K", scope="attention", jitter=0)
NAMES = {
    "attention forward": "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4>>(Flash_fwd_params)",
    "attention backward": "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnBwdSm90<...>>>(Params)",
    "gemm": "nvjet_hsh_256x128_64x4_2x1_v_bz_coopA_NNT",
    "elementwise": "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)",
    "optimiser": "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedOptimizerTensorList<4>>",
    "send and receive": "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
    "all-gather": "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "reduce-scatter": "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "all-reduce": "ncclDevKernel_AllReduce_Sum_f32_TREE_LL(ncclDevKernelArgsStorage<4096ul>)",
    "host copy": "Memcpy DtoH (Device -> Pinned)",
    "unknown": "my_own_kernel",
}
"""Names as they stand in traces that users post: flash-attn 2 and 3, cuBLAS, torch 2.x, NCCL 2.20."""

PROFILED = """
import sys, torch
from torch.profiler import ProfilerActivity, profile, schedule

def step():
    q = torch.randn(1, 2, 256, 32, requires_grad=True)
    product = torch.nn.functional.linear(torch.randn(64, 64, requires_grad=True), torch.randn(64, 64))
    out = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    (out.sum() + product.sum()).backward()

with profile(
    activities=[ProfilerActivity.CPU],
    schedule=schedule(wait=0, warmup=1, active=2),
    on_trace_ready=lambda profiler: profiler.export_chrome_trace(sys.argv[1]),
) as profiler:
    for _ in range(3):
        step()
        profiler.step()
"""


def event(name: str, ts: float, dur: float, cat: str = "kernel", pid: Any = 0, tid: Any = 7) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": {}}


def gpu_file(path: Path, events: list[dict[str, Any]], rank: int | None = None) -> Path:
    """Write a file of the shape that Kineto gives those of GPUs (libkineto/README.md of pytorch/kineto). It is written
    by hand: no file of a real GPU has been read yet.
    """
    whole: dict[str, Any] = {"schemaVersion": 1, "deviceProperties": [{"id": 0}], "traceEvents": events}
    if rank is not None:
        whole["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": 2}
    data = json.dumps(whole).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("kind", NAMES)
def test_names_of_kernels_are_known(kind: str) -> None:
    assert kind_of_name(NAMES[kind]) == kind


def test_every_op_has_a_kind_or_only_waits() -> None:
    """Those with FLOPs and transfers by name; a new op is elementwise, which its family must be."""
    waits = {name for name in KINDS if kind_of_op(name) is None}
    assert waits == {"HostSync", "Barrier"}
    for name, kind in KINDS.items():
        if kind.meta.family == "attention":
            assert str(kind_of_op(name)).startswith("attention"), name
        if kind.meta.activity == "communication" and name not in waits:
            assert kind_of_op(name) not in KERNELS, name


def steps_of(kernel_us: float, gap_us: float, rank: int) -> list[dict[str, Any]]:
    """Return two steps of 1 s: a product, attention, a gap, and a transfer from where it is posted until 0.9 s."""
    events = []
    for step in range(2):
        start = 1e6 * step
        events += [
            event(f"ProfilerStep#{step}", start, 1e6, "user_annotation", 4711, 4711),
            event(NAMES["gemm"], start, 100e3),
            event(NAMES["attention forward"], start + 100e3, kernel_us),
            event("cudaLaunchKernel", start + 100e3 + kernel_us, gap_us / 2, "cuda_runtime", 4711, 4711),
            event(
                NAMES["send and receive"], start + 100e3 + kernel_us + gap_us, 800e3 - kernel_us - gap_us, tid=rank + 20
            ),
            event("my_own_kernel", start + 900e3, 100e3),
        ]
    return [*events, event(NAMES["gemm"], 2e6, 5e6), event(NAMES["gemm"], -3e6, 1e6)]  # of other steps


def test_steps_of_gpus_are_summed_by_kind_and_rank(tmp_path: Path) -> None:
    """Rank 0 attends for 0.2 s and rank 1 for 0.6: it is rank 0 that waits, 0.5 - 0.1 s more in its transfer."""
    paths = [
        gpu_file(tmp_path / "one.json.gz", steps_of(600e3, 100e3, 1), 1),
        gpu_file(tmp_path / "two.json", steps_of(200e3, 100e3, 0), 0),
    ]
    ranks = read_traces(paths)
    assert [(one.rank, one.steps, one.step_s, len(one.work)) for one in ranks] == [(0, 2, 1.0, 8), (1, 2, 1.0, 8)]
    found = traced(ranks, SETUP.predicted().simulation)
    kinds = {row.kind: row for row in found.kinds}
    assert kinds["attention forward"].measured_s == pytest.approx(0.4)
    assert kinds["gemm"].measured_s == pytest.approx(0.1)
    assert kinds["send and receive"].measured_s == pytest.approx(0.3)
    assert kinds["attention backward"].measured_s == 0 < kinds["attention backward"].simulated_s
    assert [row.kernels_s for row in found.ranks] == pytest.approx([0.3, 0.7])
    assert [row.waiting_s for row in found.ranks] == pytest.approx([0.4, 0.0])
    assert [row.idle_s for row in found.ranks] == pytest.approx([0.1, 0.1])
    assert found.unknown == {"my_own_kernel": pytest.approx(0.1)}
    told = "\n".join(found.findings)
    assert "rank 1 runs kernels for 0.7 s a step, the others 0.3 s" in told
    assert "rank 0 waits 0.4 s a step" in told
    assert "is idle for 10 % of a step" in told
    assert "launches in 50 % of that time" in told
    assert "my_own_kernel 0.1 s" in told
    assert "gemm: 0.1 s a step in the trace, 0 s simulated: the configuration has none" in told


@pytest.mark.sweep
def test_the_doctor_takes_step_and_ranks_from_traces(tmp_path: Path) -> None:
    """Rank 1 computes at 0.4 of its rate in a simulated run, written as Longstep writes traces: no figure is given."""
    slow = SETUP.replace(set={"cluster.gpu[1].speed": 0.4}).predicted()
    path = CHROME_TRACE.at(tmp_path / "slow.json")
    write_trace(path, slow.checked, [slow.trace])
    found = longstep.doctor(SETUP, Measured(), traces=read_traces([path.path]))
    assert found.measured_s == pytest.approx(slow.step_time_s)
    assert [cause.name for cause in found.consistent] == ["slow-rank"]
    assert found.consistent[0].factor == pytest.approx(2.5, rel=0.05)
    assert found.traced
    assert "rank 1 runs kernels" in "\n".join(found.findings)


@pytest.mark.slow
def test_kinds_tell_apart_what_times_cannot(tmp_path: Path) -> None:
    """A full mask doubles the pairs: attention alone is off; slow GPUs slow down copies and sums, too."""
    full = SETUP.replace(mask="full", scope="layer").predicted()
    said = SETUP.replace(scope="layer")
    path = CHROME_TRACE.at(tmp_path / "full.json")
    write_trace(path, full.checked, [full.trace])
    alone = longstep.doctor(said, Measured(step_time_s=full.step_time_s))
    assert {"full-mask", "slow-gpus"} <= {cause.name for cause in alone.consistent}
    names = [cause.name for cause in longstep.doctor(said, Measured(), traces=read_traces([path.path])).consistent]
    assert "full-mask" in names
    assert "slow-gpus" not in names
    assert "slow-rank" not in names


def test_memory_of_a_host_is_that_of_its_buffers() -> None:
    """The runtime counts no workspace of kernels there, which is a sixth of this peak."""
    said = SETUP.replace(cluster="host", model="tiny", profile="datasheet", seq="2K")
    most = max(walk.buffer_peak_bytes for walk in walks(said.predicted().checked))
    assert most < 0.9 * said.predicted().peak_hbm_bytes
    assert longstep.doctor(said, Measured(memory_bytes=most)).verdict == "healthy"


def test_simulated_kinds_are_those_of_all_ranks() -> None:
    found = SETUP.replace(scope="layer", gpus=4).predicted()
    sums = kinds_s(found.simulation)
    rows = [row for row in found.trace.rows if row.kind == "Attend"]
    assert sums["attention forward"] == pytest.approx(sum(row.busy_s for row in rows) / 4)


def test_a_loop_over_tiles_is_taken_apart_beside_a_profiler() -> None:
    """At the rates of datasheets: of F features and t tokens SwiGLU passes 3 F t elements forward and again backward,
    where its own backward passes 5 F t; the three gradients of weights E x F of all tiles but one are added, which
    reads two and writes one.
    """
    options = {"schedule.mlp": "tiled", "schedule.checkpoint": "none"}
    step = SETUP.replace(scope="step", layers=1, profile="datasheet", jitter=0, seq="64K", set=options)
    found = step.predicted().simulation
    of_ops, of_kernels = kinds_s(found), kinds_s(found, loops_apart=True)
    (loop,) = {op for op in found.checked.schedule.program(0).ops if isinstance(op, TiledMlp)}
    tokens, (embed, ffn) = math.prod(loop.x.shape[:2]), loop.w_gate.shape
    added = 3 * 3 * embed * ffn * (-(-tokens // loop.tile) - 1)
    expected_s = 2 * (11 * ffn * tokens + added) / found.cluster.spec.hbm.bytes_per_s
    assert of_kernels["elementwise"] - of_ops["elementwise"] == pytest.approx(expected_s, rel=0.02)
    assert sum(of_kernels.values()) == pytest.approx(sum(of_ops.values()))


@pytest.mark.gloo
@pytest.mark.slow
def test_files_of_the_torch_profiler_on_a_cpu(tmp_path: Path) -> None:
    path = tmp_path / "rank1.pt.trace.json"
    # in a process of its own: the profiler ends with a segmentation fault where others have run threads before
    subprocess.run([sys.executable, "-c", PROFILED, str(path)], check=True, capture_output=True, timeout=120)
    (one,) = read_traces([path])
    assert (one.rank, one.source, one.steps) == (1, "CPU operators", 2)
    counts = {kind: sum(span.kind == kind for span in one.work) for kind in KERNELS}
    assert counts["attention forward"] == counts["attention backward"] == 2
    assert counts["gemm"] >= 4  # forward, and backward of one operand at least
    assert sum(span.seconds for span in one.work) <= one.bounds_s[-1] - one.bounds_s[0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is no Chrome trace"),
        (b"{}", "is no Chrome trace"),
        (b'{"traceEvents": 3}', "is no Chrome trace"),
        (b'{"traceEvents": []}', "no kernel, operator or op"),
        (gzip.compress(b'{"traceEvents": []}', mtime=0)[:-9], "is no Chrome trace"),
        (b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "ts": "soon", "dur": 1}]}', "has no time"),
        (b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": -1}]}', "has no time"),
        (
            b'{"traceEvents": [{"ph": "X", "ts": 1, "args": {"player": "executed"}}], "otherData": {"traces": [1]}}',
            "has no time",
        ),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_traces([path])


def test_ranks_that_are_none_of_the_run_are_refused(tmp_path: Path) -> None:
    events = [event(NAMES["gemm"], 0, 1e6)]
    same = [gpu_file(tmp_path / name, events, 0) for name in ("a.json", "b.json")]
    with pytest.raises(InputError, match="rank 0 was read before"):
        read_traces(same)
    many = read_traces([gpu_file(tmp_path / "rank9.json", events)])
    with pytest.raises(InputError, match="`trace` is of rank 9: expected ranks 0 to 1"):
        longstep.doctor(SETUP, Measured(), traces=many)
    with pytest.raises(InputError, match="cannot be read"):
        read_traces([tmp_path / "none.json"])


@pytest.mark.sweep
@pytest.mark.parametrize(("factors", "verdict"), [((0.8,) * 5, "ranks differ"), ((0.8, 1.0, 0.8, 0.6, 0.8), "healthy")])
def test_ranks_differ_only_by_more_than_their_steps_scatter(factors: tuple[float, ...], verdict: str) -> None:
    """Rank 0 takes 0.8 times as long in the median of five steps: in all of them, or by chance."""
    said = Setup("zigzag", model="llama3-8b", cluster="hgx-h100", gpus=4, seq="64K", scope="attention", jitter=0)
    simulated = ranks_of_rows(row._asdict() for row in said.predicted().trace.rows)
    steps = []
    for factor in factors:
        work = [span._replace(end_s=span.begin_s + factor * span.seconds) for span in simulated[0].work]
        steps.append([simulated[0]._replace(work=work), *simulated[1:]])
    found = longstep.doctor(said, Measured(), traces=one_after_the_other(steps))
    assert found.verdict == verdict
    assert found.measured_s == pytest.approx(simulated[0].step_s)
