"""Setups and predictions: what they take from a script, and what they leave alone."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import msgspec
import pytest

import longstep
from sim.base.errors import InputError
from sim.schedule.ir.program import Schedule
from sim.setup.machine import equipped
from sim.words.profile import Machine, Profile, profile_folder, save_profile
from tests.helpers import traces_in
from topology.host import device_name, host_facts
from topology.specs import LinkSpec

SMALL = {"model": "llama3-8b", "seq": "1K", "cluster": "hgx-h100", "gpus": 2, "scope": "attention"}


def test_a_trace_replaces_traces_only(tmp_path: Path) -> None:
    predicted, path = longstep.predict("ring", **SMALL), tmp_path / "trace.json"
    predicted.save_trace(path)
    predicted.save_trace(str(path))
    assert [trace.step_time_s for trace in traces_in(path.read_bytes())] == [pytest.approx(predicted.step_time_s)]
    path.write_text("somebody else's")
    with pytest.raises(InputError, match="is not a Chrome trace that Longstep wrote.*`force`"):
        predicted.save_trace(path)
    assert path.read_text() == "somebody else's"
    predicted.save_trace(path, force=True)
    assert traces_in(path.read_bytes())


def test_what_names_stand_for_can_be_given_in_their_place() -> None:
    by_name = longstep.predict("ring", **SMALL)
    cluster, profile = longstep.cluster("hgx-h100"), longstep.profile("h100-sxm")
    by_object = longstep.predict("ring", **SMALL | {"cluster": cluster, "profile": profile})
    assert by_object.report == by_name.report
    assert longstep.simulate(by_name.checked, cluster, profile).step_time_s == by_name.step_time_s
    with pytest.raises(InputError, match="`profile` datasheet: it has no measured times"):
        longstep.profile("datasheet")


def test_a_calibrated_host_is_as_it_was_measured_however_it_is_named() -> None:
    """Unless some of its figures were set."""
    nominal = longstep.cluster("host").spec
    measured = msgspec.structs.replace(nominal, loopback=LinkSpec(bytes_per_s=1e6, latency_s=0.0))
    gpu = device_name(host_facts(), 1)
    profile = Profile(
        name="host",
        created="",
        command="",
        complete=True,
        machine=Machine(gpu=gpu, software={}),
        cluster=measured.figures(),
        points=(),
    )
    save_profile(profile, profile_folder() / "host.json")
    for name in ("host", longstep.cluster("host"), nominal, equipped("host", None)[0]):
        spec, found = equipped(name, None)
        assert (spec, found) == (measured, profile)
    changed = longstep.cluster("host", set={"loopback.bytes_per_s": "*2"})
    assert equipped(changed, None) == (changed.spec, profile)
    assert equipped("host", "datasheet") == (nominal, None)


def test_a_python_file_is_run_once(tmp_path: Path) -> None:
    ran, mine = tmp_path / "ran", tmp_path / "mine.py"
    mine.write_text(
        f"""
with open({str(ran)!r}, "a") as file:
    file.write("once ")
