from sim.engine.simulate import simulate
from sim.mesh import Mesh
from sim.schedule.methods import ring, ulysses
from sim.schedule.proof.check import check
from sim.workload import Workload, load_model
from topology.cluster import Cluster, load_cluster

work = Workload(model=load_model("llama3-8b"), seq=1024 * 1024, dtype="bf16")
h100 = Cluster(load_cluster("hgx-h100"))
for schedule in (ring.build(work, Mesh(ring=8)), ulysses.build(work, Mesh(ulysses=8))):
    step_s = simulate(check(schedule), h100, profile=None).trace.step_time_s
    print(f"{schedule.header.name}: {step_s:.6g} s")
