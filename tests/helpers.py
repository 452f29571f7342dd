"""Small models, workloads and toy machines that tests share."""

from __future__ import annotations

from typing import Any

import msgspec

from sim.schedule.catalog import SCHEDULES
from sim.schedule.check import Checked, check
from sim.workload import ModelSpec, Parallel, Workload
from topology.specs import ClusterSpec, GpuSpec, HbmSpec, LinkSpec


def make_model(heads: int = 8, kv_heads: int = 4, head_dim: int = 16, dtype: str = "fp32") -> ModelSpec:
    fields: dict[str, Any] = {
        "name": f"test{heads}:{kv_heads}",
        "embed_dim": heads * head_dim,
        "num_layers": 2,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "ffn_dim": 64,
        "vocab_size": 128,
        "dtype": dtype,
    }
    return ModelSpec(**fields)


def make_parallel(name: str, ranks: int) -> Parallel:
    return Parallel(ulysses_degree=ranks) if name == "ulysses" else Parallel(ring_degree=ranks)


def make_checked(name: str, workload: Workload, ranks: int) -> Checked:
    return check(SCHEDULES[name].build(workload, make_parallel(name, ranks)))


def make_cluster_spec(gpus: int = 2, **changes: Any) -> ClusterSpec:
    """One node of toy GPUs: 1 TFLOP/s, memory that never limits, links of 1 GB/s, and nothing that delays."""
    fields: dict[str, Any] = {
        "name": "toy",
        "gpus_per_node": gpus,
        "gpu": GpuSpec(
            name="toy GPU",
            sms=100,
            peak_flops_per_s=dict.fromkeys(("fp64", "fp32", "bf16", "fp16"), 1e12),
            launch_s=0.0,
        ),
        "hbm": HbmSpec(capacity_bytes=2**40, bytes_per_s=1e25),
        "nvlink": LinkSpec(bytes_per_s=1e9, latency_s=0.0),
    }
    return msgspec.structs.replace(ClusterSpec(**fields), **changes)
