"""A RayCluster and its pods through the official Kubernetes client."""

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from enginery.core.errors import UnavailableError
from pipeline.fleet.cluster import Access, connection_to
from pipeline.orchestration.kuberay.workers import Pod

_KIND = ("ray.io", "v1")
_PLURAL = "rayclusters"
_NOT_FOUND, _CONFLICT = 404, 409
T = TypeVar("T")


class Kubernetes:
    """The RayCluster `name` of a namespace. Methods raise UnavailableError for what the API server refuses, or when it
    does not answer within the access's `timeout_s`."""

    def __init__(self, access: Access, namespace: str, name: str) -> None:
        connection = connection_to(access)
        from kubernetes import client

        self._custom, self._core = client.CustomObjectsApi(connection), client.CoreV1Api(connection)
        self._host, self._limit = str(connection.configuration.host), access.timeout_s
        self._namespace, self._name = namespace, name

    def find(self) -> dict[str, Any] | None:
        """It as it is now, None where there is none."""
        read = self._custom.get_namespaced_custom_object
        found: dict[str, Any] | None = self._ask(read, *self._place, self._name, absent=[_NOT_FOUND])
        return found

    def create(self, body: dict[str, Any]) -> None:
        """Make it."""
        if self._ask(self._custom.create_namespaced_custom_object, *self._place, body, absent=[_NOT_FOUND]) is None:
            raise UnavailableError(
                f"{self._host} knows no RayCluster; install the KubeRay operator, 1.7, with its CRDs"
            )

    def replace(self, body: dict[str, Any]) -> bool:
        """Write it; False, and nothing written, where it changed since it was read, or is gone."""
        write = self._custom.replace_namespaced_custom_object
        return self._ask(write, *self._place, self._name, body, absent=[_NOT_FOUND, _CONFLICT]) is not None

    def pods(self) -> list[Pod]:
        """Its pods, without those that are ending."""
        items = json.loads(self._ask(self._list_pods))["items"]
        return [Pod.from_json(item) for item in items if "deletionTimestamp" not in item["metadata"]]

    def _list_pods(self, **options: Any) -> bytes:
        selector = f"ray.io/cluster={self._name}"
        answer = self._core.list_namespaced_pod(
            self._namespace, label_selector=selector, _preload_content=False, **options
        )
        data: bytes = answer.data
        return data

    def owner(self, name: str) -> dict[str, Any]:
        """A reference to the ConfigMap: Kubernetes deletes the RayCluster with it."""
        uid = self._ask(self._core.read_namespaced_config_map, name, self._namespace).metadata.uid
        return {"apiVersion": "v1", "kind": "ConfigMap", "name": name, "uid": uid}

    @property
    def _place(self) -> tuple[str, str, str, str]:
        return (*_KIND, self._namespace, _PLURAL)

    def _ask(self, call: Callable[..., T], *words: Any, absent: Sequence[int] = (), **options: Any) -> Any:
        """The answer; None for an HTTP status of `absent`."""
        import urllib3
        from kubernetes.client.exceptions import ApiException

        try:
            return call(*words, _request_timeout=(self._limit, self._limit), **options)
        except ApiException as error:
            if error.status in absent:
                return None
            said = str(error.body or error.reason)[:500]
            raise UnavailableError(f"{self._host}: {call.__name__}: {error.status}: {said}") from error
        except urllib3.exceptions.HTTPError as error:
            raise UnavailableError(f"{self._host} does not answer: {str(error)[:300]}") from error
