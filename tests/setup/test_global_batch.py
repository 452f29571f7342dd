"""The global batch: sequences or tokens, shared out among replicas and micro-batches, or refused with what would do."""

from __future__ import annotations

import pytest

import longstep
from experiments.evidence.papers.cases import case_fields, setup_of
from longstep import InputError, Setup
from sim.plan.planned_batch import with_batch
from sim.setup.global_batch import divisors, sequences_of, usual_sequences

STEP = Setup("ulysses", model="tiny", cluster="hgx-h100", layers=1, seq="4K", jitter=0.0)


@pytest.mark.parametrize(
    ("said", "sequences"),
    [(64, 64), ("64", 64), (" 64 ", 64), ("4M", 1024), ("4m", 1024), ("1.5M", 384), ("8K", 2), ("4096 tokens", 1),
     ("12288tokens", 3)],
)  # fmt: skip
def test_a_number_counts_sequences_and_a_unit_tokens(said: int | str, sequences: int) -> None:
    """Of 4096 tokens each."""
    assert sequences_of(said, 4096) == sequences
    assert STEP.replace(gpus=2, global_batch=said).spelled_out().batch == sequences


@pytest.mark.parametrize(
    ("fields", "spelled"),
    [
        ({"gpus": 8, "ulysses_degree": 4, "global_batch": 8}, (8, 2, 4)),
        ({"nodes": 2, "ulysses_degree": 4, "global_batch": "64K"}, (16, 4, 4)),
        ({"cluster": "16xH100", "ulysses_degree": 8, "global_batch": 6}, (16, 2, 3)),
        ({"ulysses_degree": 4, "global_batch": 6}, (4, 1, 6)),
        ({"schedule": "usp", "gpus": 8, "ulysses_degree": 2, "ring_degree": 2, "global_batch": 6}, (8, 2, 3)),
        ({"schedule": "usp", "gpus": 8, "ulysses_degree": 2, "global_batch": 6}, (8, 1, 6)),
        ({"gpus": 8, "dp_degree": 4, "global_batch": 4}, (8, 4, 1)),
        ({"gpus": 8, "global_batch": 3}, (8, 1, 3)),
        ({"schedule": "single", "gpus": 8, "global_batch": 16}, (8, 8, 2)),
        ({"schedule": "single", "nodes": 1, "global_batch": 16}, (8, 8, 2)),
        ({"gpus": 8, "dp_degree": 4, "batch": 2, "global_batch": 8}, (8, 4, 2)),
        ({"gpus": 16, "ulysses_degree": 4, "pp_degree": 2, "global_batch": 8}, (16, 2, 4)),
        ({"ulysses_degree": 4, "pp_degree": 2, "global_batch": 8}, (8, 1, 8)),
        ({"gpus": 2, "documents": (3072, 1024), "global_batch": "12K"}, (2, 1, 3)),
        ({"gpus": 8, "tp_degree": 2, "ulysses_degree": 2, "global_batch": 6}, (8, 2, 3)),
        ({"cp": 2, "tp_degree": 2, "gpus": 8, "global_batch": 6}, (8, 2, 3)),
        ({"schedule": "single", "tp_degree": 2, "gpus": 8, "global_batch": 16}, (8, 4, 4)),
    ],
)
def test_degrees_say_how_many_replicas_share_it(fields: dict[str, object], spelled: tuple[int, int, int]) -> None:
    """GPUs, replicas, and sequences of each, in micro-batches of one."""
    setup = STEP.replace(**fields)
    gpus, replicas, each = spelled
    found = setup.resolved()
    assert (found.mesh.size, found.mesh.dp, found.workload.batch, found.options.micro_batches) == (
        gpus, replicas, each, each,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"gpus": 16, "dp_degree": 8, "global_batch": 12},
         (r"`global_batch` 12 is no multiple of 8 replicas: set it to 8 or 16 \(sequences\); of its divisors 1, 2, 4 "
         r"would do as `dp_degree` on 16 GPUs")),
        ({"gpus": 8, "ulysses_degree": 2, "global_batch": 3}, r"set it to 4 \(sequences\); of its divisors 1 would do"),
        ({"gpus": 12, "ulysses_degree": 8, "global_batch": 2}, "`gpus` 12 .* set `gpus` to 8 or 16, or the degrees"),
        ({"gpus": 4, "dp_degree": 2, "batch": 3, "global_batch": 8}, "not the `batch` 3: .* set `global_batch` 6"),
        ({"global_batch": "10K"}, r"`global_batch` 10K is no whole number .* 4096 tokens: set it to 2 or 3 \(seq"),
        ({"global_batch": "2K"}, "`global_batch` 2K: one sequence has 4096 tokens; set `global_batch` 1"),
        ({"global_batch": "4194304"}, "at most 1048576 sequences; .* with the word: 4194304 tokens"),
        ({"global_batch": "9" * 5000}, "`global_batch` 99999999999999999999: at most"),
        ({"global_batch": "4MB"}, "`global_batch` 4MB: expected sequences such as 64, or tokens such as 4M"),
        ({"global_batch": "-3"}, "`global_batch` -3: expected sequences"),
        ({"global_batch": 0}, "`global_batch` 0: expected a whole number of 1 or more"),
        ({"global_batch": "any"}, "`global_batch` any: only plans choose it"),
        ({"global_batch": 2.0}, "`global_batch` 2.0: expected int or str or None"),
        ({"global_batch": 2, "scope": "layer"}, "`global_batch` 2 is of training steps: set `scope` step"),
    ],
)  # fmt: skip
def test_what_does_not_divide_is_refused_with_what_does(fields: dict[str, object], said: str) -> None:
    """In one line."""
    with pytest.raises(InputError, match=said):
        STEP.replace(**fields).resolved()


