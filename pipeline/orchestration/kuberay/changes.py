"""What to write into a RayCluster (the wanted object, fields that others write, the pods that KubeRay is to end), and
which running workers that would stop.

The Job may delete no pod (docs/decisions/0010). To end a worker, it is named in its group's `workersToDelete`, as Ray's
autoscaler does; to end a head, the RayCluster is suspended until all its pods have ended.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from enginesmith.core.parsing import find, put, read

Object = Mapping[str, object]


def annotations_of(resource: Object) -> dict[str, str]:
    """The annotations by name."""
    return find(resource, "metadata.annotations", dict, {})


def groups_of(cluster: Object) -> dict[str, Object]:
    """The worker groups of a RayCluster by name."""
    group_specs = find(cluster, "spec.workerGroupSpecs", list, [])
    return {read(group, "groupName", str): group for group in group_specs}


# On the pods' templates, the version of Ray: KubeRay leaves a pod as it is when its template changes.
RAY_VERSION = "enginesmith.io/ray-version"
# On them too, the image of Ray's container: a webhook may name it otherwise in the pod.
IMAGE = "enginesmith.io/image"


@dataclass(frozen=True)
class Pod:
    """A pod that is not being deleted.

    group: its worker group, None for the head.  version: Ray's in it, None: unknown.  ended: nothing runs in it.
    image: as its template had it, None: of an older chart.
    """

    name: str
    group: str | None
    version: str | None
    ended: bool = False
    image: str | None = None

    @classmethod
    def from_json(cls, resource: Object) -> "Pod":
        """A pod of a RayCluster, as the API server has it."""
        labels = find(resource, "metadata.labels", dict, {})
        group = labels.get("ray.io/group") if labels.get("ray.io/node-type") == "worker" else None
        has_ended = find(resource, "status.phase", str, "") in ("Succeeded", "Failed")
        version, image = map(annotations_of(resource).get, (RAY_VERSION, IMAGE))
        return cls(read(resource, "metadata.name", str), group, version, has_ended, image)


@dataclass(frozen=True)
class Load:
    """What Ray's workers do. busy: pod's name -> id of the Ray node, of those that run something.  queued: whether
    something waits for a worker."""

    busy: Mapping[str, str] = field(default_factory=dict)
    queued: bool = False


def images_of(cluster: Object) -> dict[str | None, str | None]:
    """The image of each worker group of a RayCluster by its name, and the head's by None."""
    owners = [(None, read(cluster, "spec.headGroupSpec", dict)), *groups_of(cluster).items()]
    return {name: find(owner, "template.metadata.annotations", dict, {}).get(IMAGE) for name, owner in owners}


def outdated_pods(pods: Sequence[Pod], manifest: Object) -> list[Pod]:
    """The pods of the head and of wanted groups whose image is not the wanted one: KubeRay keeps them as they are."""
    images = images_of(manifest)
    return [pod for pod in pods if images.get(pod.group) not in (None, pod.image)]


def idle_pods(old_pods: Sequence[Pod], load: Load) -> list[Pod]:
    """Pods that may end at once: workers that run nothing, and the head (which ends all) if nothing runs or waits."""
    is_idle = not load.busy and not load.queued
    return [pod for pod in old_pods if (is_idle if pod.group is None else pod.name not in load.busy)]


def pods_of_other_versions(pods: Sequence[Pod], manifest: Object) -> list[Pod]:
    """The pods that run another version of Ray: nodes of two versions refuse each other."""
    version = read(manifest, "spec.rayVersion", str)
    return [pod for pod in pods if pod.version not in (None, version)]


def find_orphans(pods: Sequence[Pod], manifest: Object) -> list[Pod]:
    """Workers of groups that are not wanted, which nothing else would end.

    KubeRay 1.7 handles only the groups in the spec, and Ray 2.60's autoscaler fails in every round, for all groups,
    while such a worker exists, even one that has ended.
    """
    groups = groups_of(manifest)
    return [pod for pod in pods if pod.group is not None and pod.group not in groups]


