"""Questions of the field, each with the sweep that answers it: a file per study, with ``QUESTION`` and ``find(jobs)``.

A conclusion is made of the figures that the sweep found, so that it changes with the model. Kernels take their median
times, without noise. To add a study, add a file.
"""
