"""One op by itself: the last queries and keys of a sequence, and the bytes of communication."""

from __future__ import annotations

import pytest

from sim.schedule.derive.matching import wire_bytes
from sim.schedule.methods import single_op
from sim.schedule.methods.single_op import Attended, Sent
from sim.schedule.proof.check import check
from sim.words.mesh import Mesh
from sim.words.workload import MaskName, Workload, load_model


@pytest.mark.parametrize(
    ("queries", "keys", "mask", "window", "pairs"),
    [
        (2, 4, "full", None, 8),
        (2, 4, "causal", None, 3 + 4),
        (4, 2, "causal", None, 1 + 2),
        (2, 4, "causal", 2, 2 + 2),
    ],
)
@pytest.mark.parametrize(("kind", "products"), [("Attend", 2), ("AttendBackward", 5)])
def test_attention_alone_ends_where_its_keys_end(
    queries: int, keys: int, mask: MaskName, window: int | None, pairs: int, kind: str, products: int
) -> None:
    model = load_model("tiny")
    work = Workload(model=model, seq=1024, batch=3, mask=mask, window=window)
    checked = check(single_op.build(kind, Attended(queries=queries, keys=keys), work, Mesh(ring=2)))
    for (use,) in checked.kernels:
        assert use is not None
        assert use.flops == 2 * products * model.head_dim * 3 * model.num_heads * pairs


@pytest.mark.parametrize(
    ("kind", "sent"),
    [
        ("Exchange", 4 * 64),
        ("AllToAll", 12 * 16),
        ("AllGather", 12 * 16),
        ("ReduceScatter", 12 * 16),
        ("AllReduce", 6 * 64),
    ],
)
def test_communication_alone_sends_its_bytes(kind: str, sent: int) -> None:
    """64 bytes on each of four ranks: whole, or three of four parts of 16 (twice: what all sum)."""
    work = Workload(model=load_model("tiny"), seq=1024)
    checked = check(single_op.build(kind, Sent(nbytes=64), work, Mesh(ring=4)))
    assert wire_bytes(checked.schedule, checked.matching) == sent
