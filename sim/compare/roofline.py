"""Where kernels are on the roofline of their GPU: FLOPs a byte against the machine balance (Williams, Waterman
and Patterson, doi:10.1145/1498765.1498785).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, get_args

from sim.base.errors import InputError
from sim.engine.costs.cost import CostModel
from sim.engine.costs.measured import measured_cluster
from sim.schedule.derive.kernels import ATTENTION_KERNELS, KernelUse, unfused_use
from sim.schedule.ir.ops import Attend, AttendBackward
from sim.schedule.proof.check import Checked
from sim.setup import names
from sim.setup.answers.answer import grounds
from sim.setup.answers.rows import of_roofline
from sim.setup.answers.table import Table
from sim.setup.machine import equipped
from sim.setup.setup import Setup
from sim.words.options import AttentionName
from sim.words.profile import Profile
from sim.words.workload import Dtype
from topology.cluster import Cluster
from topology.specs import ClusterSpec

FLASH: AttentionName = "flash"


class Roof(NamedTuple):
    """What bounds kernels of one data type."""

    flops_per_s: float
    bytes_per_s: float

    @property
    def flops_per_byte(self) -> float:
        """The machine balance: kernels that do less for each byte of HBM are bound by memory."""
        return self.flops_per_s / self.bytes_per_s

    def least_s(self, flops: float, nbytes: float) -> float:
        """Return the least time of a kernel."""
        return max(flops / self.flops_per_s, nbytes / self.bytes_per_s)


def datasheet(spec: ClusterSpec, dtype: Dtype) -> Roof:
    """Return the roof of a GPU by its datasheet; raises InputError for a data type without a peak."""
    return Roof(Cluster(spec).peak_flops_per_s(0, dtype), spec.hbm.bytes_per_s)


def calibrated(profile: Profile, spec: ClusterSpec, dtype: Dtype) -> Roof | None:
    """Return the roof that kernels of a profile reach: the highest rate of its matrix products in short runs, and what
    kernels get of the memory's bandwidth. At the cluster's figures, as all that a profile says; None without products.
    """
    rates = [
        point.flops / point.median_s
        for point in profile.points
        if (point.kernel, point.dtype, point.condition) == ("gemm", dtype, "idle") and point.median_s > 0
    ]
    if not rates:
        return None
    scale = spec.gpu.peak_flops_per_s[dtype] / measured_cluster(profile).gpu.peak_flops_per_s[dtype]
    return Roof(max(rates) * scale, spec.hbm.bytes_per_s * profile.memory_efficiency)


def machine_balance(clusters: Sequence[str] | None = None, dtype: Dtype = "bf16") -> Table:
    """Return the machine balance of clusters, by default all of GPUs that ship: by datasheet and, where the profile
    that a cluster names has matrix products, as calibrated. Rates in FLOP/s and bytes/s, balance in FLOPs a byte.

    >>> for row in machine_balance(["dgx-a100", "hgx-h100"]):
    ...     print(row["cluster"], round(row["flops_per_byte"]), round(row["calibrated_flops_per_byte"]))
    dgx-a100 153 176
    hgx-h100 295 329
    """
    if clusters is None:
        clusters = [name for name in names.names("clusters") if names.cluster_spec(name).gpu.kind == "cuda"]
    rows: list[dict[str, Any]] = []
    for name in clusters:
        spec, profile = equipped(name, None)
        roof, reached = datasheet(spec, dtype), calibrated(profile, spec, dtype) if profile else None
        rows.append(
            {
                "cluster": name,
                "gpu": spec.gpu.name,
                "dtype": dtype,
                "peak_flops_per_s": roof.flops_per_s,
                "hbm_bytes_per_s": roof.bytes_per_s,
                "flops_per_byte": roof.flops_per_byte,
                "calibrated_flops_per_s": reached and reached.flops_per_s,
                "calibrated_bytes_per_s": reached and reached.bytes_per_s,
                "calibrated_flops_per_byte": reached and reached.flops_per_byte,
            }
        )
    return Table(rows)


def roofline(setup: Setup, lengths: Sequence[int | str]) -> Table:
    """Return every kernel of one layer on one GPU at some lengths: its FLOPs, its bytes of HBM and their quotient, the
    time that a simulation gives it, and the rate that this is. Attention comes as the three of ``attention_kernel``:
    flash, and the two whose scores pass through HBM (arXiv:2205.14135 §3.1).

    ``bound`` is what limits a kernel by the datasheet, ``share_of_roof`` the least time over the simulated one;
    ``note`` says what was extrapolated. Raises InputError for a length that cannot be read.

    >>> setup = Setup(model="llama3-8b", cluster="hgx-h100")
    >>> for row in roofline(setup, ["8K"]).rows[:3]:
    ...     print(row["kernel"], row["attention"], round(row["flops_per_byte"]), row["bound"])
    attention_forward flash 3257 compute
    attention_forward memory-efficient 63 memory
    attention_forward standard 63 memory
    """
    if not lengths:
        raise InputError("`lengths` is empty: give it some, such as 8K and 128K")
    alone = setup.replace(
        schedule="single", stack=None, scope="layer", layers=1, gpus=1, nodes=None, ulysses_degree=None,
        ring_degree=None, cp=None, dp_degree=1, pp_degree=1, tp_degree=1, one_device=False, global_batch=None,
    )  # fmt: skip
    rows = []
    for tokens in lengths:
        found = alone.replace(seq=tokens).resolved()
        cost = CostModel(Cluster(found.spec), found.profile)
        for attention, use in _uses(found.checked()):
            rows.append(_row(found.workload.seq, attention, use, cost, datasheet(found.spec, use.dtype)))
    order = {name: number for number, name in enumerate(ATTENTION_KERNELS)}
    rows.sort(key=lambda row: (row["seq"], order.get(row["kernel"], len(order))))
    balanced = datasheet(found.spec, found.workload.dtype).flops_per_byte
    longest = alone.replace(seq=rows[-1]["seq"]).predicted()
    return Table(rows).answering(of_roofline(found.spec.gpu.name, balanced, rows), grounds(longest))


def _uses(checked: Checked) -> Iterator[tuple[str, KernelUse]]:
    """Yield each kernel of a layer once, and attention also by the other implementations."""
    (program,), (uses,) = checked.schedule.programs, checked.kernels
    seen: set[tuple[str, KernelUse]] = set()
    for op, use in zip(program.ops, uses, strict=True):
        if use is None:
            continue
        if not isinstance(op, Attend | AttendBackward):
            found = [("", use)]
        else:
            size = (program.dtype(op.q), op.q.shape, op.k.shape[1], op.k.shape[2], op.band)
            others = [name for name in get_args(AttentionName) if name not in {op.kernel, FLASH}]
            backward = isinstance(op, AttendBackward)
            found = [(op.kernel, use), *((name, unfused_use(name, backward, *size)) for name in others)]
        for one in found:
            if one not in seen:
                seen.add(one)
                yield one


def _row(seq: int, attention: str, use: KernelUse, cost: CostModel, roof: Roof) -> dict[str, Any]:
    taken_s, note = cost.kernel_seconds(0, use)
    intensity = use.flops / use.hbm_bytes
    return {
        "seq": seq,
        "kernel": use.kernel,
        "attention": attention,
        "variant": use.variant,
        "shape": use.shape,
        "flops": use.flops,
        "hbm_bytes": use.hbm_bytes,
        "flops_per_byte": intensity,
        "bound": "compute" if intensity >= roof.flops_per_byte else "memory",
        "seconds": taken_s,
        "flops_per_s": use.flops / taken_s,
        "bytes_per_s": use.hbm_bytes / taken_s,
        "share_of_roof": roof.least_s(use.flops, use.hbm_bytes) / taken_s,
        "note": note,
    }
