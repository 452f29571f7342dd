"""What the optimiser of a training step is set to: both players, and the reference, take it from here."""

from __future__ import annotations

from typing import NamedTuple


class Adam(NamedTuple):
    """AdamW (arXiv:1711.05101) behind clipping by the norm of all gradients (arXiv:1211.5063), as Llama was trained
    (arXiv:2302.13971 §2.3).
    """

    learning_rate: float = 3e-4
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    max_norm: float = 1.0
    step: int = 10
    """Which step it is, from 1: moments of earlier ones are inputs."""


ADAM = Adam()
