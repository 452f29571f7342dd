"""The native engine: ``sim/native/player.c`` plays lowered schedules, to the last bit as the reference engine does."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, assert_never

import numpy as np

from sim.base.errors import InputError
from sim.engine.costs.cost import CostModel
from sim.engine.costs.phases import Activity, Flow, Latency, Wait
from sim.engine.play.facts import Array
from sim.engine.play.jitter import Stretch
from sim.engine.play.lowered import Lowered, Times
from sim.native.library import load
from topology.cluster import Cluster
from topology.host import num_cores

WAIT, LATENCY, FLOW = range(3)
"""Kinds of phases, as in player.c."""
_PLAYED, _STANDSTILL, _OUT_OF_MEMORY, _UNKNOWN = range(4)
"""What it returns."""

_FEW_OPS = 10_000
"""Of a step that takes no longer to play than threads take to start."""

INT = np.int32
_PHASE = np.dtype(
    [*((name, INT) for name in ("kind", "resource", "demands", "demands_end")), ("seconds", float), ("late", float)]
)
_DEMAND = np.dtype([("resource", INT), ("unused", INT), ("amount", float)])
_DEVICE = np.dtype([("compute", INT), ("memory", INT)])

_SCORE_COUNTS = ("num_ranks", "num_ops", "num_streams", "num_transfers", "num_groups")
_SCORE_ARRAYS = (
    "programs", "ops", "streams", "transfers", "groups", "stream_ops", "waits", "transfers_of", "members",
)  # fmt: skip
_COST_COUNTS = ("num_resources", "num_activities", "cuda", "handoff", "one_queue")
_COST_ARRAYS = (
    "capacity", "activities", "phases", "demands", "devices", "op_activity", "transfer_activity", "group_activity",
    "hold", "transfer_threads", "group_threads", "issue_s", "stretch", "world_seconds", "world_amounts",
    "world_capacities", "world_issues",
)  # fmt: skip


class _Score(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in _SCORE_COUNTS),
        *((name, ctypes.c_void_p) for name in _SCORE_ARRAYS),
    ]


class _Costs(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in _COST_COUNTS),
        *((name, ctypes.c_void_p) for name in _COST_ARRAYS),
    ]


class Activities:
    """Distinct activities, one after the other."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._ends = [0]
        self._phases: list[tuple[int, int, int, int, float, float]] = []
        self._demands: list[tuple[int, int, float]] = []

    def add(self, activity: Activity) -> int:
        """Return the number of an activity."""
        return self._numbered(activity, activity)

    def _numbered(self, key: Hashable, activity: Activity) -> int:
        """Return the number of what has this key; it is played as ``activity``."""
        if key not in self._numbers:
            self._numbers[key] = len(self._numbers)
            for phase in activity:
                begin = len(self._demands)
                if isinstance(phase, Flow):
                    self._demands += [(resource, 0, amount) for resource, amount in phase.demands]
                    self._phases.append((FLOW, phase.fills, begin, len(self._demands), phase.seconds, phase.late))
                elif isinstance(phase, Wait):
                    self._phases.append((WAIT, phase.resource, begin, begin, phase.seconds, 0.0))
                elif isinstance(phase, Latency):
                    self._phases.append((LATENCY, -1, begin, begin, phase.seconds, 0.0))
                else:
                    assert_never(phase)
            self._ends.append(len(self._phases))
        return self._numbers[key]

    def numbers(self, activities: Iterable[Activity]) -> Array:
        """Return the numbers of several."""
        return np.array([self.add(activity) for activity in activities], INT)

    def arrays(self) -> dict[str, Array]:
        """Return all of them."""
        return {
            "activities": np.array(self._ends, INT),
            "phases": np.array(self._phases, _PHASE),
            "demands": np.array(self._demands, _DEMAND),
        }


class Priced:
    """What a machine makes of a lowered schedule."""

    def __init__(
        self, lowered: Lowered, cluster: Cluster, cost: CostModel, activities: Activities | None = None
    ) -> None:
        """Ask for the cost of everything that is distinct, once; ``activities`` is what to keep it in."""
        activities, devices = activities or Activities(), cluster.devices[: len(lowered.programs)]
        ranks = {device.speed: rank for rank, device in reversed(list(enumerate(devices)))}
        numbers = {speed: number for number, speed in enumerate(ranks)}
        speed = np.array([numbers[device.speed] for device in devices], INT)[lowered.op_rank]
        asked = np.where(lowered.op_use >= 0, lowered.op_use * len(ranks) + speed, -1)
        kernels = np.full(len(lowered.uses.found) * len(ranks), -1, INT)
        for number in sorted(set(asked[asked >= 0].tolist())):
            use, which = divmod(number, len(ranks))
            rank = list(ranks.values())[which]
            kernels[number] = activities.add(cost.kernel_anywhere(rank, lowered.uses.found[use]))
        copies = activities.numbers(cost.on_host(program.rank, program, op) for program, op in lowered.copies.found)
        messages = activities.numbers(
            (cost.copied if one.by_copies else cost.transfer)(one.source, one.target, one.nbytes, one.group)
            for one in lowered.messages
        )
        played = len(lowered.programs)
        calls = activities.numbers(cost.collective(op, call.ranks, call.nbytes, played) for call, op in lowered.calls)
        handoff = activities.add(cost.handoff) if cost.handoff else -1
        op_activity = np.full(lowered.num_ops, -1, INT)
        for chosen, of in ((asked, kernels), (lowered.op_copy, copies)):
            op_activity[chosen >= 0] = of[chosen[chosen >= 0]]
        self.arrays = {
            "capacity": np.array(cluster.resources.capacities()),
            "devices": np.array([(device.compute, device.hbm) for device in devices], _DEVICE),
            "op_activity": op_activity,
            "transfer_activity": messages[lowered.transfer_message],
            "group_activity": calls[lowered.group_call],
            "hold": held(lowered, cost),
            "transfer_threads": _floats(cost.threads(one[:2]) for one in lowered.messages)[lowered.transfer_message],
            "group_threads": _floats(cost.threads(call.ranks) for call, _ in lowered.calls)[lowered.group_call],
            "issue_s": np.array([cost.issue_s(*one) for one in lowered.issues.found], float),
            **activities.arrays(),
        }
        cuda = cluster.spec.gpu.kind == "cuda"
        self._counts = (len(cluster.resources), len(self.arrays["activities"]) - 1, cuda, handoff, cost.one_queue)
        self.point()

    def point(self) -> None:
        """Let the player find the arrays."""
        self.struct = _Costs(**dict(zip(_COST_COUNTS, self._counts, strict=True)), **_pointers(self.arrays))


