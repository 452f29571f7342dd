"""What tests of processes share."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.runtime.programs import Programs


@pytest.fixture
def hearing() -> Iterator[None]:
    """Let this process, and those that it starts, hear Ctrl-C, to which shells make jobs in the background deaf."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def programs(hearing: None) -> Iterator[Programs]:
    started = Programs()
    try:
        yield started
    finally:
        left = started.close()
    assert not left
