"""The Kubernetes API by kind, namespace and name, as one user: objects are what JSON has."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode

import urllib3

Object = dict[str, Any]
T = TypeVar("T")
# Where each kind is. `namespaces/NAME/` comes in between for those that are in one.
_KINDS = {
    "/apis/rbac.authorization.k8s.io/v1": "clusterrolebindings clusterroles rolebindings roles",
    "/api/v1": "configmaps events namespaces nodes persistentvolumeclaims persistentvolumes pods secrets "
    "serviceaccounts services",
    "/apis/batch/v1": "cronjobs jobs",
    "/apis/apiextensions.k8s.io/v1": "customresourcedefinitions",
    "/apis/apps/v1": "deployments",
    "/apis/autoscaling/v2": "horizontalpodautoscalers",
    "/apis/networking.k8s.io/v1": "networkpolicies",
    "/apis/policy/v1": "poddisruptionbudgets",
    "/apis/scheduling.k8s.io/v1": "priorityclasses",
    "/apis/ray.io/v1": "rayclusters",
    "/apis/node.k8s.io/v1": "runtimeclasses",
    "/apis/authorization.k8s.io/v1": "selfsubjectrulesreviews subjectaccessreviews",
    "/apis/storage.k8s.io/v1": "storageclasses",
    "/apis/admissionregistration.k8s.io/v1": "validatingadmissionpolicies validatingadmissionpolicybindings",
}
PLACES = {kind: place for place, kinds in _KINDS.items() for kind in kinds.split()}


class RefusedError(Exception):
    """The server's answer to a request that it refused: `status` is HTTP's, the text is the server's own."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


def path_of(kind: str, namespace: str = "", name: str = "") -> str:
    """The path of one object, or of all of a kind ('pods', 'rayclusters')."""
    inner_text = f"/namespaces/{namespace}" if namespace else ""
    return f"{PLACES[kind]}{inner_text}/{kind}" + (f"/{name}" if name else "")


class Api:
    """One user's way to the API server. Methods raise RefusedError for what the server refuses."""

    def __init__(self, server: str, certificates: Path, token: str) -> None:
        self.server, self.certificates = server, certificates
        self._token = token
        self._pool = urllib3.PoolManager(ca_certs=str(certificates), maxsize=8)

    def ask(self, method: str, path: str, body: Any = None, content: str = "application/json") -> Object:
        """One request. A dropped connection is tried again; an answer never is."""
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": content}
        text = None if body is None else json.dumps(body)
        retries = urllib3.Retry(total=3, status=0, other=0, backoff_factor=0.5, allowed_methods=None)
        answer = self._pool.request(method, self.server + path, body=text, headers=headers, timeout=60, retries=retries)
        try:
            document: Object = json.loads(answer.data)
        except ValueError:
            document = {"message": answer.data.decode(errors="replace")}
        if answer.status >= 400:
            raise RefusedError(answer.status, document.get("message", ""))
        return document

    def get(self, kind: str, namespace: str, name: str) -> Object:
        """One object; `namespace` is '' for those that are in none."""
        return self.ask("GET", path_of(kind, namespace, name))

    def find(self, kind: str, namespace: str, name: str) -> Object | None:
        try:
            return self.get(kind, namespace, name)
        except RefusedError as error:
            if error.status != 404:
                raise
            return None

    def list(self, kind: str, namespace: str = "", labels: str = "") -> "list[Object]":
        """Objects of a kind, of all namespaces without one. labels: a selector, 'component=deploy'."""
        query = "?" + urlencode({"labelSelector": labels}) if labels else ""
        return self.ask("GET", path_of(kind, namespace) + query)["items"]

    def create(self, kind: str, namespace: str, body: Object) -> Object:
        return self.ask("POST", path_of(kind, namespace), body)

    def patch(self, kind: str, namespace: str, name: str, body: Any, manager: str = "test") -> Object:
        """Merge `body` into an object; a list is a JSON patch. manager: who owns the fields then."""
        content = "application/json-patch+json" if isinstance(body, list) else "application/merge-patch+json"
        return self.ask("PATCH", f"{path_of(kind, namespace, name)}?fieldManager={manager}", body, content)

    def delete(self, kind: str, namespace: str, name: str) -> None:
        """Delete an object with all that it owns; one that is not there is no error."""
        body = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"}
        try:
            self.ask("DELETE", path_of(kind, namespace, name), body)
        except RefusedError as error:
            if error.status != 404:
                raise


def wait_for(what: str, look: Callable[[], T | None], seconds: float = 300) -> T:
    """What `look` finds, once it is not None, False or empty. Raises TimeoutError with `what` after so many seconds."""
    end = time.monotonic() + seconds
    while not (swap := look()):
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {seconds:g} s")
        time.sleep(0.3)
    return swap
