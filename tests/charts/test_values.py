"""Wrong values are refused, by the schema or by the templates, with a message that names the value."""

import copy
import re
from typing import Any

import helm_python as helm
import pytest

from builders.targets import GENERATIONS
from charts import renders
from charts.values_schema import values_schema
from tests.charts.kube import label

L4 = {"name": "l4", "generation": "sm_89", "max": 1}


def with_value(path: str, value: Any, base: str = "aws") -> dict[str, Any]:
    """A sample's values with one changed; 'gpuGroups.0.max' leads into a list."""
    values = copy.deepcopy(renders.sample(base))
    *places, last = [int(word) if word.isdigit() else word for word in path.split(".")]
    here: Any = values
    for place in places:
        here = here[place] if isinstance(here, list) else here.setdefault(place, {})
    here[last] = value
    return values


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("images.control.digset", "sha256:0", "digset"),
        ("images.control.digest", "sha256:abc", "pattern"),
        ("images.control.repository", "registry.example/x@sha256:1", "pattern"),
        ("images.control.pullPolicy", "Sometimes", "IfNotPresent"),
        ("imagePullSecrets", "harbor", "want array"),
        ("podSecurity.runAsUser", 0, "minimum"),
        ("registry.bucket", "Upper_Case", "pattern"),
        ("registry.endpoint", "minio:9000", "pattern"),
        ("registry.endpoint", "https://minio?x=1", "pattern"),
        ("registry.sse", "yes", "aws:kms"),
        ("registry.pathStyle", "on", "want null or boolean"),
        ("prefect.externalApi.url", "prefect.example", "pattern"),
        ("prefect.worker.replicas", 0, "minimum"),
        ("prefect.server.resources.requests.cpu", 1, "want string"),
        ("prefect.server.resources.limit", {}, "limit"),
        ("prefect.server.tolerations", [{"key": "a", "effekt": "NoSchedule"}], "effekt"),
        ("prefect.server.tolerations", [{"key": "a", "effect": "Never"}], "NoSchedule"),
        ("prefect.server.nodeSelector", {"a": 1}, "want string"),
        ("prefect.flowRuns.scratch.size", "fifty", "pattern"),
        ("ray.version", "2.60", "pattern"),
        ("ray.waitForNodes", "soon", "pattern"),
        ("ray.autoscaler.upscalingMode", "Fast", "Aggressive"),
        ("gpuGroups", {"l4": {}}, "want array"),
        ("gpuGroups.0.generation", "sm89", "sm_89"),
        ("gpuGroups.0.name", "T4", "pattern"),
        ("gpuGroups.0.name", "t" * 21, "pattern"),
        ("gpuGroups.0.max", -1, "minimum"),
        ("gpuGroups.0.gpus", 1, "gpus"),
        ("gpuGroups.0.gpuResource", "amd.com/gpu", "pattern"),
        ("gpuGroups", [{"name": "l4", "generation": "sm_89"}], "max"),
        ("canary.traffic", "/some/where", "pattern"),
        ("metrics.serviceMonitor.interval", "60", "pattern"),
        ("metrics.rules.failedBuildsPerHour", "many", "want integer"),
        ("networkPolicy.registry.ports", [], "minItems"),
        ("networkPolicy.redis.cidrs", [], "minItems"),
        ("ray.gcsFaultTolerance.redisAddress", "redis.example", "pattern"),
        ("networkPolicy.apiServer.cidrs", [], "minItems"),
        ("networkPolicy.apiServer.cidrs", ["everywhere"], "pattern"),
        ("networkPolicy.metrics.from", [{}], "minProperties"),
        ("extraEnv", [{"value": "x"}], "name"),
        ("fleet.schedule", "hourly", "pattern"),
        ("fleet.catalog.configMap", "c", "configMap"),
        ("fleet.catalog.key", "../x", "pattern"),
        ("fleet.apply", "yes", "want boolean"),
        ("fullnameOverride", "Not_A_Name", "pattern"),
        ("replicas", 1, "replicas"),
    ],
)
def test_the_schema_refuses(path: str, value: Any, said: str) -> None:
    with pytest.raises(helm.HelmError) as refused:
        renders.rendered(with_value(path, value))
    message = str(refused.value)
    assert said in message
    assert path.split(".")[0] in message, "the message does not say which value"


