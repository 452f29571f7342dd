from __future__ import annotations

from typing import Any

import pytest

from runtime.processes import launch
from runtime.processes.launch import Session
from runtime.processes.rank import Seat
from sim.base.errors import InputError, RankError


@pytest.mark.gloo
@pytest.mark.parametrize(("placement", "expected"), [(None, [0, 1, 2]), ((2, 0, 3), [2, 0, 3])])
def test_each_rank_is_started_on_its_device(
    monkeypatch: pytest.MonkeyPatch, placement: Any, expected: list[int]
) -> None:
    """What is started is written down instead; the last one fails, which ends the session."""
    started: list[int] = []

    class Process:
        def __init__(self, seat: Seat, number: int) -> None:
            started.append(number)
            if seat.rank == 2:
                raise RankError("enough")

        def kill(self) -> None: ...
        def join(self, timeout_s: float) -> None: ...
        def close(self) -> None: ...

    monkeypatch.setattr(launch, "LocalRank", Process)
    with pytest.raises(RankError, match="enough"):
        Session(3, placement=placement)
    assert started == expected


def test_a_placement_has_a_device_for_each_rank() -> None:
    with pytest.raises(InputError, match=r"placement \(1,\): expected a device for each of 2 ranks"):
        Session(2, placement=(1,))
