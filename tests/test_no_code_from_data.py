"""Files are data: whatever they name, no code of theirs is run. Code is named on the command line, or by a caller."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import re
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

import longstep
from experiments.evidence.executed.executed_cases import executed_cases, own_schedules
from experiments.evidence.executed.record import RECORD_FILE, read_record, save_record
from experiments.evidence.workers import called
from experiments.recipes.evidence import EvidenceFiles, evidence
from experiments.serve.answering.jobs import JOBS, Jobs
from experiments.verbs.cli import main, open_console
from experiments.verbs.shared.cells import CellSelection, cells_of
from sim.base.errors import InputError, JournalError, LongstepError
from sim.base.presets import decoded, read_bytes
from sim.compare.journal import Journal
from sim.compare.portions import Portion, play
from sim.diagnose.profiled import read_traces
from sim.schedule.ir.program import Program, Schedule
from sim.setup.names import OwnSchedule
from sim.software.counted import load_counted
from tests.experiments.evidence.test_executed_cases import RING, on_h100
from tests.helpers import slow_but
from tests.reading_code import ROOT, places

CONFIGURATIONS = ROOT / "tests" / "setup" / "imports"
PRINTED = ROOT / "tests" / "topology" / "detect" / "printed"
CONFIG = ROOT / "tests" / "words" / "hugging_face" / "llama-3-8b.json"
RESULTS = ROOT / "experiments" / "results"
SMALL = ("--cluster", "hgx-h100", "--gpus", "2", "--scope", "attention")


class Reader(NamedTuple):
    """What reads a file."""

    file: str
    """Its name."""
    holds: Callable[[str], bytes]
    """Its content, where it names a file with code."""
    read: Callable[[str], object]
    """Reads it by its path, and does with it what is ever done."""


def shipped(path: str, **changes: str) -> Callable[[str], bytes]:
    """A file of the product, with some of its texts replaced by the name of the code."""
    text = (ROOT / path).read_text()
    assert all(old in text for old in changes.values())

    def holds(code: str) -> bytes:
        found = text
        for key, old in changes.items():
            found = found.replace(old, old.replace(key, code))
        return found.encode()

    return holds


def as_json(of: Callable[[str], Any]) -> Callable[[str], bytes]:
    return lambda code: json.dumps(of(code)).encode()


def loaded(path: Path, *keys: str) -> Any:
    found = json.loads(path.read_text())
    for key in keys:
        found = found[key]
    return found


def command(*arguments: str) -> Callable[[str], None]:
    """What a command does with a file, FILE among its arguments."""
    return lambda path: main([argument.replace("FILE", path) for argument in arguments])


CASES = """
title = "{}"
source = "{}"
quality = "q"
profile = "{profile}"

