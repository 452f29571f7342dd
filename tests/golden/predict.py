from sim.engine.simulate import simulate
from sim.schedule.methods import ring, ulysses
from sim.schedule.proof.check import check
from sim.workload import Parallel, Workload, load_model
from topology.cluster import Cluster, load_cluster

work = Workload(model=load_model("llama3-8b"), seq=1024 * 1024, dtype="bf16")
h100 = Cluster(load_cluster("hgx-h100"))
for schedule in (ring.build(work, Parallel(ring_degree=8)), ulysses.build(work, Parallel(ulysses_degree=8))):
    trace = simulate(check(schedule), h100, profile=None).trace
    print(f"{schedule.header.name}: {trace.step_time_s:.6g} s")
