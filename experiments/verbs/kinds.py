"""Types of options in the spelling whose defaults tyro checks by itself.

Of ``int | None`` and ``tuple[str, ...]`` it asks typeguard, which takes longer to import than tyro.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Optional

import tyro

OptionalInt = Optional[int]  # noqa: UP045 - see above
OptionalFloat = Optional[float]  # noqa: UP045
OptionalText = Optional[str]  # noqa: UP045
if TYPE_CHECKING:
    Texts = tuple[str, ...]
else:
    Texts = Annotated[tuple, tyro.conf.UseAppendAction]
"""As often as wanted."""
