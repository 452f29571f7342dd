"""What the Python of eager modules costs the host: on kernels of modules alone, and where software names modules."""

from __future__ import annotations

from functools import cache

import msgspec
import pytest

from sim.base.errors import InputError
from sim.engine.costs.cost import CostModel
from sim.engine.costs.issue import of_module
from sim.engine.intervals.interval import _scaled
from sim.engine.intervals.regime import _host_s
from sim.engine.play.lowered import lowered
from sim.engine.results.figures import with_calls
from sim.schedule.ir.ops import Op, Part
from sim.setup.setup import Setup
from sim.software.issue import MARK, eager_of, table
from sim.software.software import Software, load_software
from sim.words.profile import Eager, Profile, load_profile
from tests.reading_code import ROOT
from topology.cluster import Cluster

H100 = load_profile("h100-sxm")
LAUNCH_S = 2.5e-6
SHORT = Setup(
    "single", model="tiny", cluster="hgx-h100", gpus=1, seq="128", scope="layer", layers=1, seeds=1, jitter=0.0,
    software="huggingface",
)  # fmt: skip


def bare(name: str) -> Software:
    """Software whose kernels cost the host what they do by themselves."""
    named = load_software(name)
    sources = {field: one for field, one in named.sources.items() if field != "kernels.issue"}
    return msgspec.structs.replace(named, kernels=msgspec.structs.replace(named.kernels, issue=""), sources=sources)


@cache
def issued(name: str, *, named: bool = True, ranks: int = 1) -> tuple[Profile, list[tuple[Op, float]]]:
    """The profile and the ops of a layer, each with what issuing it takes."""
    found = SHORT.replace(software=name if named else bare(name), gpus=ranks, tp_degree=ranks).resolved()
    assert found.profile is not None
    cost, checked = CostModel(Cluster(found.spec), found.profile), found.checked()
    ops = zip(checked.schedule.programs[0].ops, checked.kernels[0], strict=True)
    return found.profile, [(op, cost.issue_s(op, use)) for op, use in ops]


def test_the_table_that_ships_says_what_it_is() -> None:
    assert (ROOT / "sim" / "software" / "issue.toml").read_text().startswith(MARK)


def test_eager_kernels_take_so_many_small_ones() -> None:
    """A small kernel is 6.18 us of the host on H100; a kernel of a module takes that, and the rest of its share."""
    each = table().layers["transformers"].forward.each
    found = eager_of(H100, "transformers", parallel=False)
    assert found is not None
    assert found.forward_s == pytest.approx((each - 1) * H100.issue["kernel"].host_s)
    assert found == eager_of(H100, "transformers", parallel=True)  # whose layers nobody splits
    assert eager_of(H100, "", parallel=False) is None
    assert eager_of(msgspec.structs.replace(H100, issue={}), "transformers", parallel=False) is None


def test_tensor_parallel_products_cost_more() -> None:
    alone, split = (eager_of(H100, "nanotron", parallel=parallel) for parallel in (False, True))
    assert alone is not None
    assert split is not None
    assert (split.forward_s, split.backward_s) > (alone.forward_s, alone.backward_s)
    assert [issued("nanotron", ranks=ranks)[0].eager for ranks in (1, 2)] == [alone, split]


def test_kernels_of_modules_alone_take_longer() -> None:
    """Attention, sums of the residual stream and collectives cost what they did; of a norm each kernel counts."""
    profile, ops = issued("huggingface")
    _, before = issued("huggingface", named=False)
    one_s = profile.issue["kernel"].host_s + LAUNCH_S
    assert profile.eager is not None
    for (op, seconds), (_, before_s) in zip(ops, before, strict=True):
        more = profile.eager.forward_s if op.part == "forward" else profile.eager.backward_s
        kernels = before_s / one_s if of_module(op) else 0
        assert seconds == pytest.approx(before_s + kernels * more), op.label
    assert {type(op).__name__ for op, _ in ops if not of_module(op)} == {"Attend", "AttendBackward", "Accumulate"}


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_a_layer_takes_what_was_measured_of_it(part: Part) -> None:
    """``takes`` small kernels and a launch each, beside attention and sums of the residual stream."""
    profile, ops = issued("huggingface")
    measured = getattr(table().layers["transformers"], part)
    expected_s = measured.takes * profile.issue["kernel"].host_s + measured.kernels * LAUNCH_S
    assert sum(s for op, s in ops if of_module(op) and op.part == part) == pytest.approx(expected_s)


