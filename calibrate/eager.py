"""What issuing an op costs the host in eager PyTorch: Python and the dispatcher, without the launch itself.

    python -m calibrate.eager > host.csv

Tensors of a few elements on the CPU, and torch's fake process group, which communicates nothing: what is left is the
host's work, the same as in front of a GPU. It is CPU time of the thread, which leaves out other processes.
"""

from __future__ import annotations

import csv
import platform
import sys
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from topology.host import host_facts

_RUNS, _TURNS, _WARM = 1000, 50, 100
_PEERS = 8


def main() -> None:
    """Print the times as CSV."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=_PEERS)
    table = csv.writer(sys.stdout)
    table.writerow(["op", "host_us", "source"])
    source = f"calibrate/eager.py, torch {torch.__version__}, Python {platform.python_version()}, {host_facts().cpu}"
    for name, call in calls().items():
        table.writerow([name, f"{1e6 * seconds(call):.1f}", source])
    dist.destroy_process_group()


def calls() -> dict[str, Callable[[], object]]:
    """Return what is timed, by name: calls of torch.distributed with their waits, one small kernel, attention."""
    k, v = (torch.randn(1, 4, 1, 8, dtype=torch.bfloat16) for _ in range(2))
    q, total = k.transpose(1, 2), torch.randn(1, 4, 1, 8)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001 - nothing public returns the lse
    flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward  # noqa: SLF001
    made, made_lse = flash(q, q, q, 0.0, False)

    def grouped(tensors: Sequence[torch.Tensor]) -> None:
        ops = []
        for sent in tensors:
            ops.append(dist.P2POp(dist.isend, sent, 1))
            ops.append(dist.P2POp(dist.irecv, torch.empty_like(sent), _PEERS - 1))
        for request in dist.batch_isend_irecv(ops):
            request.wait()

    def send() -> None:
        work = dist.isend(k, 1)
        assert work is not None
        work.wait()

    def receive() -> None:
        work = dist.irecv(torch.empty_like(k), _PEERS - 1)
        assert work is not None
        work.wait()

    return {
        "2 messages": lambda: grouped((k,)),
        "4 messages": lambda: grouped((k, v)),
        "send": send,
        "receive": receive,
        "collective": lambda: dist.all_reduce(k),
        "kernel": lambda: total.add_(k),
        "attention_forward": lambda: flash(q, q, q, 0.0, False),
        "attention_backward": lambda: flash_backward(q, q, q, q, made, made_lse, 0.0, False),
    }


def seconds(call: Callable[[], object], runs: int = _RUNS) -> float:
    """Return the least time of a call, in the mean of a turn of so many runs."""
    for _ in range(_WARM):
        call()
    turns = []
    for _ in range(_TURNS):
        begin_s = time.thread_time()
        for _ in range(runs):
            call()
        turns.append((time.thread_time() - begin_s) / runs)
    return min(turns)


if __name__ == "__main__":
    main()
