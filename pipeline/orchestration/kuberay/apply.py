"""Update a RayCluster to a given state: `python -m pipeline.orchestration.kuberay.apply FILE --owner CONFIGMAP`.

Helm does not apply it itself. Ray's autoscaler writes `replicas` into the same list that Helm would send, and the
numbers in an upgrade or a rollback are outdated; here they are read and written in one step that fails if the object
changed in between. And KubeRay 1.7 does not write `status.observedGeneration` when nothing else of the status changed,
for which `helm --wait` waits.
"""

import argparse
import json
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import yaml

from enginesmith.core.errors import EnginesmithError, InputError, UnavailableError
from enginesmith.core.parsing import find, put, read
from pipeline.fleet.inventory import Access, connection_to
from pipeline.orchestration.kuberay.changes import (
    CONSENT,
    SUSPENDED,
    Load,
    Object,
    Pod,
    annotations_of,
    describe_stopped,
    describe_suspension,
    idle_pods,
    images_of,
    outdated_pods,
    plan_change,
)

_KIND = ("ray.io", "v1")
_PLURAL = "rayclusters"
# HTTP's statuses, as Kubernetes uses them.
_NOT_FOUND, _CONFLICT = 404, 409
# How often the RayCluster is read, once a second: KubeRay takes milliseconds, and half a minute when it starts.
_ROUNDS = 120
_ANSWER_S = 5.0
# Until Ray ends what a drained worker still runs: longer than any unit.
_DRAINED_S = 86_400.0
T = TypeVar("T")


class _RefusedError(UnavailableError):
    """A refusal of the API server, with its HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Kubernetes:
    """The RayCluster `name` of a namespace, through the official client of Kubernetes.

    Methods raise UnavailableError for what the API server refuses, or when it does not answer within the access's
    `timeout_s`.
    """

    def __init__(self, access: Access, namespace: str, name: str) -> None:
        connection = connection_to(access)
        from kubernetes import client

        self._custom, self._core = client.CustomObjectsApi(connection), client.CoreV1Api(connection)
        self._host, self._limit = str(connection.configuration.host), access.timeout_s
        self._namespace, self._name = namespace, name

    def find(self) -> Object | None:
        """The RayCluster as the API server has it now; None where there is none."""
        read_object = self._custom.get_namespaced_custom_object
        live_object: Object | None = self._ask_if_there((_NOT_FOUND,), read_object, *self._place, self._name)
        return live_object

    def create(self, body: Object) -> None:
        """Create the RayCluster. Raises UnavailableError for a cluster without the KubeRay operator."""
        create_object = self._custom.create_namespaced_custom_object
        if self._ask_if_there((_NOT_FOUND,), create_object, *self._place, body) is None:
            raise UnavailableError(
                f"{self._host} has no resource RayCluster; install the KubeRay operator, 1.7, with its CRDs"
            )

    def replace(self, body: Object) -> bool:
        """Write a new RayCluster in its place. False, and nothing is written, where it changed since it was read, or is
        gone."""
        replace_object = self._custom.replace_namespaced_custom_object
        return self._ask_if_there((_NOT_FOUND, _CONFLICT), replace_object, *self._place, self._name, body) is not None

    def pods(self) -> list[Pod]:
        """The pods of the RayCluster that are not being deleted."""
        items = read(json.loads(self._ask(self._list_pods)), "items", list)
        return [Pod.from_json(pod) for pod in items if not find(pod, "metadata.deletionTimestamp", object, None)]

    def _list_pods(self, **options: object) -> bytes:
        pod_selector = {"label_selector": f"ray.io/cluster={self._name}", "_preload_content": False}
        data: bytes = self._core.list_namespaced_pod(self._namespace, **pod_selector, **options).data
        return data

    def owner(self, name: str) -> Object:
        """A reference to the ConfigMap: Kubernetes deletes the RayCluster with it."""
        uid = self._ask(self._core.read_namespaced_config_map, name, self._namespace).metadata.uid
        return {"apiVersion": "v1", "kind": "ConfigMap", "name": name, "uid": uid}

    @property
    def _place(self) -> tuple[str, str, str, str]:
        return (*_KIND, self._namespace, _PLURAL)

    def _ask_if_there(self, absent_statuses: Sequence[int], call: Callable[..., T], *words: object) -> T | None:
        """The answer; None for an HTTP status of `absent_statuses`."""
        try:
            return self._ask(call, *words)
        except _RefusedError as error:
            if error.status in absent_statuses:
                return None
            raise

    def _ask(self, call: Callable[..., T], *words: object) -> T:
        import urllib3
        from kubernetes.client.exceptions import ApiException

        try:
            return call(*words, _request_timeout=(self._limit, self._limit))
        except ApiException as error:
            error_text = str(error.body or error.reason)[:500]
            raise _RefusedError(f"{self._host}: {call.__name__}: {error.status}: {error_text}", error.status) from error
        except urllib3.exceptions.HTTPError as error:
            raise UnavailableError(f"{self._host} does not answer: {str(error)[:300]}") from error


class RayHead:
    """Ray's head, and its view of the workers. address: host and port of its GCS."""

    def __init__(self, address: str) -> None:
        self._address = address

    def load(self) -> Load | None:
        """What the workers do; nothing where no head listens, since nothing builds without one. None: not known."""
        host, _, port = self._address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), _ANSWER_S).close()
        except (socket.gaierror, ConnectionRefusedError):
            return Load()
        except OSError:
            return None
        from ray.autoscaler.v2.sdk import get_cluster_status

        try:
            status = get_cluster_status(self._address)
        except Exception:  # Ray raises plain ones
            return None
        # KubeRay names a Ray node's instance by its pod.
        busy_pods = {node.instance_id: str(node.node_id) for node in status.active_nodes}
        demands = status.resource_demands
        return Load(busy_pods, bool(demands.ray_task_actor_demand or demands.placement_group_demand))

    def drain(self, nodes: Sequence[str]) -> None:
        """Have these nodes take no more work, and end after what they run."""
        import ray._raylet as raylet
        from ray.core.generated.autoscaler_pb2 import DrainNodeReason

        reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        end_ms = int((time.time() + _DRAINED_S) * 1000)
        client = vars(raylet)["GcsClient"](address=self._address)
        for node in nodes:
            client.drain_node(node, reason, "its image is another one", end_ms)


