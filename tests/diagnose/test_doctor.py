"""The doctor: planted faults in simulated runs are among what it names, and clean runs raise no alarm."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import pytest

import longstep
from longstep import InputError, Measured, Setup
from sim.accounts.breakdown import kernels_s
from sim.accounts.memory import walks
from sim.diagnose.hypotheses import MACHINES, PROGRAMS
from sim.diagnose.judge import play

ATTENTION = Setup(
    "zigzag", model="llama3-8b", cluster="hgx-h100", gpus=8, seq="256K", scope="attention", jitter=0
)  # fmt: skip
STEP = ATTENTION.replace(scope="step", seq="64K", layers=1, gpus=4)
IN_STAGES = STEP.replace(layers=8, pp_degree=2, seq="32K", batch=4, set={"schedule.micro_batches": 4})


def measured(setup: Setup, **more: Any) -> Measured:
    """Return what a perfect run of a setup would measure."""
    found = setup.predicted()
    return Measured(step_time_s=found.step_time_s, memory_bytes=found.peak_hbm_bytes, **more)


def consistent(setup: Setup, run: Measured) -> list[str]:
    return [cause.name for cause in longstep.doctor(setup, run).consistent]


@pytest.mark.sweep
def test_a_run_as_predicted_is_healthy_and_nothing_more_is_simulated() -> None:
    found = longstep.doctor(STEP, measured(STEP))
    assert found.verdict == "healthy"
    assert found.causes == []
    assert found.findings == []
    assert found.floor_s < found.low_s < found.measured_s < found.high_s  # type: ignore[operator]


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("said", "ran", "name", "verdict"),
    [
        (ATTENTION, {"schedule": "ring"}, "contiguous", "too slow"),
        pytest.param(ATTENTION, {"mask": "full"}, "full-mask", "too slow", marks=pytest.mark.slow),
        pytest.param(
            ATTENTION.replace(mask="full"), {"mask": "causal"}, "causal-mask", "impossible", marks=pytest.mark.slow
        ),
        pytest.param(ATTENTION, {"window": "4K"}, "window-64", "impossible", marks=pytest.mark.slow),
        pytest.param(ATTENTION, {"seq": "32K"}, "short-length", "impossible", marks=pytest.mark.slow),
        (ATTENTION, {"schedule": "single", "seq": "32K", "dp_degree": 8, "gpus": 8}, "cp-off", "impossible"),
        pytest.param(
            STEP,
            {"schedule": "single", "dp_degree": 4, "gpus": 4},
            "cp-off-replicated",
            "too slow",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            STEP.replace(seq="256K"),
            {"set": {"schedule.checkpoint": "none"}},
            "not-checkpointed",
            "too fast",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ATTENTION.replace(gpus=16),
            {"set": {"cluster.nic.bytes_per_s": "/40"}},
            "thin-nic",
            "too slow",
            marks=pytest.mark.slow,
        ),
        (STEP, {"set": {"cluster.gpu[3].speed": 0.4}}, "slow-rank", "too slow"),
        pytest.param(
            STEP.replace(seq="32K", set={"schedule.optimiser": "host"}),
            {"set": {"software.host_optimiser": "torch"}},
            "torch-on-host",
            "too slow",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            IN_STAGES,
            {"set": {"schedule.micro_batches": 1}},
            "unfilled-pipeline-1",
            "too slow",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            IN_STAGES.replace(seq="8K", batch=8, set={"schedule.micro_batches": 8}),
            {"set": {"schedule.pipeline_schedule": "gpipe"}},
            "all-forward-first",
            "memory differs",
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_planted_fault_is_named(said: Setup, ran: dict[str, Any], name: str, verdict: str) -> None:
    """By the time and the memory of the run that it makes; what was fitted gives back the factor that was planted."""
    found = longstep.doctor(said, measured(said.replace(**ran)))
    assert found.verdict == verdict
    cause = next((one for one in found.consistent if one.name == name), None)
    assert cause, [(one.name, one.off) for one in found.causes]
    planted = {"thin-nic": 40.0, "slow-rank": 2.5}.get(name)
    assert cause.factor == (None if planted is None else pytest.approx(planted, rel=0.05))


@pytest.mark.sweep
def test_memory_alone_says_nothing_of_what_does_not_move_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask, or tokens that each rank attends by itself, which are neither a cause nor refuted."""
    few = ("cp-off", "full-mask", "window-4", "zero-0", "not-checkpointed")
    monkeypatch.setattr("sim.diagnose.doctor.PROGRAMS", [one for one in PROGRAMS if one.name in few])
    found = longstep.doctor(STEP, Measured(memory_bytes=10**12))
    assert found.verdict == "memory differs"
    assert {"cp-off", "full-mask"} <= {*found.untold}
    assert {cause.name for cause in found.causes} >= {"zero-0"}
    assert not {*found.untold} & {cause.name for cause in found.causes}
    assert all(abs(cause.peak_hbm_bytes / found.peak_hbm_bytes - 1) > 1e-3 for cause in found.causes)


