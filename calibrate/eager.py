"""What issuing an op costs the host in eager PyTorch: Python and the dispatcher, without the launch itself.

    python -m calibrate.eager > host.csv

Tensors of a few elements on the CPU, and torch's fake process group, which communicates nothing: what is left is the
host's work, the same as in front of a GPU. Merges are the formulas of ring-flash-attention, op by op.
"""

from __future__ import annotations

import csv
import platform
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - as everywhere
from torch.testing._internal.distributed.fake_pg import FakeStore

from topology.host import host_facts

_RUNS, _TURNS, _WARM = 2000, 9, 100
_PEERS = 8


def main() -> None:
    """Print the times as CSV."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=_PEERS)
    table = csv.writer(sys.stdout)
    table.writerow(["op", "host_us", "launches", "source"])
    source = f"calibrate/eager.py, torch {torch.__version__}, Python {platform.python_version()}, {host_facts().cpu}"
    for name, launches, call in _calls():
        table.writerow([name, f"{1e6 * _seconds(call):.1f}", launches, source])
    dist.destroy_process_group()


def _calls() -> list[tuple[str, int, Callable[[], object]]]:
    """Return what is timed: name, kernels that it launches on a GPU, and the call."""
    k, v = (torch.randn(1, 4, 1, 8, dtype=torch.bfloat16) for _ in range(2))
    q = k.transpose(1, 2)
    out, lse, block_lse = torch.randn(1, 4, 1, 8), torch.randn(1, 4, 1, 1), torch.randn(1, 1, 4)
    total = torch.randn(1, 4, 1, 8)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001 - nothing public returns the lse
    flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward  # noqa: SLF001
    made, made_lse = flash(q, q, q, 0.0, False)

    def exchange() -> None:
        ops = []
        for sent in (k, v):
            ops.append(dist.P2POp(dist.isend, sent, 1))
            ops.append(dist.P2POp(dist.irecv, torch.empty_like(sent), _PEERS - 1))
        for request in dist.batch_isend_irecv(ops):
            request.wait()

    def merge() -> tuple[torch.Tensor, torch.Tensor]:
        block, of_block = k.to(torch.float32), block_lse.transpose(-2, -1).unsqueeze(-1)
        return out - torch.sigmoid(of_block - lse) * (out - block), lse - F.logsigmoid(lse - of_block)

    return [
        ("exchange", 1, exchange),
        ("merge", 9, merge),
        ("accumulate", 1, lambda: total.add_(k)),
        ("attention_forward", 1, lambda: flash(q, q, q, 0.0, False)),
        ("attention_backward", 3, lambda: flash_backward(q, q, q, q, made, made_lse, 0.0, False)),
    ]


def _seconds(call: Callable[[], object]) -> float:
    """Return the median time of a call."""
    for _ in range(_WARM):
        call()
    turns = []
    for _ in range(_TURNS):
        begin_s = time.perf_counter()
        for _ in range(_RUNS):
            call()
        turns.append((time.perf_counter() - begin_s) / _RUNS)
    return statistics.median(turns)


if __name__ == "__main__":
    main()
