"""Whether a training step fits: by its terms, within what is known, on the GPU and on its host."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sim.accounts.memory import TERMS, counters, terms_in_use, walks
from sim.accounts.trace import to_chrome
from sim.engine.results.report import Report
from sim.engine.results.room import BASIS, Room
from sim.plan.search.room import room
from sim.setup.setup import Setup
from topology.reserved import OF_CUDA


def setup(*overrides: str, **fields: Any) -> Setup:
    """A small step on GPUs of 8 GB."""
    given: dict[str, Any] = {"model": "tiny", "seq": 1024, "gpus": 2, "cluster": "hgx-h100", "scope": "step"}
    own = ("cluster.hbm.capacity_bytes=8000000000", *overrides)
    return Setup(**(given | {"schedule": "zigzag", "set": own, "seeds": 1, "profile": "datasheet"} | fields))


def figures(*overrides: str, **fields: Any) -> Report:
    return setup(*overrides, **fields).predicted().figures


def room_of(report: Report) -> Room:
    assert report.room is not None
    return report.room


@pytest.mark.parametrize("options", [(), ("schedule.checkpoint=none",), ("schedule.activations=host",)])
def test_terms_sum_to_the_peak_and_at_each_op_to_what_is_in_use(options: tuple[str, ...]) -> None:
    predicted = setup(*options).predicted()
    found, checked = predicted.figures, predicted.played
    terms = room_of(found).terms
    assert list(terms) == list(TERMS) == list(BASIS)
    assert sum(terms.values()) == found.peak_hbm_bytes == sum(found.memory.values())
    for program, dependencies, walked in zip(
        checked.schedule.programs, checked.dependencies, walks(checked), strict=True
    ):
        of_terms = terms_in_use(program, dependencies)
        assert [sum(at) for at in zip(*of_terms.values(), strict=True)] == walked.in_use


def test_what_is_saved_is_what_the_forward_pass_leaves() -> None:
    """The inputs of both layers and what leaves them, of 512 tokens in fp32, and of the head its input, the gradient of
    the logits and one number a token; not what a layer is computed again for.
    """
    of = {}
    for kept in ("full", "none"):
        checked = setup(f"schedule.checkpoint={kept}").resolved().checked()
        of[kept] = terms_in_use(checked.schedule.program(0), checked.dependencies[0])
    model = setup().model_spec
    x, head = model.embed_dim, model.embed_dim + model.vocab_size + 1
    assert max(of["full"]["saved activations"]) == 512 * 4 * ((model.num_layers + 1) * x + head)
    layer = 6 * x + 2 * model.num_kv_heads * model.head_dim + model.num_heads + 2 + 3 * model.ffn_dim
    more = max(of["none"]["saved activations"]) - max(of["full"]["saved activations"])
    assert more == 512 * 4 * model.num_layers * (layer - x), (
        "x, h1, q, out, middle, h2; k, v; lse; both rstd; of the MLP"
    )
    assert max(of["full"]["attention"]) > 0


@pytest.mark.sweep
def test_it_fits_or_not_or_is_at_the_limit() -> None:
    """By capacity: what buffers hold and the constant, more or less what that is known to."""
    plain = figures()
    peak = plain.peak_hbm_bytes
    reserved, within = OF_CUDA
    for capacity, fits, verdict in (
        (peak + reserved + within, True, "yes"),
        (peak + reserved + within - 1, None, "at the limit"),
        (peak + reserved - within + 1, None, "at the limit"),
        (peak + reserved - within, False, "no"),
    ):
        found = figures(f"cluster.hbm.capacity_bytes={capacity}")
        assert (found.fits, found.verdict, found.memory) == (fits, verdict, plain.memory)
        assert room_of(found).free_bytes == capacity - peak - reserved
    exact = (
        f"cluster.hbm.capacity_bytes={peak}",
        "cluster.hbm.reserved_bytes=0",
        "cluster.hbm.reserved_within_bytes=0",
    )
    assert figures(*exact).fits is True
    assert figures(exact[0].replace(str(peak), str(peak - 1)), *exact[1:]).fits is False


@pytest.mark.sweep
def test_the_hosts_memory_is_limited() -> None:
    """Both GPUs are on one socket."""
    options = ("schedule.activations=host",)
    found = figures(*options)
    gpu, host = room_of(found).limits
    assert (gpu.memory, host.memory) == ("GPU", "host")
    assert host.held_bytes == 2 * found.peak_host_bytes > 0
    assert host.reserved_bytes == 0
    assert found.fits is True
    for more, fits in ((0, True), (-1, False)):
        found = figures(*options, f"cluster.socket.dram.capacity_bytes={host.held_bytes + more}")
        assert (found.fits, room_of(found).tightest.memory, room_of(found).free_bytes) == (fits, "host", more)
    assert len(room_of(figures()).limits) == 1, "nothing is kept on the host"


def test_ranks_of_a_cpu_host_share_its_memory() -> None:
    found = setup(cluster="host", set=(), seq=256, layers=1).predicted()
    (limit,) = room_of(found.figures).limits
    assert limit.memory == "host"
    assert limit.reserved_bytes == limit.within_bytes == 0
    assert limit.held_bytes == sum(one.peak_bytes for one in walks(found.played))


@pytest.mark.sweep
@pytest.mark.parametrize("fields", [{}, {"schedule": "ulysses", "gpus": 16, "nodes": 2, "dp_degree": 4}])
@pytest.mark.parametrize("options", [(), ("schedule.activations=host",)])
def test_it_is_known_without_a_proof_or_a_play(options: tuple[str, ...], fields: dict[str, Any]) -> None:
    one = setup(*options, **fields)
    assert room(one.resolved()) == one.predicted().room


def test_other_scopes_say_what_they_did() -> None:
    for scope in ("attention", "layer"):
        predicted = setup(scope=scope).predicted()
        assert predicted.room is None
        assert (predicted.fits, predicted.figures.verdict) == (None, "not known")
        assert "room" not in predicted.to_dict()
    found = setup().predicted().report
    assert msgspec.json.decode(msgspec.json.encode(found), type=Report) == found


def test_a_trace_shows_the_terms_of_a_step() -> None:
    for scope, tracks in (("step", {"memory", "memory by term"}), ("layer", {"memory"})):
        predicted = setup(scope=scope).predicted()
        data = to_chrome([predicted.trace], {"simulated": counters(predicted.played, predicted.trace)})
        events = [event for event in msgspec.json.decode(data)["traceEvents"] if event["ph"] == "C"]
        assert {event["name"] for event in events} == tracks
        by_name = {name: [sum(event["args"].values()) for event in events if event["name"] == name] for name in tracks}
        assert len(set(map(tuple, by_name.values()))) == 1, "terms sum to all"


def test_the_readme_says_what_each_term_rests_on() -> None:
    text = Path("sim/engine/README.md").read_text()
    shown = dict(re.findall(r"^\| `([a-z ]+)` \| [^|]+ \| (.+) \|$", text, re.MULTILINE))
    assert shown == {term: f"{basis}: {why}" for term, (basis, why) in BASIS.items()}
