"""What tests of evidence and of its pages share."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from experiments.evidence import workers


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Predict cases in a thread of this process: each that starts imports everything anew.

    ``test_cases_are_predicted_by_workers_that_are_no_forks`` and what follows it test the processes.
    """
    monkeypatch.setattr(workers, "workers", lambda _=None: ThreadPoolExecutor(1))
