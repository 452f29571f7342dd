"""How evenly ranks attend when plans are executed, beside what was predicted."""

from __future__ import annotations

import math
from typing import Any

from experiments.evidence.machine import require_machine, require_torch
from sim.balance.balance import Balance
from sim.batches.statistics import max_over_mean
from sim.engine.costs.cost import CostModel
from sim.schedule.derive.kernels import kernel_use
from sim.schedule.ir.ops import Attend, AttendBackward
from sim.setup.prediction import Prediction


def executed_skews(found: Balance, repeats: int = 5) -> list[dict[str, Any]]:
    """Return a row for each planner that was simulated: the attention seconds of the slowest rank over the mean, as
    predicted and as executed here (``runtime.execution.virtual``), of ranks one at a time, so that they do not share
    the machine; ``off`` is the difference. Raises InputError without torch, and on another machine than the cluster's.
    """
    require_torch()
    import torch

    from runtime.execution.virtual import attention_seconds

    rows = []
    for one in found.found:
        if one.played is None:
            continue
        spec = one.played.cluster.spec
        require_machine(spec, 1, (one.played.checked.schedule.header.workload.dtype,))
        device = torch.device("cpu" if spec.gpu.kind == "cpu" else "cuda")
        executed_s = attention_seconds(one.played.checked, device, repeats)
        simulated, executed = max_over_mean(alone_s(one.played)), max_over_mean(executed_s)
        rows.append(
            {"planner": one.planned.planner, "simulated": simulated, "executed": executed, "off": simulated - executed,
             "slowest_s": max(executed_s)}
        )  # fmt: skip
    return rows


def alone_s(played: Prediction) -> list[float]:
    """Return per rank the predicted seconds of its attention kernels, with the machine for each alone."""
    costs = CostModel(played.cluster, played.profile)
    return [
        math.fsum(
            costs.kernel_seconds(program.rank, kernel_use(op, program))[0]
            for op in program.ops
            if isinstance(op, Attend | AttendBackward)
        )
        for program in played.checked.schedule.programs
    ]
