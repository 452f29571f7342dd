"""Claims of papers: each has a verdict, and the verdict follows from the figures of a study."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from experiments.studies import all_nics, claims
from experiments.studies.claims import Claim, Verdict, judged, markdown, needed
from experiments.studies.study import names, study
from experiments.verbs.cli import main
from sim.base.errors import InputError
from topology.cluster import Cluster
from topology.specs import LinkSpec

PAGE = Path(__file__).parents[3] / "experiments/studies/README.md"
UNTESTABLE = get_args(Verdict)[-1]


def claimed(**figures: Any) -> Claim:
    return Claim(**{"paper": "a", "source": "b", "claim": "c", "unit": "%", "figure": "optical.x", **figures})


@pytest.mark.parametrize(
    ("low", "high", "found", "verdict"),
    [
        (1.3, 9.1, (1.3, 9.1), "confirmed"),
        (1.3, 9.1, (2.0, 3.0), "confirmed"),
        (1.3, 9.1, (1.0, 2.0), "qualified"),
        (1.3, 9.1, (9.0, 10.0), "qualified"),
        (1.3, 9.1, (1.0, 10.0), "qualified"),
        (1.3, 9.1, (1.0, 1.29), "contradicted"),
        (1.3, 9.1, (9.2, 10.0), "contradicted"),
        (-math.inf, 7.0, (0.5, 6.0), "confirmed"),
        (-math.inf, 7.0, (6.0, 8.0), "qualified"),
        (95.0, math.inf, (90.0, 94.0), "contradicted"),
        (95.0, math.inf, (95.0, 99.0), "confirmed"),
    ],
)
def test_a_verdict_follows_from_what_is_found(
    low: float, high: float, found: tuple[float, float], verdict: Verdict
) -> None:
    assert claimed(low=low, high=high).verdict(found) == verdict
    assert claimed(low=low, high=high, missing="a rate").verdict(found) == UNTESTABLE


def test_a_claim_has_a_figure_or_says_what_is_missing() -> None:
    with pytest.raises(InputError, match="name what is missing"):
        claimed(low=1.0, figure="")
    with pytest.raises(InputError, match="low first"):
        claimed(low=2.0, high=1.0)
    with pytest.raises(InputError, match="expected one at least"):
        claimed()


def test_the_page_has_every_claim_with_one_of_four_verdicts() -> None:
    """27 of 8 papers; what something is missing for is not testable, and nothing else."""
    told = claims.claims()
    assert len(told) == 27
    assert len({claim.paper for claim in told}) == 8
    assert set(needed()) <= set(names())
    rows = [line.split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")][2:]
    assert len(rows) == 27
    for claim, row in zip(told, rows, strict=True):
        assert row[0] == f"| {claim.paper}, {claim.source}"
        assert row[1:3] == [claim.claim, claims.said(claim.low, claim.high, claim.unit)]
        assert row[3] in get_args(Verdict)
        assert (row[3] == UNTESTABLE) == bool(claim.missing)
        assert row[5].removesuffix(" |").strip() == claim.missing


@pytest.mark.slow
def test_the_page_has_the_verdicts_of_what_studies_find_now() -> None:
    assert markdown(judged({name: study(name).find(1).figures for name in needed()})) in PAGE.read_text()


def test_one_pair_gets_its_own_nic_and_what_its_nvlink_carries_to_the_others() -> None:
    """NICs of 50 GB/s. With an NVLink of 70 GB/s: 50 + 70 over 8, in equal parts 70 / (7/8) = 80. With one of 700 all
    NICs, 400. Without other NICs 50 either way.
    """
    for nvlink, nics, best, even in ((70e9, 8, 120, 80), (700e9, 8, 400, 400), (70e9, 1, 50, 50), (70e9, 2, 100, 100)):
        spec = msgspec.structs.replace(
            all_nics._servers("hgx-h100"), nvlink=LinkSpec(bytes_per_s=nvlink, latency_s=0.0)
        )
        cluster = Cluster(spec)
        assert all_nics.best_bytes_per_s(cluster, nics)[0] / 1e9 == pytest.approx(best)
        assert all_nics.even_bytes_per_s(cluster, nics) / 1e9 == pytest.approx(even)


def test_claims_are_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Held against studies that find 2 to 3 of everything: less than 3.37 contradicts nothing that is not tested."""

    class Everything(dict[str, tuple[float, float]]):
        def __missing__(self, name: str) -> tuple[float, float]:
            return 2.0, 3.0

    found = type("Found", (), {"figures": Everything()})
    monkeypatch.setattr(
        "experiments.verbs.study.studies.study", lambda _: type("Wanted", (), {"find": staticmethod(lambda _: found)})
    )
    main(["study", "claims", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert len(told) == 27
    assert {one["verdict"] for one in told if one["paper"] == "Rail-only"} == {"contradicted"}
    main(["study", "claims"])
    assert capsys.readouterr().out.count("FuseLink") == 4
    with pytest.raises(SystemExit):
        main(["study", "claims", "--page", "page.html"])
    assert "claims take `json` and `markdown`" in capsys.readouterr().err.replace("--json", "`json`").replace(
        "--markdown", "`markdown`"
    )
