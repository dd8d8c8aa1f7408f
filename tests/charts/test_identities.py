"""Registries in the object stores of clouds: the URI that pods get, and whose identity they have."""

from typing import Any

import pytest

from charts import renders
from enginesmith.registry.store.base import place_in_bucket
from tests.charts.kube import deploy_commands, flow_run_job, job_variables, pod_specs, sample_objects, with_value

ACCOUNTS = {
    "aws": "eks.amazonaws.com/role-arn",
    "gke": "iam.gke.io/gcp-service-account",
    "aks": "azure.workload.identity/client-id",
}
REGISTRIES = {
    "aws": "s3://example-engines/enginesmith?region=eu-central-1&sse=aws:kms",
    "gke": "gs://example-engines/enginesmith",
    "aks": "az://exampleengines/engines/enginesmith",
}


def environment(spec: dict[str, Any]) -> dict[str, Any]:
    found = [item for container in spec["containers"] for item in container.get("env", ())]
    return {item["name"]: item for item in found}


@pytest.mark.parametrize("sample", ACCOUNTS)
def test_pods_that_use_the_registry_have_the_identity_and_no_key(sample: str) -> None:
    made = sample_objects(sample)
    (account,) = [item for item in made if item["kind"] == "ServiceAccount" and ACCOUNTS[sample] in _annotations(item)]
    pods = [spec for spec in pod_specs(list(made)) if "ENGINESMITH_REGISTRY" in environment(spec)]
    assert len(pods) > 2
    for spec in pods:
        found = environment(spec)
        assert spec["serviceAccountName"] == account["metadata"]["name"]
        assert found["ENGINESMITH_REGISTRY"]["value"] == REGISTRIES[sample]
        assert not {"AWS_SECRET_ACCESS_KEY", "AZURE_STORAGE_KEY"} & set(found)
    assert place_in_bucket(REGISTRIES[sample]).uri == REGISTRIES[sample]


def test_azures_pods_are_labelled_for_its_webhook() -> None:
    label = "azure.workload.identity/use"
    for variables in map(job_variables, deploy_commands("aks")):
        env = environment(flow_run_job(variables)["spec"]["template"]["spec"])
        assert variables["labels"][label] == "true" and env["ENGINESMITH_REGISTRY"]["value"] == REGISTRIES["aks"]


def test_an_account_key_of_azure_comes_from_its_secret() -> None:
    made = renders.objects(renders.rendered(with_value("registry.existingSecret", "keys", base="aks")))
    pods = [spec for spec in pod_specs(made) if "ENGINESMITH_REGISTRY" in environment(spec)]
    assert pods
    for spec in pods:
        key = environment(spec)["AZURE_STORAGE_KEY"]["valueFrom"]["secretKeyRef"]
        assert key == {"name": "keys", "key": "AZURE_STORAGE_KEY"} and "AWS_ACCESS_KEY_ID" not in environment(spec)


def _annotations(item: dict[str, Any]) -> dict[str, str]:
    return item["metadata"].get("annotations") or {}
