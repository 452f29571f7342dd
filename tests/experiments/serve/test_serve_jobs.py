"""What a page's worker answers: the numbers of ``longstep.predict``, the same as a command, and wrong questions."""

from __future__ import annotations

import json
import math
import random
import shlex
from itertools import takewhile
from typing import Any

import msgspec
import pytest

import longstep
from experiments.serve.answering.jobs import JOBS, Jobs
from experiments.serve.answering.offers import offers
from experiments.serve.answering.question import Dropped, Question, question_of, said_of, setup_of
from experiments.verbs.cli import parse
from experiments.verbs.simulate import Simulate
from sim.base.errors import InputError
from sim.plan.longest import longest
from sim.setup.spelled import command_of, python_of
from tests.experiments.serve.page_changes import FIRST, changed
from tests.reading_code import ROOT

TINY: dict[str, Any] = {"model": "tiny", "cluster": "hgx-h100", "gpus": 2, "layers": 2, "seq": "8K"}
CONFIG = ROOT / "tests" / "words" / "hugging_face" / "llama-3-8b.json"
TITAN = ROOT / "tests" / "setup" / "imports" / "torchtitan-llama3-8b.toml"
NANOTRON = ROOT / "tests" / "setup" / "imports" / "nanotron-llama3-8b.yaml"
CLUSTER = ROOT / "topology" / "hardware" / "hgx-h200.toml"


def parts(job: str, **payload: Any) -> list[dict[str, Any]]:
    """The parts of an answer, as a page gets them."""
    found: list[dict[str, Any]] = [json.loads(msgspec.json.encode(part)) for part in Jobs().parts(job, payload)]
    return found


def by_name(job: str, **payload: Any) -> dict[str, dict[str, Any]]:
    found = parts(job, **payload)
    assert "error" not in [part["part"] for part in found], found[-1]
    return {part["part"]: part for part in found if part["part"] != "offers"}


