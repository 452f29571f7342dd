"""Steps by few of their layers and micro-batches take what they take when they are played whole."""

from __future__ import annotations

import json
from typing import Any

import pytest

import longstep
from experiments.verbs.cli import main
from longstep import Setup
from sim.accounts.memory import walks
from sim.base.errors import InputError
from sim.plan.extended import extended
from sim.schedule.ir.program import Schedule
from sim.setup.configuration import Configuration
from tests.helpers import slow_but

STEPS: dict[str, dict[str, Any]] = {
    "layers": {"schedule": "ulysses", "seq": "64K"},
    "layers of unequal ranks": {"schedule": "ring", "seq": "64K"},
    "micro-batches": {"schedule": "zigzag", "seq": "16K", "layers": 4, "global_batch": 8, "micro_batches": 8},
    "stages": {"schedule": "ring", "gpus": 16, "seq": "32K", "pp_degree": 4, "global_batch": 12, "micro_batches": 12},
    "shares of weights in stages": {
        "schedule": "ulysses", "gpus": 16, "seq": "16K", "pp_degree": 2, "tp_degree": 4, "global_batch": 8,
        "micro_batches": 8,
    },
    "an allocator that is named": {
        "schedule": "single", "seq": "4K", "pp_degree": 4, "gpus": 4, "global_batch": 8, "micro_batches": 8,
        "software": "nanotron",
    },
}  # fmt: skip


def setup_of(name: str) -> Setup:
    given = {"model": "llama3-8b", "cluster": "hgx-h100", "scope": "step", "jitter": 0.0, **STEPS[name]}
    micro_batches = given.pop("micro_batches", 1)
    return Setup(**given, set={"schedule.micro_batches": str(micro_batches)}, yes=True)


@pytest.mark.sweep
@pytest.mark.parametrize("name", slow_but({"layers", "layers of unequal ranks"}, STEPS))
def test_it_takes_and_holds_what_the_whole_does(name: str) -> None:
    setup = setup_of(name)
    few, whole = extended(setup), setup.predicted()
    assert few.step_time_s == pytest.approx(whole.step_time_s, rel=1e-5)
    assert whole.room
    assert few.room.limits == whole.room.limits
    assert few.bound_by == whole.bound_by
    assert few.tokens_per_s_per_gpu == pytest.approx(whole.figures.tokens_per_s_per_gpu, rel=1e-5)
    assert few.answer.partition(" (")[0] == whole.answer.partition(" (")[0]
    assert few.played.startswith("told by ")


@pytest.mark.sweep
def test_memory_is_told_by_the_fullest_rank_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here that is the second one, whose copies of gathered keys are largest: the whole is not built for it."""
    given: dict[str, Any] = {"scope": "step", "seq": "32K", "global_batch": 2, "jitter": 0.0}
    setup = Setup("allgather", model="llama3-8b", cluster="hgx-h100", **given)
    whole = setup.predicted()
    assert walks(whole.simulation.checked)[1].peak_bytes > walks(whole.simulation.checked)[-1].peak_bytes
    assert whole.room
    monkeypatch.delattr("sim.plan.search.steps.room")
    assert extended(setup).room.limits == whole.room.limits


@pytest.mark.sweep
@pytest.mark.slow
def test_unlike_micro_batches_are_all_played() -> None:
    """None adds what another one does; their layers are few all the same."""
    documents = tuple([(8192 - 256 * number, 256 * number) if number else (8192,) for number in range(8)])
    given: dict[str, Any] = {"schedule": "ring", "gpus": 4, "pp_degree": 2, "seq": "8K", "documents": documents}
    setup = Setup(model="llama3-8b", cluster="hgx-h100", scope="step", jitter=0.0, **given)
    few, whole = extended(setup), setup.predicted()
    assert few.played == "told by 10 and 12 of 32 layers"
    assert few.step_time_s == pytest.approx(whole.step_time_s, rel=1e-3)
    assert few.answer.partition(" (")[2].partition("), ")[2] == whole.answer.partition(" (")[2].partition("), ")[2]


@pytest.mark.sweep
@pytest.mark.parametrize("name", slow_but({"layers", "layers of unequal ranks"}, STEPS))
def test_another_machine_is_played_on_schedules_that_are_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all figures of a step that was built anew."""
    setup, changes = setup_of(name), {"cluster.nvlink.bytes_per_s": "*2", "cluster.gpu.launch_s": "/3"}
    faster = setup.replace(set={**dict(setup.set), **changes})
    anew, few = extended(faster).to_dict(), extended(setup)
    assert few.fits

    def built(_: Configuration, *__: Any, **___: Any) -> Schedule:
        raise AssertionError

    monkeypatch.setattr(Configuration, "built", built)
    found = few.replace(set=faster.set)
    assert found.to_dict() == anew
    assert found.step_time_s < few.step_time_s
    with pytest.raises(AssertionError):
        few.replace(seq="128K")


@pytest.mark.parametrize("name", slow_but({"layers", "layers of unequal ranks"}, STEPS))
def test_seconds_of_plays_are_told_as_their_times_are(name: str) -> None:
    steps = extended(setup_of(name)).steps
    assert steps.told(lambda one: one.trace.step_time_s) == steps.step_s
    assert steps.told(lambda _: 1.0) == 1.0


def test_what_is_small_is_played_whole() -> None:
    few = extended(setup_of("layers").replace(layers=2))
    assert few.played == "played whole"


def test_other_scopes_are_refused() -> None:
    with pytest.raises(InputError, match="`extend` is of training steps .*scope is layer"):
        extended(Setup(model="llama3-8b", cluster="hgx-h100", scope="layer"))


LARGE = (
    "simulate --schedule ring --model llama3-70b --gpus 128 --seq 32K --pp-degree 4 --tp-degree 8 --scope step "
    "--global-batch 32 --set schedule.micro_batches=32"
)
SMALL = "simulate --schedule ulysses --layers 8 --seq 16K --scope step --json --extend"


@pytest.mark.sweep
def test_the_command_offers_it_and_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(LARGE.split())
    assert "or --extend what few layers and micro-batches take" in capsys.readouterr().err
    main(SMALL.split())
    found = json.loads(capsys.readouterr().out)
    assert found["rests_on"][0] == "told by 3 and 4 of 8 layers"
    setup = Setup(schedule="ulysses", layers=8, seq="16K", scope="step", cluster="hgx-h100")
    assert found["step_time_s"] == longstep.extended(setup).step_time_s
    with pytest.raises(SystemExit):
        main([*SMALL.split(), "--trace", "x.json"])
    assert "--extend plays no step whole" in capsys.readouterr().err
