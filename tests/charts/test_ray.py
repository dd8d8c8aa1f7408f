"""What the KubeRay operator asks of its resources and no schema says; the Job that makes the RayCluster.

Rules from KubeRay 1.7's validation (ray-operator/controllers/ray/utils/validation.go), as tried against the operator.
"""

import importlib.util
import re
from collections.abc import Iterator
from typing import Any

import pytest

from charts import renders
from enginesmith.core.errors import InputError
from enginesmith.core.hardware.machine import GENERATIONS
from pipeline.orchestration.kuberay.changes import IMAGE, RAY_VERSION
from tests.charts.kube import EXAMPLES, Object, everything, label, objects_in, sample_objects


def clusters() -> Iterator[tuple[str, Object]]:
    """The spec of every RayCluster, also inside of RayJobs."""
    for name, item in everything():
        if item["kind"] == "RayCluster":
            yield name, item["spec"]
        if item["kind"] == "RayJob":
            yield name, item["spec"]["rayClusterSpec"]


def broken_rules(spec: Object) -> list[str]:
    """The operator's rules that a cluster's spec breaks."""
    groups, head, autoscaler = spec["workerGroupSpecs"], spec["headGroupSpec"], spec.get("autoscalerOptions", {})
    names = [group["groupName"] for group in groups]
    policies = {part["template"]["spec"].get("restartPolicy", "Never") for part in [head, *groups]}
    token = spec.get("authOptions", {}).get("mode") == "token"
    rules = {
        "group names are not unique": len(names) != len(set(names)),
        "autoscaler v2 restarts pods itself": autoscaler.get("version") == "v2" and policies != {"Never"},
        "the autoscaler's container has no security context": autoscaler and "securityContext" not in autoscaler,
        "no token authentication before Ray 2.52": token and version(spec["rayVersion"]) < (2, 52),
        "the head takes work": head["rayStartParams"].get("num-cpus") != "0",
    }
    items = [rule for rule, broken_rule in rules.items() if broken_rule]
    return items + [f"{group['groupName']}: {rule}" for group in groups for rule in broken_by(group)]


def broken_by(group: Object) -> list[str]:
    """The operator's rules that a worker group breaks."""
    is_both = bool({"num-cpus", "num-gpus", "memory", "resources"} & set(group["rayStartParams"]))
    rules = {
        "min > max": group["minReplicas"] > group["maxReplicas"],
        "replicas < min": group["replicas"] < group["minReplicas"],
        "resources and rayStartParams exclude each other": bool(group.get("resources")) and is_both,
        "a label of Ray's own": any(name.startswith("ray.io/") for name in group.get("labels", ())),
    }
    return [rule for rule, broken_rule in rules.items() if broken_rule]


def version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def test_the_operators_rules_are_kept() -> None:
    assert not {name: broken_names for name, spec in clusters() if (broken_names := broken_rules(spec))}
    assert len(list(clusters())) == len(renders.SAMPLES) + 2


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"minReplicas": 9}, "min > max"),
        ({"minReplicas": 1, "replicas": 0}, "replicas < min"),
        ({"resources": {"cpu": "1"}, "rayStartParams": {"num-gpus": "1"}}, "exclude each other"),
        ({"labels": {"ray.io/x": "y"}}, "Ray's own"),
    ],
)
def test_a_broken_rule_is_reported(changed: dict[str, Any], message: str) -> None:
    spec = next(spec for _, spec in clusters())
    wrong_fields = {**spec, "workerGroupSpecs": [{**spec["workerGroupSpecs"][0], **changed}]}
    assert any(message in item for item in broken_rules(wrong_fields))


def test_names_are_short_enough_for_ray() -> None:
    for name, item in everything():
        max_field = {"RayCluster": 53, "RayJob": 47}.get(item["kind"])
        assert max_field is None or len(item["metadata"]["name"]) <= max_field, name


