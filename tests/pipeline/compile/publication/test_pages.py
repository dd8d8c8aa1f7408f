"""A page is drawn from its JSON alone, wherever that lies; Prefect's artifacts say the same, and nothing hostile."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from enginesmith.core.codec import decode
from enginesmith.core.errors import InputError, IntegrityError, UnknownNameError
from enginesmith.registry.store.layout import page_data_key, page_key
from enginesmith.registry.versions.lookup import load
from pipeline.compile.publication import pages
from pipeline.orchestration.artifacts import artifacts_of, show_document
from tests.pipeline.projects import Project, raising
from tests.validation.canary.reports import report as canary_report
from tests.validation.page_data import version_report
from tests.validation.reporting.test_html import HOSTILE, hostile
from validation.canary.report import CanaryReport
from validation.reporting.version_document import VersionDocument


@pytest.fixture(scope="module")
def canary(tmp_path_factory: pytest.TempPathFactory) -> CanaryReport:
    return canary_report(tmp_path_factory.mktemp("canary"), 2500, failing=0.02)


SNIPPET = """quantization:
  overrides:
    - {match: "/encoder/layers.0/attention/output/dense/MatMul", precision: fp16}"""


def version() -> VersionDocument:
    return decode(version_report(), VersionDocument)


def test_a_build_leaves_the_json_that_its_page_is_drawn_from(built: Project, tmp_path: Path) -> None:
    store = built.store
    data, page = (store.read(key("tiny", "1")) for key in (page_data_key, page_key))
    assert pages.draw_page(pages.read_version(data, "tiny@1")).encode() == page
    spreads = [spread for report in json.loads(data)["reports"] for spread in report["spreads"]]
    assert {spread["stage"] for spread in spreads} == {"export", "quantization", "engine"}
    assert all(spread["samples"] == 24 and len(spread["abs_error"]) == 101 for spread in spreads)
    text = page.decode()
    assert text.count('class="picture ecdf"') == 2 and "Worst cases" in text
    (tmp_path / "report.json").write_bytes(data)
    again = built.run("report", tmp_path / "report.json", "--out", tmp_path / "again.html")
    assert again.code == 0 and (tmp_path / "again.html").read_bytes() == page


def test_a_page_that_cannot_be_drawn_says_why_and_is_there_all_the_same(project, monkeypatch):
    monkeypatch.setattr("validation.reporting.html.render", raising(ZeroDivisionError("a picture <of> nothing")))
    project.change_spec(targets=["cpu"], precisions=["fp32"])
    done = project.build()
    assert done.code == 0 and done.json["version"] == "1"
    folder = project.registry / "models" / "tiny" / "versions" / "1"
    assert "a picture &lt;of&gt; nothing" in (folder / "report.html").read_text()
    monkeypatch.undo()
    again = project.run("report", folder / "report.json", "--out", project.folder / "again.html")
    assert again.code == 0 and "1 engine proven" in (project.folder / "again.html").read_text()


def test_what_is_no_document_is_named(tmp_path: Path, built: Project) -> None:
    with pytest.raises(InputError, match="no such file"):
        pages.read_document(tmp_path / "none.json")
    (tmp_path / "a.json").write_text('{"kind": "else"}')
    with pytest.raises(InputError, match="'else'"):
        pages.read_document(tmp_path / "a.json")
    with pytest.raises(IntegrityError, match="not whole"):
        pages.read_version(json.dumps({"kind": pages.VERSION, "model": "m"}).encode(), "m@1")
    store = built.store
    with pytest.raises(UnknownNameError, match="it is lost; publish the version again"):
        pages.published_document(store, replace(load(store, "tiny", "1"), version="7"))


def test_a_version_becomes_a_verdict_engines_drift_and_a_link() -> None:
    found = {item.key: item for item in artifacts_of(version(), "file:///r.html")}
    assert list(found) == ["result-digits", "engines-digits", "drift-digits", "page-digits"]
    text = found["result-digits"].markdown
    assert f"```yaml\n{SNIPPET}\n```" in text
    assert (
        text.index("1 engine failed; 3 proven, 21 unproven")
        < text.index("## Drift by stage")
        < text.index("## Which node")
    )
    assert "sm\\_120 int8 tensorrt-rtx: the compiler was killed" in text and "file:///r.html" in text
    assert len(found["engines-digits"].table) == len(version().engines)
    row = next(row for row in found["drift-digits"].table if row["what"] == "cpu int8 onnxruntime")
    assert row == {
        "what": "cpu int8 onnxruntime",
        "output": "logits",
        "export": "127.3 dB (limit 80.0 dB)",
        "quantization": "23.6 dB (limit 15.0 dB)",
        "engine": "35.6 dB (limit 22.0 dB)",
        "drift": "nearly all at quantization",
    }


def test_a_run_that_published_nothing_says_how_each_unit_ended() -> None:
    engine = replace(version().engines[-1], status="failed", size_bytes=None, digest=None)
    unpublished = VersionDocument(model="m", version="", created_at="2026-01-01", content="0" * 64, engines=(engine,))
    found = list(artifacts_of(unpublished, None))
    assert [item.key for item in found] == ["result-m", "engines-m"]
    assert "1 engine failed; there is none to pull" in found[0].markdown


def test_a_canary_becomes_a_verdict_criteria_and_a_link(canary: CanaryReport) -> None:
    found = {item.key: item for item in artifacts_of(canary, "file:///r.html")}
    assert list(found) == ["canary-tiny", "page-canary-tiny"]
    text = found["canary-tiny"].markdown
    assert text.startswith("# Canary: FAIL") and "| errors | FAIL |" in text and "tiny@2, 2500 requests, 5" in text


def test_hostile_text_has_no_meaning_in_markdown(canary: CanaryReport) -> None:
    for document in (
        decode(hostile(version_report()), VersionDocument),
        replace(canary, reason=f"{HOSTILE} | `a` [x](y)\n# b"),
    ):
        text = next(artifacts_of(document, None)).markdown
        assert "<script" not in text and "\n# b" not in text and "[x](y)" not in text


def test_artifacts_are_posted_by_their_kind(monkeypatch: pytest.MonkeyPatch, canary: CanaryReport) -> None:
    import prefect.artifacts

    posted: list[tuple[str, str]] = []
    for kind in ("link", "markdown", "table"):
        name = f"create_{kind}_artifact"
        monkeypatch.setattr(
            prefect.artifacts, name, lambda *_, key, kind=kind, **__: posted.append((kind, key)), raising=True
        )
    show_document(version(), "file:///r.html")
    assert [kind for kind, _ in posted] == ["markdown", "table", "table", "link"]
    show_document(canary, None)
    assert posted[-1] == ("markdown", "canary-tiny")
    assert canary.kind == pages.CANARY