def apply(
    cluster: Kubernetes, manifest: Object, owner: str, head: RayHead, wait: Callable[[float], None] = time.sleep
) -> str:
    """Make or change the RayCluster; returns the changes and the old pods that are left, as text. KubeRay ends pods of
    another Ray version, of an unwanted group, and idle ones of another image; busy ones of another image end after
    their unit.

    owner: the ConfigMap whose deletion deletes the RayCluster. Raises InputError if the next change would stop running
    workers without consent: nothing is changed then, unless workers came after a first change; UnavailableError if the
    RayCluster is being deleted or keeps changing, or if KubeRay does not end a pod or group as told."""
    name, reference = read(manifest, "metadata.name", str), cluster.owner(owner)
    ended_names: list[str] = []
    problem = ""
    for _ in range(_ROUNDS):
        live_cluster = cluster.find()
        if live_cluster is None:
            cluster.create(put(manifest, "metadata.ownerReferences", [reference]))
            return f"{name}: created"
        if find(live_cluster, "metadata.deletionTimestamp", object, None):
            raise UnavailableError(f"{name} is being deleted; run again when it is gone")
        pods = cluster.pods()
        _check(live_cluster, manifest, pods)
        old_pods = outdated_pods(pods, manifest)
        load = head.load() if old_pods and SUSPENDED not in annotations_of(live_cluster) else Load()
        free_pods = idle_pods(old_pods, load) if load else []
        resource, old_names = plan_change(live_cluster, manifest, pods, reference, free_pods)
        if not cluster.replace(resource):
            problem = f"{name} keeps changing while it is written; run again"
        elif old_names:
            ended_names += [old_name for old_name in old_names if old_name not in ended_names]
            problem = (
                f"{name}: KubeRay does not end {', '.join(old_names)}; check that its operator runs, and run again"
            )
        else:
            status_text = describe_suspension(resource) or "up to date"
            status_text += f"; ended {', '.join(ended_names)}" if ended_names else ""
            return f"{name}: {status_text}{_leave(head, old_pods, load)}"
        wait(1)
    raise UnavailableError(problem)


def finish(cluster: Kubernetes, manifest: Object, owner: str, head: RayHead) -> str:
    """Continue `apply` for the pods with another image that it left, which may be idle now.

    Nothing is changed while the RayCluster has other images than the wanted ones. Returns and raises as `apply`.
    """
    live_cluster = cluster.find()
    if live_cluster is None or images_of(live_cluster) != images_of(manifest):
        return "nothing to finish: the RayCluster does not have the images of this release"
    if SUSPENDED not in annotations_of(live_cluster) and not outdated_pods(cluster.pods(), manifest):
        return "nothing to finish: no pod has another image"
    return apply(cluster, manifest, owner, head)


def _leave(head: RayHead, old_pods: Sequence[Pod], load: Load | None) -> str:
    """The pods that keep another image, and when they end, as text; '' for none. Busy workers are drained."""
    if not old_pods:
        return ""
    names = ", ".join(pod.name for pod in old_pods)
    if load is None:
        return f"; pods with another image stay, because Ray's head does not say what they do: {names}; run again"
    head.drain([load.busy[pod.name] for pod in old_pods if pod.name in load.busy])
    message = f"; pods with another image stay, because builds run or wait: {names}; workers end after their unit"
    return message + ("; the head stays until nothing builds" if any(pod.group is None for pod in old_pods) else "")


def _check(live: Object, manifest: Object, pods: Sequence[Pod]) -> None:
    """Raise InputError where the change would stop workers and the RayCluster has no consent to that."""
    lines = list(describe_stopped(pods, live, manifest))
    if not lines or annotations_of(live).get(CONSENT) == "true":
        return
    name, namespace = (read(manifest, f"metadata.{field_name}", str) for field_name in ("name", "namespace"))
    stopped_lines = "\n".join(f"  {line}" for line in lines)
    raise InputError(
        f"{name} is left as it is: workers may be building, and this would stop them:\n{stopped_lines}\n"
        "Wait until Ray has removed the idle workers (a group keeps its `min` workers: set it to 0 first), or allow "
        "this stop:\n"
        f"  kubectl annotate raycluster {name} --namespace {namespace} {CONSENT}=true\n"
        "Then run the same upgrade again."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Read a RayCluster from a file and apply it; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="YAML of the RayCluster")
    parser.add_argument("--owner", required=True, help="ConfigMap of its namespace, with which it is deleted")
    parser.add_argument("--head", required=True, help="HOST:PORT of Ray's GCS, which knows which workers are busy")
    parser.add_argument("--finish", action="store_true", help="only end what an upgrade left, once it is idle")
    options = parser.parse_args(arguments)
    try:
        cluster_object = yaml.safe_load(options.file.read_text())
        cluster = Kubernetes(
            Access(), *(read(cluster_object, f"metadata.{field_name}", str) for field_name in ("namespace", "name"))
        )
        print((finish if options.finish else apply)(cluster, cluster_object, options.owner, RayHead(options.head)))
    except EnginesmithError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
