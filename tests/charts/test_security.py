import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from charts import renders
from tests.charts.kube import EXAMPLES, Object, containers, everything, label, pod_specs, policies, sample_objects
from tests.charts.restricted import violations

PINNED = re.compile(r"^[a-z0-9][a-z0-9./:-]*@sha256:[0-9a-f]{64}$")
# Those that talk to the Kubernetes API.
WITH_TOKEN = {
    "Deployment enginesmith-prefect-worker", "RayCluster enginesmith-ray", "Job enginesmith-ray-apply",
    "CronJob enginesmith-ray-finish", "Deployment enginesmith-metrics",
}  # fmt: skip


def test_every_pod_is_restricted_with_a_read_only_root_file_system() -> None:
    checked_number = 0
    for name, item in everything():
        for spec in pod_specs(item):
            assert not violations(spec), name
            for container in containers(spec):
                assert container["securityContext"]["readOnlyRootFilesystem"] is True, (name, container["name"])
            checked_number += 1
    assert checked_number > 40


def test_the_autoscaler_that_the_operator_adds_is_restricted_too() -> None:
    (cluster,) = [item for item in sample_objects("aws") if item["kind"] == "RayCluster"]
    options = cluster["spec"]["autoscalerOptions"]
    pod = cluster["spec"]["headGroupSpec"]["template"]["spec"]
    assert not violations({**pod, "containers": [{"name": "autoscaler", **options}]})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"hostNetwork": True}, "hostNetwork"),
        ({"volumes": [{"name": "v", "hostPath": {"path": "/"}}]}, "hostPath"),
        ({"securityContext": {}}, "seccomp"),
        ({"containers": [{"name": "c", "securityContext": {"privileged": True}}]}, "privileged"),
        ({"initContainers": [{"name": "i", "securityContext": {"runAsUser": 0}}]}, "i: runs as root"),
    ],
)
def test_an_unrestricted_pod_is_found(changed: Object, message: str) -> None:
    spec = next(spec for item in sample_objects("minimal") for spec in pod_specs(item))
    stripped_fields = [{**item, "securityContext": {"allowPrivilegeEscalation": False}} for item in spec["containers"]]
    assert any(message in item for item in violations({**spec, "containers": stripped_fields, **changed}))


def test_every_image_is_named_by_its_digest() -> None:
    for name, item in everything():
        for spec in pod_specs(item):
            for container in containers(spec):
                assert PINNED.match(container["image"]), (name, container["image"])
            for volume in spec.get("volumes", ()):
                assert "image" not in volume or PINNED.match(volume["image"]["reference"]), name
        options = item.get("spec", {}).get("autoscalerOptions", {}) if item["kind"] == "RayCluster" else {}
        assert not options or PINNED.match(options["image"]), name


def test_only_pods_that_use_the_kubernetes_api_have_a_token() -> None:
    for name, item in everything():
        if item["kind"] == "ServiceAccount":
            assert item["automountServiceAccountToken"] is False, name
        for index, spec in enumerate(pod_specs(item)):
            # A Job that is no hook has a digest at its end.
            expected = re.sub("-[0-9a-f]{10}$", "", label(item)) in WITH_TOKEN and index == 0
            assert spec.get("automountServiceAccountToken") is expected, name


def test_every_used_service_account_exists() -> None:
    for sample in renders.SAMPLES:
        names = {item["metadata"]["name"] for item in sample_objects(sample) if item["kind"] == "ServiceAccount"}
        for item in sample_objects(sample):
            hook = item["metadata"].get("annotations", {}).get("helm.sh/hook", "")
            for index, spec in enumerate(pod_specs(item)):
                if item["kind"] == "RayCluster" and index == 0:
                    # KubeRay makes the head's, which stays as long as the RayCluster.
                    assert "serviceAccountName" not in spec
                elif hook != "pre-upgrade":
                    assert spec["serviceAccountName"] in names, label(item)


# What prefect-kubernetes 0.8 calls (worker.py, observer.py), and what its observer, kopf, watches.
PREFECT_WORKER = {
    ("batch", "jobs"): {"create", "delete", "get", "list", "watch", "patch", "update"},
    ("", "pods"): {"get", "list", "watch"},
    ("", "pods/log"): {"get", "list", "watch"},
    ("", "pods/status"): {"get", "list", "watch"},
    ("", "events"): {"get", "list", "watch"},
}


def granted(role: Object) -> dict[tuple[str, str], set[str]]:
    entries: dict[tuple[str, str], set[str]] = {}
    for rule in role["rules"]:
        for group, resource in itertools.product(rule["apiGroups"], rule["resources"]):
            entries.setdefault((group, resource), set()).update(rule["verbs"])
    return entries


def role_and_binding(sample: str, name: str) -> tuple[Object, Object]:
    result = {label(item): item for item in sample_objects(sample)}
    return result[f"Role {name}"], result[f"RoleBinding {name}"]