[select]
model = "llama3-8b"
cluster = "a800"
scope = "attention"
gpus = 8
{select}
[[group]]
name = "g"
cases = [ {{ {case}measured_s = 0.01 }} ]
{more}
"""


def case_file(**parts: str) -> Reader:
    """A case file that names the code in some of its parts."""
    default = {"profile": "a800-ultraattn", "select": "", "case": 'seq = "16K", schedule = "ring", ', "more": ""}

    def holds(code: str) -> bytes:
        named = {key: part.replace("CODE", code) for key, part in (default | parts).items()}
        return CASES.format(code, code, **named).encode()

    return Reader("cases.toml", holds, command("evaluate", "FILE"))


def record(**changes: Any) -> Reader:
    """A record of ``validate`` with a cell that was quiet, and so would be predicted anew."""

    def holds(code: str) -> bytes:
        said = {key: code for key, value in changes.items() if value == "CODE" and key in RING._fields}
        found = on_h100(CellSelection(cluster="hgx-h100"), [RING._replace(seq="16K", **said)])
        others = {key: {"schedule": code, "cluster": "hgx-h100"} for key in changes if key not in RING._fields}
        return msgspec.json.encode(msgspec.structs.replace(found, **others))

    return Reader("record.json", holds, lambda path: chapter_of(path, f"{path}.md"))


def chapter_of(record: str, path: str, front_page: str | None = None, step_errors: str | None = None) -> None:
    """Write the chapter of a record, or of the records in a folder."""
    evidence(open_console(), [], [record], EvidenceFiles(path, front_page, step_errors))


def chapter(*written: str) -> Callable[[str], None]:
    """What a chapter does with a file that lies beside its record, and that is ``written`` too."""

    def read(path: str) -> None:
        beside = Path(path).with_name("record.json")
        beside.write_bytes(record(schedule="CODE").holds("mine.py:build"))
        chapter_of(str(beside.parent), f"{path}.chapter.md", **dict.fromkeys(written, path))

    return read


def rows(code: str) -> list[dict[str, Any]]:
    return [{"schedule": code, "seq": 1024, "step_time_s": 1.0, "fits": "yes", "bound_by": code, "error": code}]


def parquet(found: Mapping[str, list[Any]], about: Mapping[str, str] | None = None) -> bytes:
    out = io.BytesIO()
    import pyarrow as pa
    import pyarrow.parquet as pq  # a GPU machine may have none

    table = pa.table(found)
    pq.write_table(table.replace_schema_metadata(about) if about else table, out)
    return out.getvalue()


def trace(code: str) -> dict[str, Any]:
    events = [
        {"ph": "X", "cat": "kernel", "name": code, "pid": 0, "tid": 7, "ts": float(n), "dur": 1.0} for n in (0, 2)
    ]
    return {"traceEvents": events, "deviceProperties": [{"id": 0}], "distributedInfo": {"backend": code}}


def own_trace(code: str) -> dict[str, Any]:
    row = {"player": "executed", "kind": "Attend", "rank": 0, "label": code, "sent_bytes": 0, "begin_s": 0, "end_s": 1}
    return {"traceEvents": [{"ph": "X", "ts": 0, "args": row}], "otherData": {"traces": [{"schedule": code}]}}


def journal(path: str) -> None:
    with Journal(Path(path), "rows") as book:
        assert [row["schedule"] for row in book.rows.values()] in ([], [row["error"] for row in book.rows.values()])


def journal_of(code: str) -> bytes:
    path = Path(f"{code.rpartition('/')[0]}/written.journal")
    with Journal(path, "rows", force=True) as book:
        book.add([0], rows(code))
    return path.read_bytes()


def as_program(path: str) -> None:
    data = read_bytes("program", path, "`program`")
    for read in (Schedule.from_json, Program.from_json):
        try:
            read(data)
        except (msgspec.DecodeError, LongstepError, KeyError):
            continue


def schedule_json(code: str) -> bytes:
    workload = longstep.workload("tiny", "64")
    return longstep.build("ring", workload, 2).schedule.to_json().replace(b'"name":"ring"', f'"name":"{code}"'.encode())


ASKED: dict[str, Any] = {"cluster": "hgx-h100", "gpus": 2, "seq": "1K", "layers": 1, "model": "tiny", "set": {}}


def dropped(path: str) -> None:
    """What a page does with a file that is dropped on it, and with the question that it makes."""
    found = {"name": Path(path).name, "text": Path(path).read_bytes().decode(errors="replace"), "question": ASKED}
    for part in Jobs().parts("read", {**found, "anyway": True}):
        if "question" in part:
            asked = msgspec.to_builtins(part["question"])
            list(Jobs().parts("ask", {"question": {**ASKED, **asked, "layers": 1, "seq": "1K", "gpus": 2, "set": {}}}))


def asked(path: str) -> None:
    """What a page's worker does with a question, by any job."""
    data = decoded(read_bytes("question", path, "`question`"), "question", "ask another one")
    for job, one in JOBS.items():
        known = (
            {key: data[key] for key in one.takes.__struct_fields__ if key in data} if isinstance(data, dict) else data
        )
        list(Jobs().parts(job, known))


def question(code: str) -> dict[str, Any]:
    names = ("model", "cluster", "schedule", "stack", "software", "profile", "mask")
    variants = [{"name": name, "question": ASKED | {name: code}} for name in names]
    axes = {"across": {"key": "seq", "values": code[:40]}, "down": {"key": "gpus", "values": "2"}}
    return {"question": ASKED | {"schedule": code}, "variants": variants[:5], "competitors": variants[2:], **axes}


