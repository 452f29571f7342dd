"""The two engines say the same, to the last bit: for every schedule, on every kind of machine."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from sim.engine.play import native, reference, selfcheck
from sim.engine.play.lowered import Lowered, Times
from sim.engine.play.simulate import STEADY, Jitter, simulate
from sim.native.library import UnavailableError, load
from sim.schedule.ir.ops import Accumulate, AllReduce, Exchange, HostAdamW, HostSync, Message
from sim.schedule.ir.program import Communicator, Header, Program, Schedule
from sim.schedule.methods.catalog import SCHEDULES
from sim.schedule.proof.check import Checked, check
from sim.schedule.write.builder import ProgramBuilder
from sim.setup.predict import predict
from sim.words.mesh import Mesh
from sim.words.options import TensorOverlap
from sim.words.profile import load_profile
from sim.words.workload import Workload
from tests.engine.play.equality import Cell, require_equal_engines
from tests.helpers import make_checked, make_model
from topology.cluster import Cluster, load_cluster
from topology.specs import LinkSpec, PerGpu

ROOT = Path(__file__).parents[3]
requires_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Ops of all kinds in one order that all ranks share, so that none waits for ever: kernels of GPUs and of hosts,
    copies, messages among any two, collectives of any group, synchronisations.
    """
    ranks = draw(st.integers(1, 4))
    everyone = tuple(range(ranks))
    workload = Workload(model=make_model(4, 4), seq=64 * ranks, dtype="bf16")
    builders = [ProgramBuilder(rank, workload) for rank in everyone]
    views = [[b.tensor(f"x{i}", 256 << (4 * i), 4, "other") for i in range(3)] for b in builders]
    hosts = [[b.elsewhere(view, "host") for view in of_rank] for b, of_rank in zip(builders, views, strict=True)]
    flat = [[b.buffer("flat", "i", (1 << 20,), "fp32", "optimiser", "host") for _ in range(6)] for b in builders]
    kinds = ("kernel", "host kernel", "message", "collective", "sync", "to host", "from host")
    for number in range(draw(st.integers(1, 30))):
        kind, size = draw(st.sampled_from(kinds)), number % 3
        rank, other = draw(st.integers(0, ranks - 1)), draw(st.integers(0, ranks - 1))
        b, mine, label = builders[rank], views[rank], str(number)
        name = draw(st.sampled_from(("a", "b")))
        if kind == "kernel":
            b.add(Accumulate(label=label, source=mine[size], into=mine[size]))
        elif kind == "host kernel":
            weights, gradient, first, second, squares, cast = flat[rank]
            state = {"weights": weights, "gradient": gradient, "first": first, "second": second, "squares": squares}
            b.add(HostAdamW(label=label, cast=cast, **state))
        elif kind == "sync":
            streams = (*draw(st.sets(st.sampled_from(("compute", "a", "b")), min_size=1)),)
            b.add(HostSync(label=label, streams=streams, calls=draw(st.sampled_from((UNSET, 1, 7)))))
        elif kind == "to host":
            b.host_copy(mine[size], hosts[rank][size], label)
        elif kind == "from host":
            b.host_copy(hosts[rank][size], mine[size], label)
        elif kind == "message" and other != rank:
            there = views[other][size]
            b.add(Exchange(label=label, communicator=name, sends=(Message(other, mine[size]),), recvs=()))
            builders[other].add(Exchange(label=label, communicator=name, sends=(), recvs=(Message(rank, there),)))
        elif kind == "collective":
            for each, of_rank in zip(builders, views, strict=True):
                each.add(AllReduce(label=label, communicator=name, view=of_rank[size]))
    groups = [Communicator(name=name, groups=(everyone,)) for name in ("a", "b")]
    header = Header(name="random", workload=workload, mesh=Mesh(ring=ranks), communicators=(*groups,))
    return Schedule(header, [b.build() for b in builders].__getitem__)


