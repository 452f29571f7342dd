import longstep

p = longstep.predict("ring", model="llama3-8b", seq="1M", cluster="hgx-h100", scope="attention")
for schedule in ("ring", "zigzag", "ulysses"):
    step = p.replace(schedule=schedule)
    low_s, high_s = step.interval
    print(f"{schedule}: {step.step_time_s:.4g} s, 90 % in {low_s:.4g} to {high_s:.4g} s")

twice = p.replace(schedule="ulysses", set={"cluster.nvlink.bytes_per_s": "*2"})
print(f"ulysses with twice the NVLink: {twice.step_time_s:.4g} s, buffers of {twice.peak_hbm_bytes / 2**30:.3g} GiB")
