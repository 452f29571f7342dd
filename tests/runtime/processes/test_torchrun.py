"""Processes that torchrun starts: one command over all of them, on one host and on two that share nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from experiments.evidence.machine import require_processes
from runtime.execution.verify import BOUNDS
from runtime.processes.torchrun import Workers, _own_address
from runtime.processes.worker import World
from sim.base.errors import InputError
from tests.runtime.programs import Programs
from topology.cluster import load_cluster

pytestmark = pytest.mark.gloo

TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
LONGSTEP = ("--no-python", sys.executable, "-c", "from experiments.verbs.cli import main; main()")
RINGS = ("--no-python", sys.executable, "-c", "from tests.runtime.processes.ring_under_torchrun import main; main()")
LIMIT_S = 120


def two_processes(programs: Programs, *command: str) -> subprocess.Popen[str]:
    """Start two processes on this host."""
    return programs.start(*TORCHRUN, "--standalone", "--nproc-per-node", "2", *command)


def ended(program: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Return exit code, output and errors."""
    out, err = program.communicate(timeout=LIMIT_S)
    return program.returncode, out, err


def said(err: str) -> list[str]:
    """Return what Longstep says, among all that torchrun does."""
    return [line for line in err.splitlines() if line.startswith("longstep: ")]


@pytest.mark.slow
def test_a_command_runs_once_on_all_processes(programs: Programs) -> None:
    options = ("--gpus", "2", "--seq", "64", "--repeats", "2", "--verify", "--json")
    code, out, err = ended(two_processes(programs, *LONGSTEP, "run", *options))
    assert code == 0, err
    found = json.loads(out)
    assert len(found["step_times_s"]) == 2
    assert found["errors"].keys() == {"out", "dq", "dk", "dv"}
    assert max(found["errors"].values()) < BOUNDS["fp32"]
    assert "Traceback" not in err


@pytest.mark.slow
def test_commands_that_have_no_session_run_once_and_end_all_processes(programs: Programs) -> None:
    """Those that take no workers leave torchrun's store as it was for the one that does."""
    commands = 'for words in "list schedules" calibrate "run --gpus 3 --seq 48"; do "$@" $words; done'
    code, out, err = ended(two_processes(programs, "--no-python", "sh", "-c", commands, "sh", *LONGSTEP[1:]))
    assert code == 1
    assert out.count("zigzag") == 1
    refused, too_few = said(err)
    assert "calibrate runs without torchrun" in refused
    assert "3 ranks need as many processes, torchrun has started 2: set its --nproc-per-node and --nnodes" in too_few


LOST = "rank 1 op [0-9]+ [(].*[)] was "


def rank_and_its_worker(torchrun: subprocess.Popen[str]) -> tuple[int, int]:
    """Return the processes of rank 1, in the middle of a step that takes a second or more."""
    assert torchrun.stdout is not None
    rank, worker = map(int, re.findall("[0-9]+", torchrun.stdout.readline().removeprefix("rank 1")))
    time.sleep(0.3)
    return rank, worker


@pytest.mark.slow
def test_a_command_outlives_a_rank_that_is_killed_and_hears_ctrl_c(programs: Programs) -> None:
    """Both in the middle of a step, after earlier sessions, one of fewer ranks than processes."""
    torchrun = two_processes(programs, *RINGS, "2", "1", "survive")
    rank, worker = rank_and_its_worker(torchrun)
    os.kill(rank, signal.SIGKILL)
    assert torchrun.stdout is not None
    assert re.fullmatch(f"{LOST}killed by signal SIGKILL\n", torchrun.stdout.readline())
    later, same_worker = rank_and_its_worker(torchrun)
    assert later != rank
    assert same_worker == worker
    os.killpg(torchrun.pid, signal.SIGINT)
    code, _, err = ended(torchrun)
    assert code in {1, -signal.SIGABRT}  # torchrun, which hears it too, at times aborts as it ends on a loaded machine
    assert said(err) == ["longstep: interrupted"]


