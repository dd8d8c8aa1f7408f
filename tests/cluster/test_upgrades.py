import logging

from tests.cluster import flow_runs
from tests.cluster.api import Object, wait_for
from tests.cluster.conftest import PODS, Cluster
from tests.cluster.release import Release, Values, sample

log = logging.getLogger("cluster")


def uids(pods: dict[str, Object]) -> dict[str, str]:
    """Of all pods, but those of Jobs that are over."""
    return {name: pod["metadata"]["uid"] for name, pod in pods.items() if pod["status"].get("phase") != "Succeeded"}


def with_metrics(memory: str) -> Values:
    """The sample values with another memory limit of the metrics exporter: its Deployment alone changes."""
    return {**sample(), "metrics": {"resources": {"limits": {"memory": memory}}}}


def changed_pods(before: dict[str, str], after: dict[str, str]) -> set[str]:
    """The names, without what Kubernetes appends, of pods that are not in both."""
    return {name.rsplit("-", 2)[0] for name, _ in before.items() ^ after.items()}


def test_an_upgrade_under_load_keeps_the_autoscalers_workers_and_the_flow_runs(cluster, namespace, helm, kubelet):
    helm.install(sample())
    cluster.running(namespace, PODS)
    kubelet.hang("^compile-model")
    run = flow_runs.start(cluster, namespace, "compile-model/enginesmith")
    cluster.autoscale(namespace, "l4", 2)
    uids_before = uids(cluster.running(namespace, PODS + 2))
    log.info("%d pods run, with a second l4 worker and flow run %s", len(uids_before), run)
    helm.upgrade(sample())
    assert uids(cluster.pods(namespace)) == uids_before
    groups = cluster.api.get("rayclusters", namespace, "enginesmith-ray")["spec"]["workerGroupSpecs"]
    replicas = {group["groupName"]: group["replicas"] for group in groups}
    log.info("replicas after the upgrade: %s", replicas)
    assert replicas["l4"] == 2
    helm.upgrade(with_metrics("640Mi"))

    def replaced() -> set[str]:
        return changed_pods(uids(cluster.running(namespace, PODS + 2)), uids_before)

    assert wait_for("a new metrics pod", replaced) == {"enginesmith-metrics"}
    log.info("another value of the metrics exporter replaced its pod and no other")


def test_a_rollback_reverts_the_upgrade(cluster: Cluster, namespace: str, helm: Release) -> None:
    helm.install(sample())
    first_uids = uids(cluster.running(namespace, PODS))
    helm.upgrade(with_metrics("640Mi"))
    cluster.running(namespace, PODS)
    helm.rollback(1)

    def limits() -> set[str]:
        """Of one pod, and for a moment of the one before it, too."""
        pods = cluster.pods(namespace, "app.kubernetes.io/component=metrics").values()
        return {pod["spec"]["containers"][0]["resources"]["limits"]["memory"] for pod in pods}

    wait_for("the metrics pod of before", lambda: limits() == {"512Mi"})
    changed_names = changed_pods(first_uids, uids(cluster.running(namespace, PODS)))
    log.info("replaced by upgrade and rollback: %s", ", ".join(sorted(changed_names)) or "nothing")
    assert changed_names <= {"enginesmith-metrics"}
    assert helm.status() == "deployed"
