from pathlib import Path

import pytest

from pipeline.registry.store import Store, open_store


def _file_store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "registry", create=True)


# Every kind of store answers the same tests: a new kind is one line here.
STORES = {"file": _file_store}


@pytest.fixture(params=sorted(STORES))
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return STORES[request.param](tmp_path)
