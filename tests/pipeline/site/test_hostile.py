"""Texts that somebody else wrote stay texts, on every page."""

import re
from pathlib import Path

from enginesmith.core.text import visible
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.layout import page_key
from pipeline.site.drawing import POLICY, REPORT_POLICY, copy_report
from tests.pipeline.site.crawl import broken_links, pages
from tests.pipeline.site.sites import HOSTILE, HOSTILE_TEXT, publish_hostile, write


def test_hostile_texts_are_shown_and_nothing_of_them_is_markup(registry: Store, out: Path) -> None:
    manifest = publish_hostile(registry)
    write(registry, out)
    seen = {str(found.path.relative_to(out)): found for found in pages(out)}
    assert not [(path, found.wrong) for path, found in seen.items() if found.wrong]
    assert not broken_links(out)
    shown = " ".join(visible(HOSTILE_TEXT).split())
    for path in ("models/hostile/index.html", "models/hostile/versions/1/index.html", "runs.html", "fleet.html"):
        assert shown in seen[path].words, path
    for path, found in seen.items():
        raw = found.path.read_text()
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", raw), path
        assert not {"img", "svg onload"} & {*found.tags} and "1337" not in raw, path
        assert not any(text in raw for text in HOSTILE[:3]), path
        assert f'content="{POLICY}"' in raw.replace("&#39;", "'")
    assert "unsafe" not in POLICY and manifest.model in seen["index.html"].words


def test_data_for_the_search_is_plain_json(registry: Store, out: Path) -> None:
    publish_hostile(registry)
    write(registry, out)
    data = (out / "models.js").read_text()
    assert data.isascii() and data.startswith("registryModels([[") and data.endswith("]);\n")


def test_a_report_is_copied_beneath_a_policy_without_scripts(registry: Store, out: Path) -> None:
    manifest = publish_hostile(registry)
    key = page_key(manifest.model, manifest.version)
    registry.create(key, b"<script>alert(1)</script>")
    write(registry, out)
    copied = (out / "models/hostile/versions/1/report.html").read_bytes()
    assert copied.index(REPORT_POLICY.encode()) < copied.index(b"<script>") and b"script-src" not in copied
    assert copied == copy_report(registry.read(key) or b"")
