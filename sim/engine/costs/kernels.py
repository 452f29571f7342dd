"""What kernels of a device take, and what of it they occupy."""

from __future__ import annotations

import math
from functools import cache, cached_property

from sim.engine.costs.kernel_table import KernelTable
from sim.engine.costs.phases import OWN_COMPUTE, OWN_MEMORY, Activity, Flow, located
from sim.engine.costs.series import Figures
from sim.schedule.derive.kernels import ELEMENTWISE, SCATTERED, KernelUse, in_place_of
from sim.schedule.ir.ops import Hold
from sim.words.profile import SLICE_BACK, Profile
from sim.words.workload import FLOATS
from topology.cluster import Cluster


class KernelCosts:
    """Kernels of one cluster's devices, by a profile's points, or at the datasheet's rates where they say nothing."""

    def __init__(self, cluster: Cluster, profile: Profile | None, table: KernelTable | None, notes: set[str]) -> None:
        """``table`` is the profile's; ``notes`` gets what was extrapolated, or taken from the datasheet."""
        self._cluster, self._profile, self._table, self._notes = cluster, profile, table, notes
        self._kernel = cache(self._find_kernel)
        self._seconds = cache(self._find_seconds)
        if table and (note := table.load.note(cluster.spec.gpu.power_w)):
            notes.add(note)

    def at(self, rank: int, use: KernelUse) -> Activity:
        """Return a kernel on a rank's device: it flows over the SMs (or a core) and the memory that it works on."""
        return located(self.anywhere(rank, use), self._cluster.devices[rank])

    def anywhere(self, rank: int, use: KernelUse) -> Activity:
        """Return a kernel on any device as fast as a rank's, over the compute units and the memory of its own."""
        return self._kernel(self._peak(rank, use), use)

    def _peak(self, rank: int, use: KernelUse) -> float:
        """Return the FLOP/s that bound a kernel. Integers are only copied, which nothing but memory bounds."""
        return self._cluster.peak_flops_per_s(rank, use.dtype) if use.dtype in FLOATS else math.inf

    def _find_kernel(self, peak: float, use: KernelUse) -> Activity:
        seconds, _ = self._seconds(peak, use)
        self._notes |= {note for kernel, _ in use.each for note in self._seconds(peak, kernel)[1:] if note}
        memory = min(self._moved(use) / seconds, self._cluster.spec.hbm.bytes_per_s) if seconds > 0 else 0.0
        return self._on_sms(peak, use, seconds, memory)

    def seconds(self, rank: int, use: KernelUse) -> tuple[float, str]:
        """Return the solo time of a kernel on a rank's device, and a note where the profile has no points near it."""
        return self._seconds(self._peak(rank, use), use)

    def peak_share(self, use: KernelUse) -> float:
        """Return which share of the solo time of a kernel its FLOPs take at the peak, on the slowest device, where what
        it takes beside them counts least.
        """
        peak = self._peak(self._slowest, use)
        seconds, _ = self._seconds(peak, use)
        return min(1.0, use.flops / peak / seconds) if seconds > 0 else 0.0

    @cached_property
    def _slowest(self) -> int:
        """The number of the slowest device."""
        return min(self._cluster.devices, key=lambda device: device.speed).number

    def limited(self, use: KernelUse) -> float:
        """Return how far a kernel reaches the power limit of its GPU, from 0 to 1."""
        return self._table.load.limited(use, self.seconds(0, use)[0]) if self._table else 0.0

    def _find_seconds(self, peak: float, use: KernelUse) -> tuple[float, str]:
        if use.kernel == Hold.meta.kernel:
            return 0.0, ""
        if each := self.run(use) or (self._cluster.spec.gpu.kind == "cpu" and use.documents):
            found_each = [(*self._seconds(peak, kernel), count) for kernel, count in each]
            note = next((note for _, note, _ in found_each if note), "")
            return math.fsum(seconds * count for seconds, _, count in found_each), note
        now = Figures(peak, self._cluster.spec.hbm.bytes_per_s, sms=self._cluster.spec.gpu.sms)
        longer = self._longer(use)
        found = self._table.seconds(use, now, self._cluster.spec.gpu.power_w) if self._table else None
        if found and not (use.casts and longer > 1):  # points are of one data type
            return found
        efficiency = (self._profile.memory_efficiency if self._profile else 1.0) / longer
        memory_s = self._moved(use) / (now.bytes_per_s * efficiency)
        seconds = max(use.flops / now.flops_per_s, memory_s)
        if not self._table:
            return seconds, ""
        rate = "datasheet rate" if seconds > memory_s or efficiency == 1 else f"{efficiency:.3g} of the memory's rate"
        return self._queued_s(use) + seconds, f"{use.kernel} {use.dtype}: not in the profile, {rate}"

    def _longer(self, use: KernelUse) -> float:
        """Return how many times as long as its bytes a kernel takes that software runs as it is, by ``elementwise``."""
        if self._profile is None:
            return 1.0
        words = use.variant.split() if use.kernel == ELEMENTWISE else [SCATTERED] if use.casts else []
        return math.prod(self._profile.elementwise.get(word, 1.0) for word in words)

    def _queued_s(self, use: KernelUse) -> float:
        """Return what kernels without points take beside their work: each what a small one does behind another, to be
        dispatched, fill the SMs and drain. Points have it in them, and nothing is launched for no bytes.
        """
        if not (self._profile and self._profile.replayed_s and use.hbm_bytes):
            return 0.0
        issue = self._profile.issue
        of_one, of_back = issue.get(use.kernel), issue.get(SLICE_BACK)
        launched = of_one.launched if of_one else 1
        launched += of_back.launched if use.into_slice and of_back else 0
        return launched * self._profile.replayed_s

    def run(self, use: KernelUse) -> tuple[tuple[KernelUse, float], ...]:
        """Return what is run where several kernels stand for one: of a loop, and in software that has it so, before
        what eager modules run elsewhere.
        """
        pack, packed = use.packs
        ran = self._profile.runs.get(pack or use.kernel, ()) if self._profile else ()
        if not ran or (use.loop and use.variant != "eager"):
            return use.loop
        if pack:
            use = use._replace(shape=(packed,))
        return in_place_of(use, ((one.kernel, one.dtype, one.bytes_per_element, one.launches) for one in ran)).loop

    def _moved(self, use: KernelUse) -> float:
        """Return the bytes that a kernel moves through its memory."""
        if self._profile is None:
            return use.hbm_bytes
        if each := self.run(use):
            return math.fsum(self._moved(kernel) * count for kernel, count in each)
        back = self._profile.traffic.get(SLICE_BACK, 0.0) if use.into_slice else 0.0
        return use.hbm_bytes * (self._profile.traffic.get(use.kernel, 1.0) + back)

    def _on_sms(self, peak: float, use: KernelUse, seconds: float, memory: float) -> Activity:
        """Return the flow of a kernel over the SMs (or a core) and the memory of its device.

        On a GPU a grid of more blocks than the SMs take at once fills them until its last wave has been dispatched,
        and what is launched behind it gets none before; one of fewer leaves SMs to others. A kernel that memory bounds
        is no slower on fewer SMs. Before the grid of attention's backward pass runs a short one, for delta, and what
        waits for SMs comes behind that one (flash_attn csrc/flash_attn/src/flash_bwd_launch_template.h). A persistent
        grid is not slowed by SMs that are held: its blocks without an SM run later (``Profile.persistent``).
        """
        sms, work = float(self._cluster.spec.gpu.sms), (OWN_MEMORY, memory)
        if self._cluster.spec.gpu.kind == "cpu":
            return (Flow(seconds, ((OWN_COMPUTE, sms), work)),)
        blocks = self._profile.blocks_per_sm.get(use.kernel, 1) if self._profile else 1
        waves = math.inf if use.tiles is None else use.tiles / (sms * blocks)
        bytes_per_s = self._cluster.spec.hbm.bytes_per_s
        if waves > 1 and use.flops * bytes_per_s < use.hbm_bytes * peak:
            return (Flow(seconds, (work,), fills=OWN_COMPUTE),)
        before = min(use.delta_bytes / bytes_per_s, seconds)
        delta = (Flow(before, (work,), fills=OWN_COMPUTE),) if before else ()
        grid = seconds - before
        if waves <= 1:
            return (*delta, Flow(grid, ((OWN_COMPUTE, waves * sms), work)))
        full = Flow(grid * (1 - 1 / waves), ((OWN_COMPUTE, sms), work), fills=OWN_COMPUTE, late=self._late(use))
        return (*delta, full) if waves == math.inf else (*delta, full, Flow(grid / waves, (work,)))

    def _late(self, use: KernelUse) -> float:
        """Return how late blocks of a persistent grid make it, by SM that is held; 0 for other grids. At the lower end
        of intervals no grid is persistent, at the upper one late blocks take as long as they wait.
        """
        late = self._profile.persistent.get(use.kernel, 0.0) if self._profile else 0.0
        return {"low": 0.0, None: late, "high": 1.0}[self._profile.bound] if self._profile and late else 0.0