SIMULATE = ("simulate", *SMALL)
READERS = {
    "model": Reader("model.toml", shipped("sim/models/tiny.toml", tiny='name = "tiny"'),
        command(*SIMULATE, "--model", "FILE")),
    "config.json": Reader("config.json", as_json(lambda code: loaded(CONFIG) | {
        "_name_or_path": code, "architectures": [code], "auto_map": {"AutoModel": code}}),
        command(*SIMULATE, "--model", "FILE")),
    "cluster": Reader("cluster.toml", shipped("topology/hardware/hgx-h100.toml", **{"hgx-h100": 'name = "hgx-h100"',
        "h100-sxm": 'profile = "h100-sxm"'}), command(*SIMULATE, "--cluster", "FILE")),
    "profile": Reader("profile.json", as_json(lambda code: loaded(ROOT / "sim/profiles/h100-sxm.json") | {
        "name": code, "command": code}), command(*SIMULATE, "--profile", "FILE")),
    "profile, compared": Reader("profile.json", as_json(lambda code: loaded(ROOT / "sim/profiles/h100-sxm.json") | {
        "name": code}), command("recheck", "h100-sxm", "--against", "FILE")),
    "software": Reader("software.toml", shipped("sim/software/presets/huggingface.toml",
        **{"Hugging Face Trainer, eager": 'said = "Hugging Face Trainer, eager"'}),
        command(*SIMULATE, "--scope", "step", "--software", "FILE")),
    "software, counted": Reader("software.toml", shipped("sim/software/counted/torch-losses.toml", mm='kernel = "mm"'),
        load_counted),
    "lengths.txt": Reader("lengths.txt", lambda code: f"100\n{code}\n".encode(),
        command(*SIMULATE, "--documents", "FILE")),
    "lengths.jsonl": Reader("lengths.jsonl", as_json(lambda code: {"length": 64, "schedule": code}),
        command(*SIMULATE, "--documents", "FILE")),
    "lengths.parquet": Reader("lengths.parquet", lambda code: parquet({"length": [64], "schedule": [code]}),
        command(*SIMULATE, "--documents", "FILE")),
    "layout": Reader("layout.txt", str.encode,
        command("balance", "--documents", "64,64", "--gpus", "2", "--layout", "FILE")),
    "block mask": Reader("mask.toml", lambda code: f'size = 4096\nkept = [[0], [1]]\nschedule = "{code}"'.encode(),
        command(*SIMULATE, "--block-mask", "FILE")),
    "pipeline": Reader("pipeline.csv", lambda code: f"0F0,0B0,{code}\n".encode(), command("simulate", "--scope", "step",
        "--cluster", "hgx-h100", "--gpus", "2", "--schedule", "single", "--pp-degree", "2", "--pipeline", "FILE")),
    "cases, group": case_file(case='seq = "16K", schedule = "CODE", '),
    "cases, select": case_file(case='seq = "16K", ', select='schedule = "CODE"'),
    "cases, stack": case_file(case='seq = "16K", ', select='stack = "CODE"'),
    "cases, profile": case_file(profile="CODE"),
    "cases, alike": case_file(more='[[alike]]\nof = { schedule = "ring" }\nset = ["schedule.layout=CODE"]'),
    "cases, memory": case_file(more='[[memory]]\nname = "m"\n'
        'cases = [ { schedule = "CODE", scope = "step", ran = true } ]'),
    "cases, host fit": case_file(more='[host_fit]\ncases = [ { seq = "16K", schedule = "CODE", measured_s = 0.01 }, '
        '{ seq = "32K", schedule = "CODE", measured_s = 0.02 } ]'),
    "cases, op alone": case_file(case='measure = "CODE", queries = 64, keys = 64, '),
    "record, schedule": record(schedule="CODE"),
    "record, stack": record(scope="step", stack="CODE"),
    "record, select": record(select="CODE"),
    "record, as cases": record(schedule="CODE")._replace(
        read=command("validate", "--record", "FILE", "--cases-out", "FILE.toml")),
    "record, page": record(schedule="CODE")._replace(
        read=command("validate", "--record", "FILE", "--html", "FILE.html")),
    "record, report": record(schedule="CODE")._replace(read=command("report", "FILE", "--out", "FILE.html")),
    "record, over it": record(schedule="CODE")._replace(
        read=command("validate", "--record", f"{RESULTS}/2026-11-21-schedules-epyc-2-cores", "--out", "FILE")),
    "record, notes": Reader("notes.md", lambda code: f"{{{{ {code} }}}}".encode(), chapter()),
    "front page": Reader("front.md", str.encode, chapter("front_page")),
    "page of studies": Reader("studies.md", str.encode, command("study", "fpdt-chunks", "--markdown", "FILE")),
    "step errors": Reader("errors.json", as_json(lambda code: {"created": code, "command": code, "sets": []}),
        chapter("step_errors")),
    "lab": Reader("lab.json", shipped("experiments/results/2026-11-24-lab-thin-epyc-2-cores/thin.json",
        usp='"schedule":"usp"'), command("lab", "--record", "FILE", "--page", "FILE.html")),
    "lab, report": Reader("lab.json", shipped("experiments/results/2026-11-24-lab-thin-epyc-2-cores/thin.json",
        usp='"schedule":"usp"'), command("report", "FILE", "--out", "FILE.html")),
    "lab, calibration": Reader("lab.json", as_json(lambda code: loaded(ROOT / "sim/profiles/h100-sxm.json") | {
        "name": code}), command("lab", "--calibration", "FILE", "--gpus", "2", "--schedule", "ring", "--seq", "1K")),
    "journal": Reader("rows.journal", journal_of, journal),
    "trace of torch": Reader("rank0.json", as_json(trace), command("doctor", "--model", "tiny", "--layers", "1",
        "--seq", "1K", "--gpus", "1", "--cluster", "hgx-h100", "--trace", "FILE")),
    "trace of torch, gzip": Reader("rank0.json.gz", lambda code: gzip.compress(json.dumps(trace(code)).encode()),
        lambda path: read_traces([path])),
    "trace of ours": Reader("trace.json", as_json(own_trace), lambda path: read_traces([path])),
    "trace, report": Reader("trace.json", as_json(own_trace), command("report", "FILE", "--out", "FILE.html")),
    "results, JSON": Reader("rows.json", as_json(rows), command("report", "FILE", "--out", "FILE.html")),
    "results, JSON lines": Reader("rows.jsonl", lambda code: b"\n".join([json.dumps(rows(code)[0]).encode()] * 2),
        command("report", "FILE", "--out", "FILE.html")),
    "results, step": Reader("step.json", as_json(lambda code: {"step_time_s": 1.0, "floors": code, "evidence": {
        "profile": code}}), command("report", "FILE", "--out", "FILE.html")),
    "results, plan": Reader("plan.json", as_json(lambda code: {"best": rows(code), "lost": rows(code)}),
        command("report", "FILE", "--out", "FILE.html")),
    "results, CSV": Reader("rows.csv", lambda code:
        f"# longstep sweep: sweep\nschedule,step_time_s\n{code},1\n".encode(),
        command("report", "FILE", "--out", "FILE.html")),
    "results, Parquet": Reader("rows.parquet", lambda code: parquet({"schedule": [code], "step_time_s": [1.0]}, {
        "longstep sweep": code}), command("report", "FILE", "--out", "FILE.html")),
    "table, over it": Reader("rows.parquet", lambda code: parquet({"schedule": [code]}),
        command("sweep", *SMALL, "--vary", "seq=1K", "--step-only", "--jobs", "1", "--out", "FILE")),
    "configuration, TOML": Reader("run.toml", lambda code: (CONFIGURATIONS / "torchtitan-llama3-8b.toml").read_bytes()
        .replace(b'"alltoall"', f'"{code}"'.encode()), command("import", "FILE", "--anyway")),
    "configuration, JSON": Reader("run.json", as_json(lambda code: loaded(CONFIGURATIONS / "trainer-fsdp.json") | {
        "model_name_or_path": code, "deepspeed": code}), command("import", "FILE")),
    "configuration, YAML": Reader("run.yaml", lambda code: f"base_model: {code}\nplugins: ['{code}', 'evil.build']\n"
        "sequence_len: !!python/object/apply:evil.build []\n".encode(), command("import", "FILE", "--anyway")),
    "configuration, shell": Reader("run.sh", lambda code: f"python {code} --num-layers $(python {code}) `{code}` "
        f"--hidden-size 64 --spec {code}\n".encode(), command("simulate", "--from", "FILE", "--anyway")),
    "log": Reader("run.log", lambda code: f"{code} step: 4 memory: 3.0GiB(4%) {code}: 26s/it\n".encode(), command(
        "explain", str(CONFIGURATIONS / "torchtitan-llama3-8b.toml"), "--model", "tiny", "--layers", "1", "--seq", "1K",
        "--gpus", "1", "--ring-degree", "1", "--batch", "1", "--log", "FILE")),
    "schedule": Reader("schedule.json", schedule_json, as_program),
    "schedule, over it": Reader("schedule.json", schedule_json,
        command("show", "--gpus", "2", "--format", "json", "--out", "FILE")),
    "dropped, JSON": Reader("config.json", as_json(lambda code: loaded(CONFIG) | {
        "_name_or_path": code, "architectures": [code], "auto_map": {"AutoModel": code}}), dropped),
    "dropped, cluster": Reader("cluster.toml", shipped("topology/hardware/hgx-h100.toml", **{
        "hgx-h100": 'name = "hgx-h100"', "h100-sxm": 'profile = "h100-sxm"'}), dropped),
    "dropped, configuration": Reader("run.toml", lambda code: (CONFIGURATIONS / "torchtitan-llama3-8b.toml")
        .read_bytes().replace(b'"alltoall"', f'"{code}"'.encode()), dropped),
    "dropped, lengths": Reader("lengths.txt", lambda code: f"100\n{code}\n".encode(), dropped),
    "question of a page": Reader("question.json", as_json(question), asked),
    "nvidia-smi topo": Reader("topo.txt", lambda code: (PRINTED / "h100.topo.txt").read_bytes().replace(
        b"mlx5_0", code.encode()), command("machine", "--topo", "FILE", "--gpus", str(PRINTED / "h100.gpus.csv"))),
    "nvidia-smi, CSV": Reader("gpus.csv", lambda code: (PRINTED / "h100.gpus.csv").read_bytes().replace(
        b"NVIDIA", code.encode()), command("machine", "--topo", str(PRINTED / "h100.topo.txt"), "--gpus", "FILE")),
    "nvidia-smi, XML": Reader("gpus.xml", lambda code: (PRINTED / "a100.gpus.xml").read_bytes().replace(
        b"NVIDIA", code.encode()), command("machine", "--topo", str(PRINTED / "a100.topo.txt"), "--gpus", "FILE")),
    "ibstat": Reader("ib.txt", lambda code: (PRINTED / "h100.ib.txt").read_bytes().replace(b"mlx5_0", code.encode()),
        command("machine", "--topo", str(PRINTED / "h100.topo.txt"), "--gpus", str(PRINTED / "h100.gpus.csv"), "--ib",
        "FILE")),
}  # fmt: skip
"""All that read a file which is not the product's own."""
OURS = "reads what ships with Longstep"
COMPILED = "reads what this user has compiled, under the hash of its source"
PROVED = "compares keys of proofs that this user has written, as bytes"
KERNEL = "reads what the kernel says of this machine"
BESIDE = "reads what another process of this run says"
WRITES = "writes, and reads nothing"
NEEDS_NONE = {OURS, COMPILED, PROVED, KERNEL, BESIDE, WRITES}
PLACES: dict[str, str] = {
    "calibrate/plan.py:_own_version": OURS,
    "calibrate/published/between_nodes.py:_cluster": OURS,
    "calibrate/published/elementwise.py:_losses": OURS,
    "calibrate/published/elementwise.py:_modules": OURS,
    "calibrate/published/losses.py:backwards": OURS,
    "calibrate/published/losses.py:losses": OURS,
    "calibrate/published/reading.py:rows": OURS,
    "calibrate/published/streaming.py:_liger": OURS,
    "experiments/evidence/papers/cases.py:_alone": "cases, op alone",
    "experiments/evidence/papers/cases.py:written_cases": "cases, group",
    "experiments/evidence/papers/coverage.py": "step errors",
    "experiments/evidence/kept.py:kept_in": "record, notes",
    "experiments/evidence/kept.py:notes": "record, notes",
    "experiments/evidence/links/lab.py": "lab",
    "experiments/evidence/links/lab.py:read_lab": "lab",
    "experiments/evidence/executed/record.py": "record, over it",
    "experiments/evidence/executed/record.py:read_record": "record, schedule",
    "experiments/evidence/results.py:_csv": "results, CSV",
    "experiments/evidence/results.py:_json": "results, JSON lines",
    "experiments/evidence/results.py:_parquet": "results, Parquet",
    "experiments/evidence/results.py:read_result": "results, JSON",
    "experiments/pages/report/chapters.py:stated": "results, step",
    "experiments/recipes/carry.py:needed_by_tests": OURS,
    "experiments/recipes/carry.py:requirements": OURS,
    "experiments/recipes/gpu.py:leave": OURS,
    "experiments/serve/answering/dropped.py:_kind": "dropped, JSON",
    "experiments/serve/files.py:_own": OURS,
    "experiments/serve/answering/jobs.py:parts": "question of a page",
    "experiments/serve/answering/question.py:question_of": "dropped, configuration",
    "experiments/serve/server.py:do": "question of a page",
    "experiments/serve/worker.py:_hear": BESIDE,
    "experiments/serve/worker.py:_resident_bytes": KERNEL,
    "experiments/studies/claims.py:claims": OURS,
    "experiments/verbs/balance.py:_order": "layout",
    "experiments/verbs/recheck.py:_profile": "profile, compared",
    "experiments/verbs/cli.py:_print_no_more": WRITES,
    "experiments/recipes/evidence.py:_text": "front page",
    "experiments/verbs/machine.py:_read": "nvidia-smi topo",
    "experiments/verbs/study.py:_page": "page of studies",
    "experiments/verbs/sweep.py:_is_parquet": "table, over it",
    "runtime/lab/keeper.py:main": BESIDE,
    "runtime/processes/fork_server.py:_hear": BESIDE,
    "runtime/lab/lab.py:_answer": BESIDE,
    "runtime/lab/namespaces.py:enter": BESIDE,
    "runtime/lab/namespaces.py:leave": BESIDE,
    "sim/batches/files.py:_json_lines": "lengths.jsonl",
    "sim/batches/files.py:_parquet": "lengths.parquet",
    "sim/batches/files.py:read_lengths": "lengths.txt",
    "sim/batches/lengths.py:histogram": OURS,
    "sim/engine/costs/measured.py:measured_cluster": "profile",
    "sim/engine/intervals/learned.py:shipped": OURS,
    "sim/base/files.py:_is_ours": "schedule, over it",
    "sim/base/files.py:write_whole": WRITES,
    "sim/words/hugging_face.py:model_fields": "config.json",
    "sim/native/library.py:_found": COMPILED,
    "sim/base/overrides.py:override": "cluster",
    "sim/base/presets.py:_shipped": OURS,
    "sim/base/presets.py:converted": "cluster",
    "sim/base/presets.py:decoded": "profile",
    "sim/base/presets.py:from_toml": "cluster",
    "sim/base/presets.py:read_bytes": "cluster",
    "sim/words/profile.py": "lab, calibration",
    "sim/words/profile.py:_decoded": "profile",
    "sim/words/profile.py:_shipped": OURS,
    "sim/words/profile.py:profile_bytes": "profile",
    "sim/schedule/ir/program.py:from_json": "schedule",
    "sim/schedule/model/pipeline/files.py:_cells": "pipeline",
    "sim/schedule/model/pipeline/files.py:read_pipeline": "pipeline",
    "sim/schedule/proof/remembered.py:_add": PROVED,
    "sim/schedule/proof/remembered.py:_code": OURS,
    "sim/schedule/proof/remembered.py:_lines": PROVED,
    "sim/setup/block_masks.py:block_mask_of": "block mask",
    "sim/setup/imports/frameworks.py:frameworks": OURS,
    "sim/setup/imports/reading.py": "configuration, YAML",
    "sim/setup/imports/reading.py:_json": "configuration, JSON",
    "sim/setup/imports/reading.py:_toml": "configuration, TOML",
    "sim/setup/imports/reading.py:read": "configuration, shell",
    "sim/compare/journal.py:__init__": "journal",
    "sim/compare/journal.py:_head": "journal",
    "sim/compare/journal.py:_portion": "journal",
    "sim/compare/journal.py:_read": "journal",
    "sim/explain/logs.py:read_log": "log",
    "sim/diagnose/profiled.py:_decoded": "trace of torch",
    "sim/software/attention.py:_tables": OURS,
    "sim/software/counted.py:_loaded": "software, counted",
    "sim/software/software.py:load_software": "software",
    "sim/software/host.py:_table": OURS,
    "sim/software/issue.py:table": OURS,
    "sim/words/workload.py:load_model": "model",
    "sim/words/workload.py:model_of_config": "config.json",
    "topology/cluster.py:load_cluster": "cluster",
    "topology/host.py:_cpu_name": KERNEL,
    "topology/detect/machine.py:machine": "nvidia-smi topo",
    "topology/named.py:_preset": "cluster",
    "topology/detect/tools.py:_of_csv": "nvidia-smi, CSV",
    "topology/detect/tools.py:_of_xml": "nvidia-smi, XML",
}
"""Every place of the product where a file is read, or data are decoded, with the reader above that comes by, or why
none has to."""
_DECODES = re.compile(
    r"msgspec\.(json|toml|yaml|msgpack)\.(decode|Decoder)|msgspec\.convert|(json|tomllib|marshal|yaml)\.(loads?|\w+_load)"
    r"|yaml\.\w*Loader"
    r"|(torch|numpy)\.(load|fromfile|loadtxt|genfromtxt|memmap)|csv\.(reader|DictReader)|gzip\.(open|decompress|GzipFile)"
    r"|xml\.etree\.ElementTree\.(fromstring|parse|XML|iterparse)|(pandas|polars)\.read_\w+|ast\.literal_eval"
    r"|pyarrow(\.parquet)?\.(ParquetFile|ParquetDataset|read_\w+|feather\w*|ipc\w*|csv\w*|json\w*)"
    r"|(configparser|shelve|sqlite3|plistlib|fileinput|linecache|mmap)\.\w+"
    r"|\.(read_text|read_bytes|open|read_parquet|read_csv|unpack)|open|(io|os|codecs|bz2|lzma)\.open"
    r"|.*\bpresets\.(read_bytes|load_toml|from_json|decoded|converted)"
)
RUNS: dict[str, str] = {
    "calibrate/software/libraries/transformers_modules.py:_module": "modules of transformers",
    "experiments/studies/study.py:study": "a module of this package, whose name is listed first",
    "experiments/verbs/cli.py:parses_to": "a module of this package, of a verb",
    "experiments/verbs/cli.py:run": "a module of this package, of a verb",
    "longstep.py:__getattr__": "a module of this package, of a public name",
    "longstep.py": "the command line",
    "runtime/execution/ops/cuda_attention.py:__init__": "flash-attn 2 or 3",
    "runtime/processes/fork_server.py:main": "what the server loads before it forks",
    "sim/setup/names.py:_function": "the user's own schedule: an OwnSchedule",
}
"""Every place of the product where code is loaded by its name, and which."""
_LOADS = re.compile(
    r"importlib\.(import_module|reload|util\.(spec_\w+|module_\w+)|machinery\.\w+)|runpy\.\w+|pkgutil\.resolve_name"
    r"|exec|eval|compile|__import__|builtins\.\w+|.*\.(exec_module|load_module)|code\.\w+"
    r"|(pickle|cloudpickle|dill|joblib|shelve|marshal)\.\w+|.*\.(dec_hook|ext_hook)"
)