def test_kueue_gets_its_labels() -> None:
    (cluster,) = [item for item in sample_objects("onprem") if item["kind"] == "RayCluster"]
    assert cluster["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "builds"
    assert cluster["metadata"]["annotations"]["kueue.x-k8s.io/elastic-job"] == "true"
    assert len(cluster["spec"]["workerGroupSpecs"]) <= 17
    assert "suspend" not in cluster["spec"], "that is Kueue's to write"
    job = next(item for path in EXAMPLES for item in objects_in(path) if item["kind"] == "RayJob")
    assert job["spec"]["shutdownAfterJobFinishes"] is True


def test_groups_have_the_labels_that_builds_request() -> None:
    """As `steps.engines` asks Ray: enginesmith/sm is a generation's name; a product is one of its products."""
    products_by_sm = {item.sm: item.products for item in GENERATIONS}
    for name, spec in clusters():
        for group in spec["workerGroupSpecs"]:
            labels = group.get("labels", {})
            if group["groupName"] == "cpu":
                continue
            assert labels.keys() <= {"enginesmith/sm", "enginesmith/product"}, name
            assert labels.get("enginesmith/product") in {None, *products_by_sm[labels["enginesmith/sm"]]}, name


def job(name: str) -> Object:
    """The Job that makes the RayCluster, of a sample."""
    return next(item for item in sample_objects(name) if label(item).startswith("Job enginesmith-ray-apply"))


def test_a_job_creates_the_ray_cluster_not_helm() -> None:
    """Helm would send numbers of another time, fight with the autoscaler for them, and wait for what never comes."""
    for name in renders.SAMPLES:
        texts = renders.rendered(renders.sample(name))
        assert not [path for path, text in texts.items() if re.search("^kind: RayCluster", text, re.MULTILINE)], name
        (container,) = job(name)["spec"]["template"]["spec"]["containers"]
        module, file, owner, of, *head = container["command"][2:]
        assert head == ["--head", f"{of}-head-svc:6379"]
        assert (module, owner, of) == ("pipeline.orchestration.kuberay.apply", "--owner", "enginesmith-ray")
        assert importlib.util.find_spec(module)
        folder, _, key = file.rpartition("/")
        assert folder in {mount["mountPath"] for mount in container["volumeMounts"]}
        (config,) = [item for item in sample_objects(name) if label(item) == "ConfigMap enginesmith-ray"]
        assert key in config["data"]


def test_flows_are_registered_after_ray() -> None:
    hooks = {
        item["metadata"]["name"]: item["metadata"]["annotations"]
        for item in sample_objects("aws")
        if item["kind"] == "Job"
    }
    order = {name: int(annotations["helm.sh/hook-weight"]) for name, annotations in hooks.items()}
    assert order["enginesmith-ray-apply"] < order["enginesmith-deploy"]
    assert hooks["enginesmith-ray-apply"]["helm.sh/hook"] == hooks["enginesmith-deploy"]["helm.sh/hook"]


def test_a_refusing_job_is_not_retried() -> None:
    (rule,) = job("aws")["spec"]["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob" and rule["onExitCodes"]["values"] == [InputError.exit_code]


def test_pods_state_their_ray_version_and_image() -> None:
    for name in renders.SAMPLES:
        (cluster,) = [item for item in sample_objects(name) if item["kind"] == "RayCluster"]
        spec = cluster["spec"]
        for part in [spec["headGroupSpec"], *spec["workerGroupSpecs"]]:
            annotations, image = (
                part["template"]["metadata"]["annotations"],
                part["template"]["spec"]["containers"][0]["image"],
            )
            assert (annotations[RAY_VERSION], annotations[IMAGE]) == (spec["rayVersion"], image)


def made_with(**chosen: Any) -> tuple[Object, list[str]]:
    """The RayCluster of a sample with `ray.gcsFaultTolerance`, and the names of the network policies."""
    values = renders.sample("aws")
    docs = renders.objects(renders.rendered({**values, "ray": {**values.get("ray", {}), "gcsFaultTolerance": chosen}}))
    (cluster,) = [item for item in docs if item["kind"] == "RayCluster"]
    return cluster, [item["metadata"]["name"] for item in docs if item["kind"] == "NetworkPolicy"]


def test_redis_stores_the_state_of_the_head_if_enabled() -> None:
    cluster, policies = made_with(redisAddress="rediss://redis.example:6380", existingSecret="redis", username="ray")
    assert cluster["spec"]["gcsFaultToleranceOptions"] == {
        "redisAddress": "rediss://redis.example:6380",
        "redisUsername": {"value": "ray"},
        "redisPassword": {"valueFrom": {"secretKeyRef": {"name": "redis", "key": "redis-password"}}},
        "externalStorageNamespace": f"enginesmith-enginesmith-ray-{cluster['spec']['rayVersion']}",
    }
    assert "enginesmith-ray-head-to-redis" in policies
    reduced_document, policies = made_with()
    assert "gcsFaultToleranceOptions" not in reduced_document["spec"]
    assert "enginesmith-ray-head-to-redis" not in policies