def until_offers(question: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The parts of an answer that come before what else can be asked for, which takes longest where ranks are many."""
    found = takewhile(lambda part: part["part"] != "offers", Jobs().parts("ask", {"question": question}))
    return {part["part"]: part for part in found}


def error(job: str, **payload: Any) -> str:
    (part,) = [part for part in parts(job, **payload) if part["part"] == "error"]
    assert "\n" not in part["error"]
    return str(part["error"])


def converted(question: dict[str, Any]) -> Question:
    return msgspec.convert(question, Question)


def require_as_predicted(found: dict[str, dict[str, Any]], p: longstep.Prediction) -> None:
    """To the digit, whatever the page left out on its way."""
    figures, answer, whole = found["figures"], found["answer"], found["whole"]
    report = json.loads(msgspec.json.encode(p.report))
    for name in ("step_time_s", "tokens_per_s_per_gpu", "mfu", "peak_hbm_bytes", "breakdown"):
        assert figures[name] == report[name], name
    assert (figures["fits"], figures["title"]) == (p.report.verdict, p.title)
    assert (answer["answer"], answer["interval_s"]) == (p.answer, report["interval_s"])
    for name in ("bound_by", "saves"):
        assert whole[name] == report[name], name
    assert (whole["rests_on"], whole["techniques"]) == (p.rests_on, p.techniques)


ASKED = [
    {"schedule": "ring"},
    {"schedule": "zigzag", "set": {"cluster.nvlink.bytes_per_s": "*2", "schedule.checkpoint": "none"}},
    {"schedule": "ulysses", "software": "huggingface", "gpus": 4, "cp": 2},
    {"stack": "alst", "global_batch": "32K"},
    {"schedule": "zigzag", "documents": [5000, 3000, 192], "pad": True},
    {"schedule": "usp", "gpus": 8, "ulysses_degree": 2, "dp_degree": 2, "mask": "window:1K"},
    {"schedule": "single", "gpus": 2, "dp_degree": 2, "cluster": "2xA100", "profile": "datasheet"},
]


@pytest.mark.sweep
@pytest.mark.parametrize("asked", ASKED)
def test_answers_are_those_of_predict_and_so_is_the_command(asked: dict[str, Any]) -> None:
    question = TINY | asked
    found = by_name("ask", question=question)
    setup = setup_of(converted(question))
    require_as_predicted(found, setup.predicted())
    _, command = parse(shlex.split(found["spelled"]["command"])[1:])
    assert isinstance(command, Simulate)
    assert command.selection.setup().resolved() == setup.resolved()
    named: dict[str, Any] = {}
    exec(found["spelled"]["python"].replace("longstep.predict(", "dict(").removeprefix("import longstep"), named)
    assert longstep.Setup(**named["p"]).resolved() == setup.resolved()


@pytest.mark.sweep
@pytest.mark.parametrize("count", [3, pytest.param(18, marks=pytest.mark.slow)])
def test_one_worker_answers_many_changes_as_predict_does(count: int) -> None:
    """What it keeps from one question is of no other."""
    jobs, draw, question, answered = Jobs(), random.Random(5), FIRST | {"layers": 3}, 0
    for _ in range(count):
        asked = changed(question, draw, gpus=(2, 4))
        found = {part["part"]: json.loads(msgspec.json.encode(part)) for part in jobs.parts("ask", {"question": asked})}
        if "error" in found:
            with pytest.raises(InputError):
                setup_of(converted(asked)).predicted()
            continue
        require_as_predicted(found, setup_of(converted(asked)).predicted())
        question, answered = asked, answered + 1
    assert answered > count * 2 / 3


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a path": ({"model": "/etc/passwd"}, "unknown model '/etc/passwd'"),
    "a path in a folder": ({"model": "models/mine.toml"}, "unknown model"),
    "a cluster by its path": ({"cluster": "topology/hardware/hgx-h100.toml"}, "unknown cluster"),
    "software by its path": ({"software": "../x.toml"}, "unknown software"),
    "a profile by its path": ({"profile": "../p.json"}, "unknown profile"),
    "a table by its path": ({"set": {"software.norm": "../t.toml:norm"}}, "a page opens no file"),
    "a pipeline by its path": ({"set": {"schedule.pipeline_schedule": "mine.csv"}}, "a page opens no file"),
    "code": ({"schedule": "evil.py:build"}, "unknown schedule"),
    "a script": ({"model": "<script>alert(1)</script>"}, "unknown model"),
    "no number": ({"gpus": "8"}, "question.gpus is '8': expected a whole number"),
    "true": ({"gpus": True}, "question.gpus"),
    "a huge number": ({"gpus": 10**9}, "question.gpus"),
    "none": ({"gpus": 0}, "question.gpus"),
    "a huge length": ({"seq": "9" * 400}, "question.seq"),
    "no length": ({"seq": "12x"}, "question.seq is '12x': expected tokens such as 8192 or 128K"),
    "many nodes": ({"set": {"cluster.nodes": "1e12"}}, "cluster.nodes"),
    "an unknown field": ({"engine": "simpy"}, "engine"),
    "a list": ({"schedule": ["ring"]}, "question.schedule"),
    "a key of no root": ({"set": {"os.path": "x"}}, "question.set"),
    "many keys": ({"set": {f"schedule.x{n}": "1" for n in range(65)}}, "question.set"),
    "many documents": ({"documents": [1] * 5000}, "question.documents"),
    "no text": ({"set": {"schedule.loss": "a\x00b"}}, "question.set"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_question_is_a_line_that_names_the_value(what: str) -> None:
    asked, said = WRONG[what]
    assert said in error("ask", question=TINY | asked)


def test_a_fault_of_longstep_is_a_line_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: object, **__: object) -> None:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr("experiments.serve.answering.jobs.setup_of", breaks)
    assert "Longstep broke on this question" in error("ask", question=TINY)


def test_jobs_refuse_what_they_do_not_take() -> None:
    for job in JOBS:
        assert error(job)
        assert error(job, question=TINY, file="/etc/passwd")
    for payload in (None, [], 7, "x", {"question": []}):
        (part,) = Jobs().parts("ask", payload)
        assert part["part"] == "error"


@pytest.mark.sweep
def test_what_takes_long_is_refused_with_its_estimate() -> None:
    large = {"schedule": "ring", "model": "tiny", "cluster": "hgx-h100", "gpus": 512, "seq": "512K", "layers": 2}
    found = until_offers(large)
    assert [*found] == ["spelled", "refused", "bounded"]
    assert "ring of 512 ranks: about" in found["refused"]["said"]
    assert "beyond the 10 s or 2 GB" in found["refused"]["said"]
    assert found["bounded"]["said"].startswith("At least ")
    assert [*until_offers(large | {"gpus": 2048, "seq": "2M"})] == ["spelled", "refused"]


@pytest.mark.sweep
def test_what_is_refused_can_be_asked_for_anyway(monkeypatch: pytest.MonkeyPatch) -> None:
    some = {"schedule": "ring", "model": "tiny", "cluster": "hgx-h100", "gpus": 8, "seq": "8K", "layers": 65}
    monkeypatch.setattr("experiments.serve.answering.jobs.BUDGET_S", 0.1)
    refused, found = by_name("ask", question=some), by_name("ask", question=some, anyway=True)
    assert [*refused] == ["spelled", "refused", "bounded"]
    assert 0 < refused["bounded"]["least_s"] <= found["figures"]["step_time_s"]
    row = by_name("compare", variants=[{"name": "large", "question": some}])["compared"]["table"]["rows"][0]
    assert "beyond the 0.1 s" in json.dumps(row)


@pytest.mark.slow
def test_what_one_rank_says_comes_first_where_all_take_long() -> None:
    some = {"schedule": "ring", "model": "tiny", "cluster": "hgx-h100", "gpus": 64, "seq": "64K", "layers": 1}
    found = by_name("ask", question=some | {"jitter": 0.0})
    assert [*found] == ["spelled", "draft", "figures", "answer", "whole"]
    assert 0 < found["draft"]["least_s"] <= found["figures"]["step_time_s"]
    assert "by the kernels and transfers of one rank" in found["draft"]["said"]


def test_a_play_without_noise_comes_before_those_with_it_where_these_take_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And bounds of one rank before that, where its schedule is not there yet."""
    for limit in ("_LONG_S", "_NOISE_S"):
        monkeypatch.setattr(f"experiments.serve.answering.jobs.{limit}", 0.0)
    monkeypatch.setattr("sim.setup.effort._is_surely_small", lambda *_: False)
    jobs, some = Jobs(), TINY | {"schedule": "ring", "gpus": 2}
    first, again = ([*jobs.parts("ask", {"question": some | {"jitter": share}})] for share in (0.03, 0.02))
    names = ["near", "figures", "answer", "whole"]
    assert [[part["part"] for part in parts if part["part"] != "offers"] for parts in (first, again)] == [
        ["spelled", "draft", *names], ["spelled", *names],
    ]  # fmt: skip
    near = next(part for part in first if part["part"] == "near")
    assert near["steady_s"] == setup_of(converted(some | {"jitter": 0.0})).predicted().step_time_s
    assert near["takes"] == "5 plays with noise follow"


def test_choices_that_cannot_be_made_have_their_reason() -> None:
    setup = setup_of(converted(TINY | {"schedule": "ulysses", "gpus": 8, "set": {"schedule.zero_stage": "0"}}))
    told: dict[str, Any] = {}
    for some in offers(setup, setup.resolved()):
        told |= some
    heads = setup.model_spec.num_heads
    assert told["schedules"]["zigzag"] == ""
    for one in told["degrees"]:
        assert one["ulysses_degree"] * one["tp_degree"] * one["dp_degree"] == 8
        assert bool(one["why"]) == (heads % (one["ulysses_degree"] * one["tp_degree"]) != 0), one
    assert [one["ulysses_degree"] for one in told["degrees"] if one["now"]] == [8]
    assert not told["techniques"]["FSDP"]["on"]
    assert told["techniques"]["FSDP"]["turns"] == {"zero_stage": "3"}
    assert "zero_stage=0" in told["techniques"]["optimiser on the host"]["why"]
    assert told["sliders"]["nvlink"] == "cluster.nvlink.bytes_per_s"


def test_stages_are_offered_where_micro_batches_fill_them() -> None:
    """At most as many as there are, and as divide the layers."""
    some = TINY | {"schedule": "ulysses", "gpus": 8, "scope": "step", "layers": 4, "batch": 2}
    setup = setup_of(converted(some | {"pp_degree": 2, "set": {"schedule.micro_batches": "2"}}))
    told: dict[str, Any] = {}
    for part in offers(setup, setup.resolved()):
        told |= part
    assert {one["pp_degree"] for one in told["degrees"]} == {1, 2}
    degrees = ("tp_degree", "pp_degree", "ulysses_degree", "dp_degree")
    assert all(math.prod(one[name] for name in degrees) == 8 for one in told["degrees"])
    now = [(one["pp_degree"], one["ulysses_degree"], one["dp_degree"]) for one in told["degrees"] if one["now"]]
    assert now == [(2, 4, 1)]
    assert question_of(setup).pp_degree == 2


@pytest.mark.sweep
def test_shares_of_weights_are_offered_within_a_node() -> None:
    """Of a model that has them; of another each is there once, with its reason."""
    some = TINY | {"schedule": "ulysses", "gpus": 8, "scope": "step", "layers": 2, "tp_degree": 2}
    setup = setup_of(converted(some))
    told: dict[str, Any] = {}
    for part in offers(setup, setup.resolved()):
        told |= part
    shares = [(one["tp_degree"], one["ulysses_degree"], one["dp_degree"]) for one in told["degrees"] if not one["why"]]
    assert shares == [(1, 8, 1), (1, 4, 2), (1, 2, 4), (1, 1, 8), (2, 4, 1), (2, 2, 2), (2, 1, 4), (4, 2, 1),
                      (4, 1, 2), (8, 1, 1)]  # fmt: skip
    assert [(one["tp_degree"], one["ulysses_degree"]) for one in told["degrees"] if one["now"]] == [(2, 4)]
    assert question_of(setup).tp_degree == 2
    assert "--tp-degree 2" in command_of(setup)
    assert "tp_degree=2," in python_of(setup)
    other = setup_of(converted(some | {"tp_degree": 1, "set": {"model.qk_norm": "all"}}))
    (offered,) = [part["degrees"] for part in offers(other, other.resolved()) if "degrees" in part]
    refused = {one["tp_degree"]: one["why"] for one in offered if one["why"]}
    assert [*refused] == [2, 4, 8]
    assert all("norms of all heads of q and k as one of tiny are not computed" in why for why in refused.values())


@pytest.mark.sweep
def test_variants_stand_side_by_side_and_one_that_cannot_be_played_says_why() -> None:
    variants = [{"name": name, "question": TINY | {"schedule": name}} for name in ("ring", "zigzag")]
    wrong = {"name": "<b>7 GPUs</b>", "question": TINY | {"ulysses_degree": 7, "schedule": "ulysses"}}
    found = by_name("compare", variants=[*variants, wrong])["compared"]
    ring, zigzag, other = found["table"]["rows"]
    assert [row[0][1] for row in (ring, zigzag, other)] == ["ring", "zigzag", "<b>7 GPUs</b>"]
    assert "fastest" in [cell[1] for cell in [*ring, *zigzag]]
    assert "`ulysses_degree` 7" in json.dumps(other)
    steps = found["charts"][0]
    assert steps["traces"][0]["x"] == [setup_of(converted(one["question"])).predicted().step_time_s for one in variants]
    assert all(trace["error_x"]["array"] for trace in steps["traces"])
    assert "&lt;b&gt;" not in json.dumps(found["charts"]), "what cannot be played is in no chart"


@pytest.mark.sweep
def test_a_page_of_what_is_pinned() -> None:
    name = "ring <script>alert(1)</script>"
    (part,) = parts("export", variants=[{"name": name, "question": TINY | {"schedule": "ring"}}])
    assert part["page"].startswith("<!doctype html>")
    assert '<meta name="generator" content="longstep">' in part["page"]
    assert "<script>alert(1)" not in part["page"]


@pytest.mark.sweep
def test_a_map_comes_coarse_to_fine_and_says_who_wins() -> None:
    competitors = [{"name": name, "question": TINY | {"schedule": name}} for name in ("ring", "zigzag")]
    first, *cells = parts(
        "atlas", competitors=competitors, across={"key": "seq", "values": "8K,16K,32K"},
        down={"key": "gpus", "values": "2,3"},
    )  # fmt: skip
    assert first["across"] == [["8K", "8K"], ["16K", "16K"], ["32K", "32K"]]
    assert first["down"] == [["2", "2 GPUs"], ["3", "3 GPUs"]]
    places = [(cell["x"], cell["y"]) for cell in cells]
    assert sorted(places) == [(x, y) for x in range(3) for y in range(2)]
    assert places[:2] == [(0, 0), (2, 0)], "every second one of each axis before those between"
    assert {cell["winner"] for cell in cells if cell["y"] == 0} == {"zigzag"}
    assert all(cell["ratio"] > 1 for cell in cells if cell["y"] == 0)
    said = error("atlas", competitors=competitors, across={"key": "seq", "values": "8K..64K+64"},
                 down={"key": "gpus", "values": "2"})  # fmt: skip
    assert "897 x 1 cells: at most 400" in said
    of_documents = [{"name": "packed", "question": TINY | {"documents": [4096, 4096]}}]
    said = error("atlas", competitors=of_documents, across={"key": "seq", "values": "8K"},
                 down={"key": "gpus", "values": "2"})  # fmt: skip
    assert "the documents of a question say its length" in said


@pytest.mark.sweep
def test_the_longest_context_is_that_of_the_ladder() -> None:
    question = TINY | {"schedule": "ulysses", "set": {"cluster.hbm.capacity_bytes": "6e9"}}
    (found,) = parts("longest", question=question)
    assert found["tokens"] == longest(setup_of(converted(question)), 2**24) > 0


def test_ops_over_time_are_those_of_some_ranks() -> None:
    (found,) = parts("timeline", question=TINY | {"schedule": "ring"}, ranks=1)
    p = setup_of(converted(TINY | {"schedule": "ring"})).predicted()
    assert {lane["rank"] for lane in found["timeline"]["lanes"]} == {0}
    ends = [end for lane in found["timeline"]["lanes"] for _, _, end in lane["simulated"]]
    assert max(ends) == pytest.approx(max(row.end_s for row in p.trace.of_rank(0)), abs=1e-9)
    assert found["of"] == 2


def read(name: str, text: str, question: dict[str, Any] = TINY, **more: Any) -> dict[str, Any]:
    return by_name("read", name=name, text=text, question=question, **more)["read"]


def test_a_dropped_config_is_a_model_and_the_command_names_its_file() -> None:
    found = read("config.json", CONFIG.read_text())
    assert found["kind"] == "model"
    question = converted(found["question"] | {"layers": 2})
    assert question.model == Dropped("config.json", CONFIG.read_text())
    assert (
        setup_of(question).predicted().step_time_s
        == setup_of(converted(TINY | {"model": "llama3-8b"})).predicted().step_time_s
    )
    assert "--model config.json" in command_of(said_of(question))
    assert 'model="config.json"' in python_of(said_of(question))


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("config.json", '{"model_type": "mixtral", "hidden_size": 64}', "mixtral"),
        ("config.json", CONFIG.read_text()[:200], "'config.json'"),
        ("config.json", "[" * 50_000, "config.json"),
        ("lengths.txt", "100\nmany\n", "'many' is no length"),
        ("cluster.toml", CLUSTER.read_text().replace('profile = "', 'profile = "/etc/'), "unknown profile '/etc/"),
        ("run.sh", "python -c 1", "0 keys"),
        (
            "run.json",
            json.dumps({"model_name_or_path": "/etc/passwd", "deepspeed": "x"}),
            "unknown model '/etc/passwd'",
        ),
    ],
)
def test_a_wrong_file_is_a_line(name: str, text: str, said: str) -> None:
    assert said in error("read", name=name, text=text, question=TINY)


