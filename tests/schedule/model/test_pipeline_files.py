"""Timetables in files: what torch writes and reads, and what is wrong in one."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest

from sim.base.errors import InputError
from sim.schedule.methods.catalog import NAMED
from sim.schedule.model.pipeline.files import PIPELINE_FILE, pipeline_in, read_pipeline, to_csv
from sim.schedule.model.pipeline.timetables import PIPELINES
from sim.schedule.proof.check import check
from sim.words.mesh import Mesh
from sim.words.workload import Workload
from tests.helpers import make_model

WRITTEN = [name for name, pipeline in PIPELINES.items() if pipeline.copies == 1]


def size_of(name: str) -> tuple[int, int, int]:
    return 3, 6, PIPELINES[name].chunks or 2


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_is_read(name: str) -> None:
    stages, micros, chunks = size_of(name)
    written = to_csv(PIPELINES[name], stages, micros, chunks)
    read = pickle.loads(pickle.dumps(pipeline_in(written, "my.csv")))  # as other processes get it
    for stage in range(stages):
        same = PIPELINES[name].timetable(stage, stages, micros, chunks)
        assert read.timetable(stage, stages, micros, chunks) == same
    of_stages = [PIPELINES[name].stage_of(chunk, stages) for chunk in range(stages * chunks)]
    assert [read.stage_of(chunk, stages) for chunk in range(stages * chunks)] == of_stages
    assert (read.chunks, read.paper) == (chunks, "the file my.csv")
    assert to_csv(read, stages, micros, chunks) == written


def test_copies_are_in_no_file() -> None:
    with pytest.raises(InputError, match="torch's pipelining has each stage on one rank, .*=dualpipe-v, which is half"):
        to_csv(PIPELINES["dualpipe"], 2, 4, 1)


def of_torch(size: tuple[int, int, int], kind: Any) -> Any:
    """A schedule of torch without modules, which its constructor wants."""
    own = kind.__new__(kind)
    own.pp_group_size, own._n_microbatches, own.n_local_stages = size
    own._num_stages = own.num_stages = size[0] * size[2]
    own._stages, own.pipeline_order, own._defer_pp_recv = [], {}, False
    return own


@pytest.mark.sweep  # loads torch's compiler
@pytest.mark.parametrize("name", WRITTEN)
def test_torch_reads_what_is_written(name: str, tmp_path: Path) -> None:
    """And finds an order for what it sends and receives."""
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    path, size = tmp_path / "pipeline.csv", size_of(name)
    PIPELINE_FILE.at(path).write(to_csv(PIPELINES[name], *size))
    PIPELINE_FILE.at(path).require()  # it is ours, and so may be replaced
    own = of_torch(size, _PipelineScheduleRuntime)
    own._load_csv(str(path))
    letters = {"F": "F", "BW": "B", "B": "I", "W": "W"}
    for stage in range(size[0]):
        cells = [f"{item.chunk}{letters[item.kind]}{item.micro}" for item in PIPELINES[name].timetable(stage, *size)]
        assert list(map(str, own.pipeline_order[stage])) == cells
        lowered = [str(action) for action in own.pipeline_order_with_comms[stage]]
        assert [cell for cell in lowered if cell in cells] == cells
        assert any("RECV_" in cell for cell in lowered)


@pytest.mark.sweep  # loads torch's compiler
@pytest.mark.parametrize("name", ["zb-v", "dualpipe-v"])
def test_what_torch_writes_is_read(name: str, tmp_path: Path) -> None:
    """With idle cells, and pairs of passes in one cell."""
    from torch.distributed.pipelining import schedules

    kinds = {"zb-v": schedules.ScheduleZBVZeroBubble, "dualpipe-v": schedules.ScheduleDualPipeV}
    path, size = tmp_path / "pipeline.csv", size_of(name)
    own = of_torch(size, kinds[name])
    own.pipeline_order = {rank: own._calculate_single_rank_operations(rank) for rank in range(size[0])}
    schedules.PipelineScheduleMulti._dump_csv(own, str(path))
    assert (",," in path.read_text()) == (name == "zb-v")
    assert ("OVERLAP_F_B" in path.read_text()) == (name == "dualpipe-v")
    read = read_pipeline(str(path))
    for stage in range(size[0]):
        assert read.timetable(stage, *size) == PIPELINES[name].timetable(stage, *size)


def test_a_file_says_what_stages_do(tmp_path: Path) -> None:
    """The same as a pipeline by name."""
    model = make_model(4, 2, head_dim=4)
    workload = Workload(model=model, seq=16, batch=4, dtype="fp64", scope="step", layers=4)
    path, entry, programs = tmp_path / "v.csv", NAMED["single"], []
    path.write_bytes(to_csv(PIPELINES["zb-v"], 2, 4, 2))
    for name in ("zb-v", str(path)):
        options = dataclasses.replace(entry.options, micro_batches=4, zero_stage=0, pipeline_schedule=name)
        checked = check(entry.schedule(workload, Mesh(pp=2), options))
        programs.append([program.ops for program in checked.schedule.programs])
    assert programs[0] == programs[1]
    options = dataclasses.replace(entry.options, micro_batches=2, zero_stage=0, pipeline_schedule=str(path))
    with pytest.raises(
        InputError, match=r"has 2 stages, 4 micro-batches and 2 chunks a stage, and asked are 2, 2 and 2"
    ):
        entry.schedule(workload, Mesh(pp=2), options)
    options = dataclasses.replace(options, pipeline_schedule="zbv")
    with pytest.raises(InputError, match=r"unknown pipeline 'zbv' .*FILE.csv; set it with `set` schedule.pipeline_sch"):
        entry.schedule(workload, Mesh(pp=2), options)


ONE = "0F0,0B0,0F1,0B1\n"
WRONG = {
    "": "it has no row: expected one a rank",
    ONE + "\n": "row 2 has no pass: expected those of rank 1, or no such row",
    "0F0,,,\n,,,": "row 2 has no pass",
    "0F0,2Q0": "row 1, cell 2 '2Q0': expected a pass such as 2F0, 2B0, 2I0 or 2W0",
    "0F0,F0": "row 1, cell 2 'F0': expected a pass",
    "0F0,0F": "row 1, cell 2 '0F': expected a pass",
    "0F0,-1F0": "row 1, cell 2 '-1F0': expected a pass",
    "0F0,0B٣": "row 1, cell 2 '0B٣': expected a pass",
    "0F0,0F12345678": "cell 2 '0F12345678': expected a pass",
    "0F0," + 99 * "x": r"cell 2 'x{60}' …: expected a pass",
    "0F0,0UNSHARD": r"cell 2 '0UNSHARD': expected passes alone, as _dump_csv\(FILE, format='compute_only'\) writes",
    "0F0,0SEND_F0": "cell 2 '0SEND_F0': expected passes alone",
    "(0F0;0RECV_B0)OVERLAP_F_B": "cell 1 '0RECV_B0': expected passes alone",
    "(0F0;)OVERLAP_F_B": "cell 1 '': expected a pass",
    '0F0,"0B0': "unexpected end of data: expected a CSV file",
    "0F0," + 2**18 * "x": "field larger than field limit .*: expected a CSV file",
    "," * 2**20: "expected at most 16384 rows and 1048576 cells",
    ONE * (2**14 + 1): "expected at most 16384 rows and 1048576 cells",
    "0F0,0B0,1F0,1B0\n1F1,1B1": "row 2, cell 1 1F1: expected each stage on one rank, and row 1 has this one, too",
    ONE + "7F0,7B0": "row 2, cell 1 7F0: expected stages 0 to 1, as there are 2",
    "0F0,1F0,1B0,0B0\n2F0,2B0": "row 2 has 1 stages, and row 1 2: expected as many on each rank",
    "0F0,0B0,0F0": "row 1, cell 3 0F0: expected it once, and there is row 1, cell 1 0F0",
    "0F0,0B0,0I0": "row 1, cell 3 0I0: expected it once, and there is row 1, cell 2 0B0",
    "0F0,0I0,0W0,0B0": "row 1, cell 4 0B0: expected it once, and there is row 1, cell 2 0I0",
    "0F0,0I0,0W0,0W0": "row 1, cell 4 0W0: expected it once, and there is row 1, cell 3 0W0",
    "0B0,0F0": "row 1, cell 1 0B0: expected 0F0 before it in its row",
    "0F0,0W0,0I0": "row 1, cell 2 0W0: expected 0I0 before it in its row",
    "0F0,0B0,0F4,0B4": "row 1, cell 3 0F4: expected micro-batches 0 to 1, as stages have 2 forward passes",
    ONE + "1F0,1B0": "there is no 1F1: expected each stage to have one",
    "0F0": "there is no 0B0 or 0I0: expected each stage to have one",
    "0F0,0I0": "there is no 0B0 or 0W0: expected each stage to have one",
    "0F0,0F1,0B0,0B1\n1F1,1F0,1B0,1B1": "row 2, cell 1 1F1: expected 1F0 first, as row 1 hands on that micro-batch",
    "0F0,0F1,0B0,0B1\n1F0,1F1,1I1,1W1,1B0": "row 1, cell 3 0B0: expected 0I1 first, as row 2 hands on",
    "0F0,1F0,0F1,1F1,1B1,0B0,1B0,0B1": "row 1, cell 6 0B0: expected 0B1 first, as row 1 hands on",
    ONE + "1F0,1F1,1B0,1B1": "stages wait for each other: stage 0 before backward of micro-batch 0 in chunk 0; stage 1",
}


@pytest.mark.parametrize("text", WRONG, ids=range(len(WRONG)))
def test_what_is_wrong_in_a_file_is_named(text: str) -> None:
    with pytest.raises(InputError, match=f"^pipeline 'my.csv': .*{WRONG[text]}") as refused:
        pipeline_in(text.encode(), "my.csv")
    assert str(refused.value).endswith("change it in that file, or set another with `set` schedule.pipeline_schedule")
    assert len(str(refused.value)) < 400


def test_a_stage_that_a_file_does_not_have_is_named() -> None:
    pipeline = pipeline_in(b"0F0,0B0\n1F0,1B0", "my.csv")
    with pytest.raises(InputError, match="'my.csv' has 2 stages, and asked are 4: set `pp_degree`"):
        pipeline.last_stage(4)


def test_bytes_that_are_no_text_and_marks_of_byte_order() -> None:
    with pytest.raises(InputError, match="row 1, cell 1 '\ufffd\ufffd': expected a pass"):
        pipeline_in(b"\xff\xfe", "my.csv")
    assert pipeline_in(b'\xef\xbb\xbf 0F0 , ,"0B0"\r\n', "my.csv").chunks == 1