@pytest.mark.slow
def test_a_worker_that_is_killed_ends_the_command_which_names_it(programs: Programs) -> None:
    torchrun = two_processes(programs, *RINGS)
    _, worker = rank_and_its_worker(torchrun)
    os.kill(worker, signal.SIGKILL)
    code, _, err = ended(torchrun)
    assert code == 1
    (line,) = said(err)
    assert re.fullmatch(f"longstep: {LOST}lost: .*", line), err


def test_nodes_are_those_of_the_cluster() -> None:
    h100, world = load_cluster("hgx-h100"), World(rank=0, size=16, local_rank=0, local_size=8)
    require_processes(h100, 16, world)
    require_processes(h100, 4, world)
    with pytest.raises(InputError, match="--nproc-per-node 8, or `set` cluster.gpus_per_node=4"):
        require_processes(h100, 16, world._replace(local_size=4))
    with pytest.raises(InputError, match="torchrun has started 16"):
        require_processes(h100, 24, world)
    require_processes(load_cluster("host"), 16, world._replace(local_size=4))


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> World:
    """The only process that torchrun has started."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    return World(rank=0, size=1, local_rank=0, local_size=1)


def test_a_command_leaves_signals_as_they_were_and_listens_to_its_own_host_only(alone: World) -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
    before = [signal.getsignal(number) for number in numbers]
    with Workers(alone) as workers:
        assert workers._listener.address[0] == "127.0.0.1"
        assert not set(before) & {signal.getsignal(number) for number in numbers}
    assert [signal.getsignal(number) for number in numbers] == before


def test_a_host_that_knows_its_name_as_a_loopback_address_listens_to_others_too(alone: World) -> None:
    assert _own_address(alone) == ("127.0.0.1", "127.0.0.1")
    assert _own_address(alone._replace(size=2)) == ("", "localhost")


# Two hosts


def administer(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=20)


@pytest.fixture
def two_hosts() -> Iterator[list[list[str]]]:
    """Per host, what to put before a command to run there: in a network, with files and a clock of its own."""
    if not (os.geteuid() == 0 and shutil.which("ip") and shutil.which("unshare")):
        pytest.skip("two hosts on one machine take root, ip and unshare")
    names = [f"longstep{os.getpid()}-{host}" for host in (1, 2)]
    own_files = 'mount -t tmpfs none /dev/shm && mount -t tmpfs none /var/tmp && exec "$@"'
    own = ["unshare", "--mount", "--ipc", "--time", "--monotonic"]
    hosts = [
        ["ip", "netns", "exec", name, *own, f"{number}00000", "sh", "-c", own_files, "sh"]
        for number, name in enumerate(names, start=1)
    ]
    try:
        for name in names:
            administer("ip", "netns", "add", name)
        cable = ["ip", "link", "add", "cable", "netns", names[0], "type", "veth", "peer", "cable", "netns", names[1]]
        administer(*cable)
        for number, (name, host) in enumerate(zip(names, hosts, strict=True), start=1):
            administer("ip", "-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "cable")
            for device in ("lo", "cable"):
                administer("ip", "-n", name, "link", "set", device, "up")
            administer(*host, "true")
        yield hosts
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this machine cannot play two hosts: {error.stderr.decode().strip()}")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, timeout=20)


@pytest.mark.slow
def test_two_hosts_that_share_nothing_but_a_network(programs: Programs, two_hosts: list[list[str]]) -> None:
    """Their clocks are a day apart, which no step takes."""
    options = ("--gpus", "2", "--seq", "64", "--repeats", "1", "--scope", "layer")
    nodes = [
        programs.start(
            *host, *TORCHRUN, "--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", "1",
            "--master-addr", "10.77.0.1", "--master-port", "29500", *LONGSTEP, "run", *options, "--verify", "--json",
            GLOO_SOCKET_IFNAME="cable", TMPDIR="/var/tmp",
        )
        for number, host in enumerate(two_hosts)
    ]  # fmt: skip
    (code, out, err), (other_code, other_out, other_err) = map(ended, nodes)
    assert (code, other_code) == (0, 0), err + other_err
    assert other_out == ""
    found = json.loads(out)
    assert max(found["errors"].values()) < BOUNDS["fp32"]
    assert 0 < found["step_time_s"] < LIMIT_S
