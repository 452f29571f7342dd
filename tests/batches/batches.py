"""Small random batches, masks by enumeration, and the list of planners that every property walks over."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import strategies as st

from sim.batches.batch import Batch, batch
from sim.batches.planned import Planned
from sim.batches.planners.dcp import DcpOptions, dcp
from sim.batches.planners.fcp import FcpOptions, fcp
from sim.batches.planners.groups import GroupOptions, groups
from sim.batches.planners.static import all_gather, ring
from sim.batches.planners.wlb import wlb
from sim.batches.statistics import TokenBytes
from sim.schedule.ir.masks import CAUSAL, FULL, Band, Rectangle, Span
from sim.words.patterns import AttentionSink, CausalBlockwise, Pattern, SharedQuestion

Pairs = set[tuple[int, int]]

PATTERNS: dict[str, Band | Pattern] = {
    "causal": CAUSAL,
    "full": FULL,
    "window": Band(left=3, right=0),
    "lambda": AttentionSink(sink=2, window=4),
    "blockwise": CausalBlockwise(size=3, local=2),
    "shared question": SharedQuestion(answers=3, share=0.2),
}
BANDS = ("causal", "full", "window")

Planner = Callable[[Batch, int], Planned]

ANY_LENGTH: dict[str, Planner] = {
    "wlb": wlb,
    "wlb per sequence": lambda found, ranks: wlb(found, ranks, "sequence"),
    "wlb per document": lambda found, ranks: wlb(found, ranks, "document"),
}
DIVIDED: dict[str, Planner] = {
    "ring": ring,
    "zigzag": lambda found, ranks: ring(found, ranks, "zigzag"),
    "striped": lambda found, ranks: ring(found, ranks, "striped"),
    "all-gather": all_gather,
    "all-gather striped": lambda found, ranks: all_gather(found, ranks, "striped"),
}
"""Those whose layouts need a length that 2P divides."""
PER_TOKEN = TokenBytes(kv=3, query=5, out=7)
OF_BLOCKS: dict[str, Planner] = {
    "fcp": lambda found, ranks: fcp(found, ranks, FcpOptions(block_size=4)),
    "fcp of one division": lambda found, ranks: fcp(found, ranks, FcpOptions(block_size=3, divisions=1)),
    "groups": groups,
    "groups of powers of two": lambda found, ranks: groups(found, ranks, GroupOptions(powers_of_two=True)),
}
PARTITIONED: dict[str, Planner] = {
    "dcp": lambda found, ranks: dcp(found, ranks, PER_TOKEN, DcpOptions(block_size=4, gpus_per_node=3)),
    "dcp of one node": lambda found, ranks: dcp(found, ranks, PER_TOKEN, DcpOptions(block_size=6)),
}
"""Those that need Mt-KaHyPar."""
ANY_MASK = {*DIVIDED, *OF_BLOCKS, *PARTITIONED}


def lengths(most: int = 30, number: int = 8) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(1, most), min_size=1, max_size=number)


def in_band(band: Band, query: int, key: int) -> bool:
    return (band.left is None or query - band.left <= key) and (band.right is None or key <= query + band.right)


def kept(rectangles: tuple[Rectangle, ...]) -> list[tuple[int, int]]:
    return [(q, k) for r in rectangles for q in range(*r.queries) for k in range(*r.keys) if in_band(r.band, q, k)]


def for_planner(name: str, documents: list[int], ranks: int, pattern: str) -> Batch:
    """Return a batch that the planner takes: static ones get a last document that fills up to 2P."""
    rest = -sum(documents) % (2 * ranks)
    filled = [*documents, rest] if name in DIVIDED and rest else documents
    return batch(filled, PATTERNS[pattern])


def within(span: Span) -> set[int]:
    return set(range(*span))


def sees(keeps: Pattern, size: int, query: int, key: int) -> bool:
    """Return whether a query of a document of ``size`` tokens sees a key of it, by the definition of the mask."""
    if key > query:
        return False
    if isinstance(keeps, AttentionSink):
        return key < keeps.sink or query - key < keeps.window
    if isinstance(keeps, CausalBlockwise):
        row, column, last = query // keeps.size, key // keeps.size, (size - 1) // keeps.size
        return row == last or column < keeps.sink or row - column < keeps.local
    edge = size - keeps.answers * int(size * keeps.share)
    return key < edge or (query - edge) // int(size * keeps.share) == (key - edge) // int(size * keeps.share)


def patterns() -> st.SearchStrategy[Pattern]:
    return st.one_of(
        st.builds(AttentionSink, sink=st.integers(1, 9), window=st.integers(1, 9)),
        st.builds(CausalBlockwise, size=st.integers(1, 7), local=st.integers(1, 4), sink=st.integers(1, 3)),
        st.integers(1, 5).flatmap(
            lambda answers: st.builds(SharedQuestion, answers=st.just(answers), share=st.floats(0.01, 0.99 / answers))
        ),
    )
