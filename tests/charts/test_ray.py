"""What the KubeRay operator asks of its resources and no schema says; what an upgrade does to workers that run.

Rules from KubeRay 1.7's validation (ray-operator/controllers/ray/utils/validation.go), as tried against the operator.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import celpy
import helm_python as helm
import pytest
import yaml

from builders.targets import GENERATIONS
from charts import renders
from tests.charts.api_server import api_server
from tests.charts.kube import EXAMPLES, Object, everything, objects_in, sample_objects

RESERVED = {"num-cpus", "num-gpus", "memory", "resources"}


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
    found = [rule for rule, broken in rules.items() if broken]
    return found + [f"{group['groupName']}: {rule}" for group in groups for rule in broken_by(group)]


def broken_by(group: Object) -> list[str]:
    """The operator's rules that a worker group breaks."""
    both = bool(RESERVED & set(group["rayStartParams"]))
    rules = {
        "min > max": group["minReplicas"] > group["maxReplicas"],
        "replicas < min": group["replicas"] < group["minReplicas"],
        "resources and rayStartParams exclude each other": bool(group.get("resources")) and both,
        "a label of Ray's own": any(name.startswith("ray.io/") for name in group.get("labels", ())),
    }
    return [rule for rule, broken in rules.items() if broken]


def version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def test_the_operators_rules_hold() -> None:
    found = {name: broken for name, spec in clusters() if (broken := broken_rules(spec))}
    assert not found
    assert len(list(clusters())) == len(renders.SAMPLES) + 2


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"minReplicas": 9}, "min > max"),
        ({"minReplicas": 1, "replicas": 0}, "replicas < min"),
        ({"resources": {"cpu": "1"}, "rayStartParams": {"num-gpus": "1"}}, "exclude each other"),
        ({"labels": {"ray.io/x": "y"}}, "Ray's own"),
    ],
)
def test_a_broken_rule_is_found(changed: dict[str, Any], said: str) -> None:
    spec = next(spec for _, spec in clusters())
    wrong = {**spec, "workerGroupSpecs": [{**spec["workerGroupSpecs"][0], **changed}]}
    assert any(said in item for item in broken_rules(wrong))


def test_names_are_as_short_as_ray_wants_them() -> None:
    for name, item in everything():
        most = {"RayCluster": 53, "RayJob": 47}.get(item["kind"])
        assert most is None or len(item["metadata"]["name"]) <= most, name


