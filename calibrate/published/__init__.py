"""Profiles of machines that others have measured: each made from the tables that lie beside this file.

A table says where it comes from, and under which licence, in ``tables/README.md``; nothing in it is changed. A profile
is committed under ``sim/profiles`` before anything is validated with it, and can be made again:

    longstep calibrate --published a800-ultraattn --out sim/profiles/a800-ultraattn.json
"""

from __future__ import annotations

from collections.abc import Callable

from calibrate.published import ultraattn
from sim.profile import Profile

PUBLISHED: dict[str, Callable[[str], Profile]] = {
    "a800-ultraattn": ultraattn.a800,
    "h800-ultraattn": ultraattn.h800,
}
"""What makes each profile, given its name."""
