import json
import re
from collections.abc import Iterator
from typing import Any

import helm_python as helm
import pytest
import yaml

from charts import renders
from charts.kubernetes_names import KEY, NAME, OPTIONAL_NAME
from charts.values_schema import values_schema
from enginesmith.core.hardware.machine import GENERATIONS
from tests.charts.kube import batches, job_variables, label, pod_specs, with_value


def test_fields_without_a_schema_can_be_set() -> None:
    """AWS_ACCESS_KEY_ID is the chart's with `registry.existingSecret` alone, which this sample lacks."""
    names = ["AWS_ACCESS_KEY_ID", "RAY_task_oom_retries", "HTTPS_PROXY"]
    renders.rendered(with_value("extraEnv", [{"name": name, "value": ""} for name in names]))
    with pytest.raises(helm.HelmError, match="extraEnv: the chart sets AWS_ACCESS_KEY_ID"):
        renders.rendered(with_value("extraEnv", [{"name": "AWS_ACCESS_KEY_ID", "value": "x"}], base="onprem"))


def leaves(value: Any) -> Iterator[Any]:
    """Everything in objects that is no list or mapping, keys included."""
    if isinstance(value, dict):
        yield from (leaf_value for pair in value.items() for leaf_value in leaves(list(pair)))
    elif isinstance(value, list):
        yield from (leaf_value for item in value for leaf_value in leaves(item))
    else:
        yield value


def names_in(schema: dict[str, Any], path: str = "") -> Iterator[str]:
    """Paths of values that are names and keys of Kubernetes."""
    for key, inner_value in schema.get("properties", {}).items():
        yield from names_in(inner_value, f"{path}.{key}".strip("."))
    if schema.get("pattern") in (NAME["pattern"], OPTIONAL_NAME["pattern"], KEY["pattern"]):
        yield path


@pytest.mark.parametrize("word", ["31", "2026-01-01"])
def test_names_that_yaml_reads_as_numbers_and_dates_stay_text(word: str) -> None:
    values = {**with_value("ray.gcsFaultTolerance.redisAddress", "redis:6379"), "nameOverride": word}
    names = ("serviceAccounts", "registry.existingClaim", "fleet.catalog", "prefect.externalApi", "nodeCache", "global")
    for path in names_in(values_schema(yaml.safe_load((renders.CHART / "values.yaml").read_text()))):
        if not path.startswith(names):
            values = with_value(path, word, values)
    values = with_value("serviceAccounts.builds.name", word, values)
    objects = renders.objects(renders.rendered(values, name="e", namespace=word))
    assert word in set(leaves(objects)) and yaml.safe_load(word) not in set(leaves(objects))


