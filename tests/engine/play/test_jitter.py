"""Noise: drawn before anything is played, the same in every what-if, and the step is the median of its seeds."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest

import longstep
from sim.base.errors import InputError
from sim.engine.costs.cost import CostModel
from sim.engine.intervals.interval import interval
from sim.engine.intervals.learned import NOTHING
from sim.engine.play.fold import Fold
from sim.engine.play.jitter import CHIPS, HANDOFFS, STEADY, Jitter
from sim.engine.play.simulate import Engine, Simulation, simulate
from sim.engine.results.report import report
from sim.schedule.ir import ops
from sim.schedule.methods import single
from sim.schedule.proof.check import Checked, check
from sim.words.mesh import Mesh
from sim.words.profile import at_rates, load_profile
from sim.words.workload import Workload, load_model
from tests.helpers import make_checked
from topology.cluster import Cluster, load_cluster

WORK = Workload(model=load_model("llama3-8b"), seq=16384, dtype="bf16")


@pytest.fixture(scope="module")
def zigzag() -> Checked:
    return make_checked("zigzag", WORK, 8)


def test_gpus_scatter_both_ways_and_a_cpu_only_lengthens(zigzag: Checked) -> None:
    """Kernels up to 50 us by their whole share, longer ones with the root of their time by less."""
    gpu, cpu = (CostModel(Cluster(load_cluster(name)), None) for name in ("hgx-h100", "host"))
    taken_s = np.array([gpu.kernel_seconds(0, use)[0] if use else 0.0 for uses in zigzag.kernels for use in uses])
    own = taken_s > 0
    noise = Jitter(0.1, seed=3)
    whole = Fold(zigzag, Cluster(load_cluster("hgx-h100")))
    z = np.log(noise.stretch(whole, gpu))
    expected = np.where(own, 0.1 * np.sqrt(50e-6 / np.maximum(taken_s, 50e-6)), HANDOFFS)
    for chosen in (own, ~own):
        units = z[chosen] / expected[chosen]
        assert len(units) > 100
        assert abs(np.mean(units)) < 4 / math.sqrt(len(units))
        assert np.std(units) == pytest.approx(1, rel=0.2)
    assert taken_s.max() > 80e-6
    lengthened = noise.stretch(whole, cpu)
    assert lengthened is not None
    assert (lengthened[own] > 1).all()
    assert (lengthened[~own] == 1).all()
    assert STEADY.stretch(whole, gpu) is None


def test_the_slowest_gpu_of_a_job_sets_the_pace_of_kernels_at_the_power_limit() -> None:
    """Without noise kernels under load take 1.5 % times 1.39 longer on 8 GPUs, the median of the slowest of 8 draws;
    in short runs, and where FLOPs bound nothing, they take what was measured.
    """
    cluster, profile = Cluster(load_cluster("hgx-h100")), load_profile("h100-sxm")
    schedule = make_checked("ulysses", msgspec.structs.replace(WORK, seq=2**18), 8)
    whole, loaded = Fold(schedule, cluster), CostModel(cluster, at_rates(profile, "sustained"))
    stretch = STEADY.stretch(whole, loaded)
    assert stretch is not None
    kernels = [use.kernel if use else "" for uses in schedule.kernels for use in uses]
    of_kernels = {(kernel, round(z, 2)) for kernel, z in zip(kernels, np.log(stretch) / CHIPS, strict=True)}
    at_limit = {("attention_forward", 1.39), ("attention_backward", 1.39)}
    assert at_limit < of_kernels
    assert {z for _, z in of_kernels - at_limit} == {0.0}
    assert STEADY.stretch(whole, CostModel(cluster, at_rates(profile, "burst"))) is None


@pytest.mark.parametrize("among", [1, 16])
def test_gpus_of_a_role_are_the_slowest_of_its_replicas(among: int) -> None:
    """Over 400 seeds the factor has the mean and the scatter of the largest of so many normal draws."""
    mean, scatter = {1: (0.0, 1.0), 16: (1.766, 0.543)}[among]
    schedule = check(single.build(msgspec.structs.replace(WORK, passes="forward"), Mesh(dp=among)))
    cluster, profile = Cluster(load_cluster("hgx-h100")), at_rates(load_profile("h100-sxm"), "sustained")
    cost, folded = CostModel(cluster, profile), Fold(schedule.at({"dp": [0]}), cluster, {"dp": {0: range(among)}})
    drawn = [np.log(Jitter(1e-300, seed).stretch(folded, cost)).max(initial=-1.0) / CHIPS for seed in range(400)]
    assert np.mean(drawn) == pytest.approx(mean, abs=4 * scatter / 20)
    assert np.std(drawn) == pytest.approx(scatter, rel=0.2)


@pytest.mark.parametrize("engine", ["simpy", "native"])
def test_an_event_of_another_stream_is_late_by_its_draw(engine: Engine) -> None:
    """With kernels of no noise a transfer is posted one launch, times its draw, after the kernel that it waits for."""
    checked = make_checked("ring", msgspec.structs.replace(WORK, passes="forward"), 2)
    spec = load_cluster("hgx-h100")
    noise = Jitter(1e-300, seed=5)
    drawn = noise.stretch(Fold(checked, Cluster(spec)), CostModel(Cluster(spec), None))
    assert drawn is not None
    trace = simulate(checked, Cluster(spec), None, noise, engine=engine).trace
    first = next(i for i, op in enumerate(checked.schedule.program(0).ops) if isinstance(op, ops.Exchange))
    behind = max((row.end_s for row in trace.rows if row.rank == 0 and row.op < first), default=0.0)
    row = next(row for row in trace.rows if (row.rank, row.op) == (0, first))
    issued = (first + 1) * spec.gpu.launch_s
    assert row.posted_s == pytest.approx(max(behind, issued) + spec.gpu.launch_s * drawn[first], rel=1e-12)


@pytest.mark.parametrize("speed", [1.0, 0.8])
@pytest.mark.parametrize("seed", range(3))
def test_noise_makes_no_kernel_faster_than_its_peak(speed: float, seed: int) -> None:
    """At the rates of datasheets attention takes its FLOPs at the peak: noise only lengthens it."""
    setup = longstep.Setup(
        "allgather", model="llama3-8b", cluster="l20-pcie", gpus=1, seq="64K", scope="attention", jitter=0.05,
        seed=seed, seeds=1, set={"cluster.gpu[0].speed": speed},
    )  # fmt: skip
    found = setup.predicted()
    assert found.step_time_s >= max(found.figures.floors.values())


def test_the_step_is_the_median_of_its_seeds(zigzag: Checked) -> None:
    cluster, profile = Cluster(load_cluster("hgx-h100")), load_profile("h100-sxm")
    alone = [simulate(zigzag, cluster, profile, Jitter(0.05, seed)) for seed in range(2, 7)]
    steps = sorted(one.trace.step_time_s for one in alone)
    together = simulate(zigzag, cluster, profile, Jitter(0.05, 2, seeds=5))
    assert together.step_times_s == tuple(steps)
    assert len(set(steps)) == 5
    assert together.trace.step_time_s == steps[2]
    same = next(one for one in alone if one.trace.step_time_s == steps[2])
    assert together.trace.rows == same.trace.rows
    assert together.noise == same.noise
    whole, part = interval(together, NOTHING), interval(same, NOTHING)
    assert whole is not None
    assert part is not None
    assert whole == pytest.approx((part[0] - steps[2] + steps[0], part[1] + steps[4] - steps[2]))


@pytest.mark.sweep
def test_races_that_decide_a_step_are_told() -> None:
    """With memory 6.1 times as fast the kernel before attention's backward grid takes as long as a launch: who comes
    first decides a quarter of the step (104 or 131 ms without noise). Without a race nothing is said.
    """
    what = {"model": "llama3-8b", "cluster": "dgx-a100", "nodes": 2, "gpus": 16, "seq": "64K", "passes": "backward"}
    plain = longstep.predict("zigzag", **what, scope="attention")  # type: ignore[arg-type]
    assert not any("which kernel" in note for note in plain.figures.evidence.notes)
    near = plain.replace(set={"cluster.hbm.bytes_per_s": "*6.095"})
    (note,) = [note for note in near.figures.evidence.notes if "which kernel" in note]
    fastest_s, *_, slowest_s = near.simulation.step_times_s
    assert f"{fastest_s * 1e3:.4g} to {slowest_s * 1e3:.4g} ms in 5 seeds" in note
    assert fastest_s < near.step_time_s < slowest_s


def test_what_ifs_have_the_same_noise(zigzag: Checked) -> None:
    """So a machine that is faster by nothing but kernels is faster in every seed."""
    spec = load_cluster("hgx-h100")
    faster = msgspec.structs.replace(
        spec, hbm=msgspec.structs.replace(spec.hbm, bytes_per_s=1.01 * spec.hbm.bytes_per_s)
    )
    noise = Jitter(0.05, seeds=5)
    before, after = (simulate(zigzag, Cluster(one), None, noise).step_times_s for one in (spec, faster))
    assert all(b > a for b, a in zip(before, after, strict=True))


def test_without_noise_one_play_is_enough(zigzag: Checked) -> None:
    found = simulate(zigzag, Cluster(load_cluster("hgx-h100")), None, Jitter(0.0, seeds=5))
    assert found.step_times_s == (found.trace.step_time_s,)
    assert report(found).step_times_s == found.step_times_s


@pytest.mark.parametrize("seeds", [0, 2, -1, 101])
def test_a_number_of_seeds_without_a_median_is_refused(seeds: int) -> None:
    with pytest.raises(InputError, match=f"`seeds` {seeds}: expected an odd number from 1 to 99"):
        longstep.predict(
            "ring", model="llama3-8b", cluster="hgx-h100", seq="8K", gpus=2, seeds=seeds, scope="attention"
        )


@pytest.mark.parametrize("seed", [-1, -(10**30)])
def test_a_seed_of_no_generator_is_refused(seed: int) -> None:
    with pytest.raises(InputError, match=f"`seed` {seed}: expected a whole number from 0 to"):
        longstep.predict("ring", model="llama3-8b", cluster="hgx-h100", seq="8K", gpus=2, seed=seed, scope="attention")


def test_replicas_that_pad_what_they_send_have_the_same_noise_and_more_ops() -> None:
    """Three ranks do not divide the weights: the last one has less of them, and zeros."""
    found = longstep.predict(
        "single", model="tiny", layers=1, seq="1K", cluster="hgx-h100", gpus=3, dp_degree=3, scope="step"
    )
    counts = [len(program.ops) for program in found.checked.schedule.programs]
    assert counts[0] == counts[1] < counts[2]
    assert found.step_time_s > 0


def test_seeds_that_are_played_at_once_are_those_of_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def played() -> Simulation:
        return longstep.predict("ring", model="tiny", cluster="hgx-h100", gpus=2, seq="8K", layers=2).simulation

    monkeypatch.setattr("sim.engine.play.native.num_cores", lambda: 1)
    in_turn = played()
    monkeypatch.setattr("sim.engine.play.native.num_cores", lambda: 4)
    monkeypatch.setattr("sim.engine.play.native._FEW_OPS", 0)
    at_once = played()
    assert len({*in_turn.step_times_s}) == 5
    assert at_once.step_times_s == in_turn.step_times_s
    assert (at_once.trace.ended_s == in_turn.trace.ended_s).all()
