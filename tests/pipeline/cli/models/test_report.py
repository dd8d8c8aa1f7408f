from dataclasses import replace
from pathlib import Path

import pytest

from enginesmith.core.errors import IntegrityError
from enginesmith.registry.evidence.attestations import attest
from pipeline.compile.publication.pages import draw_page, published_document, read_document
from tests.pipeline.projects import Project
from tests.validation.canary.reports import report as canary_report
from validation.canary.report import CanaryReport


@pytest.fixture(scope="module")
def canary(tmp_path_factory: pytest.TempPathFactory) -> CanaryReport:
    return canary_report(tmp_path_factory.mktemp("canary"), 2500, failing=0.02)


def test_the_page_of_a_reference_is_current(built: Project, tmp_path: Path) -> None:
    store, manifest = built.published()
    document_before = published_document(store, manifest)
    report = next(item for item in document_before.reports if item.verdict == "proven")
    attest(
        store, manifest, replace(report, verdict="failed", reason="it broke", created_at="2999-01-01T00:00:00+00:00")
    )
    after = published_document(store, manifest)
    assert [entry.status for entry in after.engines].count("failed") == 1
    assert len(after.reports) == len(document_before.reports)
    assert [item.reason for item in after.reports].count("it broke") == 1
    result = built.run("report", "tiny@1", "--out", tmp_path / "today.html")
    assert result.code == 0 and "1 engine failed" in (tmp_path / "today.html").read_text()


def test_a_canarys_page_is_redrawn_from_its_report(canary: CanaryReport, tmp_path: Path, built: Project) -> None:
    (tmp_path / "report.json").write_bytes(canary.to_bytes())
    assert built.run("report", tmp_path / "report.json", "--out", tmp_path / "page.html").code == 0
    assert (tmp_path / "page.html").read_text() == draw_page(canary)
    (tmp_path / "report.json").write_bytes(replace(canary, reason="edited").to_bytes())
    with pytest.raises(IntegrityError, match="digest"):
        read_document(tmp_path / "report.json")
