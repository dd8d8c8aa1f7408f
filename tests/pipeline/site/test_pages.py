"""What the pages say, over a version that was built and over small ones."""

import re
from pathlib import Path

from enginesmith.core.text import format_bytes, visible
from enginesmith.registry.store import layout
from enginesmith.registry.store.base import Store
from enginesmith.registry.trust.signing import SigningKey, sign
from enginesmith.registry.versions import lookup
from pipeline.site.comparison import compare, facts_of, read_version
from pipeline.site.drawing import POLICY, REPORT_POLICY, copy_report
from tests.enginesmith.cli.commands import said
from tests.enginesmith.registries import engine, overwrite, publish_engines
from tests.enginesmith.registry.test_ensembles import publish_graphs, publish_whole
from tests.enginesmith.registry.trust.keys import written
from tests.pipeline.canary.files import write_observations
from tests.pipeline.projects import Project
from tests.pipeline.site.crawl import Seen, broken_links, linked, pages
from tests.pipeline.site.sites import HOSTILE, HOSTILE_TEXT, move, publish_hostile, publish_small, write


def words(out: Path, *parts: str) -> str:
    return Seen(out.joinpath(*parts)).words


def test_a_versions_page_answers_common_questions(built: Project, out: Path) -> None:
    store = built.store
    write(store, out)
    version = words(out, "models", "tiny", "versions", "1", "index.html")
    for title in ("Engines", "Quality", "Drift by stage", "Provenance", "Spec"):
        assert title in version
    assert " dB" in version
    assert lookup.load(store, "tiny", "1").digest in version
    assert "candidate 1" in words(out, "index.html") and "done" in words(out, "runs.html")
    report = (out / "models" / "tiny" / "versions" / "1" / "report.html").read_text()
    assert report.index("http-equiv") < report.index("<style") and "script-src" not in report[:300]
    assert not [(seen_page.path, seen_page.wrong) for seen_page in pages(out) if seen_page.wrong]
    assert not broken_links(out)
    assert {path for path in out.rglob("*.*") if ".enginesmith-site" not in path.parts} == linked(out) | {
        out / "models.js"
    }


def test_channels_show_who_moved_them_why_and_on_which_canary(store: Store, out: Path, tmp_path: Path) -> None:
    first_manifest, manifest = (publish_engines(store, [engine(store, data=c.encode())], c).manifest for c in "ab")
    move(store, "digits", "1")
    paths = write_observations(tmp_path / "canary", manifest, first_manifest)
    uri = tmp_path / "registry"
    said("canary", "judge", "--candidate", paths[0], "--baseline", paths[1], "--registry", uri, "--attach")
    report = tmp_path / "canary" / "report.json"
    said("promote", "digits@2", "--why", "faster", "--canary", report, "--registry", uri)
    write(store, out)
    model = words(out, "models", "digits", "index.html")
    assert "stable promoted from 1 to 2" in model and "faster" in model and "rule 7" in model
    (page,) = (out / "models" / "digits" / "canaries").iterdir()
    assert page.stem[:12] in model and "PASS: the candidate is not worse" in Seen(page).words
    assert "digits@2" in words(out, "canaries.html")
    version_page = (out / "models" / "digits" / "versions" / "2" / "index.html").read_text()
    assert f'id="canary-{page.stem[:12]}"' in version_page
    assert not broken_links(out) and not [seen_page.wrong for seen_page in pages(out) if seen_page.wrong]


def test_a_damaged_version_is_reported_beside_the_others(store: Store, out: Path) -> None:
    for content in "ab":
        publish_small(store, content=content)
    overwrite(store, layout.manifest_key("digits", "1"), b"{")
    overwrite(store, layout.channel_key("digits", "candidate"), b"[]")
    store.create(layout.page_data_key("digits", "2"), b'{"kind": "enginesmith-version"}')
    write(store, out)
    assert "Cannot be read" in words(out, "models", "digits", "versions", "1", "index.html")
    second_words = words(out, "models", "digits", "versions", "2", "index.html")
    assert "Cannot be read: report.json of digits@2" in second_words and "no sm_89 here" in second_words
    assert words(out, "models", "digits", "index.html").count("unreadable") == 2
    assert not broken_links(out) and not [seen_page.wrong for seen_page in pages(out) if seen_page.wrong]


def test_many_models_are_paged_and_all_are_searched(store, out, monkeypatch):
    monkeypatch.setattr("pipeline.site.generate.PER_PAGE", 2)
    for model in ("a", "b", "c"):
        publish_engines(store, [engine(store)], model, model=model)
    write(store, out)
    assert "3 models" in words(out, "index.html") and not (out / "index-3.html").exists()
    assert "models/c/index.html" in Seen(out / "index-2.html").links
    assert [f'["{name}","1",1,' in (out / "models.js").read_text() for name in "abc"] == [True] * 3
    assert not broken_links(out)


