"""From a spec to a version with a compile cache, and the same again."""

from pathlib import Path

import pytest

from enginesmith.core.names import parse_reference
from enginesmith.registry.store.base import open_store
from enginesmith.registry.versions.lookup import locate
from tests.enginesmith.cli.commands import run
from tests.pipeline.compile.caches.test_make_cache import NET, SPEC

# A net of one layer has little to compile, and another machine other times: the other checks must hold.
MAY_FAIL = "engine warm start, CPU time"


@pytest.mark.slow
def test_a_build_publishes_the_cache_that_it_proved_and_makes_no_second_one(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NET.format(factor=2))
    backends = "\nbackends: {onnxruntime: {}}\nvalidation: {latency: 'off'}\n"
    (tmp_path / "net.yaml").write_text(SPEC.format(source="{torch: 'net.py:build'}") + backends)
    words = "build", tmp_path / "net.yaml", "--registry", tmp_path / "registry"
    assert "cpu     fp32       torch-compile" in run(*words).stdout
    manifest = locate(open_store(tmp_path / "registry"), parse_reference("net")).manifest
    (cache,) = manifest.caches
    assert cache.status == "proven" or cache.reason.startswith(MAY_FAIL), cache.reason
    assert (cache.digest in manifest.blobs()) == (cache.status == "proven")
    assert [item.kind for item in cache.requires] == ["cpu", "runtime", "installation"]
    assert cache.notes and cache.notes[0].startswith("first answer of a process: cold ")
    assert "unchanged: everything was cached" in run(*words).stdout
