"""Where the optimiser's state is and in which data type: exact over several steps, memory and time by hand, and what is
wrong in it is found.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from runtime.execution import inputs, reference
from runtime.execution.inputs import global_ids, global_labels, global_state
from runtime.execution.ops import state
from runtime.execution.reference import relative_error
from runtime.execution.tensors import TORCH_DTYPE
from runtime.execution.verify import BOUNDS, Outputs, output_errors
from runtime.execution.virtual import execute_virtual
from sim.accounts.memory import lifetimes, walk
from sim.accounts.trace import Row
from sim.base.errors import InputError
from sim.engine.play.simulate import STEADY, Jitter, simulate
from sim.schedule.ir.masks import Span, mask_of
from sim.schedule.ir.ops import HostAdamW, HostCopy, ReduceScatter
from sim.schedule.ir.program import Schedule
from sim.schedule.methods.one_device import on_one_device
from sim.schedule.model.scope import kind_of, layers_of, units
from sim.schedule.proof.check import Checked, check
from sim.words.optimiser import ADAM
from sim.words.workload import Workload
from tests.engine.play.equality import Cell, require_equal_engines
from tests.engine.play.test_engines import requires_compiler
from tests.helpers import by_tier, make_cluster_spec, make_model, slow_but
from tests.schedule.model.test_step import is_exact, make_step, replaced, step, without
from tests.schedule.proof.test_check_catches import refuses
from topology.cluster import Cluster, load_cluster

STACKS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "host": {"optimiser": "host"},
    "host, weights kept": {"optimiser": "host", "zero_stage": 1},
    "host, gradients sharded": {"optimiser": "host", "zero_stage": 2},
    "host, reduced in the model's type": {"optimiser": "host", "reduce": "model", "activations": "save-on-cpu"},
    "model": {"optimiser_states": "model"},
    "model, weights kept": {"optimiser_states": "model", "zero_stage": 0},
    "model, host": {"optimiser_states": "model", "optimiser": "host"},
}


@pytest.mark.sweep
@pytest.mark.parametrize("stack", [name for name in STACKS if "," in name])
@pytest.mark.parametrize("dtype", slow_but({"bf16"}, ["fp64", "bf16"]))
def test_every_place_and_data_type(stack: str, dtype: str) -> None:
    """Those of ``test_step`` are exact there."""
    is_exact("zigzag", 2, step(layers=3, dtype=dtype), **STACKS[stack])


@pytest.mark.sweep
def test_one_rank_and_replicas() -> None:
    is_exact("single", 1, step(), optimiser="host")
    is_exact("ring", 4, step(), dp=2, optimiser="host", shards="replica")


@pytest.mark.sweep
def test_all_ranks_on_one_device() -> None:
    folded = check(on_one_device(make_step("zigzag", 2, step(), optimiser="host")))
    errors = output_errors(folded, execute_virtual(folded, torch.device("cpu")))
    assert max(errors.values()) <= BOUNDS["fp64"]


# Several steps


@pytest.mark.parametrize(
    "cell",
    by_tier(
        {("host", "fp64"), ("fp32", "fp32")},
        {("model, host", "fp64"), ("host, reduced in the model's type", "fp64")},
        [(name, dtype) for name in STACKS for dtype in ("fp64", "fp32")],
    ),
)
def test_three_steps(monkeypatch: pytest.MonkeyPatch, cell: tuple[str, str]) -> None:
    """What one leaves is what the next begins with; against three steps of torch's AdamW behind its clipping."""
    stack, dtype = cell
    workload = step(layers=1, dtype=dtype)
    checked = make_step("zigzag", 2, workload, **STACKS[stack])
    held = {
        (tensor.name, unit.layer): _begun(tensor.name, unit.layer, workload)
        for unit in units(workload)
        for tensor in (*unit.states, *unit.weights, unit.working)
    }
    given = [held[unit.flat.name, unit.layer].double() for unit in units(workload)]
    monkeypatch.setattr(inputs, "global_state", lambda name, layer, *_: held[name, layer])
    for number in (1, 2, 3):
        monkeypatch.setattr(state, "ADAM", ADAM._replace(step=number))
        outputs = execute_virtual(checked, torch.device("cpu"), order_seed=number)
        held |= _left(checked, outputs, held)
    for unit, exact in zip(units(workload), _by_torch(given, workload), strict=True):
        for tensor, whole in zip(unit.states, exact, strict=True):
            error = relative_error(held[tensor.name, unit.layer], whole)
            assert error <= {"fp64": 1e-10, "fp32": 1e-4}[dtype], tensor.name


