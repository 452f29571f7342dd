"""Two ranks of a causal ring on a slow link: what begins and ends when, in microseconds."""

from sim.base.overrides import override
from sim.engine.play.simulate import simulate
from sim.schedule.methods import ring
from sim.schedule.proof.check import check
from sim.words.mesh import Mesh
from sim.words.workload import Workload, load_model
from topology.cluster import Cluster, load_cluster

workload = Workload(model=load_model("llama3-8b"), seq=8192, dtype="bf16")
spec = override(load_cluster("hgx-h100"), [("nvlink.bytes_per_s", "50e9")], "--set cluster.")
trace = simulate(check(ring.build(workload, Mesh(ring=2))), Cluster(spec), profile=None).trace
for row in sorted(trace.rows, key=lambda row: (row.begin_s, row.rank, row.op)):
    times = " ".join(f"{1e6 * at:11.6g}" for at in (row.posted_s, row.begin_s, row.end_s))
    print(f"rank {row.rank} {row.stream:9} {row.label:16} {times}")
