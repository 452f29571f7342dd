"""CPU time that a search may take, so that it finds the same on a busy machine as on an idle one."""

from __future__ import annotations

import math
import time


class CpuTime:
    """Seconds of a processor that this process and its workers may take; None is no limit."""

    def __init__(self, limit_s: float | None = None) -> None:
        self.limit_s = math.inf if limit_s is None else limit_s
        self._began_s, self._workers_s = time.process_time(), 0.0
        self.interrupted = False
        """Whether its user has pressed Ctrl-C: then nothing is left."""

    def add(self, workers_s: float) -> None:
        """Count the seconds that workers took which have ended."""
        self._workers_s += workers_s

    def left_s(self, workers_s: float = 0.0) -> float:
        """Return the seconds that are left, where live workers have taken ``workers_s``; 0 or less if none are."""
        if self.interrupted:
            return 0.0
        return self.limit_s - (time.process_time() - self._began_s) - self._workers_s - workers_s
