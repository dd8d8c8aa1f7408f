import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.registry.store import Store, open_store
from tests.pipeline.registry.s3_server import BUCKET, ENVIRONMENT, FOREIGN, serving


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """URL of an S3 server with the bucket `BUCKET`."""
    with serving() as url:
        yield url


@pytest.fixture
def s3_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Credentials that moto takes, and a cache of this test's own."""
    for name in FOREIGN:
        monkeypatch.delenv(name, raising=False)
    for name, value in {**ENVIRONMENT, "ENGINERY_CACHE": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def s3_uri(s3_server: str, s3_environment: None) -> str:
    """The URI of a place in the bucket where nothing is yet."""
    return f"s3://{BUCKET}/{secrets.token_hex(8)}?endpoint={s3_server}"


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty registry in a folder; with `registries.on_each_store`, one of every kind."""
    kind = getattr(request, "param", "file")
    place = request.getfixturevalue("s3_uri") if kind == "s3" else tmp_path / "registry"
    return open_store(place, create=True)
