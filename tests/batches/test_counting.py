"""Masks of documents and their counts, held against enumeration and against the counts of one block."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.base.errors import InputError
from sim.batches.batch import batch
from sim.batches.counting import pairs_in_band, pairs_kept
from sim.schedule.ir.masks import Band, Span, count_pairs, kept_in
from sim.words.patterns import AttentionSink, CausalBlockwise, Pattern, SharedQuestion
from tests.batches.batches import PATTERNS, in_band, kept, lengths, patterns, sees


def spans(seq: int) -> st.SearchStrategy[Span]:
    return st.builds(
        lambda start, size, step: Span(start, start + size * step, step),
        st.integers(0, seq),
        st.integers(1, 12),
        st.integers(1, 4),
    )


@given(lengths(), st.sampled_from(list(PATTERNS)), st.lists(st.tuples(spans(60), spans(60)), min_size=1, max_size=5))
def test_blocks_keep_what_enumeration_keeps(
    documents: list[int], pattern: str, blocks: list[tuple[Span, Span]]
) -> None:
    rectangles = batch(documents, PATTERNS[pattern]).rectangles
    pairs = kept(rectangles)
    found = pairs_kept([q for q, _ in blocks], [k for _, k in blocks], rectangles)
    assert found.tolist() == [sum(q in range(*rows) and k in range(*keys) for q, k in pairs) for rows, keys in blocks]


@given(lengths(), st.sampled_from(list(PATTERNS)))
def test_masks_stay_in_documents_and_keep_no_pair_twice(documents: list[int], pattern: str) -> None:
    found = batch(documents, PATTERNS[pattern])
    pairs = kept(found.rectangles)
    assert len(pairs) == len(set(pairs))
    document = np.repeat(np.arange(len(documents)), documents)
    assert all(document[q] == document[k] for q, k in pairs)
    assert {(token, token) for token in range(found.num_tokens)} <= set(pairs)


def test_lambda_keeps_the_sink_and_a_window() -> None:
    keys = {k for q, k in kept(kept_in(Span(10, 20), AttentionSink(sink=2, window=3))) if q == 18}
    assert keys == {10, 11, 16, 17, 18}


def test_blockwise_keeps_near_blocks_the_first_and_all_for_the_last() -> None:
    pairs = kept(kept_in(Span(0, 10), CausalBlockwise(size=2, local=2)))
    assert {k for q, k in pairs if q == 7} == {0, 1, 4, 5, 6, 7}
    assert {k for q, k in pairs if q == 9} == set(range(10))


def test_answers_see_the_question_and_themselves() -> None:
    pairs = kept(kept_in(Span(0, 10), SharedQuestion(answers=2, share=0.2)))
    assert {k for q, k in pairs if q == 9} == {0, 1, 2, 3, 4, 5, 8, 9}


@given(spans(40), spans(40), st.none() | st.integers(0, 9), st.none() | st.integers(-3, 9))
def test_counts_in_one_band_are_those_of_one_block(
    queries: Span, keys: Span, left: int | None, right: int | None
) -> None:
    if left is not None and right is not None and left + right < -1:
        return  # no band
    queries, keys = queries._replace(step=1), keys._replace(step=1)
    columns = [np.array([at]) for at in (queries.start, queries.stop, keys.start, keys.stop)]
    band = Band(left, right)
    wanted = sum(in_band(band, q, k) for q in range(*queries) for k in range(*keys))
    assert pairs_in_band(*columns, band).tolist() == [wanted] == [count_pairs(band, queries, keys)]


def test_a_million_tokens_are_counted_exactly() -> None:
    documents = [2**20 - 2000 + 1, *[1] * 1999]
    whole = Span(0, 2**20)
    size = documents[0]
    assert pairs_kept([whole], [whole], batch(documents).rectangles).tolist() == [size * (size + 1) // 2 + 1999]


@pytest.mark.parametrize("documents", [[], [3, 0], [-1]])
def test_documents_without_tokens_are_refused(documents: list[int]) -> None:
    with pytest.raises(InputError, match="expected"):
        batch(documents)


def test_bad_patterns_are_refused() -> None:
    with pytest.raises(InputError, match="`sink` 0: expected a whole number"):
        AttentionSink(sink=0, window=4)
    with pytest.raises(InputError, match="leaves no question: expected above 0 and below 0.25"):
        SharedQuestion(answers=4, share=0.25)


@given(st.integers(1, 40), st.integers(0, 20), patterns())
def test_patterns_keep_what_they_say(size: int, start: int, keeps: Pattern) -> None:
    wanted = [(q, k) for q in range(size) for k in range(size) if sees(keeps, size, q, k)]
    found = kept(kept_in(Span(start, start + size), keeps))
    assert sorted(found) == [(start + q, start + k) for q, k in wanted]