@requires_compiler
@pytest.mark.sweep
@given(
    schedules(),
    st.integers(0, 60),
    st.sampled_from((1e9, 5e10, 4.5e11)),
    st.sampled_from((0.0, 3e-6)),
    st.lists(st.sampled_from((0.5, 0.9, 1.0)), min_size=4, max_size=4),
    st.sampled_from((0.0, 0.2)),
    st.sampled_from((None, 2, 30)),
)
def test_both_engines_play_random_programs_alike(
    schedule: Schedule, sms: int, rate: float, delay_s: float, speeds: list[float], share: float, peer_sms: int | None
) -> None:
    """Also where communication that holds the SMs of a GPU comes to a standstill."""
    spec = load_cluster("a100-pcie")
    gpu = msgspec.structs.replace(spec.gpu, communication_sms=sms, launch_s=delay_s)
    link = LinkSpec(bytes_per_s=rate, latency_s=delay_s, peer_sms=peer_sms)
    per_gpu = {number: PerGpu(speed=speed) for number, speed in enumerate(speeds)}
    spec = msgspec.structs.replace(spec, gpu=gpu, nvlink=link, per_gpu=per_gpu)
    require_equal_engines(Cell(Checked(schedule), Cluster(spec), None, Jitter(share, 1)))


@pytest.mark.sweep
@requires_compiler
@pytest.mark.parametrize(
    ("overlap", "sequence"),
    [
        pytest.param("none", True, marks=pytest.mark.slow), pytest.param("shards", True, marks=pytest.mark.slow),
        ("chunks", True), pytest.param("gradients", False, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_both_engines_play_tensor_parallelism_alike(overlap: TensorOverlap, sequence: bool) -> None:
    workload = Workload(model=make_model(8, 4), seq=1024, dtype="bf16", scope="step", layers=2)
    entry = SCHEDULES["ring"]
    options = dataclasses.replace(entry.options, tp_overlap=overlap, tp_sequence=sequence)
    checked = check(entry.schedule(workload, Mesh(tp=4, ring=2), options))
    for one_queue in (False, True):
        profile = msgspec.structs.replace(load_profile("h100-sxm"), one_queue=one_queue)
        require_equal_engines(Cell(checked, Cluster(load_cluster("hgx-h100")), profile, Jitter(0.1, 1)))


def all_at_once(ranks: int, times: int) -> Schedule:
    """Return an all-to-all of single messages, more than once: each rank sends to all others at a time."""
    workload, everyone = Workload(model=make_model(4, 4), seq=ranks), tuple(range(ranks))

    def program(rank: int) -> Program:
        b = ProgramBuilder(rank, workload)
        out, into = (b.tensor(name, ranks, 4, "communication") for name in ("out", "in"))
        for number in range(times):
            sends, recvs = (
                tuple([Message(peer, x[:, peer : peer + 1]) for peer in everyone if peer != rank]) for x in (out, into)
            )
            b.add(Exchange(label=str(number), communicator="all", sends=sends, recvs=recvs))
        return b.build()

    every = Communicator(name="all", groups=(everyone,))
    return Schedule(Header(name="all", workload=workload, mesh=Mesh(ring=ranks), communicators=(every,)), program)


@requires_compiler
@pytest.mark.sweep
def test_messages_of_which_many_are_under_way_at_once_are_played_alike() -> None:
    """The native engine has room for 1024 of them, which then grows and serves the next ones."""
    schedule = all_at_once(40, 2)
    spec = msgspec.structs.replace(load_cluster("hgx-h100"), nodes=5)
    assert len(Lowered(Checked(schedule)).transfers) == 2 * 40 * 39
    require_equal_engines(Cell(Checked(schedule), Cluster(spec), None, STEADY))


@requires_compiler
def test_engines_are_chosen_by_name() -> None:
    checked, cluster = (
        make_checked("zigzag", Workload(model=make_model(8, 4), seq=64), 4),
        Cluster(load_cluster("hgx-h100")),
    )
    found = [simulate(checked, cluster, None, engine=engine).trace.rows for engine in ("auto", "native", "simpy")]
    assert found[0] == found[1] == found[2]


def python(code: str, **changes: str) -> subprocess.CompletedProcess[str]:
    """Run code in an interpreter of its own, with a changed environment."""
    env = os.environ | {"PYTHONPATH": str(ROOT)} | changes
    return subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False, timeout=300
    )


PREDICT = (
    "from sim.setup.predict import predict; p = predict('zigzag', seq='1K', gpus=4, cluster='hgx-h100', "
    "scope='attention'%s); print(p.step_time_s)"
)


@pytest.mark.gloo
def test_without_a_compiler_simpy_plays_and_says_so_once(tmp_path: Path) -> None:
    hidden = {"PATH": str(tmp_path), "CC": "", "XDG_CACHE_HOME": str(tmp_path)}
    plain = python(f"{PREDICT % ''}; {PREDICT % ''}", **hidden)
    assert plain.stderr.count("no C compiler") == 1, plain.stderr
    played = predict("zigzag", seq="1K", gpus=4, cluster="hgx-h100", scope="attention", engine="simpy")
    assert plain.stdout.split() == [str(played.step_time_s)] * 2
    asked = python(PREDICT % ", engine='native'", **hidden)
    assert "`engine` native: no C compiler" in asked.stderr


@requires_compiler
@pytest.mark.slow
@pytest.mark.gloo
def test_a_library_is_compiled_once_and_only_ones_own_is_loaded(tmp_path: Path) -> None:
    env = {"XDG_CACHE_HOME": str(tmp_path)}
    started = [
        subprocess.Popen([sys.executable, "-c", PREDICT % ""], env=os.environ | env | {"PYTHONPATH": str(ROOT)})
        for _ in range(3)
    ]
    assert [process.wait(300) for process in started] == [0, 0, 0]
    kept, *others = sorted((tmp_path / "longstep" / "native").iterdir(), reverse=True)
    assert [path.name.partition("-")[0] for path in (kept, *others)] == ["player", "derive"]
    assert kept.stat().st_mode & 0o777 == 0o700
    compiled = kept.stat().st_mtime_ns
    loads = "from sim.native.library import load; print(load('player')._name)"
    assert python(loads, **env).stdout.strip() == str(kept)
    assert kept.stat().st_mtime_ns == compiled
    kept.chmod(0o777)  # so that others could have changed it
    python(PREDICT % ", engine='native'", **env)
    assert kept.stat().st_mode & 0o777 == 0o700
    kept.write_bytes(b"damaged")
    assert not python(PREDICT % ", engine='native'", **env).returncode
    assert kept.stat().st_size > 1000


@requires_compiler
@pytest.mark.gloo
@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user")
@pytest.mark.slow
def test_where_nothing_can_be_kept_it_is_compiled_for_one_process(tmp_path: Path) -> None:
    (tmp_path / "longstep").mkdir()
    (tmp_path / "longstep" / "native").mkdir(mode=0o700)
    os.chown(tmp_path / "longstep" / "native", 65534, 65534)
    found = python(PREDICT % ", engine='native'", XDG_CACHE_HOME=str(tmp_path))
    assert not found.returncode, found.stderr
    assert not list((tmp_path / "longstep" / "native").iterdir())


@pytest.mark.sweep
@requires_compiler
def test_a_library_that_differs_by_one_bit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    play = native.player(load("player"))
    selfcheck.require_equal(play)
    played = reference.play

    def later(*args: Any) -> Times:
        times = played(*args)
        times.ended[-1] = np.nextafter(times.ended[-1], np.inf)
        return times

    monkeypatch.setattr(reference, "play", later)
    with pytest.raises(UnavailableError, match="not those of SimPy's engine"):
        selfcheck.require_equal(play)


@requires_compiler
@pytest.mark.gloo
@pytest.mark.slow
def test_sanitizers_find_nothing(tmp_path: Path) -> None:
    """Addresses and undefined behaviour, over random cells, with other worlds and without."""
    wrapper = tmp_path / "cc"
    wrapper.write_text('#!/bin/sh\nexec cc -g -fsanitize=address,undefined -fno-sanitize-recover=all "$@"\n')
    wrapper.chmod(0o755)
    runtime = subprocess.run(["cc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True).stdout
    code = (
        "from tests.engine.play import equality, test_engines\n"
        "from tests.engine.results import test_worlds\n"
        "for cell in equality.cells(7, 100, 8): equality.require_equal_engines(cell)\n"
        "test_engines.test_messages_of_which_many_are_under_way_at_once_are_played_alike()\n"
        "test_worlds.test_a_world_like_the_first_one_takes_the_same(7, 40)"
    )
    env = {"CC": str(wrapper), "LD_PRELOAD": runtime.strip(), "ASAN_OPTIONS": "detect_leaks=0"}
    found = python(code, XDG_CACHE_HOME=str(tmp_path), **env)
    assert not found.returncode, found.stderr[-2000:]