from sim.schedule.methods.ring import build
"""
    )
    longstep.predict(longstep.OwnSchedule(f"{mine}:build"), **SMALL)
    assert ran.read_text() == "once "
    workload = longstep.workload("tiny", "1K")
    with pytest.raises(InputError, match=r"schedule '.*mine.py:build' has no option layouts: it takes .*layout"):
        longstep.build(longstep.OwnSchedule(f"{mine}:build"), workload, 2, layouts="zigzag")
    assert ran.read_text() == "once once "


def test_a_builder_that_returns_no_schedule_is_told_what_to_return() -> None:
    returns = "its builder returned NoneType, expected sim.schedule.ir.program.Schedule"
    with pytest.raises(InputError, match=returns):
        longstep.build(lambda _workload, _mesh: None, longstep.workload("tiny", "1K"), 2)  # type: ignore[arg-type, return-value]
    with pytest.raises(InputError, match=returns):
        longstep.predict(lambda _workload, _mesh: None, **SMALL)  # type: ignore[arg-type, return-value]


def test_what_ifs_add_to_what_was_set() -> None:
    """Also where one key was set twice, and whatever has become of the dict since."""
    twice = longstep.Setup("ring", **SMALL, set=["cluster.nvlink.bytes_per_s=*2"] * 2)
    more = twice.replace(set={"model.num_kv_heads": 4})
    faster, both = (one.resolved().spec.nvlink for one in (twice, more))
    assert both == faster
    assert more.resolved().workload.model.num_kv_heads == 4
    changes: dict[str, object] = {"cluster.nvlink.bytes_per_s": "*2"}
    setup = longstep.Setup("ring", **SMALL, set=changes)
    changes["cluster.nvlink.bytes_per_s"] = "*4"
    assert (
        setup.resolved().spec
        == longstep.Setup("ring", **SMALL, set={"cluster.nvlink.bytes_per_s": "*2"}).resolved().spec
    )


def test_documents_are_given_as_lengths_text_or_file(tmp_path: Path) -> None:
    """And decide the length; one document is none."""
    path = tmp_path / "lengths.txt"
    path.write_text("44800 12800 7936")
    setup = longstep.Setup("zigzag", **SMALL | {"seq": "8K"}, jitter=0)
    whole = setup.replace(seq=65536).predicted()
    for documents in ((44800, 12800, 7936), [44800, 12800, 7936], "44800,12800,7936", str(path)):
        found = setup.replace(documents=documents)
        assert found.resolved().workload.documents == (44800, 12800, 7936)
        assert "S 65536" in found.resolved().title
        assert "3 documents" in found.resolved().title
        assert found.predicted().step_time_s < 0.9 * whole.step_time_s
    one = setup.replace(documents=[65536]).predicted()
    assert one.report.schedule_hash == whole.report.schedule_hash
    for wrong, says in (("5,0", "document 1 has 0 tokens"), ("none.txt", "none.txt"), ((1.5,), "whole numbers")):
        with pytest.raises(InputError, match=says):
            setup.replace(documents=wrong).resolved()


@pytest.mark.parametrize(
    ("fields", "seq", "padding"),
    [
        pytest.param({"schedule": "single", "seq": 242}, 248, [6], id="members alone"),
        pytest.param({"schedule": "zigzag", "cp": 3, "seq": 1001}, 1008, [7], id="a layout, then members"),
        pytest.param({"schedule": "zigzag", "cp": 3, "documents": ((501, 500), (77,))}, 1008, [7, 19], id="each"),
    ],
)
def test_padding_fills_up_what_members_of_groups_have_parts_of(
    fields: dict[str, Any], seq: int, padding: list[int]
) -> None:
    """Of 8 members each has an even number of tokens of a rank, or of each half of a rank's."""
    workload = longstep.Setup(tp_degree=8, pad=True, layers=1, **fields).resolved().workload
    assert workload.seq == seq
    assert [one.padding for one in workload.sequences or (workload,)] == padding


def test_help_shows_what_predict_takes_and_returns() -> None:
    shown = inspect.signature(longstep.predict)
    assert shown.return_annotation == "Prediction"
    assert list(shown.parameters) == list(inspect.signature(longstep.Setup).parameters)


@pytest.mark.parametrize(
    ("fields", "degrees"),
    [
        ({"schedule": "ulysses", "dp_degree": 512}, (512, 1, 8)),
        ({"schedule": "ring", "dp_degree": 2, "gpus": 8}, (2, 4, 1)),
        ({"schedule": "ring", "dp_degree": 2, "nodes": 4}, (2, 16, 1)),
        ({"schedule": "ring", "dp_degree": 2, "ring_degree": 4}, (2, 4, 1)),
        ({"schedule": "usp", "dp_degree": 3, "gpus": 24, "ulysses_degree": 2}, (3, 4, 2)),
        ({"schedule": "usp", "dp_degree": 3, "ring_degree": 2, "ulysses_degree": 2}, (3, 2, 2)),
        ({"schedule": "single", "dp_degree": 4}, (4, 1, 1)),
    ],
)
def test_replicas_multiply_the_ranks(fields: dict[str, Any], degrees: tuple[int, int, int]) -> None:
    found = longstep.Setup(model="llama3-8b", cluster="hgx-h100", **fields).resolved()
    assert (found.mesh.dp, found.mesh.ring, found.mesh.ulysses) == degrees
    assert found.spec.nodes == fields.get("nodes", -(-found.mesh.size // 8))
    assert f"{found.mesh.dp} replicas" in found.title


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"dp_degree": 0}, "`dp_degree` 0: expected a whole number of 1 or more"),
        (
            {"dp_degree": 3, "gpus": 8},
            "`gpus` 8 is not `dp_degree` 3, or a multiple of 3: set `gpus` 3, or the degrees",
        ),
        (
            {"dp_degree": 2, "ring_degree": 4, "gpus": 12},
            "`gpus` 12 is not `ring_degree` 4 x `dp_degree` 2: set `gpus` 8",
        ),
    ],
)
def test_replicas_that_do_not_fit_the_gpus_are_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as error:
        longstep.Setup("ring", model="llama3-8b", cluster="hgx-h100", **fields).resolved()
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("option", "degree", "says"),
    [
        ("tp_overlap=shards", "tp_degree", "which is none"),
        ("tp_hands=parts", "tp_degree", "which is all"),
        ("tp_sequence=false", "tp_degree", "which is true"),
        ("memory_order=sbh", "tp_degree", "which is bsh"),
        ("pipeline_schedule=gpipe", "pp_degree", "which is 1f1b"),
        ("pipeline_chunks=2", "pp_degree", "which is 1"),
        ("pipeline_layers=16,16", "pp_degree", "or leave it out"),
    ],
)
def test_options_of_degrees_are_refused_where_nobody_says_these(option: str, degree: str, says: str) -> None:
    """They would change nothing. Software may have them, for where somebody does."""
    setup = longstep.Setup("single", model="llama3-8b", cluster="hgx-h100")
    with pytest.raises(InputError) as error:
        setup.replace(set=[f"schedule.{option}"]).resolved()
    assert f"`set` schedule.{option} is of " in str(error.value)
    assert f"set `{degree}`, or leave it out" in str(error.value)
    assert says in str(error.value)
    key, usual = option.partition("=")[0], says.removeprefix("which is ")
    if "which" in says:
        setup.replace(set=[f"schedule.{key}={usual}"]).resolved()
    setup.replace(set=[f"schedule.{option}"], **{degree: 1}).resolved()
    setup.replace(software="megatron").resolved()


