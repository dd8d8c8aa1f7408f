"""The real client of Kubernetes against a server that answers `GET /api/v1/nodes` as the API does, over a socket."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from enginesmith.core.errors import InputError, UnavailableError
from pipeline.fleet.inventory import Access, read_cluster
from tests.enginesmith.object_stores.servers import serving
from tests.pipeline.fleet import nodes

TOKEN = "abc"


class Api(ThreadingHTTPServer):
    """All nodes, for a bearer token. allowed: whether the user may list. raw: the answer instead. silent: no answer."""

    daemon_threads = True

    def __init__(self, items: list[nodes.Json]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.items, self.allowed, self.raw = items, True, b""
        self.silence = threading.Event()
        self.silent = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Api

    def do_GET(self) -> None:
        if self.server.silent:
            self.server.silence.wait(30)
            return
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.fail(401, "Unauthorized", "Unauthorized")
        elif not self.server.allowed:
            label = 'User "system:serviceaccount:enginesmith:fleet" cannot list resource "nodes" at the cluster scope'
            self.fail(403, "Forbidden", f"nodes is forbidden: {label}")
        elif self.path != "/api/v1/nodes":
            self.fail(404, "NotFound", "the server could not find the requested resource")
        else:
            body = {"kind": "NodeList", "apiVersion": "v1", "metadata": {"resourceVersion": "12345"}}
            self.send(200, self.server.raw or json.dumps({**body, "items": self.server.items}).encode())

    def fail(self, code: int, reason: str, message: str) -> None:
        status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "reason": reason}
        self.send(code, json.dumps({**status, "code": code}).encode())

    def send(self, code: int, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def api() -> Iterator[Api]:
    values = [*nodes.WHOLE.values(), nodes.MIG_SINGLE, nodes.MIG_MIXED, nodes.TIME_SHARED, nodes.NO_GFD, nodes.CPU]
    with serving(server := Api(values)):
        yield server
        server.silence.set()


def access(folder: Path, url: str, token: str = TOKEN, **options: Any) -> Access:
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
        "clusters": [{"name": "here", "cluster": {"server": url}}],
        "users": [{"name": "me", "user": {"token": token}}],
    }
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump(document))
    return Access(path, **options)


def test_each_node_is_read_once(api: Api, tmp_path: Path) -> None:
    fleet = read_cluster(access(tmp_path, api.url))
    assert fleet.source == api.url
    assert sum(group.nodes for group in fleet.groups) == len(api.items)  # one is left out, one is in two groups
    assert [item.node for item in fleet.left_out] == ["no-gfd"]


def test_the_environment_s_kubeconfig_is_found(api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(access(tmp_path, api.url).kubeconfig))
    assert read_cluster(Access(context="here")).groups


def test_a_pods_own_account_is_used(api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The service account's files and variables, as the kubelet gives them; over http, as this server has no TLS."""
    from kubernetes.config import incluster_config

    for name, text in (("token", TOKEN), ("ca.crt", "-----BEGIN CERTIFICATE-----\n")):
        (tmp_path / name).write_text(text)
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(api.server_address[1]))
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(tmp_path / "ca.crt"))
    # A proxy on the way out of the cluster is none on the way to its own API.
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    assert Access().in_cluster and not Access(context="here").in_cluster
    with pytest.raises(UnavailableError, match=r"https://127\.0\.0\.1:\d+ does not answer") as error:
        read_cluster(Access(timeout_s=5))
    assert "proxy" not in str(error.value)


def test_refusals_of_the_cluster_have_a_remedy(api: Api, tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="401 Unauthorized; the cluster does not accept these") as error:
        read_cluster(access(tmp_path, api.url, token="secret-token"))
    assert "secret-token" not in str(error.value) and error.value.exit_code == 3
    api.allowed = False
    with pytest.raises(UnavailableError, match=r"403 Forbidden; .* bind it a ClusterRole with verb list on nodes"):
        read_cluster(access(tmp_path, api.url))
    with pytest.raises(UnavailableError, match="404 Not Found"):
        api.allowed = True
        read_cluster(access(tmp_path, f"{api.url}/elsewhere"))


@pytest.mark.parametrize("raw", [b"<html>", b"[]", b'{"items": 3}', b'{"kind": "NodeList"}'])
def test_a_server_other_than_kubernetes_is_reported(api: Api, tmp_path: Path, raw: bytes) -> None:
    api.raw = raw
    with pytest.raises(UnavailableError, match="is it a Kubernetes API"):
        read_cluster(access(tmp_path, api.url))


def test_a_silent_cluster_is_reported(api: Api, tmp_path: Path) -> None:
    api.silent = True
    with pytest.raises(UnavailableError, match=r"does not answer \(.*timed out"):
        read_cluster(access(tmp_path, api.url, timeout_s=0.1))
    api.shutdown()
    api.server_close()
    with pytest.raises(UnavailableError, match="does not answer"):
        read_cluster(access(tmp_path, api.url, timeout_s=5))


def test_an_unusable_kubeconfig_is_reported(tmp_path: Path) -> None:
    (tmp_path / "bad").write_text("clusters: [")
    (tmp_path / "empty").write_text("{}")
    for path, context in ((tmp_path / "none", None), (tmp_path / "bad", None), (tmp_path / "empty", "other")):
        with pytest.raises(InputError, match=r"name a file with --kubeconfig, or give an --inventory"):
            read_cluster(Access(path, context))
