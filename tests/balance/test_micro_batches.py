"""Documents of a global batch in micro-batches: what packers make of them, and what a pipeline makes of that."""

from __future__ import annotations

from typing import Any

import pytest

import longstep
from longstep import Setup
from sim.balance.micro_batches import PACKERS, document_seconds, packed_by, sharded_by
from sim.base.errors import InputError
from sim.setup.names import micro_batches_of

DOCUMENTS = (4000, 900, 700, 600, 500, 400, 300, 200, 300, 292)


def step(**fields: Any) -> Setup:
    """Two stages of two ranks, two micro-batches of 4K tokens."""
    given: dict[str, Any] = {"schedule": "zigzag", "model": "llama3-8b", "gpus": 4, "pp_degree": 2, "layers": 2}
    given |= {"seq": "4K", "batch": 2, "documents": DOCUMENTS, "jitter": 0.0, "set": {"schedule.micro_batches": 2}}
    return Setup(**given | fields)


def test_packers_put_all_documents_into_micro_batches() -> None:
    found = {packer: micro_batches_of(packed_by(step(), packer).documents or ()) for packer in PACKERS}
    assert found["concatenated"] == ((4000, 96), (804, 700, 600, 500, 400, 300, 200, 300, 292))
    assert found["heaviest-first"] == found["concatenated"]
    reversed_ = micro_batches_of(packed_by(step(documents=DOCUMENTS[::-1]), "heaviest-first").documents or ())
    assert reversed_ is not None
    assert reversed_[0] == (96, 4000)  # the last one of those concatenated
    assert found["fixed-length"] == ((4000,), (900, 700, 600, 500, 400, 300, 300, 292))  # there is no room for 200
    by_work = found["wlb-llm"]
    assert by_work is not None
    assert sorted(size for one in by_work for size in one) == sorted(DOCUMENTS)
    assert sum(by_work[0]) < 4096 < sum(by_work[1])  # of attention the first has more


def test_seconds_of_a_document_grow_faster_than_its_tokens() -> None:
    """All of a layer but attention by the token; under a window attention, too, from its length on."""
    work, window = document_seconds(step(seq="64K")), document_seconds(step(seq="64K", mask="window:1K"))
    assert work(2 * 65536) > 2.5 * work(65536)
    assert work(512) / 512 == pytest.approx(work(1024) / 1024, rel=0.15)
    assert window(2 * 65536) == pytest.approx(2 * window(65536), rel=0.05)


def test_documents_are_drawn_by_the_seed() -> None:
    one, other = (packed_by(step(documents="wlb-llm", seed=seed)) for seed in (1, 2))
    assert one.documents == packed_by(step(documents="wlb-llm", seed=1)).documents != other.documents
    assert [sum(documents) for documents in one.documents or ()] == [4096, 4096]  # type: ignore[arg-type]


def test_one_micro_batch_has_the_documents_of_the_sequence() -> None:
    """Of any scope."""
    found = packed_by(step(batch=1, documents="magi", pp_degree=1, gpus=2, scope="attention", layers=None, set={}))
    assert sum(found.resolved().workload.documents or ()) == 4096


def test_a_global_batch_is_of_all_replicas() -> None:
    """Each has the documents."""
    whole = step(gpus=8, dp_degree=2, batch=1, global_batch=4, set={})
    found = packed_by(whole).resolved()
    assert (found.mesh.dp, found.workload.batch, found.options.micro_batches) == (2, 2, 2)


@pytest.mark.slow
def test_every_packing_is_played_with_what_it_costs() -> None:
    found = longstep.balance_micro_batches(step(), planners=["all-gather", "wlb-llm"])
    assert [(row["packer"], row["planner"]) for row in found] == [
        (packer, planner) for packer in PACKERS for planner in ("all-gather", "wlb-llm")
    ]
    for row in found:
        played = sharded_by(packed_by(step(), row["packer"]), row["planner"]).predicted()
        assert (row["error"], row["step_time_s"]) == ("", played.step_time_s)
        assert row["uneven"] == played.report.uneven
        assert row["tokens"] == sum(DOCUMENTS) - 200 * (row["packer"] == "fixed-length")
    assert found.answer.split()[0].lower() in PACKERS
    refused = longstep.balance_micro_batches(step(), ["wlb-llm"], ["wlb-llm", "fpdt"])
    assert "does not play `documents` of each micro-batch yet" in refused[1]["error"]


@pytest.mark.parametrize(
    ("fields", "packer", "said"),
    [
        (
            {},
            "greedy",
            "unknown value of `pack` 'greedy': allowed are concatenated, heaviest-first, fixed-length, wlb-llm",
        ),
        ({"documents": None}, "wlb-llm", "`pack` wlb-llm puts documents into micro-batches: set `documents`"),
        ({"documents": (9000,)}, "concatenated", "9000 tokens do not fit into 2 micro-batches of 4096"),
        ({"documents": (4000,)}, "wlb-llm", "micro-batch 1 of 2 has no document: set fewer micro-batches"),
        ({"documents": ((4000,), (3,))}, "wlb-llm", "of each micro-batch: expected those that all sequences share"),
    ],
)
def test_what_cannot_be_packed_is_refused(fields: dict[str, Any], packer: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        packed_by(step(**fields), packer)


def test_a_list_for_each_micro_batch_says_how_many_there_are() -> None:
    """As a text or as tuples; each is padded by itself."""
    given = {"batch": 1, "set": {}, "pad": True}
    for documents in ("4000,96; 3001", ((4000, 96), (3001,))):
        found = step(documents=documents, **given).resolved()
        workload = found.workload
        assert (workload.batch, found.options.micro_batches, workload.seq) == (2, 2, 4096)
        assert [(one.documents, one.padding) for one in workload.sequences or ()] == [((4000, 96), 0), ((3001,), 3)]
        assert "S 3004 to 4096, B 2" in found.title
    for fields, said in (
        ({"batch": 3}, "`batch` 3, and `documents` of 2 micro-batches: leave out `batch`"),
        ({"global_batch": 4}, "`global_batch` 4, and `documents` of each micro-batch of a replica: leave it out"),
        ({"documents": ((4000,), 96)}, "expected lengths alone, or a list of them for each micro-batch"),
        ({"scope": "layer"}, "are of training steps"),
    ):
        with pytest.raises(InputError, match=said):
            step(**{"documents": ((4000, 96), (3001,)), **given} | fields).resolved()
