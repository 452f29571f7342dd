"""Explanations of runs: what is said beside a measurement, single changes in the framework's words, and the screen."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

import longstep
from experiments.verbs.cli import main
from sim.explain.changes import changes
from sim.explain.screen import WIDTH, Explanation
from sim.explain.weighed import longest_by_few
from sim.plan.longest import longest
from sim.setup.imports.imported import imported
from sim.setup.imports.reading import File, read
from tests.setup.test_imports import FILES, SAYABLE

TORCHTITAN = FILES / "torchtitan-llama3-8b.toml"
SMALL: dict[str, Any] = {"model": "tiny", "seq": "8K", "layers": 6, "gpus": 2, "ring_degree": 2}
EIGHT = {("torchtitan-llama3-8b.toml",): {}, ("megatron-llama3-8b.sh",): {}, **{
    files: {"model": "llama3-8b"} for files in (("trainer-alst.json", "deepspeed-zero3.json"), ("axolotl-cp.yaml",))
}}  # fmt: skip
"""Files of a large model, and what is typed beside them."""


def small(log: str | None = None, **given: Any) -> Explanation:
    return longstep.explain(TORCHTITAN, log=log, **SMALL, **given)


def as_file(text: str, file: File, folder: Path) -> File:
    """What a file says that has this change alone, in the words of a file of that kind."""
    kind = file.path.rpartition(".")[2]
    path = folder / f"alone.{kind}"
    path.write_text({"json": f"{{{text}}}", "sh": f"run {text}\n"}.get(kind, f"{text}\n"))
    return read(str(path))


@pytest.mark.sweep
@pytest.mark.parametrize("files", SAYABLE, ids=lambda files: files[0])
def test_a_change_says_what_the_framework_reads(files: tuple[str, ...], tmp_path: Path) -> None:
    """Its text, as a file of that kind, changes the files as it was said to."""
    given = SAYABLE[files][0]
    found = imported(*(FILES / file for file in files))
    base = found.setup(**given)
    its = [one for one in changes(found, **given) if one.by != "option" and "without" not in one.text]
    assert its
    for one in its:
        said = [
            dataclasses.replace(
                found, anyway=True,
                files=(*found.files[:at], File(file.path, {**file.given, **alone.given}), *found.files[at + 1 :]),
            ).setup(**given, gpus=base.gpus)
            for at, file in enumerate(found.files)
            for alone in [as_file(one.text, file, tmp_path)]
        ]  # fmt: skip
        assert one.setup.resolved() in [setup.resolved() for setup in said], one.text
        assert one.setup.resolved() != base.resolved()


@pytest.mark.sweep
def test_changes_are_keys_of_the_framework_first_and_each_is_there_once() -> None:
    found = [*changes(imported(TORCHTITAN))]
    by = [one.by for one in found]
    assert by == sorted(by, key=["flag", "nearest flag", "option"].index)
    texts = [one.text for one in found]
    assert 'activation_checkpoint.mode = "selective"' in texts  # the nearest that there is
    assert 'activation_checkpoint.mode = "none"' in texts
    assert "--set schedule.loss=chunked" in texts
    assert "--set schedule.checkpoint=attention" not in texts
    configurations = [(one.found.mesh, one.found.schedule, one.found.options, one.found.workload) for one in found]
    assert all(configurations.count(one) == 1 for one in configurations)
    assert {one.setup.gpus for one in found} == {8}
    flags = [one.text for one in changes(imported(FILES / "megatron-arguments.txt", anyway=True))]
    assert "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1" in flags
    assert {"--tensor-model-parallel-size 2", "--tensor-model-parallel-size 8"} <= {*flags}
    alone = [one.text for one in changes(imported(FILES / "megatron-llama3-8b.sh"))]
    assert "--tensor-model-parallel-size 2" in alone


@pytest.fixture(scope="module")
def plain() -> Explanation:
    return small()


@pytest.mark.slow
def test_many_micro_batches_take_what_all_of_them_do(plain: Explanation) -> None:
    predicted = plain.setup.predicted()
    assert plain.setup.resolved().options.micro_batches == 8
    assert plain.step_time_s == pytest.approx(predicted.step_time_s, rel=1e-2)
    assert sum(plain.parts.values()) == pytest.approx(plain.step_time_s, rel=1e-3)
    assert sum(plain.memory.terms.values()) == pytest.approx(predicted.peak_hbm_bytes, rel=1e-3)
    assert plain.memory.fits is predicted.fits is True
    low, high = plain.interval_s or (0.0, 0.0)
    assert (low, high) == pytest.approx(predicted.interval, rel=1e-2)
    assert plain.longest == pytest.approx(longest(plain.setup, 2**24), rel=1 / 15)  # one length further
    assert plain._repr_html_().startswith("<p><b>Predicted ")


@pytest.mark.slow
def test_a_pipeline_takes_what_all_of_its_micro_batches_do() -> None:
    """By as many of them as fill its stages and one more; so does each change."""
    stages = {**SMALL, "gpus": 4, "dp_degree": 1, "pp_degree": 2, "layers": 12, "accumulate": 8}
    found = longstep.explain(TORCHTITAN, **stages)
    predicted = found.setup.replace(jitter=0.0).predicted()
    assert found.setup.resolved().options.micro_batches == 8
    assert found.step_time_s == pytest.approx(predicted.step_time_s, rel=1e-4)
    assert sum(found.parts.values()) == pytest.approx(found.step_time_s, rel=1e-3)
    assert sum(found.memory.terms.values()) == pytest.approx(predicted.peak_hbm_bytes, rel=1e-3)
    for one in found.helps[:2]:
        changed = one.change.setup.replace(jitter=0.0).predicted()
        assert one.step_time_s == pytest.approx(changed.step_time_s / one.tokens, rel=1e-4), one.change.text
    assert any("in 2 stages" in line for line in found.understood)


@pytest.mark.sweep
def test_changes_take_what_predictions_of_them_do(plain: Explanation) -> None:
    shown = plain.helps
    assert 0 < len(shown) <= 4
    assert [one.change.by == "option" for one in shown] == sorted(one.change.by == "option" for one in shown)
    for one in shown:
        predicted = one.change.setup.predicted()
        assert one.step_time_s == pytest.approx(predicted.step_time_s / one.tokens, rel=2e-2), one.change.text
        assert one.peak_bytes == pytest.approx(predicted.peak_hbm_bytes, rel=3e-3), one.change.text


@pytest.mark.sweep
def test_what_was_measured_is_as_expected_or_what_it_is(plain: Explanation) -> None:
    step_s, held = plain.step_time_s, plain.memory.gpu.held_bytes / 2**30
    healthy = small(f"{step_s}s/it, {held}GiB")
    assert re.fullmatch(
        r"Predicted .* a step \(.*\); measured .* is as expected\. Predicted .* of 80 GiB of a GPU \(fits, .* left\); "
        r"measured .* is as expected\.", healthy.answer,
    )  # fmt: skip
    slow = small(f"{30 * step_s}s/it")
    assert "is 30 times as long as predicted: no single change of it would take that" in slow.answer
    assert f"longstep doctor --from {TORCHTITAN} --step-time" in slow.answer


@pytest.mark.slow
def test_what_else_was_measured_is_told_by_what_it_would_be(plain: Explanation) -> None:
    step_s, held = plain.step_time_s, plain.memory.gpu.held_bytes / 2**30
    assert "is 0.01 times as long as predicted, and impossible: " in small(f"{step_s / 100}s/it").answer
    assert "as expected of one of its 8 micro-batches" in small(f"{step_s / 8}s/it").answer
    assert "GiB more than expected" in small(f"{held + 40}GiB").answer
    tokens = plain.setup.resolved().workload.seq * 8
    by_rate = small(f"tps: {tokens / step_s / 2}, 5 apples")
    assert by_rate.measured_s == pytest.approx(step_s)
    assert "not understood of the log: 5 apples" in repr(by_rate)
    assert small(f"{8 / step_s} samples/s").measured_s == pytest.approx(step_s)


@pytest.mark.slow
def test_a_change_that_would_take_what_was_measured_is_named() -> None:
    given = {**SMALL, "model": "llama3-8b", "seq": "32K"}
    plain = longstep.explain(TORCHTITAN, **given)
    one = next(one for one in plain.weighed if one.change.text == 'activation_checkpoint.mode = "none"')
    assert one.step_time_s
    log = f"{one.step_time_s}s/it, {one.peak_bytes / 2**30}GiB"
    said = longstep.explain(TORCHTITAN, log=log, **given)
    assert ': with activation_checkpoint.mode = "none" it would be ' in said.answer


@pytest.mark.sweep
def test_the_screen_is_read_at_80_columns_and_without_colour(capsys: pytest.CaptureFixture[str]) -> None:
    given = [
        "--model",
        "tiny",
        "--seq",
        "8K",
        "--layers",
        "6",
        "--gpus",
        "2",
        "--ring-degree",
        "2",
        "--log",
        "2s/it, 30GiB",
    ]
    main(["explain", str(TORCHTITAN), *given])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Predicted ")
    assert [line for line in lines if len(line) > WIDTH and "/" not in line] == []
    bars = [line for line in lines if re.match(r"  (predicted|measured) ", line)]
    assert [line.split()[0] for line in bars] == ["predicted", "measured"] * 2
    assert any("set --cluster" in line for line in lines)
    assert "\x1b" not in "".join(lines)
    assert any(line.startswith("what helps most, each alone") for line in lines)
    assert re.search(r"measured ones 90 % were within|too few were measured", " ".join(lines[-2:]))
    main(["explain", str(TORCHTITAN), *given, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert next(iter(found)) == "answer"
    assert found["measured"]["step_time_s"] == 2.0
    assert {one["by"] for one in found["changes"]} <= {"flag", "nearest flag", "option"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "explain needs a configuration: name one file or more"),
        ([str(TORCHTITAN), "--log", "hello"], "--log 'hello': nothing of it is understood"),
        ([str(TORCHTITAN), "--log", "missing.log"], "log file 'missing.log' cannot be read"),
        (["missing.toml"], "configuration file 'missing.toml' cannot be read"),
        ([str(FILES / "megatron-arguments.txt")], "not sayable: .*--anyway"),
        ([str(TORCHTITAN), "--scope", "layer"], "--scope layer: explained are training steps"),
    ],
    ids=["no file", "no log", "no such log", "no such file", "not sayable", "no step"],
)
def test_wrong_files_and_logs_are_a_line(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["explain", *arguments])
    told = capsys.readouterr().err
    assert stop.value.code == 2
    assert re.search(says, told)
    assert told.count("\n") == 1


@pytest.mark.sweep
@pytest.mark.slow
def test_what_is_left_out_and_left_to_the_framework_is_said() -> None:
    shared = SMALL | {"gpus": 4, "tp_degree": 2}
    found = longstep.explain(FILES / "torchtitan-llama3-405b.toml", anyway=True, **shared)
    said = repr(found).replace("\n  ", " ")
    assert "tensor parallelism over 2" in said
    assert "left out: model.converters = quantize.linear.float8: layers of other number formats" in said
    assert "as the framework takes it: parallelism.fsdp_reshard_after_forward" in said


@pytest.mark.slow
@pytest.mark.parametrize("files", EIGHT, ids=lambda files: files[0])
def test_changes_of_a_large_model_take_what_predictions_of_them_do(files: tuple[str, ...]) -> None:
    """Without noise, which is within 1 % of the median of seeds."""
    found = longstep.explain(*(FILES / file for file in files), **EIGHT[files])
    assert found.step_time_s == pytest.approx(found.setup.replace(jitter=0.0).predicted().step_time_s, rel=1e-3)
    assert found.step_time_s == pytest.approx(found.setup.predicted().step_time_s, rel=1e-2)
    for one in found.helps:
        predicted = one.change.setup.replace(jitter=0.0).predicted()
        assert one.step_time_s == pytest.approx(predicted.step_time_s / one.tokens, rel=2e-3), one.change.text
        assert one.peak_bytes == pytest.approx(predicted.peak_hbm_bytes, rel=2e-2), one.change.text  # of one rank
        assert one.longest == pytest.approx(longest(one.change.setup, 2**24), rel=1 / 15), one.change.text


def test_of_documents_no_longest_context_is_told() -> None:
    setup = longstep.Setup("ring", model="tiny", cluster="hgx-h100", gpus=2, documents=(1024, 1024), seq=2048, layers=1)
    assert longest_by_few(setup, 0) is None