def test_the_hash_is_computed_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    found = longstep.predict("ring", **SMALL)
    hashed: list[Schedule] = []
    monkeypatch.setattr(Schedule, "hash", property(lambda one: hashed.append(one) or "of it"))
    assert found.figures.step_time_s == found.step_time_s
    assert not hashed
    assert found.report.schedule_hash == "of it"


def test_a_prediction_of_replicas_says_what_was_played(tmp_path: Path) -> None:
    """Two replicas on two nodes take as long as one on one: attention alone sends nothing between them."""
    one = longstep.predict("ulysses", model="llama3-8b", seq="16K", cluster="hgx-h100", gpus=8, scope="attention")
    two = one.replace(gpus=16, dp_degree=2)
    assert two.step_time_s == one.step_time_s
    assert two.report.tokens_per_s_per_gpu == one.report.tokens_per_s_per_gpu
    assert two.report.mfu == one.report.mfu
    assert (two.checked.schedule.num_ranks, two.trace.num_ranks) == (16, 8)
    assert "2 equal data-parallel replicas, of which one was played for all" in two.report.evidence.notes
    slow = two.replace(set={"cluster.nodes": "2", "cluster.gpu[9].speed": "0.5"})
    assert slow.step_time_s > two.step_time_s
    assert slow.report.critical_rank == 9
    own = two.replace(jitter=0.1, jitter_per_rank=True)
    assert own.trace.num_ranks == 16
    two.save_trace(tmp_path / "trace.json")
    assert (tmp_path / "trace.json").stat().st_size


@pytest.mark.parametrize(
    ("fields", "degrees", "title"),
    [
        ({"schedule": "ring", "gpus": 8, "tp_degree": 4}, "TP 4 R 2", "ring (TP 4), step"),
        ({"schedule": "ulysses", "nodes": 1, "tp_degree": 2}, "TP 2 U 4", "ulysses (TP 2), step"),
        ({"schedule": "usp", "nodes": 2, "tp_degree": 4}, "TP 4 U 2 R 2", "usp (TP 4, U 2 x R 2), step"),
        (
            {"schedule": "single", "gpus": 8, "tp_degree": 4, "dp_degree": 2},
            "TP 4 DP 2",
            "single (TP 4, 2 replicas), step",
        ),
        (
            {"schedule": "ulysses", "cp": 2, "tp_degree": 8},
            "TP 8 U 2",
            "ulysses (TP 8, each of 8 key/value heads on 2 ranks), step",
        ),
    ],
)
def test_gpus_are_shared_out_among_degrees(fields: dict[str, Any], degrees: str, title: str) -> None:
    """Members of a tensor-parallel group are neighbours; heads that are traded are those of a share."""
    found = longstep.Setup(model="llama3-8b", cluster="hgx-h100", **fields).resolved()
    assert found.mesh.named() == degrees
    assert found.title.startswith(title)
    assert found.mesh.groups("tp")[0] == tuple(range(found.mesh.tp))
