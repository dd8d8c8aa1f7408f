import logging
import time

import helm_python
import pytest

from tests.cluster.api import Object, wait_for
from tests.cluster.conftest import PODS, Cluster
from tests.cluster.release import Release, Values, sample

log = logging.getLogger("cluster")
CONSENT = {"metadata": {"annotations": {"enginesmith.io/may-stop-workers": "true"}}}


def with_max(group: str, most: int) -> Values:
    """The sample values with another `max` of a group: the RayCluster alone changes."""
    groups = [{**item, **({"max": most} if item["name"] == group else {})} for item in sample()["gpuGroups"]]
    return {**sample(), "gpuGroups": groups}


def without(group: str) -> Values:
    return {**sample(), "gpuGroups": [item for item in sample()["gpuGroups"] if item["name"] != group]}


def live(cluster: Cluster, namespace: str) -> dict[str, Object]:
    """The worker groups of the RayCluster, by name."""
    groups = cluster.api.get("rayclusters", namespace, "enginesmith-ray")["spec"]["workerGroupSpecs"]
    return {group["groupName"]: group for group in groups}


def workers(cluster: Cluster, namespace: str, group: str = "") -> set[str]:
    """Names of Ray's pods that are not ending, of one group or all with the head."""
    result = cluster.pods(namespace, "ray.io/cluster=enginesmith-ray" + (f",ray.io/group={group}" if group else ""))
    return {name for name, pod in result.items() if "deletionTimestamp" not in pod["metadata"]}


@pytest.fixture
def busy(cluster: Cluster, namespace: str, helm: Release) -> str:
    """A namespace with an installation that the autoscaler has scaled: two workers of group l4 run."""
    helm.install(sample())
    cluster.running(namespace, PODS)
    cluster.autoscale(namespace, "l4", 2)
    cluster.running(namespace, PODS + 1)
    return namespace


def test_upgrades_and_rollbacks_keep_the_autoscalers_workers(cluster, busy, helm):
    workers_before = workers(cluster, busy)
    options: list[Values] = [{}, {"wait": "watcher"}, {"wait": "watcher", "rollback_on_failure": True}]
    for max_index, inputs in enumerate(options, 3):
        helm.upgrade(with_max("l4", max_index), **inputs)
        assert helm.status() == "deployed"
        assert (live(cluster, busy)["l4"]["maxReplicas"], live(cluster, busy)["l4"]["replicas"]) == (max_index, 2)
        cluster.autoscale(busy, "a100", max_index % 2 + 1)
    helm.rollback(1, wait="watcher")
    assert (live(cluster, busy)["l4"]["maxReplicas"], live(cluster, busy)["l4"]["replicas"]) == (2, 2)
    assert workers_before <= workers(cluster, busy)
    log.info("no worker was stopped by %d upgrades and a rollback", len(options))


def test_a_group_with_running_workers_is_deleted_only_with_consent(cluster, busy, helm):
    workers_before = workers(cluster, busy)
    with pytest.raises(helm_python.HelmError, match="enginesmith-ray-apply"):
        helm.upgrade(without("l4"))
    with pytest.raises(helm_python.HelmError, match="enginesmith-ray-apply"):
        helm.upgrade(with_max("l4", 1))
    assert workers(cluster, busy) == workers_before
    assert live(cluster, busy)["l4"]["maxReplicas"] == 2
    cluster.api.patch("rayclusters", busy, "enginesmith-ray", CONSENT)
    helm.upgrade(without("l4"))
    assert "l4" not in live(cluster, busy)
    wait_for("the workers of the group to go", lambda: not workers(cluster, busy, "l4"))
    current_object = cluster.api.get("rayclusters", busy, "enginesmith-ray")["metadata"].get("annotations", {})
    assert "enginesmith.io/may-stop-workers" not in current_object, "it is for one change"
    assert helm.status() == "deployed"


def test_another_version_of_ray_waits_for_running_workers(cluster: Cluster, busy: str, helm: Release) -> None:
    newer_fields = {**sample(), "ray": {**sample()["ray"], "version": "2.61.0"}}
    head = workers(cluster, busy, "headgroup")
    with pytest.raises(helm_python.HelmError, match="enginesmith-ray-apply"):
        helm.upgrade(newer_fields)
    assert cluster.api.get("rayclusters", busy, "enginesmith-ray")["spec"]["rayVersion"] == "2.60.0"
    cluster.api.patch("rayclusters", busy, "enginesmith-ray", CONSENT)
    workers_before = workers(cluster, busy)
    helm.upgrade(newer_fields)

    def renewed() -> bool:
        pods = cluster.pods(busy, "ray.io/cluster=enginesmith-ray").values()
        versions = {pod["metadata"]["annotations"]["enginesmith.io/ray-version"] for pod in pods}
        return versions == {"2.61.0"} and not workers_before & workers(cluster, busy)

    wait_for("Ray's pods to have the new version", renewed)
    assert head.isdisjoint(workers(cluster, busy, "headgroup"))
    log.info("head and %d workers have Ray 2.61.0", len(workers(cluster, busy)) - 1)


def test_kuberay_ends_a_leftover_worker_of_a_deleted_group(cluster: Cluster, busy: str, helm: Release) -> None:
    """Whoever took the group out of the RayCluster by hand left it, with its GPU."""
    names = [item["groupName"] for item in live(cluster, busy).values()]
    gone_fields = [{"op": "remove", "path": f"/spec/workerGroupSpecs/{names.index('t4')}"}]
    cluster.api.patch("rayclusters", busy, "enginesmith-ray", gone_fields)
    (orphan,) = workers(cluster, busy, "t4")
    with pytest.raises(helm_python.HelmError, match="enginesmith-ray-apply"):
        helm.upgrade(without("t4"))
    assert workers(cluster, busy, "t4") == {orphan}
    cluster.api.patch("rayclusters", busy, "enginesmith-ray", CONSENT)
    other_workers = workers(cluster, busy) - {orphan}
    helm.upgrade(without("t4"))
    assert workers(cluster, busy) == other_workers
    assert "t4" not in live(cluster, busy)
    log.info("KubeRay ended %s, and nothing else", orphan)


