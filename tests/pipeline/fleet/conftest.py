from pathlib import Path

import pytest

from enginesmith.registry.store.base import Store, open_store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty registry."""
    return open_store(tmp_path / "registry", create=True)
