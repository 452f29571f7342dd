"""A training step from token ids to gradients: exact for every schedule, and what is wrong at its ends is found."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from runtime.execution.verify import BOUNDS, output_errors
from runtime.execution.virtual import execute_virtual
from sim.errors import InputError
from sim.schedule.ir.ops import CrossEntropy, Embed, EmbedBackward, Op, RmsNorm
from sim.schedule.ir.program import Port, Schedule
from sim.schedule.methods.catalog import SCHEDULES
from sim.schedule.model.layer import gemm_flops
from sim.workload import Workload
from tests.helpers import make_checked, make_model
from tests.schedule.test_check_catches import refuses


def step(**fields: Any) -> Workload:
    options: dict[str, Any] = {"model": make_model(8, 4), "seq": 32, "scope": "step", "layers": 2, "dtype": "fp64"}
    return Workload(**(options | fields))


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_proved_and_exact(name: str) -> None:
    """Loss and all gradients equal autograd of the textbook formulas, in random orders."""
    is_exact(name, 1 if name == "single" else 4, step(batch=2))


@pytest.mark.parametrize(
    "fields", [{"layers": 1}, {"padding": 5}, {"dtype": "fp32"}, {"dtype": "bf16"}, {"mask": "full"}, {"window": 7}]
)
def test_other_steps(fields: dict[str, Any]) -> None:
    is_exact("zigzag", 2, step(**fields))


def is_exact(name: str, ranks: int, workload: Workload) -> None:
    checked = make_checked(name, workload, ranks)
    errors = output_errors(checked, execute_virtual(checked, torch.device("cpu"), order_seed=1))
    assert errors.keys() >= {f"loss {workload.layers}", "dw_embed", "dnorm1", f"dw_head {workload.layers}"}
    assert max(errors.values()) <= BOUNDS[workload.dtype]


def test_flops_by_hand() -> None:
    """The head's 2 FLOPs a token and weight three times: 128 x 64 weights more than the layers have."""
    layers = msgspec.structs.replace(step(), scope="layer")
    model = layers.model
    assert gemm_flops(step()) - gemm_flops(layers) == 6 * model.embed_dim * model.vocab_size * 32


def replaced(schedule: Schedule, kind: type[Op], **changes: Any) -> Schedule:
    """Return a schedule with other values of some fields of rank 0's ops of a kind."""

    def program(rank: int) -> Any:
        found = schedule.program(rank)
        if rank:
            return found
        ops = [msgspec.structs.replace(op, **changes) if isinstance(op, kind) else op for op in found.ops]
        return found.replace(ops=tuple(ops))

    return Schedule(schedule.header, program)


def with_port(schedule: Schedule, tensor: str, **changes: Any) -> Schedule:
    """Return a schedule whose input of a name says something else."""

    def changed(port: Port) -> Port:
        return msgspec.structs.replace(port, **changes) if port.tensor == tensor else port

    def program(rank: int) -> Any:
        found = schedule.program(rank)
        return found.replace(inputs=tuple(map(changed, found.inputs)))

    return Schedule(schedule.header, program)


def test_labels_and_ids_of_other_tokens() -> None:
    schedule = make_checked("ring", step(), 2).schedule
    for tensor in ("labels", "ids"):
        tokens = {port.tensor: port.tokens for port in schedule.program(1).inputs}[tensor]
        refuses(with_port(schedule, tensor, tokens=tokens), "with other tokens, labels|is rotated by positions")


def test_a_loss_that_is_averaged_over_others() -> None:
    """Of 2 sequences of 32 tokens, of which the last ones have no next token to predict."""
    schedule = make_checked("ring", step(batch=2), 2).schedule
    refuses(replaced(schedule, CrossEntropy, count=64), "has count 64: the number of labels is 62")


def test_ids_and_labels_change_places() -> None:
    schedule = make_checked("ring", step(), 2).schedule
    ids, labels = (
        next(port.view for port in schedule.program(0).inputs if port.tensor == name) for name in ("ids", "labels")
    )
    refuses(replaced(schedule, CrossEntropy, labels=ids), "CrossEntropy of logits of layer 2, ids of layer 0")
    refuses(replaced(schedule, Embed, ids=labels), "Embed of w_embed of layer 0, labels of layer 2")
    refuses(replaced(schedule, EmbedBackward, ids=labels), "EmbedBackward of dx of layer 0, labels of layer 2")


def test_integers_are_looked_up_only() -> None:
    schedule = make_checked("ring", step(), 2).schedule
    ids = next(port.view for port in schedule.program(0).inputs if port.tensor == "ids")
    rstd = next(op.rstd for op in schedule.program(0).ops if isinstance(op, RmsNorm))
    refuses(replaced(schedule, Embed, ids=rstd), "takes fp64 for ids: beside fp64 allowed is int64")
    refuses(replaced(schedule, RmsNorm, rstd=ids), "computes with integers, of buffer 'ids'|writes to the input")


def test_what_is_no_step() -> None:
    with pytest.raises(InputError, match="a training step has both; set `passes` both"):
        step(passes="forward")
    with pytest.raises(InputError, match="no next one to predict"):
        step(seq=1)
