"""Fits two figures of a host to the two cases that a case file names for it; these are no evidence then."""

from __future__ import annotations

import math
from collections.abc import Sequence

from experiments.evidence.papers.cases import Case, HostFigures
from sim.base.errors import InputError
from sim.engine.play.simulate import simulate

_FIRST = HostFigures(20e-6, 10e-6)
_STEPS, _CLOSE = 20, 1e-3


def host_figures(cases: Sequence[Case]) -> HostFigures | None:
    """Return the figures by which both cases take what was measured; None where there are no cases.

    By Newton's method on both times, which are linear in the figures where the host decides. Raises InputError where no
    figures above 0 give the times.
    """
    if not cases:
        return None
    found = [case.setup.resolved() for case in cases]
    checked = [one.checked() for one in found]

    def errors(host: HostFigures) -> list[float]:
        profiles = [case._replace(host=host).played.resolved().profile for case in cases]
        steps = [
            simulate(proved, one.cluster, profile, one.jitter, engine=one.engine).trace.step_time_s
            for proved, one, profile in zip(checked, found, profiles, strict=True)
        ]
        return [step_s - case.measured_s for step_s, case in zip(steps, cases, strict=True)]

    host = _FIRST
    for _ in range(_STEPS):
        left = errors(host)
        if all(abs(error) < _CLOSE * case.measured_s for error, case in zip(left, cases, strict=True)):
            return host
        more = [errors(host._replace(**{name: 1.01 * getattr(host, name)})) for name in HostFigures._fields]
        by_call, by_kernel = (
            [(later - now) / (0.01 * seconds) for later, now in zip(some, left, strict=True)]
            for some, seconds in zip(more, host, strict=True)
        )
        across = by_call[0] * by_kernel[1] - by_call[1] * by_kernel[0]
        if across == 0:
            break
        call_s = host.call_s - (left[0] * by_kernel[1] - left[1] * by_kernel[0]) / across
        kernel_s = host.kernel_s - (left[1] * by_call[0] - left[0] * by_call[1]) / across
        if not all(math.isfinite(seconds) and seconds > 0 for seconds in (call_s, kernel_s)):
            break
        host = HostFigures(call_s, kernel_s)
    raise InputError(
        f"host_fit: no figures of the host above 0 give {cases[0].measured_s:g} and {cases[1].measured_s:g} s: name "
        "other cases, in which the host decides"
    )
