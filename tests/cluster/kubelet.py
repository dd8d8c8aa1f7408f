"""A kubelet of all nodes that moves pods to Running, Succeeded or Failed as a kubelet would, and runs no container.

A pod that names a Secret, ConfigMap, key or claim that is not there waits, with the reason, as under a real one.
Tests make chosen pods fail, hang, or never start, by a regular expression of their names.
"""

import itertools
import logging
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from time import monotonic

from urllib3.exceptions import HTTPError

from tests.cluster.api import Api, Object, RefusedError, path_of
from tests.cluster.nodes import NODES, node

log = logging.getLogger("cluster")
# Seconds that a pod is pending, and that a Job's pod runs.
PULLS, RUNS = 0.5, 1.0
_POD_KINDS = {
    "secretKeyRef": "secrets", "secretRef": "secrets", "configMapKeyRef": "configmaps", "configMapRef": "configmaps",
}  # fmt: skip


class Kubelet:
    """Plays the nodes of a cluster in a thread of its own, between `start` and `stop`."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kubelet", daemon=True)
        self._since: dict[str, float] = {}  # when a pod, by its uid, came into its phase
        self._waiting: dict[str, str] = {}
        self._addresses = (f"10.244.{high}.{low}" for high in range(256) for low in range(1, 255))
        self._rules: dict[str, list[str]] = {"fail": [], "hang": [], "hold": []}
        self._work: dict[str, Callable[[Object], int]] = {}

    def run(self, component: str, work: Callable[[Object], int]) -> None:
        """Have a component's pods do their work: `work` takes the pod and returns its exit code."""
        self._work[component] = work

    def fail(self, pattern: str) -> None:
        """Pods of Jobs and hooks whose names match end as Failed."""
        self._rules["fail"].append(pattern)

    def hang(self, pattern: str) -> None:
        """Pods of Jobs and hooks whose names match run for ever."""
        self._rules["hang"].append(pattern)

    def hold(self, pattern: str) -> None:
        """Pods whose names match stay Pending on their nodes, as while their image is fetched."""
        self._rules["hold"].append(pattern)

    def release(self) -> None:
        """Forget what was said with `fail`, `hang` and `hold`."""
        for patterns in self._rules.values():
            patterns.clear()

    def start(self) -> None:
        """Make the nodes and a default storage class, and begin."""
        for name, has in NODES.items():
            body, status = node(name, has)
            self._api.create("nodes", "", body)
            self._patch("nodes", "", name, status)
        standard = {"name": "standard", "annotations": {"storageclass.kubernetes.io/is-default-class": "true"}}
        self._api.create("storageclasses", "", {"metadata": standard, "provisioner": "kubelet.test/none"})
        self._thread.start()

    def stop(self) -> None:
        """End; pods stay as they are."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(30)

    def _run(self) -> None:
        while not self._ended.wait(0.3):
            try:
                for pod in self._api.list("pods"):
                    self._step(pod)
                for claim in self._api.list("persistentvolumeclaims"):
                    self._bind(claim)
            except HTTPError:  # the server is gone at the end
                continue
            except Exception:  # else no pod of any later test would start, and nothing said why
                log.exception("kubelet: it goes on")

    def _step(self, pod: Object) -> None:
        try:
            if pod["spec"].get("nodeName") not in NODES:
                return
            if "deletionTimestamp" in pod["metadata"]:
                self._remove(pod)
            elif pod["status"].get("phase", "Pending") == "Pending":
                self._try_to_start(pod)
            elif pod["status"]["phase"] == "Running":
                self._try_to_end(pod)
        except RefusedError as error:
            if error.status not in (404, 409):  # gone, or another one of that name
                log.error("kubelet: %s: %s", pod["metadata"]["name"], error)

    def _try_to_start(self, pod: Object) -> None:
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        if self._matches("hold", name) or monotonic() - self._since.setdefault(uid, monotonic()) < PULLS:
            return
        problem = next(self._problems(pod), "")
        if problem:
            if self._waiting.get(uid) != problem:
                self._waiting[uid] = problem
                log.info("kubelet: %s/%s waits: %s", pod["metadata"]["namespace"], name, problem)
                waits = {"waiting": {"reason": "CreateContainerConfigError", "message": problem}}
                self._tell(pod, "Pending", waits)
            return
        self._since[uid] = monotonic()
        self._tell(pod, "Running", {"running": {"startedAt": now()}})

    def _try_to_end(self, pod: Object) -> None:
        metadata = pod["metadata"]
        name = metadata["name"]
        of_job = any(owner["kind"] == "Job" for owner in metadata.get("ownerReferences", ()))
        is_ends = of_job or "helm.sh/hook" in metadata.get("annotations", {})
        ran = monotonic() - self._since.setdefault(metadata["uid"], monotonic())
        if not is_ends or ran < RUNS or self._matches("hang", name):
            return
        work = self._work.get(metadata.get("labels", {}).get("app.kubernetes.io/component"), lambda _: 0)
        code = 1 if self._matches("fail", name) else work(pod)
        ended_fields = {"exitCode": code, "reason": "Error" if code else "Completed", "finishedAt": now()}
        self._tell(pod, "Failed" if code else "Succeeded", {"terminated": ended_fields})

    def _matches(self, rule: str, name: str) -> bool:
        return any(re.search(pattern, name) for pattern in self._rules[rule])

    def _problems(self, pod: Object) -> Iterator[str]:
        """What a pod names that is not there, in a kubelet's words."""
        namespace, spec = pod["metadata"]["namespace"], pod["spec"]
        for volume in spec.get("volumes", ()):
            if "secret" in volume:
                yield from self._lacks("secrets", namespace, volume["secret"]["secretName"], volume["secret"])
            if "configMap" in volume:
                yield from self._lacks("configmaps", namespace, volume["configMap"]["name"], volume["configMap"])
            if "persistentVolumeClaim" in volume:
                name = volume["persistentVolumeClaim"]["claimName"]
                claim = self._api.find("persistentvolumeclaims", namespace, name)
                if claim is None or claim["status"].get("phase") != "Bound":
                    yield f"claim {name!r} is not bound"
        for container in [*spec.get("initContainers", ()), *spec["containers"]]:
            values = (item.get("valueFrom", {}) for item in container.get("env", ()))
            sources = itertools.chain(container.get("envFrom", ()), values)
            for field, source in ((field, source) for item in sources for field, source in item.items()):
                if field in _POD_KINDS:
                    yield from self._lacks(_POD_KINDS[field], namespace, source["name"], source)

    def _lacks(self, kind: str, namespace: str, name: str, source: Object) -> Iterator[str]:
        if source.get("optional"):
            return
        result = self._api.find(kind, namespace, name)
        if result is None:
            yield f"{kind[:-1]} {name!r} not found"
        elif "key" in source and source["key"] not in result.get("data", {}):
            yield f"{kind[:-1]} {name!r} has no key {source['key']!r}"

    def _tell(self, pod: Object, phase: str, state: Object) -> None:
        """Write a pod's status: all its containers are in `state`."""
        spec, metadata = pod["spec"], pod["metadata"]
        flag = phase == "Running"
        conditions = [
            {"type": kind, "status": "True" if is_so else "False", "lastTransitionTime": now()}
            for kind, is_so in (("Initialized", phase != "Pending"), ("Ready", flag), ("ContainersReady", flag))
        ]
        address = pod["status"].get("podIP") or next(self._addresses)
        ended_fields = {"terminated": {"exitCode": 0, "reason": "Completed", "finishedAt": now()}}
        result = state if phase == "Pending" else ended_fields
        status = {
            "phase": phase,
            "podIP": address,
            "podIPs": [{"ip": address}],
            "startTime": pod["status"].get("startTime") or now(),
            "conditions": conditions,
            "initContainerStatuses": [_container(item, result, True) for item in spec.get("initContainers", ())],
            "containerStatuses": [_container(item, state, flag) for item in spec["containers"]],
        }
        self._patch("pods", metadata["namespace"], metadata["name"], {"status": status})
        log.debug("kubelet: %s/%s is %s on %s", metadata["namespace"], metadata["name"], phase, spec["nodeName"])

    def _patch(self, kind: str, namespace: str, name: str, body: Object) -> None:
        content = "application/strategic-merge-patch+json"
        self._api.ask("PATCH", path_of(kind, namespace, name) + "/status", body, content)

    def _remove(self, pod: Object) -> None:
        metadata = pod["metadata"]
        body = {
            "kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": 0,
            "preconditions": {"uid": metadata["uid"]},
        }  # fmt: skip
        self._api.ask("DELETE", path_of("pods", metadata["namespace"], metadata["name"]), body)

    def _bind(self, claim: Object) -> None:
        """Make the volume that a claim asks for, as a provisioner would."""
        metadata, spec = claim["metadata"], claim["spec"]
        if claim["status"].get("phase") != "Pending" or "volumeName" in spec or not spec.get("storageClassName"):
            return
        volume = {
            "metadata": {"name": f"pv-{metadata['uid']}"},
            "spec": {
                "capacity": {"storage": spec["resources"]["requests"]["storage"]}, "hostPath": {"path": "/nowhere"},
                "accessModes": spec["accessModes"], "storageClassName": spec["storageClassName"],
                "claimRef": {
                    "apiVersion": "v1", "kind": "PersistentVolumeClaim", "namespace": metadata["namespace"],
                    "name": metadata["name"], "uid": metadata["uid"],
                },
            },
        }  # fmt: skip
        with suppress(RefusedError):  # made at the last look
            self._api.create("persistentvolumes", "", volume)


def _container(container: Object, state: Object, ready: bool) -> Object:
    return {
        "name": container["name"], "image": container["image"], "imageID": container["image"], "state": state,
        "ready": ready, "started": "running" in state, "restartCount": 0,
    }  # fmt: skip


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