@pytest.mark.sweep
def test_it_is_what_is_spelled_out_to_the_digit() -> None:
    """Time, memory, tokens a second and the sentence; micro-batches that are set stay."""
    short = STEP.replace(gpus=4, ulysses_degree=2, global_batch="24K")
    spelled = STEP.replace(gpus=4, ulysses_degree=2, dp_degree=2, batch=3, set={"schedule.micro_batches": 3})
    one, other = short.predicted(), spelled.predicted()
    assert one.step_time_s == other.step_time_s
    assert one.figures == other.figures
    assert one.room == other.room
    assert one.answer == other.answer
    assert "for 6 sequences (24K tokens), " in one.answer
    assert one.figures.tokens_per_s_per_gpu == pytest.approx(6 * 4096 / one.step_time_s / 4, rel=1e-12)
    once = short.replace(set={"schedule.micro_batches": 1}).predicted()
    assert once.figures == spelled.replace(set={"schedule.micro_batches": 1}).predicted().figures
    assert one.replace(global_batch=2).step_time_s < one.step_time_s


@pytest.mark.sweep
def test_it_stays_where_gpus_lengths_and_schedules_are_varied() -> None:
    """In a sweep as an axis, in winners and in fit: rows of what does not divide say why."""
    base = STEP.replace(seeds=1)
    swept = longstep.explore(
        base.replace(gpus=2), {"global_batch": "2,16K,10K"}, intervals=False, bounds=False, jobs=1
    )  # fmt: skip
    times = [row["step_time_s"] for row in swept]
    assert times[:2] == [base.replace(gpus=2, global_batch=count).predicted().step_time_s for count in (2, 4)]
    assert "no whole number of sequences" in swept[2]["error"]
    kept = base.replace(gpus=2, global_batch="8K")
    fitted = longstep.fit(kept, ["ulysses", "single"], ["4K", "8K"])
    assert [bool(row["error"]) for row in fitted] == [False, False, False, True]
    assert "is no multiple of 2 replicas: set it to 2 (sequences)" in fitted[3]["error"]
    assert fitted[0]["step_time_s"] == kept.predicted().step_time_s
    won = longstep.winners(
        kept.replace(schedule=None), {"schedule": ["ulysses", "ring"]}, {"seq": ["4K", "8K"]}, jobs=1
    )  # fmt: skip
    assert [row["winner"] for row in won] == ["ulysses", "ulysses"]
    assert won[0]["step_time_s"] == kept.predicted().step_time_s


def test_a_case_file_says_it() -> None:
    """As it was typed, whether sequences or tokens."""
    said = STEP.replace(gpus=4, ulysses_degree=2, global_batch="24K")
    fields = case_fields(said)
    assert fields["global_batch"] == "24K"
    again = setup_of(fields, "h100-sxm")
    assert again.resolved().workload == said.resolved().workload
    assert again.resolved().mesh.dp == 2


def test_plans_take_no_documents_of_each_micro_batch() -> None:
    """Nobody has asked for the global batch that a plan would assume, so that is not what is refused."""
    documents = ((5000, 3192), (8192,))
    with pytest.raises(InputError, match="^`documents` of each micro-batch are of one step, and plans choose"):
        with_batch(Setup(model="tiny", cluster="hgx-h100", gpus=8, seq="8K", documents=documents))


@pytest.mark.parametrize(
    ("seq", "gpus", "sequences"),
    [(2**13, 64, 64), (2**13, 24, 48), (2**16, 64, 8), (2**16, 24, 8), (100_000, 8, 4), (2**19, 64, 1), (2**21, 64, 1)],
)
def test_a_plan_assumes_about_half_a_million_tokens(seq: int, gpus: int, sequences: int) -> None:
    """That divide the GPUs, or are a multiple of them; one sequence at least."""
    assert usual_sequences(seq, gpus) == sequences
    found = with_batch(Setup(model="tiny", cluster="hgx-h100", gpus=gpus, seq=seq))
    assert found.assumed["global_batch"] == str(sequences)


def test_a_plan_assumes_what_its_degrees_can_share() -> None:
    """One sequence a replica where these leave no choice; what is named stays; of a ``batch`` it is open."""
    long = Setup(model="tiny", cluster="hgx-h100", gpus=16, seq="1M")
    assert with_batch(long.replace(schedule="ulysses", ulysses_degree=4)).global_batch == "4"
    assert with_batch(long.replace(schedule="single", dp_degree=16)).global_batch == "16"
    assert with_batch(long.replace(schedule="usp", ulysses_degree=4)).global_batch == "1"
    assert with_batch(long.replace(batch=2)).assumed["global_batch"] == "any"
    named = with_batch(long.replace(global_batch="2M"))
    assert (named.global_batch, "global_batch" in named.assumed) == ("2M", False)
    assert with_batch(long.replace(seq="8K"), of_any_length=True).global_batch == "1"
    with pytest.raises(InputError, match="`global_batch` 2M is in tokens, of which longer sequences are fewer"):
        longstep.longest_context(long.replace(global_batch="2M"))


def test_divisors_are_all_of_them() -> None:
    """Also of squares."""
    assert [divisors(number) for number in (1, 12, 36)] == [[1], [1, 2, 3, 4, 6, 12], [1, 2, 3, 4, 6, 9, 12, 18, 36]]