def _begun(name: str, layer: int, workload: Workload) -> torch.Tensor:
    """Return a tensor before the first step, whose moments are zero."""
    found = global_state(name, layer, workload).to(TORCH_DTYPE[workload.dtype])
    return torch.zeros_like(found) if kind_of(name) == "moment" else found


def _left(
    checked: Checked, outputs: list[Outputs], held: dict[tuple[str, int], torch.Tensor]
) -> dict[tuple[str, int], torch.Tensor]:
    """Return what a step has made of weights and moments, each of all ranks."""
    found: dict[tuple[str, int], torch.Tensor] = {}
    for program, of_rank in zip(checked.schedule.programs, outputs, strict=True):
        for port, tensor in zip(program.outputs, of_rank, strict=True):
            if kind_of(port.tensor) == "updated":
                key = (port.tensor.removeprefix("new "), port.layer)
                (rows,) = port.tokens
                found.setdefault(key, torch.full_like(held[key], math.nan))[rows.start : rows.stop] = tensor
    return found


def _by_torch(given: list[torch.Tensor], workload: Workload) -> list[list[torch.Tensor]]:
    """Return the weights and moments of each unit after three steps."""
    model, parameters = workload.model, [torch.nn.Parameter(flat.clone()) for flat in given]
    optimiser = torch.optim.AdamW(
        parameters, ADAM.learning_rate, (ADAM.beta1, ADAM.beta2), ADAM.epsilon, ADAM.weight_decay, fused=False
    )
    kept, whole = optimiser.state, Span(0, workload.seq)
    tokens = global_ids(whole, workload), global_labels(whole, workload)
    for _ in range(3):
        weights = []
        for unit, flat in zip(units(workload), parameters, strict=True):
            shapes = {weight.name: weight.shape(model) for weight in unit.weights}
            parts = flat.detach().clone().split([math.prod(shape) for shape in shapes.values()])
            weights.append({name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)})
        whole_batch = reference.Sequences(*tokens, [(model, mask_of(workload))] * workload.layers)
        _, gradients = reference.step(weights, [whole_batch], linear=False)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        torch.nn.utils.clip_grad_norm_(parameters, ADAM.max_norm)
        optimiser.step()
    return [[one.detach(), kept[one]["exp_avg"], kept[one]["exp_avg_sq"]] for one in parameters]


# Memory


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("stack", "on_gpu", "on_host"),
    [
        ("fp32", (4 / 2, 8 / 2), (0, 0)),
        ("host", (2 / 2, 0), (4 / 2, 8 / 2)),
        ("host, gradients sharded", (2, 0), (4 / 2, 8 / 2)),
        ("model", (2 / 2, 4 / 2), (0, 0)),
        ("model, weights kept", (2 + 2, 4), (0, 0)),
        ("model, host", (2 / 2, 0), (2 / 2, 4 / 2)),
    ],
)
def test_bytes_per_weight_by_hand(stack: str, on_gpu: tuple[float, float], on_host: tuple[float, float]) -> None:
    """Weights, and moments, when a step of bf16 begins on 2 ranks."""
    workload = step(dtype="bf16")
    program = make_step("ring", 2, workload, **STACKS[stack]).schedule.program(0)
    found = Counter[tuple[str, str]]()
    for number in {port.view.buffer for port in program.inputs}:
        buffer = program.buffers[number]
        found[buffer.place, buffer.category] += buffer.nbytes
    total = sum(math.prod(unit.flat.shape(workload.model)) for unit in units(workload))
    for place, (weights, moments) in (("hbm", on_gpu), ("host", on_host)):
        assert (found[place, "parameter"], found[place, "optimiser"]) == (weights * total, moments * total)


