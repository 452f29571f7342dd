"""What an op costs: the activity that it is on a cluster, by a profile's efficiencies or at datasheet rates."""

from __future__ import annotations

from functools import cache, partial

from sim.base.errors import InputError
from sim.engine.channels import cores_of_threads, held_by_collective, held_by_messages
from sim.engine.costs.issue import IssueCosts
from sim.engine.costs.kernels import KernelCosts
from sim.engine.costs.measured import measured_cluster, tables
from sim.engine.costs.messages import MessageCosts
from sim.engine.costs.moving import MovingCosts
from sim.engine.costs.on_host import HostCosts
from sim.engine.costs.phases import OWN_COMPUTE, Activity, Latency, Wait
from sim.schedule.ir.ops import HostAdamW, HostCopy
from sim.schedule.ir.program import Program
from sim.words.profile import Profile
from topology.cluster import Cluster


class CostModel:
    """The cost of ops on one cluster. Without a profile every kernel runs at the datasheet's rates."""

    def __init__(self, cluster: Cluster, profile: Profile | None) -> None:
        self._cluster, self._one_queue = cluster, profile is not None and profile.one_queue
        self.notes: set[str] = set()
        """What was extrapolated, or taken from the datasheet although there is a profile."""
        self.warnings: set[str] = set()
        """What of the software makes costs larger, and can be avoided."""
        if profile is not None:
            measured_on = measured_cluster(profile).gpu
            if measured_on.chip != cluster.spec.gpu.chip:
                raise InputError(
                    f"profile {profile.name!r} is of {measured_on.name!r}, but cluster {cluster.spec.name!r} has "
                    f"{cluster.spec.gpu.name!r}: set `profile` to one of that device, or to datasheet"
                )
        of_kernels, of_transfers = tables(profile) if profile else (None, None)
        kernels = KernelCosts(cluster, profile, of_kernels, self.notes)
        moving = MovingCosts(cluster, profile, of_transfers, self.notes)
        messages = MessageCosts(cluster, moving, self.warnings)
        self._host = HostCosts(cluster, profile, kernels, moving, self.notes)
        self.kernel, self.kernel_anywhere, self.kernel_seconds = kernels.at, kernels.anywhere, kernels.seconds
        self.peak_share, self.limited, self.run = kernels.peak_share, kernels.limited, kernels.run
        self.transfer, self.copied, self.collective = messages.transfer, messages.copied, messages.collective
        issue = IssueCosts(cluster, profile, kernels)
        self.issue_s, self.python_s = issue.seconds, issue.python_s
        self.held_by_messages = cache(partial(held_by_messages, cluster))
        self.held_by_collective = cache(partial(held_by_collective, cluster))
        self.threads = cache(partial(cores_of_threads, cluster))

    @property
    def cuda(self) -> bool:
        """Whether ranks are GPUs, which run kernels and communication side by side, and not threads of a CPU."""
        return self._cluster.spec.gpu.kind == "cuda"

    @property
    def one_queue(self) -> bool:
        """Whether GPUs begin with kernels of all streams in the order in which the host issues them."""
        return self.cuda and self._one_queue

    def on_host(self, rank: int, program: Program, op: HostCopy | HostAdamW) -> Activity:
        """Return what a rank does in its host's memory, without SMs."""
        return self._host.copy(rank, program, op) if isinstance(op, HostCopy) else self._host.kernel(rank, program, op)

    @property
    def handoff(self) -> Activity:
        """What it takes until a stream goes on after another has ended what it waited for: on a CPU a thread has to be
        woken; on a GPU an event takes as long as a launch, and the kernel behind it is on the SMs by then.
        """
        spec = self._cluster.spec
        if spec.gpu.kind == "cuda":
            return (Latency(spec.gpu.launch_s),)
        assert spec.host is not None
        return (Wait(OWN_COMPUTE, spec.host.wakeup_s), Latency(spec.host.handoff_s))
