"""Times kernels: one-op programs, run by the very function that plays schedules, alone and with all cores at work."""

from __future__ import annotations

import time
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from runtime.attention import AttentionKernel, attention_kernel
from runtime.groups import start_together
from runtime.kernels import run_kernel
from runtime.launch import RankContext, Session
from runtime.tensors import Storage
from sim.profile import Condition, Point
from sim.schedule.builder import ProgramBuilder
from sim.schedule.ir import Program
from sim.schedule.kernels import kernel_use
from sim.schedule.masks import CAUSAL, FULL
from sim.schedule.ops import Attend, AttendBackward, Kernel, Split
from sim.workload import Dtype, ModelSpec, Workload, accumulation_dtype

_MIN_RUNS = 5
_LONG_S = 0.4
"""Kernels that take longer are timed three times only."""
_COLD_BYTES = {"attention": 64 * 2**20, "memory": 256 * 2**20}
"""Operands are rotated over this much memory: in a step, too, what a kernel reads has left the caches. Kernels that
only move memory need more of it, since caches keep what was streamed last."""
_MAX_SETS = 64


class Sample(NamedTuple):
    """Times in seconds: the fields of a Point that describe them."""

    mean_s: float
    low_s: float
    median_s: float
    high_s: float
    runs: int


class KernelCase(NamedTuple):
    """One kernel at one size."""

    kernel: str
    """As in ``KernelUse``."""
    causal: bool
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: Dtype

    @property
    def label(self) -> str:
        """What a progress bar shows."""
        mask = (" causal" if self.causal else " full") if self.kernel.startswith("attention") else ""
        return f"{self.kernel}{mask} {self.tokens} tokens, {self.heads} heads"


