"""A training step from token ids to updated weights: exact for every schedule, and what is wrong in it is found."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from runtime.execution.verify import BOUNDS, output_errors
from runtime.execution.virtual import execute_virtual
from sim.accounts.memory import walks
from sim.base.errors import InputError
from sim.schedule.ir.fragments import Fragment, Port
from sim.schedule.ir.masks import Span
from sim.schedule.ir.ops import (
    AdamW,
    AllGather,
    Copy,
    CrossEntropy,
    Embed,
    EmbedBackward,
    Op,
    Pack,
    ReduceScatter,
    RmsNorm,
    SquareSum,
    Unpack,
    Zero,
)
from sim.schedule.ir.program import Schedule
from sim.schedule.ir.views import Split, View
from sim.schedule.methods.catalog import SCHEDULES
from sim.schedule.methods.one_device import on_one_device
from sim.schedule.model.layer import gemm_flops
from sim.schedule.model.scope import HEADED, units
from sim.schedule.proof.check import Checked, check
from sim.schedule.proof.remembered import check_once
from sim.schedule.proof.supersteps import Supersteps
from sim.words.workload import Workload
from tests.helpers import make_checked, make_model, slow_but, sweep_but
from tests.schedule.proof.test_check_catches import refuses


def step(**fields: Any) -> Workload:
    """Of a vocabulary that is large enough for a loss in chunks to have four."""
    model = msgspec.structs.replace(make_model(8, 4), vocab_size=512)
    options: dict[str, Any] = {"model": model, "seq": 32, "scope": "step", "layers": 2, "dtype": "fp64"}
    return Workload(**(options | fields))


@pytest.mark.sweep
@pytest.mark.parametrize("name", slow_but({"zigzag", "allgather", "fpdt"}, SCHEDULES))
def test_every_schedule_is_proved_and_exact(name: str) -> None:
    """Loss, weights and moments equal autograd of the textbook formulas and torch's AdamW, in random orders."""
    is_exact(name, 1 if name == "single" else 4, step(batch=2))


@pytest.mark.sweep
@pytest.mark.parametrize(
    "fields", [{"layers": 1}, {"padding": 5}, {"dtype": "fp32"}, {"dtype": "bf16"}, {"mask": "full"}, {"window": 7}]
)
def test_other_steps(fields: dict[str, Any]) -> None:
    is_exact("zigzag", 2, step(**fields))


STACKS: dict[str, dict[str, Any]] = {
    "nothing": {"zero_stage": 0, "checkpoint": "none"},
    "optimiser sharded": {"zero_stage": 1},
    "gradients sharded": {"zero_stage": 2, "reduce": "model"},
    "weights sharded, everything kept": {"checkpoint": "none"},
    "two gathered ahead": {"prefetch": 2, "reduce": "model"},
    "none gathered ahead": {"prefetch": 0},
    "a communicator for gradients": {"weight_communicators": "two"},
    "chunked loss": {"loss": "chunked"},
    "chunked loss, weights kept": {"loss": "chunked", "zero_stage": 0},
    "inputs of layers on the host": {"activations": "host"},
    "attention kept": {"checkpoint": "attention"},
    "a list kept, on the host and back in the way": {"checkpoint": "x+out+h2", "activations": "save-on-cpu"},
    "mlp in tiles": {"mlp": "tiled"},
    "mlp in tiles, everything kept": {"mlp": "mini", "checkpoint": "none", "activations": "host"},
    "optimiser on the host": {"optimiser": "host"},
    "states in the model's type": {"optimiser_states": "model"},
    "micro-batches": {"micro_batches": 2, "reduce": "model"},
    "micro-batches, one sum": {"micro_batches": 3, "sync": "last"},
    "micro-batches, one sum to the host": {"micro_batches": 2, "sync": "last", "optimiser": "host", "zero_stage": 2},
    "as nanotron, nothing sharded": {
        "zero_stage": 0, "checkpoint": "none", "loss": "subtracted", "micro_batches": 2, "sync": "last",
        "accumulate": "in-place", "bucket_mb": 25, "host_waits": "micro-batch",
    },
    "as nanotron, optimiser sharded": {
        "zero_stage": 1, "checkpoint": "none", "loss": "subtracted", "micro_batches": 2, "accumulate": "in-place",
        "reduce_to": "all", "gather": "all", "host_waits": "micro-batch",
    },
    "micro-batches, weights kept": {"micro_batches": 3, "zero_stage": 0, "activations": "host"},
}  # fmt: skip


