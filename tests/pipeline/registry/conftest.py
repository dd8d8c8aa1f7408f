from pathlib import Path

import pytest

from pipeline.registry.store import Store, open_store


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty registry in a folder; with `registries.on_each_store`, one of every kind."""
    kind = getattr(request, "param", "file")
    place = request.getfixturevalue("s3_uri") if kind == "s3" else tmp_path / "registry"
    return open_store(place, create=True)