def kernel_cases(model: ModelSpec, dtype: Dtype, *, quick: bool) -> list[KernelCase]:
    """Return what is to be timed for a model: attention at its heads and at half of them, as two ranks of Ulysses have
    them, and the memory-bound kernels over four decades of size.
    """
    heads = [(model.num_heads, model.num_kv_heads)]
    if model.num_heads % 2 == 0 and model.num_kv_heads % 2 == 0:
        heads.insert(0, (model.num_heads // 2, model.num_kv_heads // 2))
    top = 12 if quick else 13
    cases = []
    for h, kv in heads:
        shape = (h, kv, model.head_dim, dtype)
        for kernel in ("attention_forward", "attention_backward"):
            cases += [
                KernelCase(kernel, True, 2**n, *shape) for n in range(7, top + (1 if h < model.num_heads else 0) + 1)
            ]
            cases += [KernelCase(kernel, False, 2**n, *shape) for n in range(7, top + 1)]
    for kernel in ("merge", "accumulate", "copy"):
        cases += [KernelCase(kernel, False, 2**n, *heads[-1], model.head_dim, dtype) for n in range(4, 15, 2)]
    return cases


def case_program(case: KernelCase) -> Program:
    """Return a program whose one op is the kernel."""
    model = ModelSpec(
        name="calibration",
        embed_dim=case.heads * case.head_dim,
        num_layers=1,
        num_heads=case.heads,
        num_kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        ffn_dim=1,
        vocab_size=1,
    )
    b = ProgramBuilder(0, Workload(model=model, seq=case.tokens, dtype=case.dtype))
    q, out = (b.tensor(name, case.tokens, case.heads, "other") for name in ("q", "out"))
    k, v = (b.tensor(name, case.tokens, case.kv_heads, "other") for name in ("k", "v"))
    lse = b.lse("lse", case.tokens, case.heads, "other")
    band = CAUSAL if case.causal else FULL
    sum_dtype = accumulation_dtype(case.dtype)
    if case.kernel == "attention_forward":
        b.attend(q, k, v, out, lse, band, case.label)
    elif case.kernel == "attention_backward":
        grads = (b.like("dq", q, "other"), b.like("dk", k, "other"), b.like("dv", v, "other"))
        b.attend_backward((q, k, v, out, lse), b.like("dout", q, "other"), grads, band, case.label)
    elif case.kernel == "merge":
        total = (b.like("sum", q, "other", sum_dtype), b.like("lse sum", lse, "other"))
        b.merge((out, lse), total, case.label)
    elif case.kernel == "accumulate":
        b.accumulate(q, b.like("sum", q, "other", sum_dtype), case.label)
    else:
        assert case.kernel == "copy", case.kernel
        packed = b.buffer("packed", "bshd", (2, case.tokens, case.heads // 2, case.head_dim), case.dtype, "other")
        b.copy_parts(Split(q, 2, 2), Split(packed, 0, 2), case.label)  # as Ulysses packs heads
    return b.build()


def time_kernel(session: Session, case: KernelCase, condition: Condition, budget_s: float) -> Point:
    """Return the time of a kernel on rank 0 alone (idle), or on every rank of the session at once (busy)."""
    program = case_program(case)
    op = program.ops[0]
    assert isinstance(op, Kernel)
    use = kernel_use(op, program)
    active = 1 if condition == "idle" else session.ranks
    seconds = [s for of_rank in session.call(_time, msgspec.json.encode(program), active, budget_s) for s in of_rank]
    times = sample(seconds)
    return Point(
        kernel=use.kernel,
        variant=use.variant,
        dtype=use.dtype,
        shape=use.shape,
        condition=condition,
        flops=use.flops,
        nbytes=use.hbm_bytes,
        **times._asdict(),
    )


def sample(seconds: list[float]) -> Sample:
    """Return what a profile keeps of a sample of times."""
    low, median, high = (float(x) for x in np.percentile(seconds, [25, 50, 75]))
    return Sample(float(np.mean(seconds)), low, median, high, len(seconds))


def _time(context: RankContext, program_json: bytes, active: int, budget_s: float) -> list[float]:
    """Time the op of a program on the first ``active`` ranks, all of them starting together."""
    program = msgspec.json.decode(program_json, type=Program)
    op = program.ops[0]
    assert isinstance(op, Kernel)
    if context.rank >= active:
        return []
    attention = attention_kernel(context.device)
    first = _operands(program, op, context, attention)
    sets = [first, *(_copied(program, first, context) for _ in range(_num_sets(program, op) - 1))]
    for storage in sets:
        run_kernel(op, storage, attention)
    seconds: list[float] = []
    if active == context.ranks:
        start_together(context.ranks, context.device)
    deadline = time.perf_counter() + budget_s
    enough = _MIN_RUNS
    while len(seconds) < enough or (time.perf_counter() < deadline and len(seconds) < 40 * _MIN_RUNS):
        storage = sets[len(seconds) % len(sets)]
        begin = time.perf_counter()
        run_kernel(op, storage, attention)
        seconds.append(time.perf_counter() - begin)
        context.progress(0, False)
        enough = 3 if seconds[0] > _LONG_S else _MIN_RUNS
    return seconds


def _num_sets(program: Program, op: Kernel) -> int:
    """Return how many sets of operands do not fit into the caches."""
    size = sum(buffer.nbytes for buffer in program.buffers)
    kind = "attention" if isinstance(op, Attend | AttendBackward) else "memory"
    return min(max(_COLD_BYTES[kind] // size, 1), _MAX_SETS)


def _operands(program: Program, op: Kernel, context: RankContext, attention: AttentionKernel) -> Storage:
    """Return random operands; a backward pass gets the out and lse of its forward pass."""
    storage = Storage(program, context.device)
    generator = torch.Generator().manual_seed(context.rank)
    for view in {*op.reads, *op.writes}:
        storage.write(view).normal_(generator=generator)
    if isinstance(op, AttendBackward):
        run_kernel(_forward_of(op), storage, attention)
    return storage


def _copied(program: Program, storage: Storage, context: RankContext) -> Storage:
    """Return the same operands at another place in memory."""
    copy = Storage(program, context.device)
    for view in {*program.ops[0].reads, *program.ops[0].writes}:
        copy.write(view).copy_(storage.read(view))
    return copy


def _forward_of(op: AttendBackward) -> Attend:
    """Return the forward pass that makes the out and lse of a backward one."""
    return Attend(
        stream=op.stream, part="forward", label=op.label, q=op.q, k=op.k, v=op.v, out=op.out, lse=op.lse, band=op.band
    )