def find_unwanted_groups(live: Object, manifest: Object) -> list[str]:
    """Groups of the RayCluster `live` that are not wanted and that ask for workers."""
    groups = groups_of(manifest)
    return [name for name, group in groups_of(live).items() if name not in groups and replicas_of(group)]


def replicas_of(group: Object) -> int:
    """How many workers a group asks for."""
    return find(group, "replicas", int, 0)


def describe_stopped(pods: Sequence[Pod], live: Object, manifest: Object) -> Iterator[str]:
    """The workers and groups that a change of the RayCluster `live` to `manifest` would stop, one per line; the head
    builds nothing. A worker that the operator has yet to make for a removed group counts too: nothing would end it."""
    old_head = next((pod for pod in pods_of_other_versions(pods, manifest) if pod.group is None), None)
    pods = [pod for pod in pods if pod.group is not None and not pod.ended]
    wanted_version = read(manifest, "spec.rayVersion", str)
    old_pods, orphans = pods_of_other_versions(pods, manifest), find_orphans(pods, manifest)
    for pod in pods:
        if pod in orphans:
            yield f"{pod.name}: its group {pod.group} is removed"
        elif pod in old_pods:
            yield f"{pod.name}: has Ray {pod.version}, not {wanted_version}"
        elif old_head:
            yield f"{pod.name}: ends with {old_head.name}, which has Ray {old_head.version}, not {wanted_version}"
    worker_counts = Counter(pod.group for pod in pods)
    groups = groups_of(live)
    for name in find_unwanted_groups(live, manifest):
        if (replica_count := replicas_of(groups[name])) > worker_counts[name]:
            yield (
                f"group {name}: it is removed; {replica_count} workers were requested, and {worker_counts[name]} run"
            )
    pod_counts = Counter(pod.group for pod in pods if pod not in old_pods)
    for name, group in groups_of(manifest).items():
        if pod_counts[name] > (max_replicas := read(group, "maxReplicas", int)):
            worker_text = f"{pod_counts[name]} workers run, and max is {max_replicas}"
            yield f"group {name}: {worker_text}: Ray's autoscaler would stop the others"


# On the RayCluster, with the value "true": this one change may stop workers. It is taken away with that change.
CONSENT = "enginesmith.io/may-stop-workers"
# On the RayCluster, with the value "true": the Job suspended it, and resumes it.
SUSPENDED = "enginesmith.io/suspended-by-ray-apply"
QUEUE = "kueue.x-k8s.io/queue-name"
_REDIS_FINALIZER = "ray.io/gcs-ft-redis-cleanup-finalizer"


def plan_change(
    live: Object, manifest: Object, pods: Sequence[Pod], owner: Object, idle: Sequence[Pod] = ()
) -> tuple[Object, list[str]]:
    """The RayCluster to write in place of `live`, and the names of the pods and groups that KubeRay then ends; as long
    as there are some, plan and write again. owner: a reference to the object that it is deleted with.  idle: pods that
    are to end although their group is wanted.  manifest: the wanted RayCluster."""
    resource = merge(live, manifest, owner)
    unwanted_pods = list(dict.fromkeys([*pods_of_other_versions(pods, manifest), *find_orphans(pods, manifest), *idle]))
    groups = find_unwanted_groups(live, manifest)
    if not unwanted_pods and not groups:
        return resource, []
    # The consent stays until all have ended: a Job that is killed half way is followed by one that may go on.
    consent_annotations = {name: text for name, text in annotations_of(live).items() if name == CONSENT}
    old_names = [*(pod.name for pod in unwanted_pods), *(f"group {name}" for name in groups)]
    return _annotate(_end(resource, live, unwanted_pods), consent_annotations), old_names