def test_labels_and_annotations_of_users_override_the_charts() -> None:
    values = with_value("commonLabels", {"release": "all"})
    values["cpuGroup"] = {"podAnnotations": {"karpenter.sh/do-not-disrupt": "false"}}
    objects_by_label = {label(item): item for item in renders.objects(renders.rendered(values))}
    assert objects_by_label["ServiceMonitor enginesmith"]["metadata"]["labels"]["release"] == "kube-prometheus-stack"
    assert objects_by_label["Service enginesmith-metrics"]["metadata"]["labels"]["release"] == "all"
    annotations = objects_by_label["RayCluster enginesmith-ray"]["spec"]["workerGroupSpecs"][0]["template"]["metadata"][
        "annotations"
    ]
    assert annotations["karpenter.sh/do-not-disrupt"] == "false"
    assert annotations["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "false"


@pytest.mark.parametrize(
    "cron",
    [
        "0 0 31 2,3 *", "0 0 29 2 *", "0 0 31 3 mon", "0 0 31 1-6/2 *", "0 0 */2 2 *", "0 2 * * *", "*/20 * * * *",
        "59 23 31 12 7", "0,30 8-18/2 1 JAN,jul mon-fri", "0-59/5 * * * SUN",
    ],
)  # fmt: skip
def test_valid_schedules_pass(cron: str) -> None:
    assert cron in renders.rendered(with_value("fleet.schedule", cron))["prefect/deploy.yaml"]


def test_networks_of_both_families_are_accepted() -> None:
    cidrs = [
        "10.0.0.0/8", "0.0.0.0/0", "::/0", "fd00::/8", "2001:db8:1:2::/64", "fe80::1:2/128", "10.0.0.130/31",
        "fd00:ff00::/24", "1:2:3:4:5:6:7:8/128",
    ]  # fmt: skip
    texts = renders.rendered(with_value("networkPolicy.registry.cidrs", cidrs))
    for cidr in cidrs:
        assert f'cidr: "{cidr}"' in texts["network/policies.yaml"]


def test_a_whole_number_of_cpus_is_a_valid_quantity() -> None:
    """The variables of Prefect's job template, and so flow runs, take text alone."""
    values = with_value("cpuGroup", {"cpu": 8})
    values["gpuGroups"][0]["cpu"] = 16
    values["prefect"]["flowRuns"]["cpuRequest"] = 2
    values["prefect"]["worker"] = {"resources": {"requests": {"cpu": 1, "memory": "1Gi"}, "limits": {"memory": "1Gi"}}}
    for light_fleet in (values["fleet"], values["prefect"].setdefault("gpuRuns", {})):
        light_fleet["resources"] = {"requests": {"cpu": 1, "memory": "1Gi"}}
    objects = renders.objects(renders.rendered(values))
    (cluster,) = [item for item in objects if item["kind"] == "RayCluster"]
    asked = [next(pod_specs(group))["containers"][0]["resources"] for group in cluster["spec"]["workerGroupSpecs"][:2]]
    assert [item["requests"]["cpu"] for item in asked] == ["8", "16"]
    (config,) = [item for item in objects if label(item) == "ConfigMap enginesmith-deploy"]
    for words in json.loads(config["data"]["commands.json"]):
        assert job_variables(words)["cpu_request"] == ("2" if "--only=compile-model" in words else "1")


def test_kueue_admits_seventeen_worker_groups() -> None:
    values = renders.sample("onprem")
    groups = [{"name": f"g{number}", "generation": "sm_89", "max": 1} for number in range(17)]
    renders.rendered({**values, "gpuGroups": groups[:16]})
    with pytest.raises(helm.HelmError, match="18 worker groups: Kueue admits 17"):
        renders.rendered({**values, "gpuGroups": groups})


def test_large_numbers_are_written_as_numbers() -> None:
    """Values reach templates as floats, and Go prints those from a million on as 1e+06, which no API server takes."""
    values = with_value("podSecurity", {"runAsUser": 1000680000, "runAsGroup": 1000680000, "fsGroup": 1000680000})
    values["gpuGroups"][0]["idleTimeoutSeconds"] = 2_000_000
    texts = renders.rendered(values)
    assert not [path for path, text in texts.items() if re.search(r"\d e?\+0|\de\+0", text)]
    assert "runAsUser: 1000680000" in texts["prefect/server.yaml"]
    assert "idleTimeoutSeconds: 2000000" in texts["ray/cluster.yaml"]


CLAIM = {
    "accessModes": ["ReadWriteOnce"],
    "resources": {"requests": {"storage": "1Gi"}, "limits": {"storage": "2Gi"}},
    "selector": {"matchLabels": {"disk": "fast"}},
    "dataSourceRef": {"kind": "PersistentVolumeClaim", "name": "seed"},
    "volumeAttributesClassName": "gold",
}
ALONE = {**CLAIM, "accessModes": ["ReadWriteOncePod"]}
DNS = {"containerPort": 53}
SPREAD = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}


