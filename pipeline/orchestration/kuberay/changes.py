"""What is written into a RayCluster: what is wanted, with what others write, and the pods that KubeRay is to end.

The Job may delete no pod (docs/decisions/0010). A worker is named in its group's `workersToDelete`, as Ray's autoscaler
names it; a head is ended, with all workers, by suspending the RayCluster until its pods end.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.orchestration.kuberay.workers import Pod, left_over, orphans, stale

# On the RayCluster, with the value "true": this one change may stop workers. It is taken away with that change.
CONSENT = "enginery.io/may-stop-workers"
# On the RayCluster, with the value "true": the Job suspended it, and resumes it.
SUSPENDED = "enginery.io/suspended-by-ray-apply"
QUEUE = "kueue.x-k8s.io/queue-name"

Object = dict[str, Any]


def planned(live: Object, wanted: Object, pods: Sequence[Pod], owner: Object) -> tuple[Object, list[str]]:
    """What to write in place of the RayCluster `live`, and the pods and groups that KubeRay then ends. As long as there
    are some, it is to be planned and written again. owner: a reference to whom it is deleted with."""
    changed = merged(live, wanted, owner)
    unwanted = list(dict.fromkeys([*stale(pods, wanted), *orphans(pods, wanted)]))
    if not unwanted and not left_over(live, wanted):
        return changed, []
    # A Job that is killed half way is followed by one that may go on.
    kept = {name: text for name, text in _annotations(live).items() if name == CONSENT}
    return _annotated(_ending(changed, live, unwanted), kept), [
        *(pod.name for pod in unwanted),
        *(f"group {name}" for name in left_over(live, wanted)),
    ]


def merged(live: Object, wanted: Object, owner: Object) -> Object:
    """What is wanted, with what others write: the autoscaler the number of workers, Kueue whether it is suspended."""
    metadata, spec = wanted["metadata"], wanted["spec"]
    kept = {name: value for name, value in live["metadata"].items() if name != "managedFields"}
    annotations = {**_annotations(live), **_annotations(wanted)}
    for name in (CONSENT, SUSPENDED):
        annotations.pop(name, None)
    owners = [item for item in kept.get("ownerReferences", ()) if item["uid"] != owner["uid"]]
    found = {**kept, **metadata, "annotations": annotations, "ownerReferences": [*owners, owner]}
    known = _groups(live)
    groups = [_scaled(group, known.get(group["groupName"], {})) for group in spec["workerGroupSpecs"]]
    return {**wanted, "metadata": found, "spec": {**spec, **_suspension(live, wanted), "workerGroupSpecs": groups}}


def _scaled(group: Object, live: Mapping[str, Any]) -> Object:
    scale = {name: live[name] for name in ("replicas", "scaleStrategy") if name in live}
    return {**group, **scale, "replicas": max(group["minReplicas"], scale.get("replicas", 0))}


def _suspension(live: Object, wanted: Object) -> dict[str, bool]:
    """`suspend` as others wrote it: Kueue, for who is in a queue, else a person. Who leaves Kueue is suspended by
    nobody any more; KubeRay 1.7 resumes where it is false, and not where it is absent."""
    if "suspend" not in live["spec"]:
        return {}
    was_queued, queued = _queue(live), _queue(wanted)
    over = not queued and (was_queued or SUSPENDED in _annotations(live))
    return {"suspend": bool(live["spec"]["suspend"]) and not over}


def _ending(changed: Object, live: Object, pods: Sequence[Pod]) -> Object:
    """`changed`, in which the pods end, and groups that it has not are kept without workers until theirs have."""
    spec = changed["spec"]
    if any(pod.group is None for pod in pods):
        return _annotated({**changed, "spec": {**spec, "suspend": True}}, {SUSPENDED: "true"})
    names: dict[str, list[str]] = defaultdict(list, {name: [] for name in left_over(live, changed)})
    for pod in pods:
        names[str(pod.group)].append(pod.name)
    groups, known = _groups(changed), _groups(live)
    for name, going in names.items():
        group = groups.get(name) or _without_workers(name, known.get(name), spec)
        before = group.get("scaleStrategy", {}).get("workersToDelete", ())
        groups[name] = {**group, "scaleStrategy": {"workersToDelete": sorted({*before, *going})}}
    return {**changed, "spec": {**spec, "workerGroupSpecs": list(groups.values())}}


def _without_workers(name: str, live: Mapping[str, Any] | None, spec: Mapping[str, Any]) -> Object:
    """A group of which no pod is made; the head's template stands in for that of one that is not there."""
    group = live or {"rayStartParams": {}, "template": spec["headGroupSpec"]["template"]}
    return {**group, "groupName": name, "minReplicas": 0, "maxReplicas": 0, "replicas": 0}


def suspended(written: Object) -> str | None:
    """What resumes a RayCluster that is suspended, so that no pod of it runs; None for one that is not."""
    if not written["spec"].get("suspend"):
        return None
    if queue := _queue(written):
        return f"suspended: no pod of it runs until Kueue admits it to queue {queue}"
    name, namespace = written["metadata"]["name"], written["metadata"]["namespace"]
    return (
        "suspended by hand: no pod of it runs, and no build on Ray; to resume it:\n"
        f"  kubectl patch raycluster {name} --namespace {namespace} --type merge --patch "
        '\'{"spec": {"suspend": false}}\''
    )


def _annotations(item: Object) -> dict[str, str]:
    return item["metadata"].get("annotations") or {}


def _annotated(item: Object, more: Mapping[str, str]) -> Object:
    return {**item, "metadata": {**item["metadata"], "annotations": {**_annotations(item), **more}}}


def _queue(item: Object) -> str | None:
    return (item["metadata"].get("labels") or {}).get(QUEUE)


def _groups(item: Object) -> dict[str, Object]:
    return {group["groupName"]: group for group in item["spec"].get("workerGroupSpecs", ())}