def gpu(**changed: Any) -> list[dict[str, Any]]:
    return [{**L4, **changed}]


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("images.control.digest", "", "images.control.digest is empty; give the digest"),
        ("images.worker.repository", "", "images.worker.repository is empty; build images/worker.Dockerfile"),
        ("images", {"allowTags": True, "control": {"repository": "a"}}, "images.control has neither digest nor tag"),
        ("registry", {"bucket": "one", "existingClaim": "two"}, "both bucket and existingClaim"),
        ("registry", {"bucket": ""}, "neither bucket nor existingClaim"),
        ("prefect.server.enabled", False, "there is no prefect.externalApi.url"),
        ("prefect.externalApi.url", "https://prefect.example/api", "prefect.server.enabled=false to use the external"),
        ("ray.enabled", False, "gpuGroups are workers of the RayCluster"),
        ("ray.gcsFaultTolerance.existingSecret", "redis", "ray.gcsFaultTolerance: a Secret or user is given"),
        ("ray.version", "2.51.0", "2.51.0 has no token authentication; use 2.52.0"),
        ("fullnameOverride", "f" * 41, "has 41 characters"),
        ("gpuGroups", [L4, L4], 'the name "l4" is taken'),
        ("gpuGroups", gpu(name="cpu"), "taken by cpuGroup"),
        ("gpuGroups", gpu(min=2, gpuLabels=True), "gpuGroups.l4: min 2 is more than max 1"),
        ("gpuGroups", gpu(product="h100", gpuLabels=True), '"h100" is no product of sm_89, which has l4, l40s'),
        ("gpuGroups", gpu(), "gpuLabels is false and nodeSelector is empty"),
        ("cpuGroup", {"min": 5}, "cpuGroup: min 5 is more than max 4"),
        ("canary.traffic", "", "canary.traffic is empty"),
        ("metrics.enabled", False, "there is nothing to scrape"),
        ("serviceAccounts.builds", {"create": False}, "serviceAccounts.builds: create is false and name is empty"),
        ("fleet.catalog", {"content": {"serve": [{}]}, "existingConfigMap": "c"}, "fleet.catalog: both content and"),
        ("fleet.catalog.content", {"models": []}, "fleet.catalog.content has no `serve`"),
        ("networkPolicy.registry.cidrs", [], "an empty rule would allow everything"),
    ],
)
def test_the_templates_refuse(path: str, value: Any, said: str) -> None:
    with pytest.raises(helm.HelmError, match=said):
        renders.rendered(with_value(path, value))


def test_kueue_admits_seventeen_worker_groups() -> None:
    values = renders.sample("onprem")
    groups = [{"name": f"g{number}", "generation": "sm_89", "max": 1} for number in range(17)]
    renders.rendered({**values, "gpuGroups": groups[:16]})
    with pytest.raises(helm.HelmError, match="18 worker groups: Kueue admits 17"):
        renders.rendered({**values, "gpuGroups": groups})


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(helm.HelmError) as refused:
        renders.rendered({})
    assert "images.control.repository" in str(refused.value)
    assert "registry: neither bucket" in str(refused.value)


def test_large_numbers_are_written_as_numbers() -> None:
    """Values reach templates as floats, and Go prints those from a million on as 1e+06, which no API server takes."""
    values = with_value("podSecurity", {"runAsUser": 1000680000, "runAsGroup": 1000680000, "fsGroup": 1000680000})
    values["gpuGroups"][0]["idleTimeoutSeconds"] = 2_000_000
    texts = renders.rendered(values)
    assert not [path for path, text in texts.items() if re.search(r"\d e?\+0|\de\+0", text)]
    assert "runAsUser: 1000680000" in texts["prefect/server.yaml"]
    assert "idleTimeoutSeconds: 2000000" in texts["ray/cluster.yaml"]


def test_a_release_named_by_a_number_has_labels_of_text_and_is_told_that_services_want_a_letter() -> None:
    values = {**renders.sample("aws"), "fullnameOverride": "builds"}
    for item in renders.objects(renders.rendered(values, name="2024")):
        assert all(type(value) is str for value in item["metadata"]["labels"].values()), label(item)
    with pytest.raises(helm.HelmError, match="does not begin with a letter"):
        renders.rendered(renders.sample("aws"), name="2024")


def test_a_tag_is_taken_only_when_allowed() -> None:
    values = renders.sample("minimal")
    values["images"] = {"allowTags": True, "control": {"repository": "registry.example/control", "tag": "1.2"}}
    texts = renders.rendered(values)
    assert "image: registry.example/control:1.2" in texts["prefect/server.yaml"]
    assert "images go by tag" in texts["NOTES.txt"]


def test_every_generation_that_enginery_knows_can_be_a_group() -> None:
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
        generation = next(item for item in GENERATIONS if item.sm == group["labels"]["enginery/sm"])
        assert pod["nodeSelector"] == generation.labels
        (wanted,) = term["matchExpressions"]
        assert tuple(wanted["values"]) == generation.products[group["labels"]["enginery/product"]]


def test_a_default_that_says_nothing_of_what_may_be_given_is_found() -> None:
    with pytest.raises(TypeError, match=r"some\.thing: \{\} does not say"):
        values_schema({"some": {"thing": {}}, "gpuGroupDefaults": {"min": 0}})