ACCEPTED = [
    ("images.control.repository", "registry.example:5000/team_a/enginesmith.control--x"),
    ("images.control.repository", "control"),
    ("ray.finishSchedule", "0 0 31 2 mon"),
    ("cpuGroup.cpu", "0.5"),
    ("cpuGroup.cpu", "10"),
    ("cpuGroup.cpu", "500m"),
    ("cpuGroup.memory", "0.5Gi"),
    ("cpuGroup.memory", "10Gi"),
    ("canary.duration", "8h"),
    ("networkPolicy.metrics.from", [{"ipBlock": {"cidr": "fd00::/16", "except": ["fd00:1::/32"]}}]),
    ("networkPolicy.metrics.from", [{"ipBlock": {"cidr": "0.0.0.0/0", "except": ["10.0.0.0/8"]}}]),
    ("networkPolicy.extraEgress", [{"to": [{"podSelector": {}}], "ports": [{"port": 80, "endPort": 90}]}]),
    ("metrics.resources", {"limits": None, "requests": {"cpu": "1", "memory": "1Gi"}}),
    ("metrics.dashboard.labels", {"grafana_dashboard": None}),
    ("extraVolumes", [{"name": "a", "configMap": {"name": "c", "items": [{"key": "k", "path": "a/..b"}]}}]),
    ("extraVolumes", [{"name": "a", "ephemeral": {"volumeClaimTemplate": {"spec": CLAIM}}}]),
    ("metrics.serviceAnnotations", {"helm.sh/resource-policy": "keep"}),
    ("registry", {"bucket": "one", "sse": "aws:kms", "kmsKey": "arn:aws:kms:eu-central-1:111122223333:key/a-b"}),
    (
        "site.httpRoute.parentRefs",
        [{"name": "a", "sectionName": "x"}, {"name": "a", "sectionName": "y"}, {"name": "b"}],
    ),
    ("prefect.server.ingress", {"className": "", "annotations": {"kubernetes.io/ingress.class": "alb"}}),
    ("prefect.server.extraContainers", [{"name": "a", "image": "b", "ports": [DNS, {**DNS, "protocol": "UDP"}]}]),
    ("site.topologySpreadConstraints", [{**SPREAD, "matchLabelKeys": ["pod-template-hash"]}]),
    ("extraVolumes", [{"name": "a", "ephemeral": {"volumeClaimTemplate": {"spec": ALONE}}}]),
    ("site.podAnnotations", {"controller.kubernetes.io/pod-deletion-cost": "-2147483648"}),
    ("site.podAnnotations", {"controller.kubernetes.io/pod-deletion-cost": "2147483647"}),
    ("extraVolumes", [{"name": "a", "emptyDir": {"sizeLimit": "0"}}]),
    ("site.ingress", {"className": "nginx", "annotations": {"kubernetes.io/ingress.class": "alb"}}),
]


@pytest.mark.parametrize("batch", batches(ACCEPTED))
def test_valid_values_are_accepted(batch: list[tuple[str, Any]]) -> None:
    values = renders.sample("aws")
    for path, value in batch:
        values = with_value(path, value, values)
    assert renders.rendered(values)


def test_every_generation_that_enginesmith_knows_can_be_a_group() -> None:
    values = renders.sample("onprem")
    values["kueue"] = {}
    values["gpuGroups"] = [
        {"name": f"{item.sm.replace('_', '')}-{product}", "generation": item.sm, "product": product, "max": 1}
        for item in GENERATIONS
        for product in item.products
    ]
    (cluster,) = [item for item in renders.objects(renders.rendered(values)) if item["kind"] == "RayCluster"]
    for group in cluster["spec"]["workerGroupSpecs"][1:]:
        pod = group["template"]["spec"]
        (term,) = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
        generation = next(item for item in GENERATIONS if item.sm == group["labels"]["enginesmith/sm"])
        assert pod["nodeSelector"] == generation.labels
        (expected,) = term["matchExpressions"]
        assert tuple(expected["values"]) == generation.products[group["labels"]["enginesmith/product"]]


def test_a_default_without_a_type_is_refused() -> None:
    with pytest.raises(TypeError, match=r"some\.thing: \{\} does not say"):
        values_schema({"some": {"thing": {}}, "gpuGroupDefaults": {"min": 0}})
