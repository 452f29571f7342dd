"""Profiles of machines that others have measured: each is made from files in ``tables``.

``calibrate/README.md`` states the source and the licence of each table; nothing in a table is changed. A profile is
committed under ``sim/profiles`` before anything is validated with it, and can be made again:

    longstep calibrate --published a800-ultraattn --out sim/profiles/a800-ultraattn.json
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from calibrate.held.leave_one_out import with_residuals
from calibrate.published import attention, gpus, ultraattn
from sim.base.errors import unknown
from sim.words.profile import Profile

PUBLISHED: Mapping[str, Callable[[str], Profile]] = {
    "a800-ultraattn": ultraattn.a800,
    "h800-ultraattn": ultraattn.h800,
} | {name: partial(gpus.profile_of, gpu=gpu) for name, gpu in gpus.GPUS.items()}
"""What makes each profile, given its name."""
ATTENTION: Mapping[str, Callable[[str], Profile]] = {
    name: partial(attention.profile_of, table=table) for name, table in attention.TABLES.items()
}
"""The same of attention alone, under ``sim/profiles/attention``."""


def published(name: str) -> Profile:
    """Return a profile with the residuals of its points; raises InputError for a name that there is none of."""
    makers = {**PUBLISHED, **ATTENTION}
    if name not in makers:
        raise unknown("published profile", name, makers, "`published`")
    return with_residuals(makers[name](name))
