"""What kernels hold of a GPU's memory beside their buffers, against every tensor that they make: played on meta
tensors, which have shapes and no values, with the kernels of CUDA.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from runtime.execution.ops.attention import AttentionKernel, Backward, Saved
from runtime.execution.ops.attention_choice import NAMES, described
from runtime.execution.ops.cuda_attention import AtenFlash, Cudnn, MemoryEfficient, Window
from runtime.execution.ops.dense import eager_norm, eager_norm_backward
from runtime.execution.ops.kernels import run_kernel
from runtime.execution.tensors import Rotations, Storage, ends_at
from sim.accounts.memory import lifetimes, walk
from sim.schedule.derive.workspace import (
    REPEATING,
    adopted,
    embed_backward_bytes,
    flash_backward_bytes,
    repeated_bytes,
    workspace_bytes,
)
from sim.schedule.ir.ops import (
    Attend,
    AttendBackward,
    EagerNorm,
    EagerNormBackward,
    EagerSwiGlu,
    EagerSwiGluBackward,
    ExpSum,
    Kernel,
    LargestLogit,
    LogitKernel,
    LogitLoss,
    TiledKernel,
    TiledMlp,
    TiledMlpBackward,
)
from sim.schedule.methods.catalog import SCHEDULES
from sim.schedule.methods.one_device import on_one_device
from sim.schedule.proof.check import Checked, check
from sim.words.mesh import Mesh
from sim.words.workload import DTYPE_BYTES, Dtype, QkNormName, Workload
from tests.helpers import VARIANTS, checked_or_refused, make_checked, make_model, slow_but
from tests.runtime.execution.test_kernels import llama_norm
from tests.schedule.model.test_step import make_step

META = torch.device("meta")
EAGER = (EagerNorm, EagerNormBackward, EagerSwiGlu, EagerSwiGluBackward)


class Allocations(TorchDispatchMode):
    """Counts the bytes of the tensors that ops make within it, and the most that were alive at a time."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: set[int] = set()
        self._now = 0
        self.peak_bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        given = {storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        for leaf in tree_leaves(made):
            if isinstance(leaf, torch.Tensor) and storage(leaf) not in given | self._alive:
                memory = leaf.untyped_storage()
                self._alive.add(storage(leaf))
                self._count(memory.nbytes())
                weakref.finalize(memory, self._gone, storage(leaf), memory.nbytes())
        return made

    def _count(self, nbytes: int) -> None:
        self._now += nbytes
        self.peak_bytes = max(self.peak_bytes, self._now)

    def _gone(self, number: int, nbytes: int) -> None:
        self._alive.discard(number)
        self._now -= nbytes


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


@pytest.fixture(autouse=True)
def _fused_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch's fused norms be ops of their own: on meta tensors the forward one falls apart into others."""

    def forward(x: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty_like(x), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)

    forward.default = torch.ops.aten._fused_rms_norm.default  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.ops.aten, "_fused_rms_norm", forward)


class Flash(AtenFlash):
    """torch's flash attention, with what its kernel allocates while it runs."""

    def _call_backward(self, saved: Saved, dout: torch.Tensor, window: Window) -> Backward:
        q, k = saved[:2]
        own = torch.empty(
            flash_backward_bytes("bf16" if q.itemsize == 2 else "fp32", q.shape, k.shape),
            device=META,
            dtype=torch.uint8,
        )
        grads = super()._call_backward(saved, dout, window)
        assert own.is_meta
        return grads


class Held(NamedTuple):
    """What a kernel holds beside the buffers of its op, in bytes."""

    op: Kernel
    seen: int
    said: int
    taken: int
    """Buffers that are not a result but hold it, and so are taken only after the kernel: what is said may be more."""


