"""What is to be timed: ops taken out of the very programs that schedules are made of, each as a program of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, get_args

import msgspec

from sim.base.errors import InputError
from sim.schedule.derive.kernels import ATTENTION_KERNELS, KernelUse, kernel_use
from sim.schedule.ir.declare import rebound
from sim.schedule.ir.ops import Gemm, Hold, Kernel
from sim.schedule.ir.program import Program
from sim.schedule.methods import allgather, ring, single, ulysses
from sim.schedule.methods.catalog import SCHEDULES
from sim.schedule.methods.ring import RingOptions
from sim.schedule.write.builder import ProgramBuilder
from sim.words.mesh import Mesh
from sim.words.options import AttentionName
from sim.words.profile import Point
from sim.words.workload import Dtype, MaskName, ModelSpec, Workload


class KernelCase(NamedTuple):
    """One kernel at one size."""

    use: KernelUse
    program: Program
    """Its op alone, on the buffers that it reads and writes."""

    @property
    def label(self) -> str:
        """What a progress bar shows."""
        return " ".join([self.use.kernel, self.use.variant, "x".join(map(str, self.use.shape))])

    @property
    def rough_s(self) -> float:
        """Return about how long it takes, for putting long ones last: seconds at 100 GFLOP/s and 10 GB/s."""
        return max(self.use.flops / 1e11, self.use.hbm_bytes / 1e10)


class Sizes(NamedTuple):
    """Which sizes are timed: powers of two of tokens."""

    attention: range
    layer: range
    """Of the other kernels of a layer."""
    around: range
    """Of merges and copies."""
    splits: tuple[int, ...] = (1, 2)
    """Numbers of ranks that share the heads, as those of Ulysses do."""
    full_of_parts: bool = True
    """Whether fewer heads are timed without a mask, too."""
    rectangular: range = range(0)
    """Attention with half as many keys as queries, and vice versa, as in zigzag rings."""
    unfused: range = range(0)
    """Of attention by other kernels than flash."""


_MOST_BYTES = 2**34
"""Of what a kernel of a step moves: logits of long sequences are made in chunks."""
QUICK_CPU = Sizes(range(8, 13), range(8, 13, 2), range(4, 15, 5), full_of_parts=False)
FULL_CPU = Sizes(range(7, 14), range(7, 14), range(4, 15, 2), unfused=range(7, 12))
QUICK_GPU = Sizes(range(8, 16, 2), range(7, 16, 4), range(4, 17, 6), full_of_parts=False)
FULL_GPU = Sizes(range(8, 18), range(7, 18, 2), range(4, 17, 3), splits=(1, 2, 4, 8), rectangular=range(9, 17, 2))


def kernel_cases(model: ModelSpec, dtype: Dtype, sizes: Sizes) -> list[KernelCase]:
    """Return what is to be timed for a model, long ones last: attention at its heads and at fewer of them, as ranks of
    Ulysses have them; the other kernels of a layer; merges and copies over four decades of size.
    """
    found: dict[KernelUse, KernelCase] = {}
    for case in _cases(model, dtype, sizes):
        found.setdefault(case.use, case)
    return sorted(found.values(), key=lambda case: (case.rough_s, case.use))


def _cases(model: ModelSpec, dtype: Dtype, sizes: Sizes) -> Iterator[KernelCase]:
    lengths = sizes.attention
    for split in sizes.splits:
        if model.num_heads % split or model.num_kv_heads % split:
            continue
        heads, kv_heads = model.num_heads // split, model.num_kv_heads // split
        part = msgspec.structs.replace(model, num_heads=heads, num_kv_heads=kv_heads)
        yield from _attention(part, dtype, "causal", range(lengths.start, lengths.stop + (split > 1)))
        if split == 1 or sizes.full_of_parts:
            yield from _attention(part, dtype, "full", lengths)
    for tokens in (2**n for n in sizes.rectangular):
        workload = Workload(model=model, seq=2 * tokens, dtype=dtype)
        for program in ring.build(workload, Mesh(ring=2), RingOptions(layout="zigzag")).programs:
            yield from (case for case in cases_of(program) if _is_rectangular(case.use))
    for tokens in (2**n for n in sizes.layer):
        workload = Workload(model=model, seq=tokens, dtype=dtype, scope="layer")
        program = single.build(workload, Mesh()).program(0)
        yield from (case for case in cases_of(program) if case.use.kernel not in ATTENTION_KERNELS)
    for tokens in (2**n for n in sizes.layer):
        yield from _of_steps(Workload(model=model, seq=tokens, dtype=dtype, scope="step"))
    for tokens in (2**n for n in sizes.around):
        workload = Workload(model=model, seq=2 * tokens, dtype=dtype)
        for program in _programs_of_two(workload):
            yield from (case for case in cases_of(program) if case.use.kernel not in ATTENTION_KERNELS)
    for kernel in get_args(AttentionName):
        yield from _attention(model, dtype, "causal", sizes.unfused, kernel)


def _programs_of_two(workload: Workload) -> Iterator[Program]:
    """Yield what one of two ranks does in schedules that between them have every kernel around attention."""
    for options in (RingOptions(), RingOptions(ring_backward="kv-at-hand"), RingOptions(ring_backward="queries")):
        yield from ring.build(workload, Mesh(ring=2), options).programs
    yield allgather.build(workload, Mesh(ring=2), allgather.AllGatherOptions(gradients="fp32")).program(1)
    alone = msgspec.structs.replace(workload, model=msgspec.structs.replace(workload.model, num_kv_heads=1))
    for one in (workload, alone):
        with contextlib.suppress(InputError):  # heads that cannot be halved: no copies of Ulysses to time
            yield ulysses.build(one, Mesh(ulysses=2)).program(1)


def _of_steps(workload: Workload) -> Iterator[KernelCase]:
    """Yield what a training step has beside its layers: embedding, loss, gradients packed and summed up, the optimiser;
    on one rank and on one of two, which has half of all states.
    """
    for name, ranks in (("single", 1), ("ring", 2)):
        workload = msgspec.structs.replace(workload, layers=1, seq=ranks * workload.seq)
        program = SCHEDULES[name].schedule(workload, Mesh(ring=ranks)).program(0)
        for case in cases_of(program):
            if case.use.kernel not in ATTENTION_KERNELS and case.use.hbm_bytes <= _MOST_BYTES:
                yield case


def _attention(
    model: ModelSpec, dtype: Dtype, mask: MaskName, exponents: Iterable[int], kernel: AttentionName = "flash"
) -> Iterator[KernelCase]:
    for n in exponents:
        workload = Workload(model=model, seq=2**n, mask=mask, dtype=dtype)
        yield from cases_of(single.build(workload, Mesh(), single.SingleOptions(kernel=kernel)).program(0))


def _is_rectangular(use: KernelUse) -> bool:
    return use.kernel in ATTENTION_KERNELS and use.shape[1] != use.shape[2]


def cases_of(program: Program) -> Iterator[KernelCase]:
    """Yield every kernel of a program; a Hold runs none."""
    for op in program.ops:
        if isinstance(op, Kernel) and not isinstance(op, Hold):
            yield KernelCase(kernel_use(op, program)._replace(into_slice=False), _alone(program, op))


def case_of(point: Point) -> KernelCase | None:
    """Return the case that a point was measured with; None except for fused attention and matrix products."""
    if point.kernel in ATTENTION_KERNELS and point.variant in {"causal", "full"}:
        _, tokens, _, heads, kv_heads, head_dim = point.shape
        model = _model(embed_dim=heads * head_dim, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim)
        mask: MaskName = "causal" if point.variant == "causal" else "full"
        cases = list(_attention(model, point.dtype, mask, [tokens.bit_length() - 1]))
    elif point.kernel == "gemm" and point.variant == "nn":
        tokens, fan_in, fan_out = point.shape
        b = ProgramBuilder(0, Workload(model=_model(embed_dim=fan_in), seq=tokens, dtype=point.dtype))
        x, out = (b.buffer("tokens", "bse", (1, tokens, width), point.dtype, "other") for width in (fan_in, fan_out))
        w = b.buffer("w", "io", (fan_in, fan_out), point.dtype, "other")
        b.add(Gemm(label="gemm", form="nn", a=x, b=w, out=out))
        cases = list(cases_of(b.build()))
    else:
        return None
    return next((case for case in cases if (case.use.kernel, case.use.shape) == (point.kernel, point.shape)), None)


def _model(embed_dim: int, num_heads: int = 1, num_kv_heads: int = 1, head_dim: int = 1) -> ModelSpec:
    heads: dict[str, Any] = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    return ModelSpec(name="calibration", embed_dim=embed_dim, num_layers=1, ffn_dim=1, vocab_size=1, **heads)


def _alone(program: Program, op: Kernel) -> Program:
    """Return a program with one op of another one, and with its buffers only."""
    used = sorted({view.buffer for view in (*op.reads, *op.writes)})
    alone = rebound(op, {buffer: new for new, buffer in enumerate(used)})
    buffers = tuple(program.buffers[buffer] for buffer in used)
    return Program(rank=0, buffers=buffers, ops=(alone,), inputs=(), outputs=())