HELD = {
    "nothing",
    "gradients sharded",
    "weights sharded, everything kept",
    "two gathered ahead",
    "a communicator for gradients",
    "chunked loss, weights kept",
    "a list kept, on the host and back in the way",
    "mlp in tiles, everything kept",
    "optimiser on the host",
    "micro-batches, one sum to the host",
    "as nanotron, optimiser sharded",
}
"""Stacks with each technique once."""


def enough(stack: str, **fields: Any) -> Workload:
    """Return a step of as many sequences as a stack has micro-batches."""
    return step(batch=STACKS[stack].get("micro_batches", 1), **fields)


@pytest.mark.sweep
@pytest.mark.parametrize("stack", slow_but(HELD, STACKS))
@pytest.mark.parametrize("dtype", slow_but({"fp64"}, ["fp64", "bf16"]))
def test_every_technique(stack: str, dtype: str) -> None:
    is_exact("zigzag", 2, enough(stack, layers=3, dtype=dtype), **STACKS[stack])


@pytest.mark.parametrize("dtype", sweep_but({"fp64"}, ["fp64", "bf16"]))
def test_a_chunked_loss_of_several_sequences(dtype: str) -> None:
    """A chunk is some tokens of each, so it lies in as many pieces."""
    checked = is_exact("zigzag", 2, step(batch=3, dtype=dtype), loss="chunked")
    ops = checked.schedule.program(0).ops
    assert {op.logits.shape[:2] for op in ops if isinstance(op, CrossEntropy)} == {(3, 4)}


@pytest.mark.sweep
def test_a_loss_that_is_not_fused_holds_logits_twice() -> None:
    """In bf16 the logits and a copy in fp32, in which the gradient is made; in fp32 there is none."""
    checked = is_exact("zigzag", 2, step(dtype="bf16"), loss="unfused", rotary_table=True)
    (op,) = [op for op in checked.schedule.program(0).ops if isinstance(op, CrossEntropy)]
    assert checked.schedule.program(0).dtype(op.logits) == "fp32"
    fused, unfused = (make_step("zigzag", 2, step(dtype="fp32"), loss=loss) for loss in ("whole", "unfused"))
    assert fused.schedule.programs == unfused.schedule.programs


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_loss_that_subtracts_holds_logits_once_more_meanwhile(dtype: str) -> None:
    """In fp32, and not between the passes: there the gradient alone is left."""
    unfused, other = (is_exact("zigzag", 2, step(dtype=dtype), loss=loss) for loss in ("unfused", "subtracted"))
    program, plain = other.schedule.program(0), unfused.schedule.program(0)
    (at,) = [number for number, op in enumerate(program.ops) if isinstance(op, CrossEntropy)]
    more = np.subtract(walks(other)[0].in_use, walks(unfused)[0].in_use)
    assert more[at] == 4 * math.prod(program.ops[at].logits.shape)
    assert np.flatnonzero(more).tolist() == [at]
    assert [one for one in program.ops if not isinstance(one, CrossEntropy)] == [
        one for one in plain.ops if not isinstance(one, CrossEntropy)
    ]


@pytest.mark.sweep
@pytest.mark.parametrize("stage", slow_but({0, 3}, [0, 1, 2, 3]))
def test_replicas(stage: int) -> None:
    """Shards lie within a replica, and their gradients are summed over all; or each replica has shards of its own."""
    for shards in ("replica", "all"):
        is_exact("ulysses", 4, step(), dp=2, zero_stage=stage, shards=shards)


@pytest.mark.sweep
def test_weights_and_gradients_go_through_one_communicator() -> None:
    """So in backward a layer's sum stands between the gathers of the two layers before it, as FSDP2 issues them; with
    two communicators each has a stream of its own.
    """
    fields = step(layers=4)
    one, two = (make_step("ring", 2, fields, weight_communicators=number).schedule for number in ("one", "two"))
    ops = [op for op in one.program(0).ops if isinstance(op, AllGather | ReduceScatter)]
    assert {op.communicator for op in ops} == {"weights"}
    layers = [type(op) for op in ops if op.label.endswith("weights")]
    assert layers == [*[AllGather] * 4, AllGather, *[AllGather, ReduceScatter] * 3, ReduceScatter]
    by_kind = {type(op): op.communicator for op in two.program(0).ops if isinstance(op, AllGather | ReduceScatter)}
    assert by_kind == {AllGather: "weights", ReduceScatter: "gradients"}
    assert make_step("ring", 2, fields, zero_stage=0).schedule.header.communicators[-1].name == "gradients"


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("layers", "prefetch"),
    [pytest.param(1, 2, marks=pytest.mark.slow), (2, 3), pytest.param(3, 9, marks=pytest.mark.slow)],
)
def test_no_more_is_gathered_ahead_than_there_are_layers(layers: int, prefetch: int) -> None:
    """Weights of a layer that forward still uses would be those that backward asks for."""
    few, many = (is_exact("ring", 2, step(layers=layers), prefetch=ahead) for ahead in (layers, prefetch))
    assert few.schedule.program(0) == many.schedule.program(0)


