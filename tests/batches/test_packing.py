"""Packing: nothing lost, outliers wait, WLB-LLM's table of imbalance, and the bound of a pipeline."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.base.errors import InputError
from sim.batches.lengths import draw, histogram
from sim.batches.packing import (
    Document,
    Packed,
    Waiting,
    by_work,
    concatenated,
    fixed_length,
    imbalance,
    token_delay,
    transformer_work,
)
from tests.batches.batches import lengths


def squared(tokens: int) -> float:
    return float(tokens) ** 2


@given(lengths(most=50), st.integers(1, 12))
def test_concatenated_sequences_are_full_and_lose_no_token(documents: list[int], seq: int) -> None:
    number = -(-sum(documents) // seq)
    sizes = [sum(one.tokens for one in found) for found in concatenated(documents, number, seq)]
    assert sum(sizes) == sum(documents)
    assert sizes[:-1] == [seq] * (number - 1)


def test_concatenated_documents_are_cut_where_sequences_end() -> None:
    assert concatenated([3, 4, 2], 2, 5) == (
        (Document(3), Document(2)),
        (Document(2), Document(2)),
    )


def test_longest_first_to_the_least_work_that_has_room() -> None:
    # 6 and 5 open a micro-batch each; 4 goes to the one of 5 (25 < 36), 3 would make it 12: it goes to the one of 6.
    packed = by_work([3, 6, 4, 5], 2, 10, squared)
    assert [[one.tokens for one in found] for found in packed.micro_batches] == [[6, 3], [5, 4]]


def test_what_finds_no_room_waits_for_the_next_batch() -> None:
    packed = by_work([6, 6, 6], 2, 10, squared)
    assert [one.tokens for one in packed.waiting.left] == [6]
    then = by_work([1], 2, 10, squared, waiting=packed.waiting, arrived=1)
    assert sorted(one for found in then.micro_batches for one in found) == [Document(1, 1), Document(6, 0)]
    assert token_delay([packed, then]) == 6 / 19


def test_outliers_wait_until_there_is_one_for_each_micro_batch() -> None:
    packed = by_work([9, 1, 2], 2, 10, squared, waiting=Waiting(thresholds=(5, 8)))
    assert packed.waiting.queues == ((), (Document(9, 0),))
    then = by_work([10, 6], 2, 10, squared, waiting=packed.waiting, arrived=1)
    assert then.waiting.queues == ((Document(6, 1),), ())
    assert sorted(found[0].tokens for found in then.micro_batches) == [9, 10]


@given(st.lists(lengths(most=60), min_size=1, max_size=5), st.integers(1, 4), st.lists(st.integers(1, 50), unique=True))
def test_no_token_is_lost_or_doubled_between_batches(
    stream: list[list[int]], number: int, thresholds: list[int]
) -> None:
    waiting = Waiting(thresholds=tuple(sorted(thresholds)))
    out: list[Document] = []
    for arrived, documents in enumerate(stream):
        packed = by_work(documents, number, 60, squared, waiting=waiting, arrived=arrived)
        assert all(sum(one.tokens for one in found) <= 60 for found in packed.micro_batches)
        out += itertools.chain(*packed.micro_batches)
        waiting = packed.waiting
    came = [Document(tokens, arrived) for arrived, documents in enumerate(stream) for tokens in documents]
    assert sorted([*out, *waiting.documents]) == sorted(came)


def test_imbalance_falls_as_in_the_table_of_wlb_llm() -> None:
    # arXiv:2503.17924 Table 2, 7B at 128K, 4 micro-batches: 1.39 as packed, 1.35 fixed-length greedy, 1.05 with two
    # queues of outliers, where tokens are late by half a batch. Their lengths are not published: these are like theirs,
    # and work is FLOPs of a 7B Llama. So the published row is a range here, not a target.
    seq, number = 131072, 4
    work = transformer_work(4096, 11008, 4096)
    sample = histogram("wlb-llm")
    plain, fixed, balanced = [], [], []
    waiting = Waiting(thresholds=(seq // 8, seq // 2))
    packed: list[Packed] = []
    for seed in range(24):
        documents = draw(sample, number * seq, seed, longest=seq)
        plain.append(imbalance(concatenated(documents, number, seq), work))
        fixed.append(imbalance(fixed_length(documents, number, seq).micro_batches, work))
        packed.append(by_work(documents, number, 2 * seq, work, waiting=waiting, arrived=seed))
        waiting = packed[-1].waiting
        balanced.append(imbalance(packed[-1].micro_batches, work))
    plain_mean, fixed_mean, balanced_mean = (sum(found[4:]) / 20 for found in (plain, fixed, balanced))
    assert 1.15 < plain_mean < 1.5
    assert 1.15 < fixed_mean < 1.5
    assert balanced_mean < 1.06
    assert 0 < token_delay(packed) < 0.6


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: by_work([11], 2, 10, squared), "a document of 11 tokens is longer than a micro-batch, 10"),
        (lambda: by_work([], 2, 10, squared), "has no document"),
        (lambda: by_work([3, -1], 2, 10, squared), "document 1 has -1 tokens"),
        (lambda: by_work([3], 0, 10, squared), "`num_micro_batches` 0"),
        (lambda: by_work([3], 1, 0, squared), "0 tokens of a micro-batch"),
        (lambda: by_work([3], 1, 9, squared, waiting=Waiting(thresholds=(5, 5))), "expected rising"),
        (lambda: concatenated([30, 1], 3, 10), "31 tokens do not fit into 3 micro-batches of 10"),
    ],
)
def test_bad_input_is_refused(call: object, said: str) -> None:
    with pytest.raises(InputError, match=said):
        call()  # type: ignore[operator]