@pytest.mark.parametrize("sample", renders.SAMPLES)
def test_the_prefect_worker_has_only_the_rights_that_it_uses(sample: str) -> None:
    role, binding = role_and_binding(sample, "enginesmith-prefect-worker")
    assert granted(role) == PREFECT_WORKER
    assert "secrets" not in json.dumps(role)
    assert [item["name"] for item in binding["subjects"]] == ["enginesmith-prefect-worker"]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]


# What pipeline/orchestration/kuberay/apply.py calls.
RAY_APPLY = {
    ("ray.io", "rayclusters"): {"create", "get", "update"},
    ("", "configmaps"): {"get"},
    ("", "pods"): {"list"},
}


@pytest.mark.parametrize("sample", renders.SAMPLES)
def test_the_ray_cluster_job_has_rights_only_for_that_cluster(sample: str) -> None:
    role, binding = role_and_binding(sample, "enginesmith-ray-apply")
    assert granted(role) == RAY_APPLY
    # Neither what is made nor what is listed can be named in a rule.
    named_rules = [rule for rule in role["rules"] if {"get", "update"} & set(rule["verbs"])]
    assert all(rule["resourceNames"] == ["enginesmith-ray"] for rule in named_rules)
    assert [item["name"] for item in binding["subjects"]] == ["enginesmith-ray-apply"]


def test_the_prefect_worker_watches_only_its_own_namespace() -> None:
    """Else it lists all pods of the cluster and reads the namespace kube-system, which it has no right to."""
    (worker,) = [item for item in sample_objects("aws") if label(item) == "Deployment enginesmith-prefect-worker"]
    env = {item["name"]: item.get("value") for item in next(pod_specs(worker))["containers"][0]["env"]}
    assert env["PREFECT_INTEGRATIONS_KUBERNETES_OBSERVER_NAMESPACES"] == "enginesmith"
    assert env["PREFECT_INTEGRATIONS_KUBERNETES_CLUSTER_UID"]


SECRET_WORDS = re.compile(r"secret_access_key|password|api_key|auth_string|token|connection_url", re.IGNORECASE)


def environment(value: Any) -> Iterator[Object]:
    if isinstance(value, dict):
        yield from (item for item in value.get("env", ()) if isinstance(item, dict))
        for inner_value in value.values():
            yield from environment(inner_value)
    elif isinstance(value, list):
        for inner_value in value:
            yield from environment(inner_value)


def test_no_secret_is_in_a_plain_field() -> None:
    for name, item in everything():
        assert item["kind"] != "Secret", f"{name}: secrets are the user's to make"
        for variable in environment(item):
            plain_match = "value" in variable and SECRET_WORDS.search(variable["name"])
            assert not plain_match or variable["name"].endswith(("_NAME", "_KEY", "_PATH")), (name, variable["name"])


def test_no_secret_is_in_a_config_map() -> None:
    for sample in renders.SAMPLES:
        for item in sample_objects(sample):
            if item["kind"] == "ConfigMap" and item["metadata"]["name"].endswith("-deploy"):
                keys = r"AWS_SECRET_ACCESS_KEY|PREFECT_API_KEY|RAY_AUTH_TOKEN\b"
                assert not re.search(keys, json.dumps(item)), sample


@pytest.mark.parametrize("sample", renders.SAMPLES)
def test_unlisted_traffic_is_denied(sample: str) -> None:
    deny_policy = policies(sample_objects(sample))["default-deny"]
    assert deny_policy["policyTypes"] == ["Ingress", "Egress"] and not {"ingress", "egress"} & deny_policy.keys()
    for item in sample_objects(sample):
        template = item.get("spec", {}).get("template", {}) if item["kind"] in ("Deployment", "Job") else item
        if item["kind"] in ("Deployment", "Job", "Pod"):
            labels = template["metadata"]["labels"]
            assert deny_policy["podSelector"]["matchLabels"].items() <= labels.items(), label(item)


def test_ray_pods_are_denied_by_default_too() -> None:
    (cluster,) = [item for item in sample_objects("aws") if item["kind"] == "RayCluster"]
    deny_labels = policies(sample_objects("aws"))["default-deny"]["podSelector"]["matchLabels"]
    for part in [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]:
        assert deny_labels.items() <= part["template"]["metadata"]["labels"].items()


def test_ray_budgets_count_by_min_available() -> None:
    """A RayCluster has no scale subresource: any maxUnavailable over its pods blocks every eviction."""
    budgets = [item for item in sample_objects("aws") if item["kind"] == "PodDisruptionBudget"]
    assert all(item["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow" for item in budgets)
    for item in budgets:
        component = item["spec"]["selector"]["matchLabels"]["app.kubernetes.io/component"]
        assert ("minAvailable" in item["spec"]) == component.startswith("ray-"), label(item)


def test_examples_exist() -> None:
    assert {path.stem for path in EXAMPLES} == {
        "canary-analysis", "kueue-queues", "prove-job", "rayjob-build", "rollout-controller", "serving-image-volume",
        "serving-init", "serving-watch",
    }  # fmt: skip
