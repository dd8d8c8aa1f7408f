"""Compile caches on the command line: asked for by kind, listed, verified, and never given in an engine's place."""

import json
from pathlib import Path

from enginesmith.registry.store.base import Store
from tests.enginesmith.cli.commands import run, said, told
from tests.enginesmith.compile_caches.test_warm_start import FACTS, published
from tests.enginesmith.registries import flip


def test_a_cache_is_resolved_and_pulled_by_kind_alone(empty: Store, tmp_path: Path) -> None:
    published(empty, tmp_path, tmp_path / "mark")
    units = {
        kind: told("pull", "--explain", "digits:candidate", "--kind", kind)["candidates"]
        for kind in ("engine", "cache")
    }
    assert [[item["backend"] for item in found] for found in units.values()] == [["onnxruntime"], ["torch-compile"]]
    pulled = told("pull", "digits:candidate", "--kind", "cache", "--dest", tmp_path / "dest")
    assert (
        pulled["backend"] == "torch-compile" and json.loads(Path(pulled["description"]).read_bytes())["kind"] == "cache"
    )
    assert (
        "compile caches" in said("show", "digits") and told("show", "digits")["caches"][0]["digest"] == pulled["digest"]
    )


def test_why_no_cache_fits_is_said(empty: Store, tmp_path: Path) -> None:
    published(empty, tmp_path, tmp_path / "mark", tuple({**dict(FACTS), "Python": "2.7"}.items()))
    result = run("pull", "--explain", "digits:candidate", "--kind", "cache")
    assert result.exit_code == 1 and "stale: made with Python 2.7, and" in result.stdout
    assert "has no compile cache for cpu" in str(run("pull", "digits:candidate", "--kind", "cache").exception)


def test_a_damaged_cache_is_found(empty: Store, tmp_path: Path) -> None:
    (cache,) = published(empty, tmp_path, tmp_path / "mark").manifest.caches
    flip(empty, str(cache.digest))
    result = run("registry", "fsck", "digits")
    assert result.exit_code == 1 and f"corrupt: {cache.digest}" in result.stdout
