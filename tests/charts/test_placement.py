"""Where a group's pods run: what the user asks for and what the group's GPU asks for hold together."""

import json
from typing import Any

from charts import renders
from tests.charts.kube import Object, job_variables, label, pod_specs

REQUIRED, PREFERRED = (f"{word}DuringSchedulingIgnoredDuringExecution" for word in ("required", "preferred"))
ZONES = [{"matchExpressions": [{"key": "zone", "operator": "In", "values": [zone]}]} for zone in ("a", "b")]
BY_NAME = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["node-1"]}]}
PRODUCT = {
    "key": "nvidia.com/gpu.product",
    "operator": "In",
    "values": ["NVIDIA-H100-80GB-HBM3", "NVIDIA-H100-PCIe", "NVIDIA-H100-NVL"],
}


def affinities(**group: Any) -> list[Object]:
    """Affinity of a group's Ray workers, and of the flow runs that prove on its hardware."""
    values = renders.sample("onprem")
    values["gpuGroups"] = [{"name": "h100", "generation": "sm_90", "max": 1, **group}]
    made = renders.objects(renders.rendered(values))
    (cluster,) = [item for item in made if item["kind"] == "RayCluster"]
    worker = next(pod_specs(cluster["spec"]["workerGroupSpecs"][-1]))
    (config,) = [item for item in made if label(item) == "ConfigMap enginery-deploy"]
    (proof,) = [words for words in json.loads(config["data"]["commands.json"]) if "--only=validate-pending" in words]
    return [worker.get("affinity", {}), job_variables(proof)["affinity"]]


def test_a_product_is_asked_for_in_each_of_the_users_terms() -> None:
    weighted = [{"weight": 1, "preference": ZONES[0]}]
    given = {
        "nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [*ZONES, BY_NAME]}, PREFERRED: weighted},
        "podAntiAffinity": {REQUIRED: [{"topologyKey": "kubernetes.io/hostname"}]},
    }
    for found in affinities(product="h100", affinity=given):
        terms = found["nodeAffinity"][REQUIRED]["nodeSelectorTerms"]
        assert terms == [
            {"matchExpressions": [*ZONES[0]["matchExpressions"], PRODUCT]},
            {"matchExpressions": [*ZONES[1]["matchExpressions"], PRODUCT]},
            {**BY_NAME, "matchExpressions": [PRODUCT]},
        ]
        assert found["nodeAffinity"][PREFERRED] == weighted
        assert found["podAntiAffinity"] == given["podAntiAffinity"]


def test_a_product_alone_is_the_only_term() -> None:
    for found in affinities(product="h100"):
        assert found == {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [{"matchExpressions": [PRODUCT]}]}}}


def test_without_a_product_the_users_affinity_is_as_given() -> None:
    given = {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": ZONES}}}
    assert affinities(affinity=given) == [given, given]
