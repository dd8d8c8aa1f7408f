"""Every object against its schema: Kubernetes' own of 1.30 to 1.36, and the operators' where their CRDs are at hand."""

import copy
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate.utils
import pytest
import yaml
from referencing import Registry, Resource

from tests.charts.kube import EXAMPLES, Object, everything, label, objects_in, sample_objects

VERSIONS = [f"1.{minor}" for minor in range(30, 37)]
BUILT_IN = {
    "v1", "apps/v1", "batch/v1", "networking.k8s.io/v1", "policy/v1", "rbac.authorization.k8s.io/v1",
}  # fmt: skip
CUSTOM = {"ray.io/v1", "monitoring.coreos.com/v1", "kueue.x-k8s.io/v1beta2", "argoproj.io/v1alpha1"}
CRD_FILES = (
    "ray.io_rayclusters.yaml", "ray.io_rayjobs.yaml", "servicemonitors.yaml", "prometheusrules.yaml",
    "podmonitors.yaml", "clusterqueues.yaml", "localqueues.yaml", "resourceflavors.yaml",
    "workloadpriorityclasses.yaml",
)  # fmt: skip
# What a version does not have yet.
SINCE = {"serving-image-volume.yaml": "1.31"}


def test_every_kind_is_checked_somewhere() -> None:
    assert {item["apiVersion"] for _, item in everything()} <= BUILT_IN | CUSTOM


@cache
def built_in(version: str, api_version: str, kind: str) -> Any:
    """The strict validator of a kind. As `kubernetes_validate.validate` makes it, but once and not for each object."""
    folder = f"kubernetes-json-schema/v{version}.0-local-strict"
    group, _, number = api_version.rpartition("/")
    name = "-".join([kind.lower(), *filter(None, [group.split(".")[0]]), number])
    schema = kubernetes_validate.utils.schema_contents(f"{folder}/{name}.json", version)
    return jsonschema.Draft202012Validator(schema, registry=definitions(folder, version))


@cache
def definitions(folder: str, version: str) -> Any:
    schema_contents = kubernetes_validate.utils.schema_contents(f"{folder}/_definitions.json", version)
    return (Resource.from_contents(schema_contents) @ Registry()).crawl()


@pytest.mark.parametrize("version", VERSIONS)
def test_objects_are_valid_for_kubernetes(version: str) -> None:
    seen_items: list[Object] = []
    for name, item in everything():
        is_new = version >= SINCE.get(name.split(":")[0], "1.30")
        if item["apiVersion"] not in BUILT_IN or not is_new or item in seen_items:
            continue
        seen_items.append(item)
        errors = built_in(version, item["apiVersion"], item["kind"]).iter_errors(item)
        assert not [f"{list(error.path)}: {error.message[:200]}" for error in errors], name
    assert len(seen_items) > 40


def test_the_validator_finds_an_unknown_field() -> None:
    wrong_item = copy.deepcopy(next(item for item in sample_objects("minimal") if item["kind"] == "Service"))
    wrong_item["spec"]["prots"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong_item, "1.34", strict=True)
    assert not built_in("1.34", "v1", "Service").is_valid(wrong_item)


@cache
def crds() -> dict[tuple[str, str], Object]:
    """Schemas by (apiVersion, kind), from the folder that ENGINESMITH_CRDS names."""
    folder = os.environ.get("ENGINESMITH_CRDS")
    if not folder:
        pytest.skip("ENGINESMITH_CRDS names no folder with the CRDs of KubeRay, Kueue and the Prometheus operator")
    entries = {}
    for path in (path for pattern in CRD_FILES for path in Path(folder).glob(pattern)):
        for crd in yaml.load_all(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            spec = crd["spec"]
            for version in spec["versions"]:
                key = (f"{spec['group']}/{version['name']}", spec["names"]["kind"])
                entries[key] = closed(version["schema"]["openAPIV3Schema"])
    return entries


def closed(schema: Any) -> Any:
    """A CRD's schema as JSON Schema that refuses unknown fields, and asks for nothing that has a default."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    result = {key: closed(value) for key, value in schema.items() if key not in ("default", "format")}
    properties = schema.get("properties")
    if isinstance(properties, dict) and "type" in schema:
        result["properties"] = {name: closed(value) for name, value in properties.items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields") and "additionalProperties" not in schema:
            result["additionalProperties"] = False
        defaulted_names = {name for name, value in properties.items() if "default" in value}
        result["required"] = [name for name in schema.get("required", ()) if name not in defaulted_names]
    return result


def custom_objects() -> Iterator[tuple[str, Object]]:
    seen_items: list[Object] = []
    for name, item in everything():
        if item["apiVersion"] in CUSTOM - {"argoproj.io/v1alpha1"} and item not in seen_items:
            seen_items.append(item)
            yield name, item


def test_custom_resources_are_valid_for_their_operators() -> None:
    schemas = crds()
    for name, item in custom_objects():
        schema = schemas[item["apiVersion"], item["kind"]]
        # `metadata` is the API server's own.
        errors = jsonschema.Draft202012Validator(schema).iter_errors({**item, "metadata": {}})
        assert not [f"{list(error.path)}: {error.message[:200]}" for error in errors], name


def test_the_validator_finds_an_unknown_field_of_a_custom_resource() -> None:
    schema = crds()["ray.io/v1", "RayCluster"]
    wrong_item = copy.deepcopy(next(item for item in sample_objects("aws") if item["kind"] == "RayCluster"))
    wrong_item["spec"]["workerGroupSpecs"][0]["minReplica"] = 0
    errors = jsonschema.Draft202012Validator(schema).iter_errors({**wrong_item, "metadata": {}})
    assert any("minReplica" in error.message for error in errors)


def test_the_analysis_template_is_valid_for_argo_rollouts() -> None:
    """No CRD of it is at hand; the fields are those of its documentation (Analysis, Job metrics)."""
    (template,) = objects_in(next(path for path in EXAMPLES if path.name == "canary-analysis.yaml"))
    (metric,) = template["spec"]["metrics"]
    assert metric.keys() == {"name", "count", "failureLimit", "provider"}
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **metric["provider"]["job"]}
    kubernetes_validate.validate(job, "1.34", strict=True)
    names = {item["name"] for item in template["spec"]["args"]}
    command = " ".join(job["spec"]["template"]["spec"]["containers"][0]["command"])
    assert all(f"{{{{args.{name}}}}}" in command for name in names), label(template)
