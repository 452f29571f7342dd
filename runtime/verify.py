"""Holds the outputs of an executed schedule against attention computed by one process in fp64."""

from __future__ import annotations

import torch

from runtime.inputs import reference
from runtime.reference import relative_error
from sim.errors import InputError
from sim.schedule.check import Checked
from sim.workload import Workload

MAX_SEQ = 32768
"""Longest sequence to verify: the reference writes out all scores of a head."""

Outputs = dict[str, torch.Tensor]
"""What one rank's output ports hold, by tensor."""


def verifiable(workload: Workload) -> None:
    """Raise InputError for a sequence that the reference is too slow for."""
    if workload.seq > MAX_SEQ:
        raise InputError(f"--seq {workload.seq} is too long to verify: at most {MAX_SEQ}")


def output_errors(checked: Checked, outputs: list[Outputs]) -> dict[str, float]:
    """Return the largest deviation of each output over all ranks, relative to that tensor's largest magnitude."""
    exact = reference(checked.schedule.header.workload)._asdict()
    worst: dict[str, float] = {}
    for program, held in zip(checked.schedule.programs, outputs, strict=True):
        for port in program.outputs:
            tokens = torch.cat([torch.arange(*span) for span in port.tokens])
            heads = torch.arange(*port.heads)
            whole = exact[port.tensor]
            part = whole[:, heads][:, :, tokens] if port.tensor == "lse" else whole[:, tokens][:, :, heads]
            error = relative_error(held[port.tensor], part, whole)
            worst[port.tensor] = max(worst.get(port.tensor, 0.0), error)
    return worst