def test_a_file_is_named_without_its_folder() -> None:
    assert "name" in error("read", name="../config.json", text="{}", question=TINY)


@pytest.mark.sweep
def test_a_dropped_cluster_and_lengths() -> None:
    found = read("mine.toml", CLUSTER.read_text())
    asked = setup_of(converted(found["question"]))
    assert (
        asked.predicted().cluster.spec.gpu.name
        == setup_of(converted(TINY | {"cluster": "hgx-h200"})).resolved().spec.gpu.name
    )
    lengths = read("lengths.txt", "100, 200\n84\n")["question"]
    assert (lengths["documents"], lengths["seq"], lengths["pad"]) == ([100, 200, 84], 384, True)
    assert by_name("ask", question=lengths)["figures"]["seq"] == 384
    drawn = by_name("drawn", distribution="wlb-llm", question=TINY)["read"]["question"]
    assert sum(drawn["documents"]) == 8192


def test_a_configuration_fills_the_form() -> None:
    """As ``longstep import`` reads it."""
    found = read("run.toml", TITAN.read_text())
    assert found["kind"] == "configuration"
    expected = longstep.imported(TITAN).setup()
    assert setup_of(converted(found["question"])).resolved() == expected.resolved()
    assert "from run.toml (torchtitan" in found["told"][0]
    stages = read("run.yaml", NANOTRON.read_text().replace("pp: 1", "pp: 2").replace("dp: 16", "dp: 8"))["question"]
    assert setup_of(converted(stages)).resolved().mesh.pp == 2
