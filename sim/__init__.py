"""The words that both players speak: schedules, workloads, traces, memory, profiles, errors.

``sim.schedule`` is the score, ``sim.engine`` the simulator that plays it. Importing ``sim`` loads neither
SimPy nor torch.
"""