def merge(live: Object, manifest: Object, owner: Object) -> Object:
    """The wanted object with what others write: the autoscaler the number of workers, Kueue whether it is suspended."""
    live_metadata = {name: value for name, value in read(live, "metadata", dict).items() if name != "managedFields"}
    annotations = {**annotations_of(live), **annotations_of(manifest)}
    for name in (CONSENT, SUSPENDED):
        annotations.pop(name, None)
    uid, owners = read(owner, "uid", str), find(live_metadata, "ownerReferences", list, [])
    other_owners = [reference for reference in owners if read(reference, "uid", str) != uid]
    metadata = {**live_metadata, **read(manifest, "metadata", dict), "annotations": annotations}
    metadata["ownerReferences"] = [*other_owners, owner]
    if not find(manifest, "spec.gcsFaultToleranceOptions", dict, None):
        # KubeRay 1.7 takes its finalizer away only where there is a Redis: the RayCluster and its pods would stay.
        metadata["finalizers"] = [name for name in find(metadata, "finalizers", list, []) if name != _REDIS_FINALIZER]
    live_groups = groups_of(live)
    groups = [_keep_scale(group, live_groups.get(name, {})) for name, group in groups_of(manifest).items()]
    spec = {**read(manifest, "spec", dict), **_suspension(live, manifest), "workerGroupSpecs": groups}
    return {**manifest, "metadata": metadata, "spec": spec}


def _keep_scale(group: Object, live: Object) -> Object:
    strategy = {name: live[name] for name in ("scaleStrategy",) if name in live}
    return {**group, **strategy, "replicas": max(read(group, "minReplicas", int), replicas_of(live))}


def _suspension(live: Object, manifest: Object) -> dict[str, bool]:
    """`suspend` as others wrote it: Kueue where the RayCluster is in a queue, else a person. A RayCluster that leaves
    Kueue is resumed: KubeRay 1.7 resumes it if the field is false, not if it is absent."""
    is_suspended = find(live, "spec.suspend", bool, None)
    if is_suspended is None:
        return {}
    was_queued, is_queued = _queue(live), _queue(manifest)
    ends_suspension = not is_queued and (was_queued or SUSPENDED in annotations_of(live))
    return {"suspend": is_suspended and not ends_suspension}


def _end(resource: Object, live: Object, pods: Sequence[Pod]) -> Object:
    """`resource` with the pods to end; groups that it lacks are kept without workers until their pods have ended."""
    if any(pod.group is None for pod in pods):
        return _annotate(put(resource, "spec.suspend", True), {SUSPENDED: "true"})
    group_pods: dict[str, list[str]] = defaultdict(list, {name: [] for name in find_unwanted_groups(live, resource)})
    for pod in pods:
        group_pods[str(pod.group)].append(pod.name)
    groups, live_groups = groups_of(resource), groups_of(live)
    for name, pod_names in group_pods.items():
        group = groups.get(name) or _without_workers(name, live_groups.get(name), resource)
        listed_names = find(group, "scaleStrategy.workersToDelete", list, [])
        groups[name] = {**group, "scaleStrategy": {"workersToDelete": sorted({*listed_names, *pod_names})}}
    return put(resource, "spec.workerGroupSpecs", list(groups.values()))


def _without_workers(name: str, live: Object | None, cluster: Object) -> Object:
    """A group that asks for no workers. live: None for one that is not there, which gets the head's template."""
    group = live or {"rayStartParams": {}, "template": read(cluster, "spec.headGroupSpec.template", object)}
    return {**group, "groupName": name, "minReplicas": 0, "maxReplicas": 0, "replicas": 0}


def describe_suspension(written: Object) -> str | None:
    """Why a RayCluster is suspended and what resumes it; None for one that is not."""
    if not find(written, "spec.suspend", bool, False):
        return None
    if queue := _queue(written):
        return f"suspended: no pod of it runs until Kueue admits it to queue {queue}"
    name, namespace = (read(written, f"metadata.{field_name}", str) for field_name in ("name", "namespace"))
    return (
        "suspended by hand: no pod of it runs, and no build on Ray; to resume it:\n"
        f"  kubectl patch raycluster {name} --namespace {namespace} --type merge --patch "
        '\'{"spec": {"suspend": false}}\''
    )


def _annotate(resource: Object, more: Mapping[str, str]) -> Object:
    return put(resource, "metadata.annotations", {**annotations_of(resource), **more})


def _queue(resource: Object) -> str | None:
    return find(resource, "metadata.labels", dict, {}).get(QUEUE)