@pytest.mark.sweep
def test_every_place_that_reads_data_is_listed() -> None:
    """Who adds a reader names it above, and the file that comes by it."""
    assert sorted(places(_DECODES) ^ PLACES.keys()) == []
    assert {by for by in PLACES.values() if by not in NEEDS_NONE} <= READERS.keys()


@pytest.mark.sweep
def test_code_is_loaded_in_few_places_and_one_takes_the_users() -> None:
    """Of a name that was typed: nothing else makes an OwnSchedule."""
    assert sorted(places(_LOADS) ^ RUNS.keys()) == []
    assert places(re.compile(r"(.*\.)?(OwnSchedule|_function)")) == {
        "experiments/verbs/shared/selection.py:typed_schedule", "sim/setup/names.py:_function",
        "sim/setup/names.py:entry",
    }  # fmt: skip
    assert {place.rpartition("/")[0] for place in places(re.compile(r"(.*\.)?typed_(schedules?|values)"))} == {
        "experiments/verbs", "experiments/verbs/shared",
    }  # fmt: skip


class Evil(NamedTuple):
    """A module that says when it is imported."""

    code: str
    """Its name, as a schedule of the user's own has it."""
    was_imported: Path


@pytest.fixture
def evil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Evil:
    monkeypatch.chdir(tmp_path)
    marker = tmp_path / "imported"
    source = f"from pathlib import Path\nPath({str(marker)!r}).touch()\nfrom sim.schedule.methods.ring import build\n"
    source += "from sim.schedule.methods.usp import build as on_both\n"
    (tmp_path / "evil.py").write_text(source)
    return Evil(f"{tmp_path}/evil.py:build", marker)


