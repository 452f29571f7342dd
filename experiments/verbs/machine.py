"""``longstep machine``: a cluster file of the node that some tools describe."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess

from rich.console import Console

from experiments.verbs.shared.kinds import OptionalText
from experiments.verbs.shared.writes import Writes
from sim.base.errors import InputError
from sim.base.files import Kind, marked, require_outputs
from sim.base.presets import read_bytes
from topology.detect.machine import MARK, machine
from topology.detect.tools import QUERY, read_gpus, read_rdma, read_topology
from topology.host import host_facts

_TOPO = ("nvidia-smi", "topo", "-m")
_GPUS = ("nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv")
_IB = ("ibstat",)
_MOST_S = 60
_CLUSTER_FILE = Kind("a cluster file", marked(MARK))


@dataclasses.dataclass(frozen=True, kw_only=True)
class MachineFile(Writes):
    """Write the cluster file of a node of GPUs, from what its tools print: of this one, or files with their output."""

    topo: OptionalText = None
    """What nvidia-smi topo -m has printed; without --topo and --gpus the tools of this machine are asked."""
    gpus: OptionalText = None
    """What nvidia-smi --query-gpu=name,memory.total,power.limit,pcie.link.gen.max,pcie.link.width.max --format=csv has
    printed, or nvidia-smi -q -x."""
    ib: OptionalText = None
    """What ibstat has printed; without it NICs have the rate of the preset."""
    like: OptionalText = None
    """Take what tools do not tell from this cluster, NAME, a GPU such as H100, or FILE.toml; by default from the preset
    with that GPU."""
    chip: OptionalText = None
    """Take SMs, FLOP/s and profile of the chip that --like has, such as H100-SXM, for those of another one."""
    out: OptionalText = None
    """Write to this FILE.toml instead of the terminal."""


def machine_file(command: MachineFile, console: Console) -> None:
    """Write the cluster file."""
    out = command.output(command.out, _CLUSTER_FILE)
    require_outputs([out])
    here = command.topo is None and command.gpus is None
    if here:
        topo, gpus = _said(_TOPO), _said(_GPUS)
        ib = _read("ib", command.ib) if command.ib else _said(_IB) if shutil.which(_IB[0]) else ""
    elif command.topo is None or command.gpus is None:
        raise InputError("`topo` and `gpus` belong together: give both files, or neither to ask the tools of this node")
    else:
        topo, gpus = _read("topo", command.topo), _read("gpus", command.gpus)
        ib = _read("ib", command.ib) if command.ib else ""
    found = machine(
        read_topology(topo),
        read_gpus(gpus),
        read_rdma(ib) if ib else (),
        like=command.like or "",
        chip=command.chip or "",
        memory_bytes=host_facts().memory_bytes if here else None,
    )
    if out is None:
        console.print(found.toml(), markup=False, end="")
        return
    out.write(found.toml().encode())
    console.print(f"{found.spec.name} in {command.out}: longstep simulate --cluster {command.out}", markup=False)
    for remark in found.remarks:
        console.print(f"  {remark}", markup=False)


def _read(option: str, path: str) -> str:
    return read_bytes(f"`{option}` file", path, f"`{option}`").decode(errors="replace")


def _said(tool: tuple[str, ...]) -> str:
    """Return what a tool of this machine prints; raises InputError where it cannot."""
    called = " ".join(tool)
    if shutil.which(tool[0]) is None:
        raise InputError(
            f"this machine has no {tool[0]}: run {called} where the GPUs are, and give its output with `topo`, `gpus` "
            f"and `ib`"
        )
    try:
        answer = subprocess.run(tool, capture_output=True, text=True, check=False, timeout=_MOST_S)
    except subprocess.TimeoutExpired as error:
        raise InputError(f"{called} has not answered in {_MOST_S} s; give its output with a file") from error
    if answer.returncode:
        raise InputError(f"{called} failed: {(answer.stderr or answer.stdout).strip()[:200]}")
    return answer.stdout