def test_a_short_step_is_as_long_as_its_host() -> None:
    """It ends with its last kernel, 1.2 us behind what the host took to issue all, where that takes its bytes alone;
    both engines say so.
    """
    for software, named in (("huggingface", True), (bare("huggingface"), False)):
        issued_s = sum(seconds for _, seconds in issued("huggingface", named=named)[1])
        step = SHORT.replace(software=software, set={"profile.replayed_s": 0})
        steps_s = {engine: step.replace(engine=engine).predicted().step_time_s for engine in ("simpy", "native")}
        assert steps_s["simpy"] == steps_s["native"]
        assert issued_s < steps_s["simpy"] < issued_s + 2e-6


def test_software_without_figures_stays_as_it_is() -> None:
    for software in ("fused", "megatron", "torchtitan-compiled"):
        assert issued(software)[0].eager is None


def test_bounds_and_what_ifs_of_the_host_reach_it() -> None:
    """An interval's host is idle or busy in all that it does; twice its calls are twice that, too."""
    eager = Eager(forward_s=1e-5, backward_s=2e-5)
    profile = msgspec.structs.replace(H100, eager=eager, check_s=1e-4)
    assert profile.host is not None
    high = _scaled(profile, "high", {})
    assert (high.eager, high.check_s) == (eager.times(profile.host.high), 1e-4 * profile.host.high)
    twice = with_calls(profile, 2.0)
    assert twice is not None
    assert (twice.eager, twice.check_s) == (Eager(forward_s=2e-5, backward_s=4e-5), 2e-4)


def test_modules_that_nobody_measured_are_refused() -> None:
    with pytest.raises(InputError, match="unknown modules 'megatron'.*transformers, nanotron"):
        SHORT.replace(set={"software.issue": "megatron"}).resolved()


def test_regimes_count_the_python_as_measured() -> None:
    """The upper bound of the host, 3.3 times, is of the rest of it."""
    simulation = SHORT.predicted().simulation
    assert simulation.profile is not None
    assert simulation.profile.host is not None
    longer, python_s = (
        simulation.profile.host.high,
        _host_s(simulation) - _host_s(SHORT.replace(software=bare("huggingface")).predicted().simulation),
    )
    assert python_s > 0
    expected_s = longer * (_host_s(simulation) - python_s) + python_s
    assert _host_s(simulation, longer) == pytest.approx(expected_s)


@pytest.mark.sweep
def test_hosts_check_collectives_by_how_many_meet() -> None:
    """Each takes so much longer for each of its ranks, of all replicas although one is played; others do not."""
    step = SHORT.replace(
        scope="step", software="megatron", gpus=8, tp_degree=2, dp_degree=4, seq="1K", batch=1,
        set={"model.num_heads": 8, "model.num_kv_heads": 8},
    )  # fmt: skip
    checking = step.replace(set={"software.check_s": 1e-4})
    plain, checked = _issued_in(step), _issued_in(checking)
    differences = {
        (type(op).__name__, ranks): after - before
        for (op, ranks, before), (_, _, after) in zip(plain, checked, strict=True)
    }
    assert {ranks for _, ranks in differences} >= {1, 2, 4}
    for (_, ranks), seconds in differences.items():
        assert seconds == pytest.approx(0.0 if ranks == 1 else ranks * 1e-4)
    assert checking.predicted().step_time_s == checking.replace(engine="simpy").predicted().step_time_s
    assert checking.predicted().step_time_s > step.predicted().step_time_s + 1e-3


def _issued_in(step: Setup) -> list[tuple[Op, int, float]]:
    """Each kind of op of a step, among how many ranks it is, and what issuing it takes."""
    found = step.predicted().simulation
    kinds = lowered(found.fold.checked).issues.found
    return [(op, ranks, found.cost.issue_s(op, use, ranks)) for op, use, ranks in kinds]


def test_rates_of_datasheets_know_no_checks() -> None:
    with pytest.raises(InputError, match="at datasheet rates"):
        SHORT.replace(software=None, profile="datasheet", set={"software.check_s": 1e-4}).resolved()
