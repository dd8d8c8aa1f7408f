import json
from dataclasses import replace
from pathlib import Path

import pytest

from enginesmith.core.errors import InputError, IntegrityError, UnknownNameError
from enginesmith.registry.store.layout import page_data_key, page_key
from enginesmith.registry.versions.lookup import load
from pipeline.compile.publication import pages
from tests.pipeline.projects import Project, raising


def test_a_build_stores_the_json_of_its_page(built: Project, tmp_path: Path) -> None:
    store = built.store
    data, page = (store.read(key("tiny", "1")) for key in (page_data_key, page_key))
    assert pages.draw_page(pages.read_version(data, "tiny@1")).encode() == page
    spreads = [spread for report in json.loads(data)["reports"] for spread in report["spreads"]]
    assert {spread["stage"] for spread in spreads} == {"export", "quantization", "engine"}
    assert all(spread["samples"] == 24 and len(spread["abs_error"]) == 101 for spread in spreads)
    text = page.decode()
    assert text.count('class="picture ecdf"') == 2 and "Worst cases" in text
    (tmp_path / "report.json").write_bytes(data)
    second_result = built.run("report", tmp_path / "report.json", "--out", tmp_path / "again.html")
    assert second_result.code == 0 and (tmp_path / "again.html").read_bytes() == page


def test_an_undrawable_page_gives_the_reason_and_exists_anyway(project, monkeypatch):
    monkeypatch.setattr("validation.reporting.html.render", raising(ZeroDivisionError("a picture <of> nothing")))
    project.change_spec(targets=["cpu"], precisions=["fp32"])
    result = project.build()
    assert result.code == 0 and result.json["version"] == "1"
    folder = project.registry / "models" / "tiny" / "versions" / "1"
    assert "a picture &lt;of&gt; nothing" in (folder / "report.html").read_text()
    monkeypatch.undo()
    second_result = project.run("report", folder / "report.json", "--out", project.folder / "again.html")
    assert second_result.code == 0 and "1 engine proven" in (project.folder / "again.html").read_text()


def test_the_error_names_an_invalid_document(tmp_path: Path, built: Project) -> None:
    with pytest.raises(InputError, match="no such file"):
        pages.read_document(tmp_path / "none.json")
    (tmp_path / "a.json").write_text('{"kind": "else"}')
    with pytest.raises(InputError, match="'else'"):
        pages.read_document(tmp_path / "a.json")
    with pytest.raises(IntegrityError, match="incomplete or invalid"):
        pages.read_version(json.dumps({"kind": pages.VERSION, "model": "m"}).encode(), "m@1")
    store = built.store
    with pytest.raises(UnknownNameError, match="it is lost; publish the version again"):
        pages.published_document(store, replace(load(store, "tiny", "1"), version="7"))
