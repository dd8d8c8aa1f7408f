"""Bringing a RayCluster to what is wanted: `python -m pipeline.orchestration.kuberay.apply FILE --owner CONFIGMAP`.

Helm does not apply it itself. Ray's autoscaler writes `replicas` into the same list that Helm would send, and the
numbers that an upgrade or a rollback sends are those of another time; here they are read and written in one step that
fails when the object changed in between. And KubeRay 1.7 does not write `status.observedGeneration` when nothing else
of the status changed, for which `helm --wait` waits.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import yaml

from enginery.core.errors import EngineryError, InputError, UnavailableError
from pipeline.fleet.cluster import Access
from pipeline.orchestration.kuberay.changes import CONSENT, Object, planned, suspended
from pipeline.orchestration.kuberay.kubernetes import Kubernetes
from pipeline.orchestration.kuberay.workers import Pod, stopped

# How often it is looked at, with a second in between: KubeRay takes milliseconds, and half a minute when it starts.
_ROUNDS = 120


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

    def owner(self, name: str) -> Object:
        """A reference to the ConfigMap: Kubernetes deletes the RayCluster with it."""


def apply(cluster: Cluster, wanted: Object, owner: str, wait: Callable[[float], None] = time.sleep) -> str:
    """Make or change the RayCluster, and have KubeRay end pods of another version and of no group; what was done.

    Raises InputError, having changed nothing, where workers that run would be stopped; UnavailableError where it is
    being deleted or changes all the time, or where KubeRay does not end what it is told to.
    """
    name, reference = wanted["metadata"]["name"], cluster.owner(owner)
    ended: list[str] = []
    problem = ""
    for _ in range(_ROUNDS):
        live = cluster.find()
        if live is None:
            cluster.create(_owned(wanted, reference))
            return f"{name}: created"
        if "deletionTimestamp" in live["metadata"]:
            raise UnavailableError(f"{name} is being deleted; run again when it is gone")
        pods = cluster.pods()
        _check(live, wanted, pods)
        changed, going = planned(live, wanted, pods, reference)
        if not cluster.replace(changed):
            problem = f"{name} changes faster than it is written; run again"
        elif going:
            ended += [item for item in going if item not in ended]
            problem = f"{name}: KubeRay does not end {', '.join(going)}; see that its operator runs, and run again"
        else:
            return f"{name}: {suspended(changed) or 'up to date'}" + (f"; ended {', '.join(ended)}" if ended else "")
        wait(1)
    raise UnavailableError(problem)


def _owned(wanted: Object, owner: Object) -> Object:
    return {**wanted, "metadata": {**wanted["metadata"], "ownerReferences": [owner]}}


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
