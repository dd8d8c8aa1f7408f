"""Stores for the site's tests."""

from pathlib import Path

import pytest

from enginesmith.registry.store.base import Store, open_store


@pytest.fixture
def registry(tmp_path: Path) -> Store:
    """An empty registry in a folder."""
    return open_store(tmp_path / "registry", create=True)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Where the site goes."""
    return tmp_path / "site"
