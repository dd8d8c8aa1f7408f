"""Proxies are those of the environment, as every AWS tool takes them."""

import socket

import pytest

from enginesmith.core.errors import UnavailableError
from enginesmith.registry.store.base import open_store
from enginesmith.registry.store.objects import api
from tests.enginesmith.s3_server import BUCKET


def uri(prefix: str) -> str:
    """A place of its own, since a process keeps a client for each; RFC 6761: no resolver knows the host."""
    return f"s3://{BUCKET}/{prefix}?endpoint=http://nowhere.invalid"


@pytest.fixture(autouse=True)
def no_proxies(s3_environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "FIRST_PAUSE_S", 0.001)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


def test_requests_go_by_the_proxy_of_the_environment_and_not_where_it_is_not_wanted(s3_server, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", s3_server)
    with pytest.raises(UnavailableError, match="there is no bucket"):  # says the proxy, which is moto
        open_store(uri("by-proxy"))
    monkeypatch.setenv("NO_PROXY", "nowhere.invalid")
    with pytest.raises(UnavailableError) as told:
        open_store(uri("straight"))
    assert "there is no bucket" not in str(told.value)


def test_a_proxy_that_is_away_is_named_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    monkeypatch.setenv("HTTP_PROXY", f"http://user:hunter2@127.0.0.1:{port}")
    with pytest.raises(UnavailableError, match="proxy cannot be reached; check HTTPS_PROXY") as told:
        open_store(uri("away"))
    assert "hunter2" not in str(told.value)
