"""Plans asked the other way round: the answers of trying everything."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest

import longstep
from longstep import InputError, Setup
from sim.plan.lengths import ROUND, last_enough, lengths_of_units
from sim.plan.reverse import _on
from sim.plan.search.branches import Lost, Played, played
from sim.plan.search.room import room
from sim.plan.search.space import Branch
from tests.plan.test_plan import SMALL, random_setup, that_fit

COUNTS = [1, 2, 4]
UNTIL = 2**16


def require_same_as_by_trying(seed: int) -> None:
    """Assert that the answers to all three questions are those of trying every configuration of a random space."""
    rng = random.Random(seed)
    setup, options = random_setup(rng)
    setup = setup.replace(gpus=4, dp_degree=1)
    if setup.schedule == "single":
        setup = setup.replace(schedule="ulysses")
    tried = {gpus: that_fit(setup.replace(gpus=gpus), options) for gpus in COUNTS}
    costs = [2.5 * gpus * step_s / count for gpus, found in tried.items() for step_s, count in found]
    fastest = [min(step_s for step_s, _ in found) for found in tried.values() if found]
    step_time_s = rng.choice(fastest or [1.0]) * rng.choice([0.9, 1.1, 2.0])
    try:
        cheapest = longstep.cheapest(setup, 2.5, counts=COUNTS, options=options, most=1, jobs=1)
    except InputError:
        assert not costs
        return
    tokens = setup.sequence_length
    cost = [row["cost_per_billion_tokens"] * tokens * 3600 / 1e9 for row in cheapest.best]
    assert cost == pytest.approx([min(costs)] if costs else [], rel=1e-12)
    fewest = longstep.fewest_gpus(
        setup, step_time_s=step_time_s, counts=COUNTS, options=options, most=1, jobs=1
    )  # fmt: skip
    enough = [gpus for gpus, found in tried.items() if any(step_s <= step_time_s for step_s, _ in found)]
    assert fewest.value == (enough[0] if enough else None)
    assert fewest.sure
    rate = tokens / step_time_s
    fewest = longstep.fewest_gpus(setup, tokens_per_s=rate, counts=COUNTS, options=options, most=1, jobs=1)
    enough = [gpus for gpus, found in tried.items() if any(step_s / count <= step_time_s for step_s, count in found)]
    assert fewest.value == (enough[0] if enough else None)
    limit_s = rng.choice([None, step_time_s])
    longest = longstep.longest_context(setup, step_time_s=limit_s, until=UNTIL, options=options, most=1, jobs=1)
    assert longest.sure
    require_longest(longest.value, setup, options, limit_s or math.inf)


def require_longest(value: int | None, setup: Setup, options: dict[str, list[str]], limit_s: float) -> None:
    """Assert that something is enough for the length that was found, and nothing for the next one, nor for others
    beyond: round ones where time counts, which is less where a length divides well. Weights are not shared out.
    """
    lengths = list(lengths_of_units(8, UNTIL))
    at = -1 if value is None else lengths.index(value)
    others = {at + 2, at + 16} if limit_s == math.inf else {-(-(at + 2) // ROUND) * ROUND}
    for number in {at, at + 1, *others} & {*range(len(lengths))}:
        found = that_fit(setup.replace(seq=lengths[number], tp_degree=1), options)
        assert any(step_s <= limit_s for step_s, _ in found) is (number == at), lengths[number]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 150))
def test_answers_are_those_of_trying_everything(seed: int) -> None:
    """In small spaces of random schedules, lengths and memories."""
    require_same_as_by_trying(seed)


@pytest.mark.slow
def test_the_longest_context_is_the_last_length_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one configuration: at the next of 128 lengths in an octave it does not. Bounds of memory
    are exact, so that it is simulated at that length only.
    """
    lengths_played: list[int | str] = []

    def counted(branch: Branch, beaten_at: float) -> Played | Lost:
        lengths_played.append(branch.setup.seq)
        return played(branch, beaten_at)

    monkeypatch.setattr("sim.plan.reverse.played", counted)
    tight = SMALL.replace(
        schedule="ulysses", gpus=2, ulysses_degree=2, set={"cluster.hbm.capacity_bytes": 8e9}
    )  # fmt: skip
    kept = {"schedule.checkpoint": "none", "schedule.activations": "hbm", "schedule.optimiser": "gpu"}
    tight = tight.replace(set={**kept, "schedule.mlp": "whole", "schedule.loss": "chunked"})
    answer = longstep.longest_context(tight, until="1M", jobs=1)
    assert answer.value is not None
    assert answer.sure
    assert lengths_played == [answer.value]
    lengths = list(lengths_of_units(4, 2**20))
    after = lengths[lengths.index(answer.value) + 1]
    fits = [
        room(tight.replace(scope="step", pad=True, seq=seq).resolved()).free_bytes >= 0 for seq in (answer.value, after)
    ]
    assert fits == [True, False]
    assert answer.tried[-1]["seq"] == after
    assert "GiB more of" in answer.tried[-1]["why"]
    assert answer.plan is not None
    assert answer.plan.best[0]["fits"] is not False


