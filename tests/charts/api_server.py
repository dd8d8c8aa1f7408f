"""As much of a Kubernetes API on loopback as a chart asks of it when it is rendered for an upgrade: what kinds there
are, and the live objects that templates look up. It stores nothing."""

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

_KINDS = {
    "v1": [("namespaces", "Namespace", False), ("pods", "Pod", True)],
    "apps/v1": [("deployments", "Deployment", True)],
    "ray.io/v1": [("rayclusters", "RayCluster", True)],
}


@contextmanager
def api_server(objects: Mapping[str, Any], folder: Path, kinds: tuple[str, ...] = tuple(_KINDS)) -> Iterator[Path]:
    """Serve objects by path ('/api/v1/namespaces/ns'); yields a kubeconfig that leads there."""
    answers = {**_discovery(kinds), **objects}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = answers.get(self.path.split("?")[0])
            missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
            body = json.dumps(missing if found is None else found).encode()
            self.send_response(404 if found is None else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield _kubeconfig(server.server_address[1], folder)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _discovery(kinds: tuple[str, ...]) -> dict[str, Any]:
    groups = []
    found: dict[str, Any] = {
        "/version": {"major": "1", "minor": "34", "gitVersion": "v1.34.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
    }
    for version in kinds:
        resources = [
            {"name": name, "singularName": kind.lower(), "namespaced": inside, "kind": kind, "verbs": ["get", "list"]}
            for name, kind, inside in _KINDS[version]
        ]
        path = f"/apis/{version}" if "/" in version else f"/api/{version}"
        found[path] = {"kind": "APIResourceList", "groupVersion": version, "resources": resources}
        if "/" in version:
            group = version.split("/")[0]
            item = {"groupVersion": version, "version": version.split("/")[1]}
            groups.append({"name": group, "versions": [item], "preferredVersion": item})
    return {**found, "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}}


def _kubeconfig(port: int, folder: Path) -> Path:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "here", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "me", "user": {}}],
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
        "current-context": "here",
    }
    path = folder / "kubeconfig"
    path.write_text(json.dumps(config))
    return path
