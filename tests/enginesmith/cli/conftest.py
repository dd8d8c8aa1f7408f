"""Registries that the commands are tried on, named by ENGINESMITH_REGISTRY."""

from pathlib import Path

import pytest

from enginesmith.registry.store.base import Store, open_store
from enginesmith.registry.versions.publish import attach_page
from tests.enginesmith.registries import engine, publish_engines, refusal


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("ENGINESMITH_REGISTRY", str(tmp_path / "registry"))
    monkeypatch.setenv("USER", "ada")
    return open_store(tmp_path / "registry", create=True)


@pytest.fixture
def three(empty: Store) -> Store:
    """Versions 1 to 3 of 'digits', each with a proven engine; no channel."""
    for content in "abc":
        publish_engines(empty, [engine(empty, data=content.encode())], content, channel=None)
    return empty


@pytest.fixture
def mixed(empty: Store) -> Store:
    """Version 1 of 'digits' with a page, and version 2 with a proven and an unproven engine and a refusal."""
    attach_page(empty, publish_engines(empty, [engine(empty)], "a").manifest, b"<html>", b"{}")
    publish_engines(empty, [engine(empty), engine(empty, "sm_89", status="unproven")], "b", others=[refusal()])
    return empty
