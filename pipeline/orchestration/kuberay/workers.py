"""The pods of a RayCluster, and what a change of it would do to those that run."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from enginery.core.documents import find, read
from pipeline.orchestration.kuberay.objects import Object, annotations_of, groups_of

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
    def from_json(cls, item: Object) -> "Pod":
        """A pod of a RayCluster, as the API server has it."""
        labels = find(item, "metadata.labels", dict, {})
        group = labels.get("ray.io/group") if labels.get("ray.io/node-type") == "worker" else None
        ended = find(item, "status.phase", str, "") in ("Succeeded", "Failed")
        return cls(read(item, "metadata.name", str), group, annotations_of(item).get(RAY_VERSION), ended)


def pods_of_other_versions(pods: Sequence[Pod], wanted: Object) -> list[Pod]:
    """Those that run another version of Ray: nodes of two versions refuse each other."""
    version = read(wanted, "spec.rayVersion", str)
    return [pod for pod in pods if pod.version not in (None, version)]


def find_orphans(pods: Sequence[Pod], wanted: Object) -> list[Pod]:
    """Workers of groups that are not wanted.

    Nobody would end them: KubeRay 1.7 looks at the groups of the spec alone, and the autoscaler of Ray 2.60 fails in
    each of its rounds, for all groups, as long as one is there, also one that has ended.
    """
    groups = groups_of(wanted)
    return [pod for pod in pods if pod.group is not None and pod.group not in groups]


def find_unwanted_groups(live: Object, wanted: Object) -> list[str]:
    """Groups of the RayCluster `live` that are not wanted and for which workers are asked."""
    groups = groups_of(wanted)
    return [name for name, group in groups_of(live).items() if name not in groups and replicas_of(group)]


def replicas_of(group: Object) -> int:
    """How many workers are asked for."""
    return find(group, "replicas", int, 0)


def describe_stopped(pods: Sequence[Pod], live: Object, wanted: Object) -> Iterator[str]:
    """What bringing the RayCluster `live` to `wanted` would stop, a line for each worker or group; the head builds
    nothing. A worker that the operator has yet to make for a group that goes counts, too: nobody would end it."""
    old_head = next((pod for pod in pods_of_other_versions(pods, wanted) if pod.group is None), None)
    pods = [pod for pod in pods if pod.group is not None and not pod.ended]
    wanted_version = read(wanted, "spec.rayVersion", str)
    old, without_group = pods_of_other_versions(pods, wanted), find_orphans(pods, wanted)
    for pod in pods:
        if pod in without_group:
            yield f"{pod.name}: its group {pod.group} is not wanted any more"
        elif pod in old:
            yield f"{pod.name}: has Ray {pod.version}, and {wanted_version} is wanted"
        elif old_head:
            version = f"{old_head.version}, and {wanted_version} is wanted"
            yield f"{pod.name}: ends with {old_head.name}, which has Ray {version}"
    running = Counter(pod.group for pod in pods)
    groups = groups_of(live)
    for name in find_unwanted_groups(live, wanted):
        if (asked := replicas_of(groups[name])) > running[name]:
            yield f"group {name}: {asked} workers are asked for, {running[name]} run, and it is not wanted any more"
    fresh = Counter(pod.group for pod in pods if pod not in old)
    for name, group in groups_of(wanted).items():
        if fresh[name] > (most := read(group, "maxReplicas", int)):
            yield f"group {name}: {fresh[name]} run, max is {most}: Ray's autoscaler would stop the others"
