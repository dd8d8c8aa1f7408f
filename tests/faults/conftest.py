"""All exports and builds of these tests fork from one server."""

import pytest

from tests.one_server import OneServer


@pytest.fixture(scope="session", autouse=True)
def forked(one_server: OneServer) -> None:
    """Has it take their place."""
