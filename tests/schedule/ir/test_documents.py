"""Documents packed into one sequence: what their mask keeps, and what every schedule makes of it."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.execution.inputs import global_labels, global_tokens, reference
from runtime.execution.reference import attention
from sim.base.errors import InputError, LengthError, ScheduleError
from sim.schedule.derive.kernels import attention_use, mask_variant
from sim.schedule.ir.masks import CAUSAL, FULL, Band, DocumentBlock, Documents, Span, count_pairs, keeps_parts
from sim.schedule.ir.ops import NO_LABEL, Attend, HostSync
from sim.schedule.ir.program import Schedule
from sim.schedule.methods.catalog import SCHEDULES
from sim.schedule.proof.check import check
from sim.schedule.write.blocks import blocks
from sim.setup.setup import Setup
from sim.words.workload import Workload
from tests.helpers import VARIANTS, by_tier, make_model
from tests.runtime.execution.test_virtual import exact_or_refused
from tests.schedule.model.test_step import is_exact, step

LENGTHS = (5, 20, 1, 3, 11, 24)
NAMES = [name for name in SCHEDULES if name != "balanced-ring"]


def workload(**fields: object) -> Workload:
    return Workload(**{"model": make_model(), "seq": 64, "documents": LENGTHS, "dtype": "fp64"} | fields)


@given(
    st.lists(st.integers(1, 9), min_size=2, max_size=8) | st.lists(st.integers(1, 3), min_size=17, max_size=24),
    st.sampled_from([CAUSAL, FULL, Band(left=2, right=0)]),
    st.integers(1, 3),
    st.data(),
)
def test_pairs_are_counted_one_by_one(lengths: list[int], band: Band, step: int, data: st.DataObject) -> None:
    document = [number for number, size in enumerate(lengths) for _ in range(size)]
    edges = tuple(sum(lengths[:at]) for at in range(len(lengths) + 1))
    queries, keys = (
        Span(start, start + step * ((edges[-1] - 1 - start) // step + 1), step)
        for start in (data.draw(st.integers(0, edges[-1] - 1)) for _ in range(2))
    )
    wanted = sum(
        document[i] == document[j] and count_pairs(band, Span(i, i + 1), Span(j, j + 1))
        for i in range(*queries)
        for j in range(*keys)
    )
    assert count_pairs(Documents(band, edges), queries, keys) == wanted


@pytest.mark.sweep
@settings(max_examples=12, deadline=None)
@given(st.data(), st.sampled_from(NAMES), st.sampled_from([2, 4]))
def test_no_pair_is_lost_or_doubled(data: st.DataObject, name: str, ranks: int) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, 63), max_size=12)))
    lengths = tuple(end - start for start, end in zip([0, *cuts], [*cuts, 64], strict=True))
    of = workload(documents=lengths)
    variant = VARIANTS[name]
    ranks = 1 if name == "single" else ranks
    check(variant.build(of, variant.mesh(ranks, of.model)))


@pytest.mark.parametrize("name", ["zigzag", "striped", "allgather", "ulysses"])
def test_executed_documents_are_exact(name: str) -> None:
    assert exact_or_refused(name, 4, 3, model=make_model(), seq=64, documents=LENGTHS, dtype="fp64")


OF_EACH = ("zigzag of each document", "double-ring of each document", "usp of each document")


@pytest.mark.parametrize("name", OF_EACH)
def test_shards_of_each_document_are_exact(name: str) -> None:
    assert exact_or_refused(name, 4, 3, model=make_model(), seq=64, documents=(8, 40, 16), dtype="fp64")


@settings(max_examples=6, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=2, max_size=8), st.sampled_from(OF_EACH), st.sampled_from([2, 4]))
def test_each_document_is_shared_out_alike(eighths: list[int], name: str, ranks: int) -> None:
    lengths = tuple(8 * size for size in eighths)
    of, variant = workload(documents=lengths, seq=sum(lengths)), VARIANTS[name]
    checked = check(variant.build(of, variant.mesh(ranks, of.model)))
    kernels = {sum(isinstance(op, Attend) for op in program.ops) for program in checked.schedule.programs}
    ring = variant.mesh(ranks, of.model).ring
    assert kernels == {ring}, "one variable-length kernel a step"


def test_a_document_that_does_not_divide_is_refused() -> None:
    """By its number; padding the sequence would not help."""
    variant, wrong = VARIANTS["zigzag of each document"], "document 1 has 12 tokens, no multiple of 8, which 4 ranks"
    with pytest.raises(InputError, match=wrong) as caught:
        variant.build(workload(documents=(40, 12, 12)), variant.mesh(4, make_model()))
    assert not isinstance(caught.value, LengthError)
    given = {"documents": (40, 12, 12), "set": {"schedule.sharding": "document"}, "scope": "attention"}
    setup = Setup("zigzag", model="tiny", cluster="hgx-h100", gpus=4, pad=True, **given)
    with pytest.raises(InputError, match=wrong):
        setup.resolved()


def test_the_host_waits_for_each_half_that_it_takes() -> None:
    """Rank 0 of 4 takes halves of queries in 3 of 4 steps: 4 times forward, 2 backward, beside those of each pass; the
    last rank of keys: 2 and 6."""
    variant, of = VARIANTS["zigzag of each document"], workload(documents=(24, 40))
    found = variant.build(of, variant.mesh(4, of.model))
    waits = [[op for op in program.ops if isinstance(op, HostSync)] for program in found.programs]
    for rank, forward, backward in ((0, 4, 2), (3, 2, 6)):
        times = [sum(op.part == part for op in waits[rank]) for part in ("forward", "backward")]
        assert times == [2 + 3 * forward, 4 + 3 * backward]
    loops = [op.calls for op in waits[0] if op.label == "masks"]
    assert loops == [2 * 10, 2 * 3]
    alone = variant.build(workload(documents=(64,)), variant.mesh(4, of.model))
    assert not any(isinstance(op, HostSync) for program in alone.programs for op in program.ops), "slices of one"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_layers_of_documents_are_exact(name: str, ranks: int) -> None:
    ran = exact_or_refused(
        name, ranks, 3, model=make_model(), seq=64, documents=LENGTHS, dtype="fp64", scope="layer", layers=2
    )
    assert ran or name == "single"


def test_the_reference_is_each_document_by_itself() -> None:
    """The pairs of documents by the mask are those of as many sequences."""
    of = workload(passes="forward")
    whole = reference(of)["out", 0]
    q, k, v = (global_tokens(name, Span(0, 64), heads, of) for name, heads in (("q", 8), ("k", 4), ("v", 4)))
    start = 0
    for size in LENGTHS:
        some = slice(start, start + size)
        alone = attention(q[:, some], k[:, some], v[:, some], None, CAUSAL).out
        assert float((alone - whole[:, some]).abs().max()) < 1e-12
        start += size


def test_labels_do_not_cross_documents() -> None:
    of = workload(scope="step", dtype="fp32")
    ends = [4, 24, 25, 28, 39, 63]
    assert (global_labels(Span(0, 64), of) == NO_LABEL).nonzero()[:, 1].tolist() == ends
    assert of.num_labels == 64 - len(ends)


def test_a_block_of_other_pairs_is_caught() -> None:
    mask = Documents(CAUSAL, (0, 5, 8))
    wrong, right = (tuple(DocumentBlock(span, span, CAUSAL) for span in (Span(0, at), Span(at, 8))) for at in (4, 5))
    whole = Span(0, 8)
    assert keeps_parts(mask, right, whole, whole, 0, 0)
    assert not keeps_parts(mask, wrong, whole, whole, 0, 0)


def test_a_schedule_that_forgets_the_documents_is_refused() -> None:
    of, single = workload(), VARIANTS["single"]
    schedule = single.build(workload(documents=msgspec.UNSET), single.mesh(1, of.model))
    header = msgspec.structs.replace(schedule.header, workload=of)
    with pytest.raises(ScheduleError, match="not what the mask"):
        check(Schedule(header, schedule.program))


def test_one_kernel_does_the_work_of_all_documents() -> None:
    documents = tuple(DocumentBlock(span, span, CAUSAL) for span in (Span(0, 256), Span(256, 384)))
    use = attention_use(False, "bf16", (1, 384, 8, 64), 384, 8, FULL, documents)
    assert use.flops == 4 * 64 * 8 * (256 * 257 // 2 + 128 * 129 // 2)
    assert use.tiles == 8 * 3


@given(st.lists(st.integers(1, 9), min_size=2, max_size=8), st.data())
def test_kernels_take_no_key_that_none_of_their_queries_sees(lengths: list[int], data: st.DataObject) -> None:
    """So parts of causal documents are full, or end in the last query's own key, as variable-length kernels ask for."""
    edges = tuple(sum(lengths[:at]) for at in range(len(lengths) + 1))
    start = data.draw(st.integers(0, edges[-1] - 1))
    queries = Span(start, data.draw(st.integers(start + 1, edges[-1])))
    for block in blocks(Documents(CAUSAL, edges), (queries,), (Span(0, edges[-1]),)):
        whole = DocumentBlock(Span(*block.rows.indices(64)), Span(*block.columns.indices(64)), block.band)
        for rows, columns, band in block.documents or (whole,):
            assert mask_variant(band, rows.size, columns.size) in {"full", "causal"}


@pytest.mark.parametrize(
    ("lengths", "match"), [((64, 0), "document 1 has 0 tokens"), ((70, -6), "has -6"), ((60,), "60 tokens in all")]
)
def test_bad_lengths_are_refused(lengths: tuple[int, ...], match: str) -> None:
    with pytest.raises(InputError, match=match):
        workload(documents=lengths)


@pytest.mark.parametrize("name", by_tier(set(), {"zigzag"}, NAMES))
def test_training_steps_of_documents_are_exact(name: str) -> None:
    """Losses, gradients and updated weights: rotary positions restart, and labels stay within their documents."""
    is_exact(name, 1 if name == "single" else 2, step(documents=(5, 20, 1, 3, 3), batch=2))