@pytest.mark.slow
def test_two_faults_at_once_are_tried_where_none_alone_explains_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention within packed documents, which is faster, and weights that are not sharded, which take more memory."""
    few = ("documents-4", "documents-16", "zero-0", "zero-1", "full-mask", "not-checkpointed")
    monkeypatch.setattr("sim.diagnose.doctor.PROGRAMS", [one for one in PROGRAMS if one.name in few])
    said = STEP.replace(layers=4)
    wrong = said.replace(documents=(4096,) * 16, set={"schedule.zero_stage": 0}).predicted()
    run = Measured(step_time_s=wrong.step_time_s, memory_bytes=wrong.peak_hbm_bytes)
    names = consistent(said, run)
    assert {"documents-16", "zero-0"} in [{*name.split(" and ")} for name in names]
    assert all(" and " in name for name in names), "one alone explains more with less"


@pytest.mark.slow
def test_links_are_not_slower_than_what_is_left_of_them_can_be() -> None:
    """NVLink at 1/173 of its rate is none; at a fifteenth it has lost most of its links."""
    named = {}
    for factor in (15, 173):
        said = ATTENTION.replace(seq="32K")
        ran = measured(said.replace(set={"cluster.nvlink.bytes_per_s": f"/{factor}"}))
        named[factor] = {*consistent(said, ran)}
    assert "thin-nvlink" in named[15]
    assert "thin-nvlink" not in named[173]


@pytest.mark.slow
def test_slower_attention_kernels_are_a_hypothesis() -> None:
    """By the seconds of a step, which a kernel of the generation before explains by a factor."""
    alone = ATTENTION.predicted()
    found = longstep.doctor(ATTENTION, Measured(step_time_s=1.7 * alone.step_time_s))
    (cause,) = (one for one in found.consistent if one.name == "slow-attention")
    assert cause.factor == pytest.approx(1.7, rel=0.05)


@pytest.mark.sweep
def test_an_mfu_alone_tells_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the field counts it; above the peak it is impossible by itself, whatever hypotheses there are."""
    monkeypatch.setattr("sim.diagnose.doctor.PROGRAMS", [one for one in PROGRAMS if one.name == "full-mask"])
    found = STEP.predicted()
    assert found.figures.mfu
    said = longstep.doctor(STEP, Measured(mfu=found.figures.mfu))
    assert (said.verdict, said.measured_s) == ("healthy", pytest.approx(found.step_time_s))
    assert "the step time is what MFU" in said.findings[0]
    above = longstep.doctor(STEP, Measured(mfu=1.96))
    assert above.verdict == "impossible"
    assert above.findings[0] == "MFU 196.0 %: nothing computes more than its peak"
    of_host = Setup("zigzag", model="tiny", cluster="host", gpus=2, seq="2K", scope="attention", profile="datasheet")
    if of_host.predicted().figures.mfu is None:
        with pytest.raises(InputError, match="`mfu` alone tells no time"):
            longstep.doctor(of_host, Measured(mfu=0.4))


