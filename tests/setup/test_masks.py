"""Masks of documents by the names that users type."""

from __future__ import annotations

import pytest

from sim.base.errors import InputError
from sim.schedule.ir.masks import CAUSAL, FULL, Band
from sim.setup.masks import kept_of
from sim.words.patterns import AttentionSink, CausalBlockwise, SharedQuestion


@pytest.mark.parametrize(
    ("given", "keeps"),
    [
        ("causal", CAUSAL),
        ("full", FULL),
        ("window:4K", Band(left=4095, right=0)),
        ("lambda:64:4K", AttentionSink(sink=64, window=4096)),
        ("blockwise:256:2", CausalBlockwise(size=256, local=2, sink=1)),
        ("blockwise:256:2:3", CausalBlockwise(size=256, local=2, sink=3)),
        ("shared-question:4:0.2", SharedQuestion(answers=4, share=0.2)),
    ],
)
def test_forms(given: str, keeps: object) -> None:
    found = kept_of(given)
    assert found.keeps == keeps
    assert found.pattern is None or kept_of(str(found.pattern)) == found, "its name says the same"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            "lamda:64:4096",
            "unknown mask 'lamda:64:4096'.*: allowed are causal, full, .*:SHARE; set it with `mask`",
        ),
        ("lambda", "`mask` lambda: expected lambda:SINK:WINDOW; allowed are causal, full, window:TOKENS"),
        ("lambda:64", "`mask` lambda:64: expected lambda:SINK:WINDOW"),
        ("causal:8", "`mask` causal:8: expected causal; allowed"),
        ("blockwise:8:2:1:1", r"expected blockwise:SIZE:LOCAL\[:SINK\]"),
        ("lambda:0:4096", "`mask` lambda:0:4096: SINK 0: expected a positive whole number of tokens"),
        ("window:4Q", "`mask` window:4Q: TOKENS 4Q: expected"),
        ("shared-question:4:0.25", "`mask` shared-question:4:0.25: .* leaves no question: .* below 0.25"),
        ("shared-question:4:nan", "leaves no question"),
        ("shared-question:4:half", "SHARE half: expected a number such as 0.2"),
    ],
)
def test_what_says_nothing_is_refused(given: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        kept_of(given)