def held(checked: Checked, rotations: Rotations, attention: AttentionKernel = Flash()) -> list[Held]:
    """Play rank 0 of a schedule in the order of issue; return what each of its kernels held."""
    program = checked.schedule.program(0)
    memory, found = Storage(program, META, rotations=rotations), []
    for port in program.inputs:
        memory.write(port.view)
    lives = lifetimes(program, checked.dependencies[0])
    ends = ends_at(lives, len(program.ops))
    for index, op in enumerate(program.ops):
        memory.drop(ends[index])
        before = memory.in_use_bytes
        if not isinstance(op, Kernel):
            for view in op.writes:
                memory.write(view)
            continue
        with Allocations() as seen:
            run_kernel(op, memory, attention)
        beside = before + seen.peak_bytes - memory.in_use_bytes
        parts = [view for view in op.writes if view.shape != program.buffers[view.buffer].shape]
        taken = memory.in_use_bytes - before if parts else 0
        twice = sum(program.buffers[one].nbytes for one in adopted(op, program) if lives[one].first < index)
        found.append(Held(op, beside, workspace_bytes(op, program) + twice, taken))
    return found


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", slow_but({"bf16"}, ["bf16", "fp32"]))
@pytest.mark.parametrize(
    "name",
    slow_but(
        {"single", "zigzag", "fpdt"},
        [name for name, variant in VARIANTS.items() if "kernel" not in variant.options],
    ),
)
def test_every_kernel_holds_what_is_said(name: str, dtype: Dtype) -> None:
    """To the byte, but for log-sum-exps, which attention of parts of a buffer gives back early or holds twice."""
    for ranks in (1, 4):
        workload = Workload(model=make_model(8, 4, head_dim=64), seq=64, dtype=dtype, scope="layer", layers=1, batch=2)
        checked = checked_or_refused(name, workload, ranks)
        if checked is None:
            continue
        folded = check(on_one_device(checked)) if ranks > 1 else checked
        rotations: Rotations = {}
        held(folded, rotations)  # their tables stay
        for op, seen, said, taken in held(folded, rotations):
            lse = folded.schedule.program(0).nbytes(op.lse) if isinstance(op, Attend | AttendBackward) else 0
            assert -1.25 * lse <= said - seen <= 1.25 * lse + taken, op.label


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("qk_norm", ["head", "all"])
@pytest.mark.parametrize("rank", [msgspec.UNSET, 4], ids=["trained", "frozen"])
def test_eager_modules_hold_what_is_said(rank: Any, qk_norm: QkNormName, dtype: Dtype) -> None:
    """To the byte, and what autograd of Llama's norm holds: at most 5 tensors in fp32 beside its inputs."""
    model = msgspec.structs.replace(make_model(8, 4, head_dim=64), qk_norm=qk_norm, lora_rank=rank)
    workload = Workload(model=model, seq=64, dtype=dtype, scope="layer", layers=1, batch=2)
    checked = make_step("single", 1, workload, modules="eager")
    found = [one for one in held(checked, {}) if isinstance(one.op, EAGER)]
    assert {type(one.op) for one in found} >= {EagerNorm, EagerNormBackward, EagerSwiGlu, EagerSwiGluBackward}
    assert [(one.op.label, one.seen) for one in found] == [(one.op.label, one.said) for one in found]


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_loss_of_shares_by_torch_holds_what_is_said(dtype: Dtype) -> None:
    """Of 128 tokens of 32 logits: in fp32 a copy, three and four of these (torch's loss_parallel), and some numbers of
    each token.
    """
    workload = Workload(model=make_model(8, 4, head_dim=64), seq=64, dtype=dtype, layers=1, scope="step", batch=2)
    options = dataclasses.replace(SCHEDULES["single"].options, loss="torch")
    checked = check(SCHEDULES["single"].schedule(workload, Mesh(tp=4), options))
    found = {type(one.op): one for one in held(checked, {}) if isinstance(one.op, LogitKernel)}
    of_all = 128 * 32 * 4
    assert {kind: one.said // of_all for kind, one in found.items()} == {LargestLogit: 1, ExpSum: 3, LogitLoss: 4}
    for one in found.values():
        assert abs(one.seen - one.said) <= 128 * 32, one.op.label


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_autograd_of_an_eager_norm_holds_as_much(dtype: torch.dtype) -> None:
    """Of 64 tokens of 512: as Hugging Face's module has it, backward beside what forward has kept."""
    x, dout = (torch.empty(2, 32, 512, dtype=dtype, device=META) for _ in range(2))
    weight = torch.empty(512, dtype=dtype, device=META, requires_grad=True)
    out = llama_norm(x.requires_grad_(), weight)
    with Allocations() as by_autograd:
        torch.autograd.grad(out, (x, weight), dout)
    made = eager_norm(x.detach(), weight.detach(), 1e-5)
    with Allocations() as by_hand:
        eager_norm_backward(made[3], weight.detach(), made[1], made[2], dout)
    rows = 3 * 64 * 4  # statistics, which autograd frees as late
    assert abs(by_autograd.peak_bytes - by_hand.peak_bytes) <= rows


@pytest.mark.sweep
@pytest.mark.parametrize("kernel", [Cudnn(), MemoryEfficient()], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("kv_heads", [2, 8])
def test_kernels_that_repeat_keys_hold_them(kv_heads: int, kernel: AttentionKernel) -> None:
    """To about one log-sum-exp, but for what the kernel itself allocates: delta, and dq in fp32, as flash-attention."""
    workload = Workload(model=make_model(8, kv_heads, head_dim=64), seq=256, dtype="bf16", scope="layer", layers=1)
    for name in ("single", "ulysses"):
        checked = make_checked(name, workload, 1 if name == "single" else 2)
        program, rotations = checked.schedule.program(0), dict[Any, Any]()
        held(checked, rotations, kernel)  # their tables stay
        attended = [one for one in held(checked, rotations, kernel) if isinstance(one.op, Attend | AttendBackward)]
        assert len(attended) >= 2
        for op, seen, said, _ in attended:
            assert isinstance(op, Attend | AttendBackward)
            copies = repeated_bytes(op, program)
            assert copies == (2 * op.k.shape[1] * op.q.shape[2] * 64 * 2 if kv_heads < 8 else 0)
            own = flash_backward_bytes("bf16", op.q.shape, op.q.shape) if isinstance(op, AttendBackward) else 0
            assert abs(said + copies - own - seen) <= 1.25 * program.nbytes(op.lse), op.label
        walked = [walk(program, checked.dependencies[0], attention) for attention in ("", kernel.name)]
        more = [most - least for least, most in zip(*(one.in_use for one in walked), strict=True)]
        assert more == [repeated_bytes(op, program) for op in program.ops]
        assert kernel.name in REPEATING


def test_kernels_that_repeat_keys_are_named() -> None:
    assert {name for name in NAMES if described(name) != name} == set(REPEATING)


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", slow_but({"bf16"}, ["bf16", "fp32"]))
def test_kernels_of_a_step_hold_what_is_said(dtype: Dtype) -> None:
    """To the byte: embedding, loss in blocks of rows and of all at once, packing and the optimiser, adapters, too."""
    plain = make_model(8, 4, head_dim=64)
    adapted = msgspec.structs.replace(plain, lora_rank=4, lora_alpha=2.0)
    for ranks, seq, loss, model in (
        (1, 2048, "whole", plain), (2, 64, "whole", plain), (1, 2048, "torch", plain), (2, 64, "whole", adapted)
    ):  # fmt: skip
        workload = Workload(model=model, seq=seq, dtype=dtype, scope="step", layers=1)
        checked = make_step("zigzag", ranks, workload, loss=loss)
        folded = check(on_one_device(checked)) if ranks > 1 else checked
        rotations: Rotations = {}
        held(folded, rotations)  # their tables stay
        for op, seen, said, _ in held(folded, rotations):
            if not isinstance(op, Attend | AttendBackward):
                assert seen == said, op.label


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(("seq", "batch", "rows"), [(245, 2, 123), (130, 1, 44)])
def test_tiles_of_an_mlp_hold_what_is_said(seq: int, batch: int, rows: int, dtype: Dtype) -> None:
    """To the byte: of several tiles, of which the last is smaller. A backward pass holds five tensors of a tile as wide
    as the feed-forward dimension (64), or four and the gradient of a weight of 64 x 64.
    """
    workload = Workload(model=make_model(4, 4), seq=seq, batch=batch, dtype=dtype, scope="step", layers=1)
    checked = make_step("single", 1, workload, mlp="tiled", checkpoint="none")
    loops = [found for found in held(checked, {}) if isinstance(found.op, TiledKernel)]
    assert [type(found.op) for found in loops] == [TiledMlp, TiledMlpBackward]
    assert [(found.seen, found.said) for found in loops] == [(found.said, found.said) for found in loops]
    wide = DTYPE_BYTES[dtype]
    assert loops[0].said == 3 * rows * 64 * wide
    assert loops[1].said == max(5 * rows * 64, 4 * rows * 64 + 64 * 64) * wide


def test_what_a_gradient_of_an_embedding_allocates_by_hand() -> None:
    """10240 tokens of 8 in bf16: of a table of 1000 rows 2024 sums in fp32, of one of 50000 rows 11264."""
    integers, sums = 8 * 3 * 10240, 8 * 4
    assert embed_backward_bytes("bf16", (2, 5120, 8), 1000) == integers + 8 * (2 * 1000 + 2024) + 2024 * sums
    assert embed_backward_bytes("bf16", (1, 10240, 8), 50000) == integers + 8 * (2 * 10240 + 11264) + 11264 * sums
    assert embed_backward_bytes("bf16", (1, 3072, 8), 1000) == 0


def test_what_flash_attention_allocates_by_hand() -> None:
    """1024 queries of 8 heads of 64 and 512 keys of 2: delta in fp32; of bf16 dq in fp32, too; dk and dv of 8 heads."""
    shapes = (1, 1024, 8, 64), (1, 512, 2, 64)
    delta = 8 * 1024 * 4
    assert flash_backward_bytes("bf16", *shapes) == delta + 1024 * 8 * 64 * 4 + 2 * 512 * 8 * 64 * 2
    assert flash_backward_bytes("fp32", *shapes) == delta + 2 * 512 * 8 * 64 * 4
    assert flash_backward_bytes("bf16", shapes[0], (1, 512, 8, 64)) == delta + 1024 * 8 * 64 * 4


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("name", ["standard attention", "memory-efficient attention"])
def test_unfused_attention_holds_about_what_is_said(name: str, dtype: Dtype) -> None:
    """Where scores are most of it."""
    workload = Workload(model=make_model(8, 4, head_dim=64), seq=4096, dtype=dtype)
    for op, seen, said, _ in held(make_checked(name, workload, 1), {}):
        assert abs(seen - said) <= 0.03 * said + 2**24, op.label