def test_kueue_is_told_what_it_needs() -> None:
    (cluster,) = [item for item in sample_objects("onprem") if item["kind"] == "RayCluster"]
    assert cluster["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "builds"
    assert cluster["metadata"]["annotations"]["kueue.x-k8s.io/elastic-job"] == "true"
    assert len(cluster["spec"]["workerGroupSpecs"]) <= 17
    assert "suspend" not in cluster["spec"], "that is Kueue's to write"
    job = next(item for path in EXAMPLES for item in objects_in(path) if item["kind"] == "RayJob")
    assert job["spec"]["shutdownAfterJobFinishes"] is True


def test_groups_have_the_labels_that_builds_ask_for() -> None:
    """As `pipeline.steps.engines` asks Ray: enginery/sm is a generation's name; a product is one of its products."""
    known = {item.sm: item.products for item in GENERATIONS}
    for name, spec in clusters():
        for group in spec["workerGroupSpecs"]:
            labels = group.get("labels", {})
            if group["groupName"] == "cpu":
                continue
            assert labels.keys() <= {"enginery/sm", "enginery/product"}, name
            assert labels.get("enginery/product") in {None, *known[labels["enginery/sm"]]}, name


def test_a_slice_of_a_gpu_is_counted_as_one() -> None:
    (cluster,) = [item for item in sample_objects("onprem") if item["kind"] == "RayCluster"]
    groups = {group["groupName"]: group for group in cluster["spec"]["workerGroupSpecs"]}
    assert groups["a100-mig"]["rayStartParams"] == {"num-gpus": "1"}
    assert groups["h100"]["rayStartParams"] == {}


LIVE = {
    "apiVersion": "ray.io/v1",
    "kind": "RayCluster",
    "metadata": {"name": "enginery-ray", "namespace": "enginery"},
    "spec": {
        "workerGroupSpecs": [
            {"groupName": "h100", "replicas": 2, "scaleStrategy": {"workersToDelete": ["h100-worker-x"]}},
            {"groupName": "l40s", "replicas": 0, "scaleStrategy": {}},
            {"groupName": "gone", "replicas": 3},
        ]
    },
}


def upgraded(folder: Path, live: Object | None) -> dict[str, Object]:
    """The worker groups of an upgrade, with what is in the cluster now."""
    path = "/apis/ray.io/v1/namespaces/enginery/rayclusters/enginery-ray"
    values = renders.sample("onprem")
    with api_server({path: live} if live else {}, folder) as kubeconfig:
        config = helm.Config(kubeconfig_path=str(kubeconfig), namespace="enginery")
        with config, helm.Chart.load(str(renders.CHART)) as chart:
            texts = config.render(chart, values, name="enginery", namespace="enginery", is_upgrade=True, revision=2)
    cluster = yaml.safe_load(texts["enginery/templates/ray/cluster.yaml"])
    return {group["groupName"]: group for group in cluster["spec"]["workerGroupSpecs"]}


@pytest.mark.server
def test_an_upgrade_asks_for_the_workers_that_run(tmp_path: Path) -> None:
    groups = upgraded(tmp_path, LIVE)
    assert groups["h100"]["replicas"] == 2
    assert groups["h100"]["scaleStrategy"] == {"workersToDelete": ["h100-worker-x"]}
    assert groups["l40s"]["replicas"] == 1, "min is 1"
    assert groups["l40s"]["scaleStrategy"] == {}, "nothing there and nothing in it differ"
    assert groups["b200"]["replicas"] == 0, "a group that is new"
    assert "scaleStrategy" not in groups["b200"]
    assert "gone" not in groups


@pytest.mark.server
def test_an_installation_asks_for_the_least(tmp_path: Path) -> None:
    groups = upgraded(tmp_path, None)
    assert {name: group["replicas"] for name, group in groups.items()} == {
        "cpu": 0, "l40s": 1, "a100-mig": 0, "h100": 0, "b200": 0
    }  # fmt: skip


def groups_of(*groups: tuple[str, int, int]) -> Object:
    """A RayCluster with worker groups: (name, replicas, most)."""
    specs = [{"groupName": name, "replicas": replicas, "maxReplicas": most} for name, replicas, most in groups]
    return {"metadata": {"name": "enginery-ray"}, "spec": {"workerGroupSpecs": specs}}


@cache
def guard() -> dict[str, Any]:
    """The guard's rule and its conditions, by name, as programs in CEL."""
    (policy,) = [item for item in sample_objects("aws") if item["kind"] == "ValidatingAdmissionPolicy"]
    (rule,) = policy["spec"]["validations"]
    assert "helm upgrade" in rule["message"]
    (resources,) = policy["spec"]["matchConstraints"]["resourceRules"]
    assert resources["resources"] == ["rayclusters"], "not its status, which the operator writes"
    texts = {item["name"]: item["expression"] for item in policy["spec"]["matchConditions"]}
    environment = celpy.Environment()
    return {
        name: environment.program(environment.compile(text))
        for name, text in {**texts, "rule": rule["expression"]}.items()
    }


def holds(name: str, **objects: Object) -> bool:
    return bool(guard()[name].evaluate({word: celpy.json_to_cel(value) for word, value in objects.items()}))


@pytest.mark.parametrize(
    ("before", "after", "allowed"),
    [
        ([("a", 2, 4)], [("a", 2, 4)], True),
        ([("a", 2, 4)], [("a", 3, 4)], True),
        ([("a", 2, 4)], [("a", 0, 4)], False),
        ([("a", 2, 4)], [("a", 2, 1)], False),  # KubeRay would stop the second
        ([("a", 0, 4)], [], True),
        ([("a", 1, 4)], [], False),
        ([("a", 1, 4)], [("b", 1, 4)], False),
        ([("a", 1, 4)], [("b", 0, 4), ("a", 1, 4)], True),
        ([], [("a", 0, 4)], True),
    ],
)
def test_the_guard_refuses_what_would_stop_workers(before: list[Any], after: list[Any], allowed: bool) -> None:
    assert holds("rule", oldObject=groups_of(*before), object=groups_of(*after)) is allowed


def test_the_guard_is_about_this_cluster_and_not_its_autoscaler_nor_who_says_so() -> None:
    asked = {"metadata": {"name": "enginery-ray", "annotations": {"enginery.io/may-stop-workers": "true"}}}
    assert holds("this-cluster", object=groups_of())
    assert not holds("this-cluster", object={"metadata": {"name": "other-ray"}})
    assert holds("not-asked-for", object=groups_of())
    assert not holds("not-asked-for", object=asked)
    autoscaler = "system:serviceaccount:enginery:enginery-ray-head"
    assert holds("not-the-autoscaler", request={"userInfo": {"username": "somebody"}})
    assert not holds("not-the-autoscaler", request={"userInfo": {"username": autoscaler}})
    (binding,) = [item for item in sample_objects("aws") if item["kind"] == "ValidatingAdmissionPolicyBinding"]
    assert binding["spec"]["matchResources"]["namespaceSelector"]["matchLabels"] == {
        "kubernetes.io/metadata.name": "enginery"
    }
