"""Linear attention: exact against scores written out, proved by what its states have seen, and no softmax schedule."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
import torch

from runtime.execution.verify import output_errors
from runtime.execution.virtual import execute_virtual
from sim.accounts.memory import walk
from sim.base.errors import InputError, ScheduleError
from sim.engine.play.simulate import simulate
from sim.schedule.derive.dependencies import derive
from sim.schedule.ir.ops import Accumulate, Exchange, LinearAttendBackward, Op, StateProduct, StateSum
from sim.schedule.ir.program import Schedule
from sim.schedule.methods import linear
from sim.schedule.methods.catalog import NAMED, SCHEDULES
from sim.schedule.methods.linear import LinearOptions
from sim.schedule.proof.check import check
from sim.setup.block_masks import block_mask_of
from sim.words.mesh import Mesh
from sim.words.workload import Workload
from tests.helpers import make_cluster_spec, make_model
from topology.cluster import Cluster

CPU = torch.device("cpu")


def build(ranks: int, chunk: int = 5, **fields: object) -> Schedule:
    workload = Workload(**{"model": make_model(), "seq": 48, "dtype": "fp64"} | fields)  # type: ignore[arg-type]
    return linear.build(workload, Mesh(ring=ranks), LinearOptions(chunk=chunk))


def errors(schedule: Schedule, order_seed: int = 1) -> dict[str, float]:
    checked = check(schedule)
    return output_errors(checked, execute_virtual(checked, CPU, order_seed))


@pytest.mark.sweep
@pytest.mark.parametrize("heads", [(8, 4), (8, 8), (4, 1)])
@pytest.mark.parametrize("chunk", [1, 5, 12, 64])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_linear_attention_is_exact(ranks: int, chunk: int, heads: tuple[int, int]) -> None:
    found = errors(build(ranks, chunk, model=make_model(*heads), batch=2))
    assert found.keys() == {"out", "dq", "dk", "dv"}
    assert max(found.values()) < 1e-12


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.sweep), 4])
def test_layers_are_exact(ranks: int) -> None:
    assert max(errors(build(ranks, scope="layer", layers=2)).values()) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_training_steps_are_exact(ranks: int) -> None:
    assert max(errors(build(ranks, scope="step", layers=2)).values()) < 1e-12


@pytest.mark.parametrize("order_seed", range(4))
def test_no_order_races(order_seed: int) -> None:
    assert max(errors(build(4), order_seed).values()) < 1e-12


def test_the_forward_pass_alone_leaves_the_output() -> None:
    assert errors(build(4, passes="forward")).keys() == {"out"}


Change = Callable[[Op], Op | None]


@pytest.mark.parametrize(
    ("rank", "kind", "number", "change", "message"),
    [
        (1, Accumulate, 0, lambda _: None, "lacks contributions"),  # hands on its own state alone
        (1, StateProduct, 0, lambda _: None, "out.* lacks contributions"),
        (1, StateProduct, 1, lambda op: msgspec.structs.replace(op, transposed=False), "adds dout"),
        (1, StateProduct, 0, lambda op: msgspec.structs.replace(op, x=op.into), "does not have all heads|adds out"),
        (2, StateSum, 0, lambda op: msgspec.structs.replace(op, b=op.a), "used as factors of one state"),
        (0, LinearAttendBackward, 0, lambda op: msgspec.structs.replace(op, k=op.v, v=op.k), "used as keys and values"),
        (1, LinearAttendBackward, 0, lambda op: msgspec.structs.replace(op, chunk=6), "FLOPs"),
        (1, Exchange, 1, lambda _: None, "peer|matches|waits|sends"),
    ],
)
def test_wrong_states_are_caught(rank: int, kind: type[Op], number: int, change: Change, message: str) -> None:
    schedule = build(4)
    programs = schedule.programs
    ops = list(programs[rank].ops)
    index = [at for at, op in enumerate(ops) if isinstance(op, kind)][number]
    new = change(ops[index])
    ops[index : index + 1] = [] if new is None else [new]
    programs[rank] = programs[rank].replace(ops=tuple(ops))
    with pytest.raises(ScheduleError, match=message):
        check(Schedule(schedule.header, programs.__getitem__))


def test_a_state_that_reads_what_the_mask_drops_is_caught() -> None:
    """The queries of rank 0 read the state of rank 0, which holds their own keys and later ones."""
    schedule = build(2)
    programs = schedule.programs
    program = programs[0]
    state = next(op for op in program.ops if isinstance(op, StateSum))
    attend = next(op for op in program.ops if type(op).__name__ == "LinearAttend")
    read = StateProduct(label="too much", x=attend.q, state=state.state, into=attend.out, transposed=False)
    at = program.ops.index(attend) + 1
    programs[0] = program.replace(ops=(*program.ops[:at], read, *program.ops[at:]))
    with pytest.raises(ScheduleError, match="some of which the mask"):
        check(Schedule(schedule.header, programs.__getitem__))


def test_what_is_sent_and_kept_does_not_grow_with_the_sequence() -> None:
    """Per rank a hop of 4 heads x 16 x 16 numbers of 8 bytes forward and backward."""
    for seq in (48, 480):
        claims = build(4, seq=seq).header.claims
        assert claims is not None
        assert claims.wire_bytes == 2 * 3 * 4 * 16 * 16 * 8
    peaks = [walk(p := build(4, seq=seq).program(3), derive(p)).peak_bytes for seq in (480, 960)]
    assert peaks[1] < 2 * peaks[0]


def test_flops_grow_with_the_sequence_alone() -> None:
    short, long = (build(4, 12, seq=seq).header.claims for seq in (48, 480))
    assert short is not None
    assert long is not None
    assert long.attention_flops == 10 * short.attention_flops


def test_both_engines_give_the_same_times() -> None:
    checked, cluster = check(build(4, scope="layer")), Cluster(make_cluster_spec(4))
    ends = [simulate(checked, cluster, None, engine=engine).trace.rows for engine in ("native", "simpy")]
    assert ends[0] == ends[1]


def test_other_masks_and_passes_are_refused() -> None:
    for fields in (
        {"mask": "full"}, {"window": 8}, {"documents": (24, 24)},
        {"block_mask": block_mask_of("topk:8:2", 48, "causal", 0)},
    ):  # fmt: skip
        with pytest.raises(InputError, match="schedule 'linear' has a causal mask"):
            build(2, **fields)
    with pytest.raises(InputError, match="needs its own forward pass"):
        build(2, passes="backward")
    with pytest.raises(InputError, match="chunk=0"):
        build(2, 0)


def test_it_is_no_schedule_of_softmax_attention() -> None:
    assert "linear" not in SCHEDULES
    workload = build(2).header.workload
    with pytest.raises(InputError, match="is of softmax attention"):
        NAMED["ring"].schedule(workload, Mesh(ring=2))
    other = msgspec.structs.replace(
        build(2).header, workload=msgspec.structs.replace(workload, attention=msgspec.UNSET)
    )
    with pytest.raises(ScheduleError, match="no kernel of the workload's softmax attention"):
        check(Schedule(other, build(2).program))
