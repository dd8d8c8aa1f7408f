from pathlib import Path

import pytest
import yaml

from tests.cluster.conftest import PODS, Cluster
from tests.cluster.release import Release, sample

SERVER, WORKER = "enginesmith-prefect-server", "enginesmith-prefect-worker"


def test_one_server_becomes_two_and_one_again_and_scaled_workers_stay(cluster: Cluster, namespace: str, helm: Release):
    """What Kubernetes itself fills in for a strategy, a server-side apply leaves, and it is refused with the other."""
    for name, key in {"postgresql": "connection-url", "redis": "url"}.items():
        cluster.api.create("secrets", namespace, {"metadata": {"name": name}, "stringData": {key: "x"}})
    shared_fields = {name: {"existingSecret": name} for name in ("postgresql", "redis")}
    worker = {"autoscaling": {"enabled": True, "max": 5}}
    helm.install({**sample(), "prefect": {"worker": worker}})
    cluster.running(namespace, PODS)
    assert cluster.api.get("horizontalpodautoscalers", namespace, WORKER)["spec"]["maxReplicas"] == 5
    cluster.api.patch("deployments", namespace, WORKER, {"spec": {"replicas": 3}}, "kube-controller-manager")
    for count, strategy in ((2, "RollingUpdate"), (1, "Recreate")):
        helm.upgrade({**sample(), "prefect": {"server": {"replicas": count, **shared_fields}, "worker": worker}})
        cluster.running(namespace, PODS + 1 + count)
        assert cluster.api.get("deployments", namespace, SERVER)["spec"]["strategy"]["type"] == strategy
        assert cluster.api.get("deployments", namespace, WORKER)["spec"]["replicas"] == 3


def test_objects_of_other_operators_are_accepted_if_their_kinds_exist(cluster, namespace, helm):
    """With names that YAML reads as something else, too."""
    operators = yaml.safe_load((Path(__file__).parent / "operators.yaml").read_text())
    if names := [name for name in operators["crds"] if not cluster.api.find("customresourcedefinitions", "", name)]:
        pytest.skip(f"crds/ in KUBE_ASSETS lacks {', '.join(names)}")
    cluster.api.create("secrets", namespace, {"metadata": {"name": "1e3"}, "stringData": {"True": "a:b"}})
    helm.install({**sample(), **operators["values"]})
    pods = cluster.running(namespace, PODS + 1)
    assert {pod["metadata"]["labels"]["on"] for pod in pods.values()} == {"off"}
    helm.upgrade({**sample(), **operators["values"]})
