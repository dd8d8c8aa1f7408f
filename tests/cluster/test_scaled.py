"""Several Prefect servers and one again, workers whose number others set, objects of other operators, odd names."""

import logging

import pytest

from tests.cluster.conftest import PODS, Cluster
from tests.cluster.release import Release, Values, sample

log = logging.getLogger("cluster")
SERVER, WORKER = "enginesmith-prefect-server", "enginesmith-prefect-worker"
# The chart makes objects of these kinds; KUBE_ASSETS need not have them.
KINDS = (
    "scaledobjects.keda.sh", "httproutes.gateway.networking.k8s.io", "podmonitors.monitoring.coreos.com",
    "prometheusrules.monitoring.coreos.com", "servicemonitors.monitoring.coreos.com",
)  # fmt: skip


def with_prefect(**prefect: Values) -> Values:
    return {**sample(), "prefect": prefect}


def make_secrets(cluster: Cluster, namespace: str, keys: dict[str, str]) -> None:
    """A Secret with one key of each of these names."""
    for name, key in keys.items():
        cluster.api.create("secrets", namespace, {"metadata": {"name": name}, "stringData": {key: "a:b"}})


def test_one_server_becomes_two_and_one_again(cluster: Cluster, namespace: str, helm: Release) -> None:
    """What Kubernetes itself fills in for a strategy, a server-side apply leaves, and it is refused with the other."""
    make_secrets(cluster, namespace, {"postgresql": "connection-url", "redis": "url"})
    shared = {name: {"existingSecret": name} for name in ("postgresql", "redis")}
    one, two = (with_prefect(server={"replicas": count, **shared}) for count in (1, 2))

    def strategy(count: int) -> str:
        cluster.running(namespace, PODS - 1 + count)
        spec = cluster.api.get("deployments", namespace, SERVER)["spec"]
        log.info("%d servers: strategy %s", spec["replicas"], spec["strategy"])
        return str(spec["strategy"]["type"])

    helm.install(sample())
    assert strategy(1) == "Recreate"
    helm.upgrade(two)
    assert strategy(2) == "RollingUpdate"
    helm.upgrade(one)
    assert strategy(1) == "Recreate"
    helm.rollback(2)
    assert strategy(2) == "RollingUpdate"
    helm.rollback(1)
    assert strategy(1) == "Recreate"


def test_an_upgrade_leaves_the_number_of_workers_to_who_scales_them(cluster, namespace, helm):
    values = with_prefect(worker={"autoscaling": {"enabled": True, "max": 5}})
    helm.install(values)
    cluster.running(namespace, PODS)
    scaler = cluster.api.get("horizontalpodautoscalers", namespace, WORKER)["spec"]
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (1, 5)
    cluster.api.patch("deployments", namespace, WORKER, {"spec": {"replicas": 3}}, "kube-controller-manager")
    before = cluster.running(namespace, PODS + 2)
    helm.upgrade(values)
    assert cluster.running(namespace, PODS + 2).keys() == before.keys()


def test_names_that_yaml_reads_as_something_else_are_names(cluster: Cluster, namespace: str) -> None:
    """The kubelet looks for the Secrets and their keys."""
    make_secrets(cluster, namespace, {"1e3": "True"})
    cluster.api.create("secrets", namespace, {"metadata": {"name": "123"}, "stringData": {
        "AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "key"}})  # fmt: skip
    values = with_prefect(server={"auth": {"existingSecret": "1e3", "key": "True"}}, workPool="null")
    values["registry"]["existingSecret"] = "123"
    values |= {"nameOverride": "0x1f", "commonLabels": {"on": "off"}, "commonAnnotations": {"yes": "2026-01-01"}}
    release = Release(cluster.plane, namespace, "e")
    try:
        release.install(values)
        pods = cluster.running(namespace, PODS)
    finally:
        release.remove()
    assert {pod["metadata"]["labels"]["on"] for pod in pods.values()} == {"off"}


def test_objects_of_other_operators_are_taken_where_their_kinds_are(cluster, namespace, helm):
    if absent := [name for name in KINDS if not cluster.api.find("customresourcedefinitions", "", name)]:
        pytest.skip(f"crds/ in KUBE_ASSETS lacks {', '.join(absent)}")
    make_secrets(cluster, namespace, {"auth": "auth-string"})
    route = {"enabled": True, "parentRefs": [{"name": "public", "namespace": "gateways"}]}
    server = {"auth": {"existingSecret": "auth"}, "uiApiUrl": "https://prefect.example/api", "httpRoute": route}
    keda = {"enabled": True, "keda": {"prometheus": "http://prometheus.monitoring:9090"}}
    values = with_prefect(server=server, worker={"autoscaling": keda})
    values["metrics"] = {"serviceMonitor": {"enabled": True}, "rules": {"enabled": True}}
    values["ray"]["podMonitor"] = {"enabled": True}
    values["networkPolicy"] = {"prefect": {"from": [{"namespaceSelector": {"matchLabels": {"router": "yes"}}}]}}
    values["networkPolicy"]["metrics"] = values["networkPolicy"]["prefect"]
    helm.install(values)
    cluster.running(namespace, PODS)
    helm.upgrade(values)