def test_new_images_leave_no_pod_of_the_old_ones(cluster: Cluster, busy: str, helm: Release) -> None:
    """No head listens here, so nothing builds. What was busy at the upgrade is ended by the CronJob."""
    digests = {name: f"sha256:{digit * 64}" for name, digit in (("control", "2"), ("worker", "3"))}
    images = {name: {**sample()["images"][name], "digest": digest} for name, digest in digests.items()}
    start_s = time.monotonic()
    helm.upgrade({**sample(), "images": images})

    def renewed() -> bool:
        pods = [pod for pod in cluster.pods(busy).values() if pod["status"].get("phase") != "Succeeded"]
        return all(pod["spec"]["containers"][0]["image"][-64:] in ("2" * 64, "3" * 64) for pod in pods)

    wait_for("all pods to have the new images", lambda: workers(cluster, busy, "headgroup") and renewed())
    log.info("no pod of the old images %.0f s after the upgrade began", time.monotonic() - start_s)
    (head,) = workers(cluster, busy, "headgroup")
    image = {"enginesmith.io/image": "registry.example/busy-until-now"}  # a webhook may rename the container's own
    cluster.api.patch("pods", busy, head, {"metadata": {"annotations": image}})
    spec = cluster.api.get("cronjobs", busy, "enginesmith-ray-finish")["spec"]["jobTemplate"]["spec"]
    cluster.api.create("jobs", busy, {"metadata": {"name": "now"}, "spec": spec})
    wait_for("the CronJob to replace the head", lambda: workers(cluster, busy, "headgroup") - {head} and renewed())
    cluster.running(busy, PODS + 1)


def test_a_name_or_size_that_would_destroy_installed_objects_is_refused(cluster, busy, helm):
    workers_before = workers(cluster, busy)
    for changed_fields, output in (
        ({"nameOverride": "other"}, "enginesmith-ray would be deleted with its builds"),
        ({"prefect": {"server": {"persistence": {"size": "1Gi"}}}}, "cannot shrink to 1Gi"),
        ({"prefect": {"server": {"persistence": {"storageClass": "fast"}}}}, "cannot become"),
    ):
        with pytest.raises(helm_python.HelmError, match=output):
            helm.upgrade({**sample(), **changed_fields})
    assert workers(cluster, busy) == workers_before and helm.status() == "deployed"


def test_a_cluster_that_leaves_kueue_is_resumed(cluster: Cluster, namespace: str, helm: Release) -> None:
    helm.install({**sample(), "kueue": {"queueName": "gpus"}})
    cluster.running(namespace, PODS)
    cluster.api.patch("rayclusters", namespace, "enginesmith-ray", {"spec": {"suspend": True}})  # as Kueue does
    wait_for("KubeRay to suspend it", lambda: not workers(cluster, namespace))
    helm.upgrade({**sample(), "kueue": {"queueName": "gpus"}})
    assert not workers(cluster, namespace), "it is Kueue that resumes"
    helm.upgrade(sample())
    cluster.running(namespace, PODS)


def test_uninstall_deletes_the_ray_cluster(cluster: Cluster, busy: str, helm: Release) -> None:
    helm.uninstall()
    wait_for("the RayCluster to go", lambda: not cluster.api.list("rayclusters", busy))
    wait_for("its pods to go", lambda: not cluster.pods(busy, "ray.io/cluster=enginesmith-ray"))


def test_a_lost_head_is_recreated_beside_its_workers_with_its_redis(cluster, namespace, helm):
    secret = {"metadata": {"name": "redis"}, "stringData": {"redis-password": "x"}}
    cluster.api.create("secrets", namespace, secret)
    redis_values = {"redisAddress": "redis.example:6379", "existingSecret": "redis"}
    helm.install({**sample(), "ray": {**sample()["ray"], "gcsFaultTolerance": redis_values}})
    cluster.running(namespace, PODS)
    workers_before, (head,) = workers(cluster, namespace), workers(cluster, namespace, "headgroup")
    cluster.api.delete("pods", namespace, head)
    (new,) = wait_for("another head", lambda: workers(cluster, namespace, "headgroup") - {head})
    cluster.running(namespace, PODS)
    assert workers(cluster, namespace) - {new} == workers_before - {head}
    container = cluster.api.get("pods", namespace, new)["spec"]["containers"][0]
    environment = {item["name"]: item for item in container["env"]}
    assert environment["RAY_REDIS_ADDRESS"]["value"] == "redis.example:6379"
    assert environment["REDIS_PASSWORD"]["valueFrom"]["secretKeyRef"]["name"] == "redis"
    # With the RayCluster goes what is in Redis, by a pod of KubeRay's with the head's account.
    emptied_labels: list[str] = []

    def empty(pod: Object) -> int:
        emptied_labels.append(pod["metadata"]["labels"]["ray.io/node-type"])
        return 0

    cluster.kubelet.run("ray-head", empty)
    helm.uninstall()
    wait_for("the RayCluster to go", lambda: not cluster.api.list("rayclusters", namespace))
    assert emptied_labels == ["redis-cleanup"], "KubeRay waits five minutes where it cannot make that pod, and gives up"
    wait_for("the head's account to go", lambda: not cluster.api.find("serviceaccounts", namespace, "enginesmith-ray"))
