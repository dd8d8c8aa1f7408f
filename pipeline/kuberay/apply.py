"""Bringing a RayCluster to what is wanted: `python -m pipeline.kuberay.apply FILE --owner CONFIGMAP`.

Helm does not apply it itself. Ray's autoscaler writes `replicas` into the same list that Helm would send, and the
numbers that an upgrade or a rollback sends are those of another time; here they are read and written in one step that
fails when the object changed in between. And KubeRay 1.7 does not write `status.observedGeneration` when nothing else
of the status changed, for which `helm --wait` waits.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import yaml

from builders.errors import EngineryError, InputError, UnavailableError
from pipeline.fleet.cluster import Access
from pipeline.kuberay.kubernetes import Kubernetes
from pipeline.kuberay.workers import Pod, orphans, stale, stopped

# On the RayCluster, with the value "true": this one change may stop workers. It is taken away with that change.
CONSENT = "enginery.io/may-stop-workers"
_QUEUE = "kueue.x-k8s.io/queue-name"
_ROUNDS = 10

Object = dict[str, Any]


class Cluster(Protocol):
    """One RayCluster of a namespace, its pods, and the ConfigMap that it is read from."""

    def find(self) -> Object | None:
        """It as it is now, None where there is none."""

    def create(self, body: Object) -> None:
        """Make it."""

    def replace(self, body: Object) -> bool:
        """Write it; False, and nothing written, where it changed since it was read."""

    def pods(self) -> list[Pod]:
        """Its pods, without those that are ending."""

    def delete(self, pod: Pod) -> None:
        """Delete one of its pods."""

    def owner(self, name: str) -> Object:
        """A reference to the ConfigMap: Kubernetes deletes the RayCluster with it."""


def apply(cluster: Cluster, wanted: Object, owner: str) -> str:
    """Make or change the RayCluster; what was done.

    Raises InputError, having changed nothing, where workers that run would be stopped; UnavailableError where it is
    being deleted or changes all the time.
    """
    name, reference = wanted["metadata"]["name"], cluster.owner(owner)
    gone: list[str] = []
    for _ in range(_ROUNDS):
        live = cluster.find()
        if live is None:
            cluster.create(merged(None, wanted, reference))
            return f"{name}: created"
        if "deletionTimestamp" in live["metadata"]:
            raise UnavailableError(f"{name} is being deleted; run again when it is gone")
        pods = cluster.pods()
        _check(live, wanted, pods)
        unwanted = {*stale(pods, wanted), *orphans(pods, wanted)}
        changed = merged(live, wanted, reference)
        if unwanted and CONSENT in live["metadata"].get("annotations", {}):
            # Until they are gone, so that a Job that is killed half way is followed by one that may go on.
            changed["metadata"]["annotations"][CONSENT] = live["metadata"]["annotations"][CONSENT]
        if not cluster.replace(changed):
            continue
        if not unwanted:
            return f"{name}: up to date" + (f"; deleted {', '.join(gone)}" if gone else "")
        # KubeRay makes the head, and workers as they are needed.
        for pod in (pod for pod in pods if pod in unwanted):
            cluster.delete(pod)
            gone.append(pod.name)
    raise UnavailableError(f"{name} changes faster than it is written; run again")


def merged(live: Object | None, wanted: Object, owner: Object) -> Object:
    """What is wanted, with what others write: the autoscaler the number of workers, Kueue whether it is suspended."""
    metadata, spec = dict(wanted["metadata"]), dict(wanted["spec"])
    if live is None:
        return {**wanted, "metadata": {**metadata, "ownerReferences": [owner]}}
    kept = {name: value for name, value in live["metadata"].items() if name != "managedFields"}
    annotations = {**kept.get("annotations", {}), **metadata.get("annotations", {})}
    annotations.pop(CONSENT, None)
    owners = [item for item in kept.get("ownerReferences", ()) if item["uid"] != owner["uid"]]
    found = {**kept, **metadata, "annotations": annotations, "ownerReferences": [*owners, owner]}
    groups = {group["groupName"]: group for group in live["spec"].get("workerGroupSpecs", ())}
    spec["workerGroupSpecs"] = [
        _scaled(group, groups.get(group["groupName"], {})) for group in spec["workerGroupSpecs"]
    ]
    # Who leaves Kueue is suspended by nobody any more; who was never in a queue was by hand.
    if "suspend" in live["spec"] and (_QUEUE in metadata.get("labels", {}) or _QUEUE not in kept.get("labels", {})):
        spec["suspend"] = live["spec"]["suspend"]
    return {**wanted, "metadata": found, "spec": spec}


def _scaled(group: Object, live: Mapping[str, Any]) -> Object:
    scale = {name: live[name] for name in ("replicas", "scaleStrategy") if name in live}
    return {**group, **scale, "replicas": max(group["minReplicas"], scale.get("replicas", 0))}


def _check(live: Object, wanted: Object, pods: Sequence[Pod]) -> None:
    lines = list(stopped(pods, live, wanted))
    if not lines or live["metadata"].get("annotations", {}).get(CONSENT) == "true":
        return
    name, namespace = wanted["metadata"]["name"], wanted["metadata"]["namespace"]
    raise InputError(
        "\n".join(
            [
                f"{name} is left as it is: workers may be building, and this would stop them:",
                *(f"  {line}" for line in lines),
                "Wait until they are idle and gone (a group keeps its `min`: set it to 0 first), or stop them:",
                f"  kubectl annotate raycluster {name} --namespace {namespace} {CONSENT}=true",
                "Then run the same upgrade again.",
            ]
        )
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Read a RayCluster from a file and apply it; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="YAML of the RayCluster")
    parser.add_argument("--owner", required=True, help="ConfigMap of its namespace, with which it is deleted")
    given = parser.parse_args(arguments)
    try:
        wanted = yaml.safe_load(given.file.read_text())
        metadata = wanted["metadata"]
        cluster = Kubernetes(Access(), metadata["namespace"], metadata["name"])
        print(apply(cluster, wanted, given.owner))
    except EngineryError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