def test_a_cause_is_found_by_memory_alone_where_its_time_is_within_what_is_known() -> None:
    """A zigzag ring with a full mask holds other blocks than with a causal one. At the rates of datasheets up to twice
    the time is healthy, so that only memory differs, which no full mask is suspected for at first.
    """
    said = Setup("zigzag", model="tiny", cluster="host", gpus=2, seq="2K", scope="attention", profile="datasheet")
    ran = said.replace(mask="full").predicted()
    memory_bytes = max(walk.buffer_peak_bytes for walk in walks(ran.checked))
    found = longstep.doctor(said, Measured(step_time_s=ran.step_time_s, memory_bytes=memory_bytes))
    assert found.verdict == "memory differs"
    assert "full-mask" in [cause.name for cause in found.consistent]


@pytest.mark.slow
def test_times_of_ranks_tell_apart_what_the_step_time_cannot() -> None:
    """A slow rank and slow GPUs take the same step; the seconds of each rank's kernels say which it is."""
    slow = ATTENTION.replace(set={"cluster.gpu[3].speed": 0.4})
    run = measured(slow)
    assert {"slow-rank", "slow-gpus"} <= {*consistent(ATTENTION, run)}
    played = slow.predicted()
    ranks = tuple(kernels_s(played.trace).tolist())
    with_ranks = longstep.doctor(ATTENTION, measured(slow, rank_s=ranks))
    assert [cause.name for cause in with_ranks.consistent] == ["slow-rank"]
    assert "rank 3" in with_ranks.consistent[0].says


@pytest.mark.slow
def test_ranks_that_differ_are_told_where_the_step_is_healthy() -> None:
    """Of a layer of 2K tokens attention is little: a contiguous layout moves the step by less than it is known to."""
    said = ATTENTION.replace(scope="layer", seq="16K")
    ran = said.replace(schedule="ring").predicted()
    found = longstep.doctor(
        said, Measured(step_time_s=said.predicted().step_time_s, rank_s=(tuple(kernels_s(ran.trace).tolist())))
    )
    assert found.verdict == "ranks differ"
    assert "contiguous" in [cause.name for cause in found.causes]


@pytest.mark.sweep
def test_figures_that_contradict_each_other_are_said_with_the_way_of_counting_that_explains_them() -> None:
    found = ATTENTION.predicted()
    of_gpu = 256 * 1024 / found.step_time_s / 8
    said = longstep.doctor(ATTENTION, Measured(step_time_s=found.step_time_s, tokens_per_s=of_gpu)).findings
    assert len(said) == 1
    assert "it is counted per GPU" in said[0]
    assert found.figures.mfu
    run = Measured(step_time_s=found.step_time_s, mfu=2 * found.figures.mfu)
    (line,) = longstep.doctor(ATTENTION, run).findings
    assert "the mask is counted as full (" in line
    above, *_ = longstep.doctor(ATTENTION, Measured(step_time_s=found.step_time_s, mfu=1.01)).findings
    assert "nothing computes more than its peak" in above
    fine = Measured(step_time_s=found.step_time_s, mfu=found.figures.mfu, tokens_per_s=8 * of_gpu)
    assert longstep.doctor(ATTENTION, fine).findings == []


@pytest.mark.slow
def test_memory_that_did_not_move_between_degrees() -> None:
    """Of 8 GPUs each has half the activations of 4; a run whose memory stays has them whole."""
    more = STEP.replace(gpus=8)
    here, there = (one.predicted().peak_hbm_bytes for one in (STEP, more))
    run = measured(STEP)
    moved = longstep.doctor(STEP, run, [(more, Measured(memory_bytes=there))]).findings
    assert len(moved) == 1
    assert "did not move" not in moved[0]
    stayed = longstep.doctor(STEP, run, [(more, Measured(memory_bytes=here))]).findings
    assert "did not move as it should" in stayed[0]
    with pytest.raises(InputError, match="give `memory` of both"):
        longstep.doctor(STEP, run, [(more, Measured(step_time_s=1.0))])


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (Measured(), "nothing was measured"),
        (Measured(step_time_s=-1.0), "`step_time` -1.0: expected a number above 0"),
        (Measured(memory_bytes=math.inf), "`memory` inf"),
        (Measured(step_time_s=1.0, mfu=41.0), "`mfu` 41: expected a share"),
        (Measured(rank_s=(1.0, 0.0)), "`rank_times` 0"),
        (Measured(rank_s=(1.0, 2.0)), "`rank_times` of 2 ranks: expected those of all 8"),
    ],
)
def test_what_is_no_measurement_is_refused(run: Measured, message: str) -> None:
    with pytest.raises(InputError, match=message):
        longstep.doctor(ATTENTION, run)