def test_gradients_leave_the_gpu_as_they_are_summed() -> None:
    """There are no more than three at a time, and none when the first update begins; the host has all of them then."""
    workload = step(dtype="bf16", layers=6)
    checked = make_step("ring", 2, workload, optimiser="host")
    program, dependencies = checked.schedule.program(0), checked.dependencies[0]
    first = next(index for index, op in enumerate(program.ops) if isinstance(op, HostAdamW))
    shards = {op.recv.buffer for op in program.ops if isinstance(op, ReduceScatter)}
    spans = lifetimes(program, dependencies)
    alive = [sum(spans[shard].first <= index < spans[shard].end for shard in shards) for index in range(first + 1)]
    assert (max(alive), alive[-1]) == (3, 0)
    total = sum(math.prod(unit.flat.shape(workload.model)) for unit in units(workload))
    squares, cast = 4 * len(units(workload)), 2 * math.prod(units(workload)[0].flat.shape(workload.model)) // 2
    assert walk(program, dependencies).host_peak_bytes <= (12 + 4) * total / 2 + squares + 2 * cast


# Time


def large() -> Workload:
    """Of a model whose copies take longer than their launches."""
    model = msgspec.structs.replace(make_model(8, 8, head_dim=64), vocab_size=512)
    return step(model=model, seq=64, dtype="bf16")


def updates(ranks: int) -> tuple[list[Row], list[Row], Schedule]:
    """Return when rank 0 of a step on HGX H100 updates, and copies weights back."""
    checked = make_step("ulysses" if ranks > 1 else "single", ranks, large(), optimiser="host")
    rows = simulate(checked, Cluster(load_cluster("hgx-h100")), None).trace.of_rank(0)
    back = [row for row in rows if row.kind == "HostCopy" and row.stream == "from host"]
    return [row for row in rows if row.kind == "HostAdamW"], back, checked.schedule


@pytest.mark.parametrize(("ranks", "sharing"), [(1, 1), (8, 4)])
def test_ranks_of_a_socket_share_its_memory(ranks: int, sharing: int) -> None:
    """Of each weight 42 bytes pass, at 0.448 of 227.8e9 bytes/s: fp32 weights, gradients and moments read and written,
    gradients read once more, weights read again and written in bf16.
    """
    rows, _, schedule = updates(ranks)
    op = next(op for op in schedule.program(0).ops if isinstance(op, HostAdamW))
    alone_s = 42 * math.prod(op.weights.shape) / (0.448 * 227.8e9)
    assert rows[0].end_s - rows[0].begin_s == pytest.approx(sharing * alone_s, rel=1e-3)


def test_the_host_issues_nothing_while_it_updates() -> None:
    """Weights are copied back beside the next update, never before the own one has ended."""
    rows, back, _ = updates(1)
    assert len(rows) == len(back) == 4
    for update, copied in zip(rows, back, strict=True):
        assert copied.posted_s >= update.end_s
    for copied, following in zip(back, rows[1:], strict=False):
        assert following.begin_s < copied.end_s


@pytest.mark.sweep
@requires_compiler
@pytest.mark.parametrize("stack", slow_but({"host, weights kept"}, ["host", "host, weights kept", "model"]))
def test_both_engines_play_alike(stack: str) -> None:
    checked = make_step("ulysses", 4, step(dtype="bf16"), **STACKS[stack])
    for jitter in (STEADY, Jitter(0.1, 1)):
        require_equal_engines(Cell(checked, Cluster(load_cluster("hgx-h100")), None, jitter))
    checked = make_step("zigzag", 2, step(dtype="fp32"), **STACKS[stack])
    require_equal_engines(Cell(checked, Cluster(load_cluster("host")), None, STEADY))


# What is wrong


def test_what_makes_no_sense() -> None:
    with pytest.raises(InputError, match="schedule.optimiser=host with schedule.zero_stage=0: .* set schedule.zero_st"):
        make_step("ring", 2, step(), optimiser="host", zero_stage=0)
    for name, value in (("optimiser", "host"), ("optimiser_states", "model")):
        with pytest.raises(InputError, match=f"schedule.{name}={value} is of training steps: set `scope` step"):
            make_step("ring", 2, step(scope="layer"), **{name: value})
    checked = make_step("ring", 2, step(dtype="fp32"), optimiser="host")
    with pytest.raises(InputError, match="has no host memory: give it a table .socket."):
        simulate(checked, Cluster(make_cluster_spec(2)), None)


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ("gradients to the host", "before all of it is written"),
        ("norm to the host", "before all of it is written"),
        ("weights from the host", "holds working head parameters.*, expected new working head parameters"),
        ("square head", "before all of it is written"),
        ("norm of gradients", "lacks elements"),
        ("update embedding", "before all of it is written"),
    ],
)
def test_what_is_forgotten(label: str, message: str) -> None:
    refuses(without(make_step("ring", 2, step(), optimiser="host").schedule, label), message)


