"""Step time, floors and memory of both schedules over lengths: one node, two, and one with a slow GPU."""

import msgspec

from sim.engine.play.simulate import simulate
from sim.engine.results.report import report
from sim.schedule.methods import ring, ulysses
from sim.schedule.proof.check import check
from sim.words.mesh import Mesh
from sim.words.workload import Workload, load_model
from topology.cluster import Cluster, load_cluster
from topology.specs import PerGpu

one = load_cluster("hgx-h100")
machines = {
    "one node": (8, one),
    "two nodes": (16, msgspec.structs.replace(one, nodes=2)),
    "slow GPU 3": (8, msgspec.structs.replace(one, per_gpu={3: PerGpu(speed=0.9)})),
}
model = msgspec.structs.replace(load_model("llama3-8b"), num_kv_heads=16)
for name, (gpus, spec) in machines.items():
    for seq in (16, 128, 1024):
        work = Workload(model=model, seq=seq * 1024, dtype="bf16")
        for schedule in (ring.build(work, Mesh(ring=gpus)), ulysses.build(work, Mesh(ulysses=gpus))):
            checked = check(schedule)
            found = report(simulate(checked, Cluster(spec), None))
            floors = " ".join(f"{resource} {seconds:.6g}" for resource, seconds in found.floors.items())
            parts = " ".join(f"{part} {seconds:.6g}" for part, seconds in found.breakdown.items() if seconds)
            print(f"{name}, {seq}K, {checked.schedule.header.name}: {found.step_time_s:.6g} s = {parts}")
            print(f"    floors {floors}; {found.peak_hbm_bytes} bytes; bound by {found.bound_by}; MFU {found.mfu:.6g}")
