"""A RayCluster and its pods through the official Kubernetes client."""

import json
from collections.abc import Callable, Sequence
from typing import TypeVar

from enginery.core.documents import find, read
from enginery.core.errors import UnavailableError
from pipeline.fleet.cluster import Access, connection_to
from pipeline.orchestration.kuberay.objects import Object
from pipeline.orchestration.kuberay.workers import Pod

_KIND = ("ray.io", "v1")
_PLURAL = "rayclusters"
_NOT_FOUND, _CONFLICT = 404, 409
T = TypeVar("T")


class _RefusedError(UnavailableError):
    """What the API server said, with its HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Kubernetes:
    """The RayCluster `name` of a namespace. Methods raise UnavailableError for what the API server refuses, or when it
    does not answer within the access's `timeout_s`."""

    def __init__(self, access: Access, namespace: str, name: str) -> None:
        connection = connection_to(access)
        from kubernetes import client

        self._custom, self._core = client.CustomObjectsApi(connection), client.CoreV1Api(connection)
        self._host, self._limit = str(connection.configuration.host), access.timeout_s
        self._namespace, self._name = namespace, name

    def find(self) -> Object | None:
        """It as it is now, None where there is none."""
        read_object = self._custom.get_namespaced_custom_object
        found: Object | None = self._ask_if_there((_NOT_FOUND,), read_object, *self._place, self._name)
        return found

    def create(self, body: Object) -> None:
        """Make it."""
        make = self._custom.create_namespaced_custom_object
        if self._ask_if_there((_NOT_FOUND,), make, *self._place, body) is None:
            raise UnavailableError(
                f"{self._host} knows no RayCluster; install the KubeRay operator, 1.7, with its CRDs"
            )

    def replace(self, body: Object) -> bool:
        """Write it; False, and nothing written, where it changed since it was read, or is gone."""
        write = self._custom.replace_namespaced_custom_object
        return self._ask_if_there((_NOT_FOUND, _CONFLICT), write, *self._place, self._name, body) is not None

    def pods(self) -> list[Pod]:
        """Its pods, without those that are ending."""
        items = read(json.loads(self._ask(self._list_pods)), "items", list)
        return [Pod.from_json(item) for item in items if not find(item, "metadata.deletionTimestamp", object, None)]

    def _list_pods(self, **options: object) -> bytes:
        selector = f"ray.io/cluster={self._name}"
        answer = self._core.list_namespaced_pod(
            self._namespace, label_selector=selector, _preload_content=False, **options
        )
        data: bytes = answer.data
        return data

    def owner(self, name: str) -> Object:
        """A reference to the ConfigMap: Kubernetes deletes the RayCluster with it."""
        uid = self._ask(self._core.read_namespaced_config_map, name, self._namespace).metadata.uid
        return {"apiVersion": "v1", "kind": "ConfigMap", "name": name, "uid": uid}

    @property
    def _place(self) -> tuple[str, str, str, str]:
        return (*_KIND, self._namespace, _PLURAL)

    def _ask_if_there(self, absent: Sequence[int], call: Callable[..., T], *words: object) -> T | None:
        """The answer; None for an HTTP status of `absent`."""
        try:
            return self._ask(call, *words)
        except _RefusedError as error:
            if error.status in absent:
                return None
            raise

    def _ask(self, call: Callable[..., T], *words: object) -> T:
        import urllib3
        from kubernetes.client.exceptions import ApiException

        try:
            return call(*words, _request_timeout=(self._limit, self._limit))
        except ApiException as error:
            said = str(error.body or error.reason)[:500]
            raise _RefusedError(f"{self._host}: {call.__name__}: {error.status}: {said}", error.status) from error
        except urllib3.exceptions.HTTPError as error:
            raise UnavailableError(f"{self._host} does not answer: {str(error)[:300]}") from error
