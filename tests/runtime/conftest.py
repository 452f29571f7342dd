"""What tests of processes share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.runtime.programs import Programs


@pytest.fixture
def programs(hearing: None) -> Iterator[Programs]:
    started = Programs()
    try:
        yield started
    finally:
        left = started.close()
    assert not left