def _first(schedule: Schedule) -> HostAdamW:
    return next(op for op in schedule.program(0).ops if isinstance(op, HostAdamW))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (lambda op: {"first": op.second, "second": op.first}, "updates head parameters.* with second moments of head"),
        (
            lambda op: {"weights": op.first, "first": op.weights},
            "first moments of head.* where the weights of a layer or of an end",
        ),
        (lambda op: {"cast": op.cast[1:]}, "has cast of shape"),
        (lambda op: {"squares": op.squares[1:]}, "updates by a norm that lacks"),
    ],
)
def test_operands_that_are_others(changes: Callable[[HostAdamW], dict[str, Any]], message: str) -> None:
    """Of the head, the first to be updated."""
    schedule = make_step("ring", 2, step(layers=1), optimiser="host").schedule
    first = _first(schedule)

    def program(rank: int) -> Any:
        found = schedule.program(rank)
        ops = [msgspec.structs.replace(op, **changes(first)) if op == first else op for op in found.ops]
        return found.replace(ops=tuple(ops)) if rank == 0 else found

    refuses(Schedule(schedule.header, program), message)


@pytest.mark.parametrize(
    ("kind", "label", "field", "message"),
    [
        (HostAdamW, "update", "gradient", "updates weights parameters.* with dweights parameters"),
        (HostCopy, "weights from", "target", "holds new working weights.*, expected new working weights"),
    ],
)
def test_layers_that_change_places(kind: type[HostAdamW | HostCopy], label: str, field: str, message: str) -> None:
    """Of two layers each is updated by the other's gradient, or gets its weights; shards have the same shape."""
    schedule = make_step("ring", 2, step(), optimiser="host").schedule
    (size,) = layers_of(schedule.header.workload)[0].flat.shape(schedule.header.workload.model)
    found = [op for op in schedule.program(0).ops if isinstance(op, kind) and op.label.startswith(label)]
    a, b = [op for op in found if getattr(op, field).shape == (size // 2,)]

    def program(rank: int) -> Any:
        found = schedule.program(rank)
        other = {a: getattr(b, field), b: getattr(a, field)}
        ops = [msgspec.structs.replace(op, **{field: other[op]}) if op in other else op for op in found.ops]
        return found.replace(ops=tuple(ops)) if rank == 0 else found

    refuses(Schedule(schedule.header, program), message)


def test_memory_of_the_other_side() -> None:
    schedule = make_step("ring", 2, step(), optimiser="host").schedule
    program, first = schedule.program(0), _first(schedule)
    norm = next(op for op in program.ops if isinstance(op, HostCopy) and op.target == first.squares)
    refuses(replaced(schedule, HostAdamW, squares=norm.source), "'squares of gradients', which is in GPU memory")


def test_states_in_another_data_type_than_the_options_say() -> None:
    states = make_step("ring", 2, step(dtype="bf16"), optimiser_states="model").schedule
    header = msgspec.structs.replace(states.header, options=states.header.options | {"optimiser_states": "fp32"})
    refuses(Schedule(header, states.program), "is in bf16: it has to be in fp32")


def test_a_gradient_that_updates_twice() -> None:
    """The host scales it where it lies."""
    schedule = make_step("ring", 2, step(layers=1), optimiser="host").schedule

    def program(rank: int) -> Any:
        found = schedule.program(rank)
        at = next(index for index, op in enumerate(found.ops) if isinstance(op, HostAdamW))
        return found.replace(ops=(*found.ops[: at + 1], found.ops[at], *found.ops[at + 1 :]))

    refuses(Schedule(schedule.header, program), "new head parameters.* where the weights of a layer or of an end")