def test_what_is_of_pipelines_is_no_cause_where_there_is_one_stage() -> None:
    """And what is meant is none."""
    of_pipelines = [one for one in PROGRAMS if "pipeline" in one.says]
    assert len(of_pipelines) == 9
    assert not [one.name for one in of_pipelines if one.change(STEP, STEP.resolved())]
    names = {one.name for one in of_pipelines if one.change(IN_STAGES, IN_STAGES.resolved())}
    uneven_ones = {"uneven-stages-2", "uneven-stages-4"}
    assert names == {"unfilled-pipeline-1", "unfilled-pipeline-2", "all-forward-first", *uneven_ones}
    interleaved = IN_STAGES.replace(set={"schedule.pipeline_schedule": "interleaved", "schedule.pipeline_chunks": 2})
    by_name = {one.name: one.change(interleaved, interleaved.resolved()) for one in of_pipelines}
    plain = by_name["not-interleaved"]
    assert plain is not None
    assert plain.resolved().options == IN_STAGES.resolved().options
    assert by_name["uneven-stages-2"] is None, "its chunks are of two stages in turn"
    uneven = IN_STAGES.replace(set={"schedule.pipeline_layers": "3,5"})
    even = next(one for one in of_pipelines if one.name == "even-stages").change(uneven, uneven.resolved())
    assert even is not None
    assert even.resolved().options.pipeline_layers == "4,4"


@pytest.mark.sweep
def test_uneven_stages_are_told_by_the_kernels_of_their_ranks() -> None:
    """Where the step is within what is known."""
    run = IN_STAGES.replace(set={"schedule.pipeline_layers": "3,5"}).predicted()
    ranks_s = tuple(run.simulation.fold.of_all(kernels_s(run.trace).tolist()))
    found = longstep.doctor(IN_STAGES, Measured(step_time_s=run.step_time_s, rank_s=ranks_s))
    assert found.verdict == "ranks differ"
    assert "uneven-stages-4" in [cause.name for cause in found.consistent]


def test_eager_modules_are_tried_where_no_software_is_named() -> None:
    """An option at its default is one that can be changed."""
    (eager,) = [one for one in PROGRAMS if one.name == "eager-modules"]
    changed = eager.change(STEP, STEP.resolved())
    assert changed is not None
    assert changed.resolved().options.modules == "eager"


ON_TWO_NODES = Setup(
    "single", model="llama3-8b", cluster="hgx-h100", gpus=16, tp_degree=8, dp_degree=2, seq="16K", layers=1, jitter=0.0,
    set={"cluster.nic.bytes_per_s": 12.5e9},
)  # fmt: skip


def test_shares_of_weights_may_lie_between_nodes() -> None:
    """Where their groups are meant to be inside of some."""
    (machine,) = [one for one in MACHINES if one.name == "tp-between-nodes"]
    said = ON_TWO_NODES.resolved()
    ran = machine.change(said, 1.0, 0)
    assert ran is not None
    assert ran.mesh.groups("tp")[0] == (0, 2, 4, 6, 8, 10, 12, 14)
    assert said.mesh.groups("tp")[0] == tuple(range(8))
    others = [{"gpus": 8, "dp_degree": 1}, {"tp_degree": 1, "dp_degree": 16}, {"tp_degree": 16, "dp_degree": 1}]
    assert [machine.change(ON_TWO_NODES.replace(**one).resolved(), 1.0, 0) for one in others] == [None] * 3


@pytest.mark.slow
def test_shares_of_weights_between_nodes_are_found_by_the_time_that_they_take() -> None:
    """Their schedule is proved anew, and needs no factor."""
    (machine,) = [one for one in MACHINES if one.name == "tp-between-nodes"]
    ran = machine.change(ON_TWO_NODES.resolved(), 1.0, 0)
    assert ran is not None
    found = longstep.doctor(ON_TWO_NODES, Measured(step_time_s=play(ran).step_s))
    assert found.verdict == "too slow"
    (cause,) = [one for one in found.consistent if one.name == "tp-between-nodes"]
    assert (cause.factor, cause.step_time_s) == (None, pytest.approx(found.measured_s))


