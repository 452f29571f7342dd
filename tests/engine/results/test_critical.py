"""The critical path: spans that add up to the step, by hand and for steps drawn at random."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

import longstep
from sim.engine.play.simulate import simulate
from sim.engine.results.critical import Span, critical_path, shares, strip
from sim.engine.results.sensitivity import elasticities
from sim.schedule.proof.check import Checked
from sim.words.workload import Workload
from tests.engine.play.test_engines import requires_compiler
from tests.engine.results.test_what_ifs import configurations
from tests.helpers import make_checked, make_cluster_spec, make_model
from topology.cluster import Cluster
from topology.specs import LinkSpec


def path_of(checked: Checked, **changes: Any) -> list[Span]:
    return critical_path(simulate(checked, Cluster(make_cluster_spec(**changes)), None))


@pytest.mark.sweep
@requires_compiler
@pytest.mark.parametrize("count", [pytest.param(6, id="few"), pytest.param(200, id="many", marks=pytest.mark.slow)])
def test_spans_follow_each_other_from_the_start_to_the_end(count: int) -> None:
    for _, found in configurations(count):
        spans = found.critical_path()
        assert spans[0].begin_s == 0
        assert spans[-1].end_s == found.step_time_s
        assert all(one.end_s == other.begin_s for one, other in pairwise(spans))
        assert all(one.seconds > 0 for one in spans)
        assert sum(shares(spans).values()) == pytest.approx(1)


@pytest.mark.sweep
@requires_compiler
@pytest.mark.parametrize(
    ("schedule", "changes"),
    [("zigzag", {"gpus": 16, "nodes": 2, "seq": "64K"}), ("ulysses", {"seq": "64K", "scope": "layer", "layers": 1})],
)
def test_the_share_of_compute_is_its_elasticity(schedule: str, changes: dict[str, Any]) -> None:
    """Of what goes to compute a per cent more FLOP/s saves a per cent, at the rates of datasheets."""
    fields = {"model": "llama3-8b", "cluster": "hgx-h100", "scope": "attention", "profile": "datasheet", **changes}
    found = longstep.predict(schedule, **fields)
    of = {row.figure: -row.elasticity for row in elasticities(found.simulation)}
    assert shares(found.critical_path())["compute"] == pytest.approx(of["compute"], abs=0.03)


def test_a_ring_whose_link_is_slow_is_on_the_link() -> None:
    """Two ranks, full mask, nothing in the way: keys travel while the first block is attended, then the second is."""
    work = Workload(model=make_model(), seq=256, mask="full", passes="forward", dtype="fp32")
    checked = make_checked("ring", work, 2)
    slow = path_of(checked, nvlink=LinkSpec(bytes_per_s=1e6, latency_s=0.0))
    assert [one.on for one in slow] == ["nvlink", "compute", "compute"]  # attention, and its sum
    fast = path_of(checked, nvlink=LinkSpec(bytes_per_s=1e12, latency_s=0.0))
    assert {one.on for one in fast} == {"compute"}
    assert strip(slow, 4)[0] == "nvlink"


def test_a_strip_shows_what_takes_most_of_each_part() -> None:
    spans = [Span(0.0, 1.0, 0, 0, "compute"), Span(1.0, 1.75, 0, 1, "nic"), Span(1.75, 4.0, 0, 2, "compute")]
    assert strip(spans, 4) == ["compute", "nic", "compute", "compute"]
    assert strip(spans, 1) == ["compute"]
    assert shares(spans) == {"compute": 3.25 / 4, "nic": 0.75 / 4}
