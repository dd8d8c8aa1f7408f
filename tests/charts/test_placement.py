from typing import Any

from charts import renders
from tests.charts.kube import Object, pod_specs

REQUIRED, PREFERRED = (f"{word}DuringSchedulingIgnoredDuringExecution" for word in ("required", "preferred"))
ZONES = [{"matchExpressions": [{"key": "zone", "operator": "In", "values": [zone]}]} for zone in ("a", "b")]
BY_NAME = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["node-1"]}]}
PRODUCT = {
    "key": "nvidia.com/gpu.product",
    "operator": "In",
    "values": ["NVIDIA-H100-80GB-HBM3", "NVIDIA-H100-PCIe", "NVIDIA-H100-NVL"],
}


def affinity(**group: Any) -> Object:
    """Affinity of a group's Ray workers, which also prove and run canaries."""
    values = renders.sample("onprem")
    values["gpuGroups"] = [{"name": "h100", "generation": "sm_90", "max": 1, **group}]
    objects = renders.objects(renders.rendered(values))
    (cluster,) = [item for item in objects if item["kind"] == "RayCluster"]
    return next(pod_specs(cluster["spec"]["workerGroupSpecs"][-1])).get("affinity", {})


def test_a_product_is_added_to_each_of_the_users_terms() -> None:
    fields = [{"weight": 1, "preference": ZONES[0]}]
    entries = {
        "nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [*ZONES, BY_NAME]}, PREFERRED: fields},
        "podAntiAffinity": {REQUIRED: [{"topologyKey": "kubernetes.io/hostname"}]},
    }
    result = affinity(product="h100", affinity=entries)
    assert result["nodeAffinity"][REQUIRED]["nodeSelectorTerms"] == [
        {"matchExpressions": [*ZONES[0]["matchExpressions"], PRODUCT]},
        {"matchExpressions": [*ZONES[1]["matchExpressions"], PRODUCT]},
        {**BY_NAME, "matchExpressions": [PRODUCT]},
    ]
    assert result["nodeAffinity"][PREFERRED] == fields and result["podAntiAffinity"] == entries["podAntiAffinity"]


def test_without_a_product_the_users_affinity_is_unchanged() -> None:
    entries = {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": ZONES}}}
    assert affinity(affinity=entries) == entries
