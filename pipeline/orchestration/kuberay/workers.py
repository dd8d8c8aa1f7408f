"""The pods of a RayCluster, and what a change of it would do to those that run."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# On the pods' templates: KubeRay leaves pods alone whose template changed, so each says which Ray runs in it.
RAY_VERSION = "enginery.io/ray-version"


@dataclass(frozen=True)
class Pod:
    """A pod that is not being deleted.

    group: its worker group, None for the head.  version: Ray's in it, None: unknown.  ended: nothing runs in it.
    """

    name: str
    group: str | None
    version: str | None
    ended: bool = False

    @classmethod
    def from_json(cls, item: Mapping[str, Any]) -> "Pod":
        """A pod of a RayCluster, as the API server has it."""
        metadata = item["metadata"]
        labels = metadata.get("labels") or {}
        group = labels.get("ray.io/group") if labels.get("ray.io/node-type") == "worker" else None
        ended = (item.get("status") or {}).get("phase") in ("Succeeded", "Failed")
        return cls(metadata["name"], group, (metadata.get("annotations") or {}).get(RAY_VERSION), ended)


def stale(pods: Sequence[Pod], wanted: Mapping[str, Any]) -> list[Pod]:
    """Those that run another version of Ray: nodes of two versions refuse each other."""
    version = wanted["spec"]["rayVersion"]
    return [pod for pod in pods if pod.version not in (None, version)]


def orphans(pods: Sequence[Pod], wanted: Mapping[str, Any]) -> list[Pod]:
    """Workers of groups that are not wanted.

    Nobody would end them: KubeRay 1.7 looks at the groups of the spec alone, and the autoscaler of Ray 2.60 fails in
    each of its rounds, for all groups, as long as one is there, also one that has ended.
    """
    groups = {group["groupName"] for group in wanted["spec"]["workerGroupSpecs"]}
    return [pod for pod in pods if pod.group is not None and pod.group not in groups]


def left_over(live: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Groups of the RayCluster `live` that are not wanted and for which workers are asked."""
    groups = {group["groupName"] for group in wanted["spec"]["workerGroupSpecs"]}
    found = live["spec"].get("workerGroupSpecs", ())
    return [group["groupName"] for group in found if group["groupName"] not in groups and group.get("replicas", 0)]


def stopped(pods: Sequence[Pod], live: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[str]:
    """What bringing the RayCluster `live` to `wanted` would stop, a line for each worker or group; the head builds
    nothing. A worker that the operator has yet to make for a group that goes counts, too: nobody would end it."""
    old_head = next((pod for pod in stale(pods, wanted) if pod.group is None), None)
    pods = [pod for pod in pods if pod.group is not None and not pod.ended]
    old, without_group = stale(pods, wanted), orphans(pods, wanted)
    for pod in pods:
        if pod in without_group:
            yield f"{pod.name}: its group {pod.group} is not wanted any more"
        elif pod in old:
            yield f"{pod.name}: has Ray {pod.version}, and {wanted['spec']['rayVersion']} is wanted"
        elif old_head:
            version = f"{old_head.version}, and {wanted['spec']['rayVersion']} is wanted"
            yield f"{pod.name}: ends with {old_head.name}, which has Ray {version}"
    running = Counter(pod.group for pod in pods)
    asks = {group["groupName"]: group.get("replicas", 0) for group in live["spec"].get("workerGroupSpecs", ())}
    for name in left_over(live, wanted):
        if (asked := asks[name]) > running[name]:
            yield f"group {name}: {asked} workers are asked for, {running[name]} run, and it is not wanted any more"
    fresh = Counter(pod.group for pod in pods if pod not in old)
    for group in wanted["spec"]["workerGroupSpecs"]:
        name, most = group["groupName"], group["maxReplicas"]
        if fresh[name] > most:
            yield f"group {name}: {fresh[name]} run, max is {most}: Ray's autoscaler would stop the others"