def test_an_empty_registry_says_how_to_begin(store: Store, out: Path) -> None:
    write(store, out)
    assert "No version was published here yet" in words(out, "index.html")
    assert not broken_links(out) and not [seen_page.wrong for seen_page in pages(out) if seen_page.wrong]


def test_pages_show_signatures_and_trust_policy_results(store: Store, out: Path, tmp_path: Path) -> None:
    secret, _ = written(tmp_path, "release")
    sign(store, publish_small(store), SigningKey(secret))
    publish_small(store, content="b")
    trust = tmp_path / "trust.yaml"
    trust.write_text("format: 1\nsigners: {r: {public_key: release.pub}}\nrules: [{models: '*', signers: [r]}]\n")
    place = ("models", "digits", "versions")
    write(store, out)
    assert "not checked: the site was made without a trust policy" in words(out, *place, "1", "index.html")
    assert "Signatures none" in words(out, *place, "2", "index.html")
    write(store, out, trust=trust)
    assert "trusted signed by r" in words(out, *place, "1", "index.html")
    assert "not trusted digits@2 has 0 of the 1 signatures" in words(out, *place, "2", "index.html")


def test_an_ensemble_links_to_its_graphs_and_has_their_size(store: Store, out: Path) -> None:
    graphs = publish_graphs(store)
    whole_manifest = publish_whole(store, graphs)
    write(store, out)
    page = Seen(out / "models/pair/versions/1/index.html")
    assert "../../../pair-encoder/versions/1/index.html" in page.links and "image from encoder.image" in page.words
    size = sum(manifest.size_of(manifest.engines[0]) or 0 for manifest in graphs.values())
    assert size != whole_manifest.size_of(whole_manifest.engines[0]) and f" {format_bytes(size)} " in page.words
    # What is found out about a graph is seen on the page of the whole.
    store.remove(layout.manifest_key("pair-encoder", "1"))
    write(store, out)
    assert "pair-encoder@1 missing" in words(out, "models/pair/versions/1/index.html") and not broken_links(out)


def test_hostile_texts_are_escaped(store: Store, out: Path) -> None:
    manifest = publish_hostile(store)
    write(store, out)
    seen_results = {str(result.path.relative_to(out)): result for result in pages(out)}
    assert not [(path, result.wrong) for path, result in seen_results.items() if result.wrong]
    assert not broken_links(out)
    shown_text = " ".join(visible(HOSTILE_TEXT).split())
    for path in ("models/hostile/index.html", "models/hostile/versions/1/index.html", "runs.html"):
        assert shown_text in seen_results[path].words, path
    for path, result in seen_results.items():
        raw_text = result.path.read_text()
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", raw_text), path
        assert not {"img", "svg onload"} & {*result.tags} and "1337" not in raw_text, path
        assert not any(text in raw_text for text in HOSTILE[:3]), path
        assert f'content="{POLICY}"' in raw_text.replace("&#39;", "'")
    assert "unsafe" not in POLICY and manifest.model in seen_results["index.html"].words
    data = (out / "models.js").read_text()
    assert data.isascii() and data.startswith("registryModels([[") and data.endswith("]);\n"), "plain JSON"


def test_a_copied_report_has_a_policy_without_scripts(store: Store, out: Path) -> None:
    manifest = publish_hostile(store)
    key = layout.page_key(manifest.model, manifest.version)
    store.create(key, b"<script>alert(1)</script>")
    write(store, out)
    data = (out / "models/hostile/versions/1/report.html").read_bytes()
    assert data.index(REPORT_POLICY.encode()) < data.index(b"<script>") and b"script-src" not in data
    assert data == copy_report(store.read(key) or b"")


def test_an_engine_of_only_one_version_is_compared_by_status(store: Store) -> None:
    publish_engines(store, [engine(store), engine(store, "sm_80", "fp16", "unproven")], "a")
    publish_engines(store, [engine(store, data=b"other" * 100)], "b")
    documents = (read_version(store, "digits", version).document for version in "12")
    sections = compare(*(facts_of(document) for document in documents if document))
    rows = [row for section in sections for row in section.changed]
    (gone_row,) = [row for row in rows if "sm_80" in row.name]
    assert (gone_row.name, gone_row.before, gone_row.change) == ("sm_80 fp16 tensorrt-rtx: status", "unproven", "gone")
    (size,) = [row for row in rows if row.name == "cpu fp32 onnxruntime: size"]
    assert size.before.endswith(" B") and size.change.endswith(" ×")  # noqa: RUF001 - times
