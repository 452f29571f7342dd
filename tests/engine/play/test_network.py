"""Shared resources by hand: each test has its solution in the comment."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.engine.costs.phases import Activity, Flow, Latency, Wait
from sim.engine.play.clock import Clock
from sim.engine.play.network import Network
from topology.fabric.fabrics import Resource


class Machine:
    """Resources A, B, … of given capacities; what is started leaves its end time in ``ends``."""

    def __init__(self, *capacities: float) -> None:
        self.env = Clock()
        self.network = Network(self.env, [Resource(str(i), "x", c) for i, c in enumerate(capacities)])
        self.ends: dict[str, float] = {}

    def start(self, name: str, activity: Activity, at: float = 0.0) -> None:
        def later() -> object:
            yield self.env.timeout(at)
            end = self.env.event()
            self.network.run(activity, end.succeed)
            yield end
            self.ends[name] = self.env.now

        self.env.process(later())  # type: ignore[arg-type]

    def hold(self, resource: int, amount: float, at: float, until: float) -> None:
        def later() -> object:
            yield self.env.timeout(at)
            turn = self.env.event()
            if not self.network.hold(resource, amount, turn.succeed):
                yield turn
            self.ends[f"hold {at}"] = self.env.now
            yield self.env.timeout(max(until - self.env.now, 0))
            self.network.release(resource, amount)

        self.env.process(later())  # type: ignore[arg-type]

    def run(self) -> dict[str, float]:
        self.env.run()
        return self.ends


def flow(seconds: float, *demands: tuple[int, float]) -> Activity:
    return (Flow(seconds, demands),)


def test_what_fits_does_not_slow() -> None:
    machine = Machine(10)
    machine.start("a", flow(3, (0, 4)))
    machine.start("b", flow(5, (0, 6)))
    assert machine.run() == {"a": 3, "b": 5}


def test_two_flows_share_and_the_rest_goes_on_alone() -> None:
    """Demand 10 each on 10: x = 1/2. b has 1 s of work, done at 2; a then has 2 s left of 3 and ends at 4."""
    machine = Machine(10)
    machine.start("a", flow(3, (0, 10)))
    machine.start("b", flow(1, (0, 10)))
    assert machine.run() == pytest.approx({"a": 4, "b": 2})


def test_a_flow_that_comes_later_slows_only_what_is_left() -> None:
    """a alone until 1 (3 of 4 left), then halves: b (1 s) ends at 3, a has 2 left and ends at 5."""
    machine = Machine(10)
    machine.start("a", flow(4, (0, 10)))
    machine.start("b", flow(1, (0, 10)), at=1)
    assert machine.run() == pytest.approx({"a": 5, "b": 3})


def test_max_min_over_two_links() -> None:
    """A = 10, B = 4; f1 on A, f2 on B, f3 on both, demand 10 each, 1 s of work.

    B fills first, at x = 4/20 = 0.2: f2, f3 stop there. A has 10 - 2 = 8 left for f1: x = 0.8, so f1 ends at 1.25.
    f2 and f3 stay at 0.2 until both end at 5.
    """
    machine = Machine(10, 4)
    machine.start("f1", flow(1, (0, 10)))
    machine.start("f2", flow(1, (1, 10)))
    machine.start("f3", flow(1, (0, 10), (1, 10)))
    assert machine.run() == pytest.approx({"f1": 1.25, "f2": 5, "f3": 5})


def test_relative_speed_is_what_is_shared_fairly() -> None:
    """Demands 2 and 8 on 5: both run at x = 1/2 (not 2.5 each). The small one ends at 2, the large one then alone."""
    machine = Machine(5)
    machine.start("small", flow(1, (0, 2)))
    machine.start("large", flow(1, (0, 8)))
    # large: 1/2 until 2 would be done at 2 as well: both have 1 s of work
    assert machine.run() == pytest.approx({"small": 2, "large": 2})


def test_a_hold_is_taken_off_the_top() -> None:
    """132 SMs, 24 held from 1 to 3: a kernel of 4 s on all of them does 1 + 2*108/132 by then, the rest after 3."""
    machine = Machine(132)
    machine.start("kernel", flow(4, (0, 132)))
    machine.hold(0, 24, at=1, until=3)
    done = 1 + 2 * 108 / 132
    assert machine.run()["kernel"] == pytest.approx(3 + (4 - done))


def test_nothing_is_held_of_what_a_grid_still_fills() -> None:
    """A grid fills 100 SMs until 8, its last wave runs until 10: asked for at 1, 24 of them are there at 8; the next
    grid has 76 and takes 4 / 0.76 from 10 on.
    """
    machine = Machine(100, 10)
    grid = (Flow(8, ((0, 100),), fills=0), Flow(2, ((1, 1),)))
    machine.start("grid", grid)
    machine.hold(0, 24, at=1, until=30)
    machine.start("next", flow(4, (0, 100)), at=10)
    ends = machine.run()
    assert ends == {"hold 1": 8, "grid": 10, "next": pytest.approx(10 + 4 / 0.76)}


@pytest.mark.parametrize(
    ("late", "held", "until", "ends"), [(0.1, 4, 2, 3.8), (0.1, 4, 9, 4.2), (0.2, 9, 9, 6), (0.1, 0, 0, 3)]
)
def test_late_blocks_of_a_persistent_grid_run_behind_the_others(
    late: float, held: float, until: float, ends: float
) -> None:
    """10 blocks of 3 s on 10 SMs, a tenth of the wait later for each SM that is held: 4 of these until 2 cost 0.8 s, as
    long as the others run 1.2 s; at most all 3 s. What follows begins behind the late ones.
    """
    machine = Machine(10)
    if held:
        machine.hold(0, held, at=0, until=until)
    machine.start("grid", (Flow(3, ((0, 10),), fills=0, late=late), Flow(1, ())), at=1e-9)
    assert machine.run()["grid"] == pytest.approx(ends + 1)


def test_late_blocks_leave_their_turn_to_what_waits_for_sms() -> None:
    """Of a grid of 3 s on 10 SMs of which 5 are held until 2; 5 more are asked for at 1, and there at 3, when late
    blocks begin, for 2 * 5 * 0.1 = 1 s.
    """
    machine = Machine(10)
    machine.hold(0, 5, at=0, until=2)
    machine.hold(0, 5, at=1, until=9)
    machine.start("grid", (Flow(3, ((0, 10),), fills=0, late=0.1),), at=1e-9)
    assert machine.run() == pytest.approx({"hold 0": 0, "hold 1": 3, "grid": 4})


def test_holds_wait_in_turn_and_leave_something() -> None:
    """Of 100, 60 are held from 0 to 5; 60 more have to wait until then; 30 that come later wait behind them."""
    machine = Machine(100)
    machine.hold(0, 60, at=0, until=5)
    machine.hold(0, 60, at=1, until=8)
    machine.hold(0, 30, at=2, until=9)
    assert machine.run() == {"hold 0": 0, "hold 1": 5, "hold 2": 5}


def test_latency_then_flow() -> None:
    machine = Machine(10)
    machine.start("a", (Latency(2), Flow(3, ((0, 10),))))
    assert machine.run() == {"a": 5}


def test_waiting_for_a_turn_on_a_full_machine() -> None:
    """Two cores: a newcomer waits one round of 0.1 s when both are taken, two when four are there, else none."""
    for busy, rounds in ((1, 0), (2, 1), (4, 2)):
        machine = Machine(2)
        for number in range(busy):
            machine.start(f"busy {number}", flow(8, (0, 1)))
        machine.start("late", (Wait(0, 0.1),), at=1)
        assert machine.run()["late"] == pytest.approx(1 + 0.1 * rounds)


def test_equal_times_end_in_the_order_of_their_beginning() -> None:
    machine = Machine(3)
    for name in "abcdef":
        machine.start(name, flow(1, (0, 1)))
    ends = machine.run()
    assert list(ends) == list("abcdef")
    assert len(set(ends.values())) == 1


FLOWS = st.lists(
    st.tuples(
        st.floats(0.01, 5),
        st.floats(0, 5),
        st.dictionaries(st.integers(0, 3), st.floats(0.1, 1), min_size=1).map(lambda d: tuple(d.items())),
    ),
    min_size=1,
    max_size=8,
)


@given(FLOWS)
def test_properties_of_sharing(flows: list[tuple[float, float, tuple[tuple[int, float], ...]]]) -> None:
    """No flow is faster than alone; a resource never does more than its capacity; while anything runs, something is
    full or everything runs at full speed, so the whole takes no longer than one after the other.
    """
    machine = Machine(1, 1, 1, 1)
    for number, (seconds, at, demands) in enumerate(flows):
        machine.start(str(number), flow(seconds, *demands), at=at)
    ends = machine.run()
    latest = max(at for _, at, _ in flows)
    for number, (seconds, at, _) in enumerate(flows):
        assert ends[str(number)] >= at + seconds - 1e-9
    for resource in range(4):
        work = sum(seconds * dict(demands).get(resource, 0) for seconds, _, demands in flows)
        assert max(ends.values()) >= work - 1e-9
    assert max(ends.values()) <= latest + sum(seconds for seconds, _, _ in flows) + 1e-6