def test_names_are_unique() -> None:
    names = [one.name for one in (*PROGRAMS, *MACHINES)]
    assert len(names) == len({*names})


def _random_case(draw: random.Random) -> tuple[str, Setup, dict[str, Any]]:
    """Return a fault, what was said of a run, and how it differs from what ran."""
    gpus = draw.choice([4, 8, 16])
    said = ATTENTION.replace(
        gpus=gpus,
        seq=draw.choice(["32K", "128K", "512K"]),
        schedule=draw.choice(["zigzag", "striped"]),
        model=draw.choice(["llama3-8b", "llama3-70b"]),
    )
    fault = draw.choice(["clean", "slow-rank", "contiguous", "full-mask", "cp-off", "short-length", "cp-off-replicated",
                         "slow-gpus", "thin-link"])  # fmt: skip
    seq = said.resolved().workload.seq
    link = "nic" if gpus == 16 else "nvlink"
    nodes = {"cluster.nodes": -(-gpus // 8)}
    ran: dict[str, dict[str, Any]] = {
        "clean": {},
        "slow-rank": {"set": nodes | {f"cluster.gpu[{draw.randrange(gpus)}].speed": draw.uniform(0.3, 0.6)}},
        "slow-gpus": {"set": nodes | {f"cluster.gpu[{rank}].speed": 0.5 for rank in range(gpus)}},
        "contiguous": {"set": {"schedule.layout": "contiguous"}},
        "full-mask": {"mask": "full"},
        "cp-off": {"schedule": "single", "seq": seq // gpus, "dp_degree": gpus},
        "cp-off-replicated": {"schedule": "single", "dp_degree": gpus},
        "short-length": {"seq": seq // gpus},
        "thin-link": {
            "set": {f"cluster.{link}.bytes_per_s": f"/{draw.choice([30, 40] if link == 'nic' else [12, 16])}"}
        },
    }
    return fault, said, ran[fault]


@pytest.mark.slow
def test_a_hundred_random_faults() -> None:
    """Of what is measured of a run, its time (noise as wide as a third of the interval), memory and seconds of ranks'
    kernels (2 %). What is named among the consistent causes, and what is named first, by fault.
    """
    draw, table = random.Random(1), Counter[tuple[str, str]]()
    named = first = faults = alarms = clean = 0
    for _ in range(100):
        fault, said, ran = _random_case(draw)
        run = said.replace(**ran).predicted()
        reach = run.interval
        assert reach
        noise = draw.gauss(0, 1 / 1.645 / 3)
        width = math.log(reach.high_s / run.step_time_s if noise > 0 else run.step_time_s / reach.low_s)
        ranks = run.simulation.fold.of_all(kernels_s(run.trace).tolist())
        measurement = Measured(
            step_time_s=run.step_time_s * math.exp(noise * width),
            memory_bytes=max(walk.peak_bytes for walk in walks(run.simulation.fold.checked)),
            rank_s=tuple(seconds * math.exp(draw.gauss(0, 0.02)) for seconds in ranks),
        )
        found = longstep.doctor(said, measurement)
        names = [cause.name for cause in found.consistent]
        wanted = {"thin-link": {"thin-nic", "thin-nvlink"}}.get(fault, {fault})
        if fault == "clean":
            clean, alarms = clean + 1, alarms + (found.verdict != "healthy")
            table[fault, found.verdict] += 1
            continue
        faults += 1
        named += bool(wanted & {*names})
        first += bool(names) and names[0] in wanted
        table[fault, names[0] if names else found.verdict] += 1
    told = f"named {named}, first {first} of {faults}; {alarms} alarms of {clean}\n" + "\n".join(
        f"{fault:18} {name:18} {count}" for (fault, name), count in sorted(table.items())
    )
    assert named >= 0.9 * faults, told
    assert first >= 0.7 * faults, told
    assert alarms == 0, told