def read(reader: Reader, data: bytes, folder: Path) -> None:
    """Read a file; it is refused in one line, or not."""
    path = folder / "read" / reader.file
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    try:
        reader.read(str(path))
    except LongstepError:
        pass
    except SystemExit as stop:
        assert stop.code == 2


STARTS_PROCESSES = {"record, select", "record, stack"}
TRIED = [
    pytest.param(name, marks=pytest.mark.gloo if name in STARTS_PROCESSES else pytest.mark.sweep) for name in READERS
]


@pytest.mark.parametrize("name", TRIED)
def test_no_file_runs_the_code_that_it_names(
    name: str, evil: Evil, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    read(READERS[name], READERS[name].holds(evil.code), tmp_path)
    assert not evil.was_imported.exists()
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.sweep
@pytest.mark.parametrize("name", slow_but({"profile", "results, JSON", "table, over it", "nvidia-smi, CSV"}, READERS))
def test_what_is_no_such_file_is_refused_in_a_line(
    name: str, evil: Evil, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nested deeper than any parser goes, no text, cut off, and nothing at all."""
    reader = READERS[name]
    whole = reader.holds("ring" if name != "journal" else evil.code)
    for data in (b"[" * 100_000 + b"]" * 100_000, b"\xff\xfe\x00", whole[: len(whole) // 2], b""):
        read(reader, data, tmp_path)
        assert "Traceback" not in capsys.readouterr().err


def test_a_text_that_a_caller_passes_is_data_too(evil: Evil) -> None:
    for code in (evil.code, "evil.py:build"):
        with pytest.raises(
            InputError, match=r"unknown schedule '.*evil.py:build'.*longstep.OwnSchedule: no file names"
        ):
            longstep.predict(code, cluster="hgx-h100", gpus=2, scope="attention")
        with pytest.raises(InputError, match="no file names one"):
            longstep.build(code, longstep.workload("tiny", "1K"), 2)
    assert not evil.was_imported.exists()


def test_code_that_a_caller_names_is_run(evil: Evil) -> None:
    """Also behind a pickle, as other processes get it."""
    setup = longstep.Setup(OwnSchedule("evil.py:build"), cluster="hgx-h100", gpus=2, scope="attention", seq="1K")
    row = {"schedule": OwnSchedule("evil.py:build"), "seq": "2K"}
    portion = Portion((0,), setup, (row,), intervals=False, bounds=False, extend=False)
    (played,) = play(pickle.loads(pickle.dumps(portion)))
    assert evil.was_imported.exists()
    assert played["error"] == ""
    assert type(played["schedule"]) is str
    assert (
        longstep.build(OwnSchedule("evil.py:build"), longstep.workload("tiny", "1K"), 2).schedule.header.name == "ring"
    )


TYPED = {
    "simulate": ("simulate", *SMALL, "--schedule", "evil.py:build"),
    "simulate, several": ("simulate", *SMALL, "--schedule", "ring, evil.py:build"),
    "show": ("show", "--gpus", "2", "--seq", "64", "--schedule", "evil.py:build"),
    "sweep": ("sweep", *SMALL, "--step-only", "--jobs", "1", "--schedule", "evil.py:build", "--vary", "seq=1K,2K"),
    "sweep, varied": ("sweep", *SMALL, "--step-only", "--jobs", "1", "--vary", "schedule=ring,evil.py:build", "--out",
        "rows.csv"),
    "winners": ("winners", *SMALL, "--schedule", "ring,evil.py:build", "--across", "seq=1K,2K", "--jobs", "1"),
    "crossover": ("crossover", *SMALL, "--schedule", "ulysses,evil.py:build", "--along", "seq=1K..4K", "--json"),
    "plan": ("plan", "--model", "tiny", "--gpus", "2", "--seq", "1K", "--layers", "1", "--schedule", "evil.py:on_both",
        "--jobs", "1", "--limit", "1"),
}  # fmt: skip


@pytest.mark.sweep
@pytest.mark.parametrize("verb", TYPED)
def test_code_that_is_typed_is_run(verb: str, evil: Evil, capsys: pytest.CaptureFixture[str]) -> None:
    main([*TYPED[verb]])
    assert evil.was_imported.exists()
    assert "no file names one" not in capsys.readouterr().out


def test_cells_of_ones_own_are_kept_by_their_names(evil: Evil, tmp_path: Path) -> None:
    """``validate`` compares them, and its record, read again, runs nothing."""
    typed = CellSelection(cluster="hgx-h100", ranks="2", seq="1K", schedule="ring,evil.py:build", scope="attention")
    cells = cells_of(typed)
    assert cells[1].setup(typed.setup()).resolved().checked().schedule.header.name == "ring"
    assert evil.was_imported.exists()
    evil.was_imported.unlink()
    output = RECORD_FILE.at(tmp_path / "record.json")
    save_record(on_h100(typed, cells), output)
    again = read_record(output.path)
    assert [cell for cell, _ in again.comparisons] == cells
    assert [case.setup.schedule for case in executed_cases(again)] == ["ring"]
    assert own_schedules(again) == ["evil.py:build"]
    with pytest.raises(InputError, match="unknown schedule 'evil.py:build'"):
        again.comparisons[1][0].setup(typed.setup()).resolved()
    assert not evil.was_imported.exists()


def damaged(path: Path) -> dict[str, bytes]:
    """A journal of three portions in a dozen states that nobody wrote."""
    whole = path.read_bytes()
    head, first, second, third, _ = whole.split(b"\n")
    told = json.loads(head)
    line = second[8:]
    return {
        "a digit": whole.replace(b'"seq":2', b'"seq":3'),
        "a byte of no text": whole.replace(b'"numbers"', b'"numb\xffrs"', 1),
        "a line cut in two": b"\n".join([head, first, second[:40], second[40:], third, b""]),
        "a line doubled in itself": b"\n".join([head, first, second + second, third, b""]),
        "a line without its sum": b"\n".join([head, first, line, third, b""]),
        "no line": b"\n".join([head, first, b"", third, b""]),
        "zeros": b"\n".join([head, first, bytes(len(second)), third, b""]),
        "deep": b"\n".join([head, first, b"[" * 100_000, third, b""]),
        "unequal": b"\n".join([head, first, line.replace(b"[1]", b"[1,2]"), third, b""]),
        "the first line": b"\n".join([head[:40], first, second, third, b""]),
        "the first line, deep": b"\n".join([head[:23] + b"[" * 100_000, first, b""]),
        "no first line": b"\n".join([first, second, third, b""]),
        "version 1": b"\n".join([json.dumps({"mark": told["mark"], "sweep": told["sweep"]}).encode(), line, b""]),
        "version 3": whole.replace(b'"version":2', b'"version":3'),
        "a version in words": whole.replace(b'"version":2', b'"version":"two"'),
    }


def test_a_journal_that_is_damaged_is_named_and_left(tmp_path: Path) -> None:
    """By its line, which can be taken out: then the rows of all others are there."""
    path = tmp_path / "rows.journal"
    with Journal(path, "sweep") as book:
        for number in range(3):
            book.add([number], [{"seq": number + 1, "error": ""}])
    whole = path.read_bytes()
    for state, data in damaged(path).items():
        path.write_bytes(data)
        with pytest.raises(JournalError) as refused:
            Journal(path, "sweep")
        assert path.read_bytes() == data, state
        said = str(refused.value)
        assert said.startswith(repr(str(path))), state
        assert "begin anew with `force`" in said, state
        if line := re.search(r"sed -i (\d+)d FILE", said):
            lines = data.split(b"\n")
            del lines[int(line[1]) - 1]
            if state != "a line cut in two":
                path.write_bytes(b"\n".join(lines))
                with Journal(path, "sweep") as book:
                    assert len(book.rows) == 2, state
        elif "version" in state and "words" not in state:
            assert f"journal of {state}, and this Longstep writes version 2; finish the sweep with the Longstep" in said
        else:
            assert "is damaged: its first line" in said or "is no journal of a sweep" in said, state
    with pytest.raises(JournalError, match="3 rows of another sweep"):
        path.write_bytes(whole)
        Journal(path, "another")
    with Journal(path, "sweep", force=True) as book:
        assert book.rows == {}


@pytest.mark.gloo
def test_a_case_whose_process_is_killed_is_named() -> None:
    """As for lack of memory; the signal 0 is none."""
    with pytest.raises(InputError, match="case 9: the process that predicts it was killed twice"):
        list(called(signal.raise_signal, [0, 9, 0], lambda number: f"case {number}"))
    assert list(called(signal.raise_signal, [], str)) == []


@pytest.mark.parametrize("key", ["set", "vary"])
def test_a_profile_is_no_figure_of_a_cluster(key: str) -> None:
    """It was chosen before, and so changed nothing."""
    setup = longstep.Setup("ring", cluster="hgx-h100", gpus=2, scope="attention", seq="1K")
    with pytest.raises(InputError, match=f"`{key}` cluster.profile=datasheet: .*choose it with `profile` datasheet"):
        if key == "set":
            setup.replace(set={"cluster.profile": "datasheet"}).resolved()
        else:
            longstep.sweep(setup.predicted(), {"cluster.profile": ["datasheet"]})