@pytest.mark.sweep
def test_ranks_without_context_parallelism_share_weights() -> None:
    """FSDP alone: each of four ranks has a sequence of its own, and a quarter of all states."""
    checked = is_exact("single", 4, step(), dp=4)
    (rows,) = {port.tokens for port in checked.schedule.program(3).inputs if port.tensor == "first moments of head"}
    (whole,) = HEADED.flat.rows(checked.schedule.header.workload.model)
    assert rows == (Span(whole.size * 3 // 4, whole.size),)


@pytest.mark.sweep
def test_all_ranks_on_one_device() -> None:
    """Whose copies sum up squares of all units at once."""
    folded = check(on_one_device(make_step("zigzag", 2, step())))
    errors = output_errors(folded, execute_virtual(folded, torch.device("cpu")))
    assert max(errors.values()) <= BOUNDS["fp64"]


def is_exact(name: str, ranks: int, workload: Workload, dp: int = 1, **options: Any) -> Checked:
    checked = make_step(name, ranks, workload, dp, **options)
    last = workload.layers
    updates = {"new embedding parameters", "first moments of weights", f"new head parameters {last}"}
    assert errors_of(checked).keys() >= {f"loss {last}", *(name.replace("first", "new first") for name in updates)}
    return checked


def errors_of(checked: Checked) -> dict[str, float]:
    """Return the errors of all outputs on the virtual cluster, having asserted that none is too large."""
    errors = output_errors(checked, execute_virtual(checked, torch.device("cpu"), order_seed=1))
    assert max(errors.values()) <= BOUNDS[checked.schedule.header.workload.dtype]
    return errors


def make_step(name: str, ranks: int, workload: Workload, dp: int = 1, **options: Any) -> Checked:
    """Return a proved step; ``ranks`` in all."""
    entry = SCHEDULES[name]
    mesh = msgspec.structs.replace(entry.mesh(ranks // dp, workload.model), dp=dp)
    return check_once(entry.schedule(workload, mesh, dataclasses.replace(entry.options, **options)))


def test_a_chunk_of_the_loss_that_is_lost() -> None:
    schedule = make_step("ring", 2, step(), loss="chunked").schedule
    assert [op.label for op in schedule.program(0).ops].count("loss") == 4

    def program(rank: int) -> Any:
        found = schedule.program(rank)
        at = [number for number, op in enumerate(found.ops) if op.label == "gradient dw_head"][-1]
        return found.replace(ops=(*found.ops[:at], *found.ops[at + 1 :]))

    refuses(Schedule(schedule.header, program), "packs gradients that are sums over different tokens")


@pytest.mark.sweep
def test_it_is_proved_by_its_calls() -> None:
    """Layers in the middle are played once for all, forward, again and backward, and so are updates, which ask of the
    squares of all layers whether they are there.
    """
    found = [Supersteps(make_step("ring", 2, step(layers=layers)).schedule) for layers in (6, 10)]
    for supersteps in found:
        supersteps.play()
    few, many = (supersteps.num_played for supersteps in found)
    assert many == few


def test_each_pass_of_a_layer_is_proved_once() -> None:
    """Whatever the buffers of its weights held before, and whether its input is an embedding or a layer's output: each
    large call is of one form and is played once, in six layers forward, again and backward.
    """
    supersteps = Supersteps(make_step("ulysses", 2, step(layers=6)).schedule)
    large = [kind for kind in supersteps.kinds if len(kind.fragments[0].ops) > 20]
    assert sum(supersteps.kinds[kind] for kind in large) >= 3 * 6 > len(large)
    played: Counter[tuple[Fragment, ...]] = Counter()
    play = supersteps._play
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supersteps, "_play", lambda kind, *rest: played.update([kind]) or play(kind, *rest))
        supersteps.play()
    assert {played[kind] for kind in large} == {1}


@pytest.mark.sweep
def test_what_is_held_by_hand() -> None:
    """When a step begins, of each weight on 2 ranks: fp32 weights and moments take 12 bytes, halved where they are
    sharded; below stage 3 bf16 weights take 2 more.
    """
    workload = step(dtype="bf16", layers=2)
    held = {}
    for stage in (0, 1, 3):
        program = make_step("ring", 2, workload, zero_stage=stage).schedule.program(0)
        inputs = {port.view.buffer for port in program.inputs}
        held[stage] = Counter[str]()
        for number in inputs:
            held[stage][program.buffers[number].category] += program.buffers[number].nbytes
    total = sum(math.prod(unit.flat.shape(workload.model)) for unit in units(workload))
    assert held[0] == {"parameter": (4 + 2) * total, "optimiser": 8 * total, "saved": held[0]["saved"]}
    assert held[1] == {"parameter": (2 + 2) * total, "optimiser": 4 * total, "saved": held[0]["saved"]}
    assert held[3] == {"parameter": 2 * total, "optimiser": 4 * total, "saved": held[0]["saved"]}


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


def without(schedule: Schedule, label: str) -> Schedule:
    """Leave out all ops of that name."""

    def program(rank: int) -> Any:
        found = schedule.program(rank)
        return found.replace(ops=tuple(op for op in found.ops if not op.label.startswith(label)))

    return Schedule(schedule.header, program)


@pytest.mark.parametrize("half", [0, 1])
def test_squares_of_one_half_twice(half: int) -> None:
    """As many elements as there are, none of them of the other half: another norm, and another step."""
    schedule = make_step("single", 1, step()).schedule
    program = schedule.program(0)
    at, op = next((at, op) for at, op in enumerate(program.ops) if isinstance(op, SquareSum))
    new = View(len(program.buffers), op.gradient.slices)
    sides = {"source": Split(op.gradient, 0, 2), "target": Split(new, 0, 2)}
    copied = (Copy(label="copy", part=op.part, order=(half, half), **sides), msgspec.structs.replace(op, gradient=new))
    buffer = msgspec.structs.replace(program.buffers[op.gradient.buffer], category="other")
    wrong = program.replace(
        buffers=(*program.buffers, buffer), ops=(*program.ops[:at], *copied, *program.ops[at + 1 :])
    )
    refuses(Schedule(schedule.header, [wrong].__getitem__), "square of .* twice")


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ("norm of gradients", "lacks elements"),
        ("square head", "before all of it is written"),
        ("gather weights", "before all of it is written"),
        ("unpack weights", "before all of it is written"),
        ("update embedding", "new .*expected|holds|due|leaves"),
    ],
)
def test_what_is_forgotten(label: str, message: str) -> None:
    refuses(without(make_step("ring", 2, step()).schedule, label), message)


def test_a_gradient_that_is_not_summed_over_replicas() -> None:
    schedule = make_step("ring", 4, step(), dp=2, shards="replica").schedule
    refuses(without(schedule, "reduce weights over replicas"), "no flat gradient or not complete")


def test_a_gradient_that_is_packed_in_another_order() -> None:
    schedule = make_step("ring", 2, step()).schedule

    def program(rank: int) -> Any:
        found = schedule.program(rank)
        ops = [
            msgspec.structs.replace(op, gradients=op.gradients[::-1])
            if isinstance(op, Pack) and "head" in op.label
            else op
            for op in found.ops
        ]
        return found.replace(ops=tuple(ops))

    refuses(Schedule(schedule.header, program), "dw_head.*, dnorm.*in their order")


def test_parts_that_are_not_all_of_a_flat_tensor() -> None:
    schedule = make_step("ring", 2, step()).schedule
    flat = next(op.flat for op in schedule.program(0).ops if isinstance(op, Pack))
    refuses(replaced(schedule, Pack, flat=flat[1:]), "elements in parts, and .* flat")
    squares = next(op.squares for op in schedule.program(0).ops if isinstance(op, AdamW))
    refuses(replaced(schedule, SquareSum, square=squares), "sums up to .4,. numbers: allowed is 1")


def test_an_update_with_another_gradient() -> None:
    """Of the layer before, whose shard has the same shape."""
    schedule = make_step("ring", 2, step()).schedule

    def program(rank: int) -> Any:
        found = schedule.program(rank)
        updates = [op for op in found.ops if isinstance(op, AdamW) and op.label == "update weights"]
        other = {id(updates[0]): updates[1].gradient, id(updates[1]): updates[0].gradient}
        ops = [msgspec.structs.replace(op, gradient=other.get(id(op)) or op.gradient) if isinstance(op, AdamW) else op
               for op in found.ops]  # fmt: skip
        return found.replace(ops=tuple(ops))

    refuses(Schedule(schedule.header, program), "updates weights parameters.* with dweights parameters")


def test_moments_are_no_weights() -> None:
    """Nor are updated ones, which have the same shape, and come from the optimiser, too."""
    schedule = make_step("ring", 2, step(), zero_stage=0).schedule
    programs = schedule.programs
    moments = {port.tensor: port.view for port in programs[1].outputs}["new first moments of embedding"]
    ops = list(programs[1].ops)
    at = [number for number, op in enumerate(ops) if isinstance(op, Unpack) and op.label == "unpack embedding"][-1]
    ops[at] = msgspec.structs.replace(ops[at], flat=moments)
    programs[1] = programs[1].replace(ops=tuple(ops))
    refuses(Schedule(schedule.header, programs.__getitem__), "unpacks new first moments of embedding.*are needed")


def test_a_split_of_a_dimension_that_there_is_not() -> None:
    schedule = make_step("ring", 2, step(dtype="bf16")).schedule
    (cast, *_) = [op for op in schedule.program(0).ops if isinstance(op, Copy)]
    refuses(replaced(schedule, Copy, source=Split(cast.source.view, 2, 1)), "along dimension 2 into 1 parts")


def test_options_of_other_scopes() -> None:
    with pytest.raises(InputError, match="schedule.zero_stage=1 is of training steps: set `scope` step"):
        make_step("ring", 2, step(scope="layer"), zero_stage=1)
    with pytest.raises(InputError, match="schedule.prefetch=-1: expected 0 or more"):
        make_step("ring", 2, step(), prefetch=-1)


def odd(**fields: Any) -> Workload:
    """Of a model whose weights three ranks do not divide, nor all of them four."""
    model = msgspec.structs.replace(make_model(7, 7, head_dim=14), vocab_size=64)
    return step(**({"model": model, "seq": 33} | fields))


@pytest.mark.parametrize("stage", slow_but({3}, [1, 2, 3]))
@pytest.mark.parametrize("place", sweep_but({"gpu"}, ["gpu", "host"]))
def test_ranks_that_do_not_divide_weights(stage: int, place: str) -> None:
    """What they send is padded with zeros: the last rank owns less of a unit, and no state is larger for it."""
    checked = is_exact("ring", 3, odd(), zero_stage=stage, optimiser=place)
    workload = checked.schedule.header.workload
    flats = {unit.flat.name: unit.flat.shape(workload.model)[0] for unit in units(workload)}
    assert any(size % 3 for size in flats.values())
    for name, size in flats.items():
        ports = [port for program in checked.schedule.programs for port in program.inputs if port.tensor == name]
        each = -(-size // 3)
        assert [port.view.shape[0] for port in ports if port.layer == ports[0].layer] == [each, each, size - 2 * each]


def test_padding_that_is_not_zero() -> None:
    schedule = make_step("ring", 3, odd()).schedule

    def program(rank: int) -> Any:
        found = schedule.program(rank)
        return found.replace(ops=tuple(op for op in found.ops if not isinstance(op, Zero)))

    refuses(Schedule(schedule.header, program), "before all of it is written")


def test_padding_is_no_part_of_a_gradient() -> None:
    schedule = make_step("ring", 3, odd()).schedule
    found = schedule.program(2)
    shard = next(op.recv for op in found.ops if isinstance(op, ReduceScatter) and op.label == "reduce head")
    square = next(op for op in found.ops if isinstance(op, SquareSum) and op.gradient.buffer == shard.buffer)
    assert square.gradient.shape < shard.shape
    whole = msgspec.structs.replace(square, gradient=shard)

    def program(rank: int) -> Any:
        own = schedule.program(rank)
        return own.replace(ops=tuple(whole if op == square else op for op in own.ops)) if rank == 2 else own

    refuses(
        Schedule(schedule.header, program),
        "zero.* where the weights of a layer or of an end, or their gradient, are needed",
    )


def test_more_ranks_than_weights() -> None:
    model = msgspec.structs.replace(make_model(1, 1, head_dim=2), vocab_size=2, ffn_dim=2)
    with pytest.raises(InputError, match="`gpus`: 5 ranks are too many for the 6 elements of head parameters, 2 each"):
        make_step("ring", 5, step(model=model, seq=20))


def test_what_is_no_step() -> None:
    with pytest.raises(InputError, match="a training step has both; set `passes` both"):
        step(passes="forward")
    with pytest.raises(InputError, match="no next one to predict"):
        step(seq=1)