def held(lowered: Lowered, cost: CostModel) -> Array:
    """Return per op the compute units that it holds while it communicates."""
    found = np.zeros(lowered.num_ops)
    messages = [cost.held_by_messages(*exchange) for exchange in lowered.exchanges]
    calls = [cost.held_by_collective(op.name, call.ranks, call.nbytes) for call, op in lowered.calls]
    meets = lowered.ops["group"] >= 0
    found[meets] = np.array(calls, float)[lowered.group_call[lowered.ops["group"][meets]]]
    sends = lowered.op_exchange >= 0
    found[sends] = np.array(messages, float)[lowered.op_exchange[sends]]
    return found


def _floats(found: Iterable[float]) -> Array:
    return np.array(list(found), float)


def _pointers(arrays: dict[str, Array]) -> dict[str, int]:
    assert all(array.flags.c_contiguous for array in arrays.values())
    return {name: array.ctypes.data for name, array in arrays.items()}


def plays(lowered: Lowered, cluster: Cluster, cost: CostModel, stretches: Sequence[Stretch]) -> list[Times]:
    """Return for each noise the times of every op; -1 where it never came to that. Large ones are played at once, as
    many as there are cores: the player holds no lock of Python's.

    Raises UnavailableError where there is no native library.
    """
    found, priced = library(), Priced(lowered, cluster, cost)
    threads = min(num_cores(), len(stretches)) if lowered.num_ops > _FEW_OPS else 1
    if threads < 2:
        return [run(found, lowered, priced, stretch)[0] for stretch in stretches]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(lambda stretch: run(found, lowered, priced, stretch)[0], stretches))


def library() -> ctypes.CDLL:
    """Return the compiled player; raises UnavailableError where there is none."""
    return load("player", _require_equal)


def _require_equal(library: ctypes.CDLL) -> None:
    from sim.engine.play import selfcheck  # noqa: PLC0415 - it loads SimPy, once per compilation

    selfcheck.require_equal(player(library))


def player(library: ctypes.CDLL) -> Callable[[Lowered, Cluster, CostModel, Stretch], Times]:
    """Return what plays by a library a schedule on a cluster, with its costs and some noise: the times of all ops."""
    return lambda lowered, cluster, cost, stretch: run(library, lowered, Priced(lowered, cluster, cost), stretch)[0]


def run(
    library: ctypes.CDLL, lowered: Lowered, priced: Priced, stretch: Stretch = None, steps_s: Array | None = None
) -> tuple[Times, int]:
    """Return the times of all ops with some noise, and the number of events that it took; ``steps_s`` are set to the
    step times of the other worlds that a library was compiled for.
    """
    times = Times(*(np.empty(lowered.num_ops) for _ in Times._fields))
    arrays: dict[str, Any] = {name: getattr(lowered, name) for name in _SCORE_ARRAYS}
    counts = (len(lowered.programs), lowered.num_ops, len(lowered.streams), len(lowered.transfers), len(lowered.groups))
    score = _Score(**dict(zip(_SCORE_COUNTS, counts, strict=True)), **_pointers(arrays))
    costs = _Costs.from_buffer_copy(priced.struct)
    costs.stretch = None if stretch is None else stretch.ctypes.data
    events = ctypes.c_int64()
    pointers = (ctypes.c_void_p(column.ctypes.data) for column in times)
    others = None if steps_s is None else ctypes.c_void_p(steps_s.ctypes.data)
    failed = library.play(ctypes.byref(score), ctypes.byref(costs), *pointers, ctypes.byref(events), others)
    if failed == _OUT_OF_MEMORY:
        raise InputError(f"{lowered.num_ops} ops are too many for this machine's memory: use fewer ranks or layers")
    assert failed != _UNKNOWN, "player.c knows fewer kinds of ops or phases than Python"
    return times, events.value
