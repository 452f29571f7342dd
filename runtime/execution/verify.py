"""Compares the outputs of an executed schedule with a reference that one process computes in fp64."""

from __future__ import annotations

import msgspec
import torch

from runtime.execution.inputs import reference, shard_of
from runtime.execution.reference import relative_error
from sim.base.errors import InputError
from sim.schedule.ir.fragments import Port
from sim.schedule.model.scope import tensor_of
from sim.schedule.proof.check import Checked
from sim.words.workload import Dtype, Scope, Workload

MAX_SEQ: dict[Scope, int] = {"attention": 32768, "layer": 2048, "step": 2048}
"""Longest sequence to verify: the reference writes out all scores of a head, or (autograd) of all heads and layers."""

Outputs = list[torch.Tensor]
"""What one rank's output ports hold, in their order."""


BOUNDS: dict[Dtype, float] = {"fp64": 1e-12, "fp32": 2e-5, "bf16": 3e-2, "fp16": 5e-3}
"""Largest relative error per tensor that counts as exact; bf16 and fp16: a few units in the last place (2^-8, 2^-11) of
the largest element.
"""


def verifiable(workload: Workload) -> None:
    """Raise InputError for a sequence that is too long for the reference."""
    longest = MAX_SEQ[workload.scope]
    if workload.seq > longest:
        raise InputError(f"`seq` {workload.seq} is too long to verify at scope {workload.scope}: at most {longest}")


def output_errors(checked: Checked, outputs: list[Outputs]) -> dict[str, float]:
    """Return the largest deviation of each output over all ranks, relative to that tensor's largest magnitude."""
    workload = checked.schedule.header.workload
    header = checked.schedule.header
    members = header.members
    exact = reference(_of_all(workload, header.mesh.dp))
    worst: dict[str, float] = {}
    for program, held in zip(checked.schedule.programs, outputs, strict=True):
        for port, tensor in zip(program.outputs, held, strict=True):
            whole = exact[port.tensor, port.layer]
            own = workload.of_sequence(port.batch.start)
            value, part = _real(tensor, port, own), _part(whole, port, own, members)
            error = relative_error(value, part, whole) if part.numel() else 0.0
            worst[port.name] = max(worst.get(port.name, 0.0), error)
    return worst


def _of_all(workload: Workload, replicas: int) -> Workload:
    """Return the workload of the sequences of all replicas."""
    sequences = workload.sequences * replicas if workload.sequences else msgspec.UNSET
    return msgspec.structs.replace(workload, batch=workload.batch * replicas, sequences=sequences)


def _part(whole: torch.Tensor, port: Port, workload: Workload, members: int) -> torch.Tensor:
    """Return what a port holds of a global tensor, without padding."""
    if tensor_of(port.tensor, workload.model).of_weight:
        return shard_of(whole, port, workload, members)
    whole = whole[port.batch.start : port.batch.stop]
    tokens = torch.cat([torch.arange(*span) for span in port.tokens])
    tokens, heads = tokens[tokens < workload.real_seq], torch.arange(*port.heads)
    if tensor_of(port.tensor, workload.model).heads(workload.model) is None:
        return whole[:, tokens]
    return whole[:, heads][:, :, tokens] if port.tensor == "lse" else whole[:, tokens][:, :, heads]


def _real(held: torch.Tensor, port: Port, workload: Workload) -> torch.Tensor:
    """Return what a port holds, without padding."""
    if tensor_of(port.tensor, workload.model).of_weight or not workload.padding:
        return held
    keep = torch.cat([torch.arange(*span) for span in port.tokens]) < workload.real_seq
    return held[:, :, keep] if port.tensor == "lse" else held[:, keep]
