"""Forms of messages in time, by hand: what is a kernel of its own waits by itself for SMs and for its stream."""

from __future__ import annotations

import shutil
from itertools import pairwise

import msgspec
import pytest

from sim.accounts.trace import Trace
from sim.engine.play.simulate import Engine, simulate
from sim.schedule.proof.check import Checked, check
from sim.schedule.write.hops import MessageForm
from sim.words.mesh import Mesh
from sim.words.workload import Workload
from tests.helpers import Variant, make_cluster_spec, make_model
from topology.cluster import Cluster
from topology.specs import HbmSpec, LinkSpec

RANKS, TOKENS, HEADS, DIM, BATCH = 6, 1024, 4, 16, 400
WAVES = BATCH * HEADS * TOKENS / 128 / 100
"""Of attention's grid on the 100 SMs of the toy."""
BACKWARD_S = 10 * TOKENS**2 * BATCH * HEADS * DIM / 1e12
KV_BYTES = 2 * BATCH * TOKENS * HEADS * DIM * 4
ENGINES = ["simpy", pytest.param("native", marks=pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler"))]


def backward(form: MessageForm) -> Checked:
    """A ring's backward pass without a mask, so that all ranks do the same; dk and dv have the data type of k and v."""
    workload = Workload(
        model=make_model(HEADS, HEADS, DIM), seq=TOKENS * RANKS, mask="full", passes="backward", batch=BATCH
    )
    return check(Variant("ring", {"messages": form, "communicators": "one"}).build(workload, Mesh(ring=RANKS)))


def played(form: MessageForm, kv: float, engine: Engine) -> Trace:
    """Play it where k and v together take ``kv`` times as long as a block. A launch takes less than the kernel for
    delta before each grid, so that what is posted as a block ends begins beside the next one.
    """
    gpu = msgspec.structs.replace(make_cluster_spec().gpu, sms=100, communication_sms=1, launch_s=BACKWARD_S / 2000)
    spec = make_cluster_spec(
        RANKS,
        gpu=gpu,
        hbm=HbmSpec(capacity_bytes=2**40, bytes_per_s=KV_BYTES / (BACKWARD_S / 100)),
        nvlink=LinkSpec(bytes_per_s=KV_BYTES / (kv * BACKWARD_S), latency_s=0.0),
    )
    return simulate(backward(form), Cluster(spec), None, engine=engine).trace


@pytest.mark.sweep
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kv", [0.4, 1.0, 3.0])
def test_each_kernel_of_messages_waits_for_the_last_wave_by_itself(kv: float, engine: Engine) -> None:
    """A block A = 1 with one hop beside it. In one call dk and dv begin with the next block, k and v come behind it:
    the period is max(A, dkv) + kv. By themselves dk begins with the block, dv waits for it, then come k and v:
    max(A, dk) + dk + 2 k. The last wave, of 128, leaves SMs to what waits.
    """
    assert WAVES == 128
    expected = {"grouped": max(1, kv) + kv, "packed": max(1, kv) + kv}
    expected |= {"separate": max(1, kv / 2) + kv / 2 + kv, "packed-separate": max(1, kv) + kv}
    for form, period in expected.items():
        trace = played(form, kv, engine)  # type: ignore[arg-type]
        begins = [row.begin_s / BACKWARD_S for row in trace.of_rank(0) if row.kind == "AttendBackward"]
        steady = [later - earlier for earlier, later in pairwise(begins[2:])]
        assert steady == pytest.approx([period] * len(steady), rel=0.025), form


@pytest.mark.parametrize("engine", ENGINES)
def test_messages_of_one_direction_queue_and_both_directions_do_not(engine: Engine) -> None:
    """Half a block's time for k and v. k is sent and received from the start on, and v behind it finds the SMs taken by
    the first block, until its last wave: 1 + 0.25. In one buffer, copied there in 0.02, both are there at 0.52.
    """
    for form, tensors, ended in (("separate", 2, 1.25), ("packed-separate", 1, 0.52)):
        trace = played(form, 0.5, engine)  # type: ignore[arg-type]
        rows = [row for row in trace.of_rank(0) if row.kind == "Exchange"][: 2 * tensors]
        sends, receives = rows[::2], rows[1::2]
        assert [row.end_s for row in sends] == pytest.approx([row.end_s for row in receives], rel=1e-6)
        assert sends[-1].end_s == pytest.approx(ended * BACKWARD_S, abs=0.02 * BACKWARD_S)
