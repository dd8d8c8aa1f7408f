"""The real client of Kubernetes against a server that answers `GET /api/v1/nodes` as the API does, over a socket."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml

from enginesmith.core.errors import InputError, UnavailableError
from pipeline.fleet import inventory
from pipeline.fleet.inventory import Access, read_cluster
from tests.enginesmith.object_stores.servers import serving
from tests.pipeline.fleet import nodes

TOKEN = "abc"


class Api(ThreadingHTTPServer):
    """Nodes page by page, with a bearer token, as kube-apiserver gives them.

    expire: so many continue tokens are answered with 410, as after a compaction.  allowed: whether the user may list.
    silent: answers nothing.
    """

    daemon_threads = True

    def __init__(self, items: list[nodes.Json]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.items, self.asked = items, list[dict[str, list[str]]]()
        self.expire, self.allowed, self.raw = 0, True, b""
        self.silence = threading.Event()
        self.silent = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Api

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        self.server.asked.append(query)
        if self.server.silent:
            self.server.silence.wait(30)
            return
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.fail(401, "Unauthorized", "Unauthorized")
        elif not self.server.allowed:
            who = 'User "system:serviceaccount:enginesmith:fleet" cannot list resource "nodes" at the cluster scope'
            self.fail(403, "Forbidden", f"nodes is forbidden: {who}")
        elif url.path != "/api/v1/nodes":
            self.fail(404, "NotFound", "the server could not find the requested resource")
        else:
            self.page(int(query.get("limit", ["0"])[0]), query.get("continue", [""])[0])

    def page(self, limit: int, token: str) -> None:
        if token and self.server.expire:
            self.server.expire -= 1
            self.fail(410, "Expired", "The provided continue parameter is too old")
            return
        start = int(token or 0)
        end = start + limit if limit else len(self.server.items)
        left = len(self.server.items) - end
        metadata: dict[str, Any] = {"resourceVersion": "12345"}
        metadata |= {"continue": str(end), "remainingItemCount": left} if left > 0 else {}
        body = {"kind": "NodeList", "apiVersion": "v1", "metadata": metadata, "items": self.server.items[start:end]}
        self.send(200, self.server.raw or json.dumps(body).encode())

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
    every = [*nodes.WHOLE.values(), nodes.MIG_SINGLE, nodes.MIG_MIXED, nodes.TIME_SHARED, nodes.NO_GFD, nodes.CPU]
    with serving(server := Api(every)):
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


def test_every_page_is_read_and_each_node_once(api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "_PAGE", 4)
    found = read_cluster(access(tmp_path, api.url))
    assert found.source == api.url
    assert sum(group.nodes for group in found.groups) == len(api.items)  # one is left out, one is in two groups
    assert [item.node for item in found.left_out] == ["no-gfd"]
    assert [query.get("continue") for query in api.asked] == [None, ["4"], ["8"], ["12"]]
    assert {query["limit"][0] for query in api.asked} == {"4"}


def test_a_list_that_went_stale_is_read_again_from_its_start(api, tmp_path, monkeypatch):
    monkeypatch.setattr(inventory, "_PAGE", 8)
    api.expire = 1
    found = read_cluster(access(tmp_path, api.url))
    assert sum(group.nodes for group in found.groups) == len(api.items)
    assert [query.get("continue") for query in api.asked] == [None, ["8"], None, ["8"]]
    api.expire = 99
    with pytest.raises(UnavailableError, match="keeps changing"):
        read_cluster(access(tmp_path, api.url))


def test_the_environment_s_kubeconfig_is_found(api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(access(tmp_path, api.url).kubeconfig))
    assert read_cluster(Access(context="here")).groups


def test_a_pod_s_own_account(api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_what_the_cluster_refuses_has_its_remedy(api: Api, tmp_path: Path) -> None:
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
def test_what_is_no_kubernetes(api: Api, tmp_path: Path, raw: bytes) -> None:
    api.raw = raw
    with pytest.raises(UnavailableError, match="is it a Kubernetes API"):
        read_cluster(access(tmp_path, api.url))


def test_a_cluster_that_does_not_answer(api: Api, tmp_path: Path) -> None:
    api.silent = True
    with pytest.raises(UnavailableError, match=r"does not answer \(.*timed out"):
        read_cluster(access(tmp_path, api.url, timeout_s=0.1))
    api.shutdown()
    api.server_close()
    with pytest.raises(UnavailableError, match="does not answer"):
        read_cluster(access(tmp_path, api.url, timeout_s=5))


def test_a_kubeconfig_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "bad").write_text("clusters: [")
    (tmp_path / "empty").write_text("{}")
    for path, context in ((tmp_path / "none", None), (tmp_path / "bad", None), (tmp_path / "empty", "other")):
        with pytest.raises(InputError, match=r"name a file with --kubeconfig, or give an --inventory"):
            read_cluster(Access(path, context))