def test_lengths_are_multiples_and_near_each_other() -> None:
    """At most 1 % apart, of two for each of 24 GPUs."""
    lengths = list(lengths_of_units(48, 10**6))
    assert lengths[0] == 48 * 128
    assert all(length % 48 == 0 for length in lengths)
    assert all(1 < after / before <= 1.01 for before, after in pairwise(lengths))


@pytest.mark.parametrize("last", [0, 1, 2, 3, 6, 7, 62, 63, 99])
def test_the_last_that_is_enough_is_found_in_few_steps(last: int) -> None:
    """Of 100, wherever it is known to begin."""
    for known in range(0, last + 1, 7):
        asked: list[int] = []

        def reaches(number: int, asked: list[int] = asked) -> bool:
            asked.append(number)
            return number <= last

        assert last_enough(100, known, reaches) == last
        assert len(asked) == len({*asked}) <= 14


def test_a_part_of_a_socket_has_a_part_of_its_memory() -> None:
    """Two of the four GPUs of a socket have half; what pins most of what there is is said to be unusual."""
    whole = SMALL.resolved().spec.socket
    assert whole is not None
    for gpus, share in ((1, 0.25), (2, 0.5), (4, 1.0)):
        socket = _on(SMALL, gpus).resolved().spec.socket
        assert socket is not None
        assert socket.dram.capacity_bytes == share * whole.dram.capacity_bytes


@pytest.mark.slow
def test_what_no_one_would_run_is_said_to_be_that() -> None:
    """More than half of a socket's memory pinned."""
    on_host = SMALL.replace(schedule="ulysses", gpus=2, ulysses_degree=2, set={"schedule.optimiser": "host"})
    options = {"checkpoint": ["full"], "mlp": ["whole"], "activations": ["hbm"]}
    held = longstep.plan(on_host, options=options, jobs=1).best[0]
    assert held["unusual"] == ""
    little = {"cluster.socket.dram.capacity_bytes": int(1.5 * held["peak_socket_bytes"])}
    tight = longstep.plan(on_host.replace(set=little), options=options, jobs=1).best[0]
    assert tight["unusual"].startswith("it pins")


@pytest.mark.sweep
def test_bad_questions_are_refused() -> None:
    """With what is allowed."""
    with pytest.raises(InputError, match="`step_time` -1"):
        longstep.fewest_gpus(SMALL, step_time_s=-1)
    with pytest.raises(InputError, match="`tokens_per_s` 0"):
        longstep.longest_context(SMALL, tokens_per_s=0)
    with pytest.raises(InputError, match="`until` 100: expected 1024 tokens or more where 4 GPUs share a sequence"):
        longstep.longest_context(SMALL, until=100)
    with pytest.raises(InputError, match="`documents` say how long"):
        longstep.longest_context(SMALL.replace(documents=(4096, 4096)))
    with pytest.raises(InputError, match="`price` 0"):
        longstep.cheapest(SMALL, 0)
    with pytest.raises(InputError, match="`counts` 0"):
        longstep.fewest_gpus(SMALL, counts=[0, 2])
    with pytest.raises(InputError, match="no configuration can be built"):
        longstep.fewest_gpus(SMALL.replace(schedule="ring"), options={"checkpoint": ["nonsense"]})
