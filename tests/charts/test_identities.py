from typing import Any

import pytest

from charts import renders
from enginesmith.registry.store.base import place_in_bucket
from tests.charts.kube import pod_specs, sample_objects, with_value

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
    items = [item for container in spec["containers"] for item in container.get("env", ())]
    return {item["name"]: item for item in items}


@pytest.mark.parametrize("sample", ACCOUNTS)
def test_pods_that_use_the_registry_have_the_identity_and_no_key(sample: str) -> None:
    objects = sample_objects(sample)
    accounts = [item["metadata"] for item in objects if item["kind"] == "ServiceAccount"]
    account = {item["name"] for item in accounts if ACCOUNTS[sample] in (item.get("annotations") or {})}
    pods = [spec for spec in pod_specs(list(objects)) if "ENGINESMITH_REGISTRY" in environment(spec)]
    assert len(pods) > 2
    for spec in pods:
        result = environment(spec)
        assert spec["serviceAccountName"] in account
        assert result["ENGINESMITH_REGISTRY"]["value"] == REGISTRIES[sample]
        assert not {"AWS_SECRET_ACCESS_KEY", "AZURE_STORAGE_KEY"} & set(result)
    assert place_in_bucket(REGISTRIES[sample]).uri == REGISTRIES[sample]


def test_an_account_key_of_azure_comes_from_its_secret() -> None:
    objects = renders.objects(renders.rendered(with_value("registry.existingSecret", "keys", base="aks")))
    pods = [spec for spec in pod_specs(objects) if "ENGINESMITH_REGISTRY" in environment(spec)]
    assert pods
    for spec in pods:
        key = environment(spec)["AZURE_STORAGE_KEY"]["valueFrom"]["secretKeyRef"]
        assert key == {"name": "keys", "key": "AZURE_STORAGE_KEY"} and "AWS_ACCESS_KEY_ID" not in environment(spec)


READS = {"annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/reads"}, "podLabels": {"reads": "yes"}}


@pytest.mark.parametrize(
    ("accounts", "name"),
    [
        ({"builds": {"annotations": {"a/b": "c"}}}, "builds"),  # the only identity there is
        ({"builds": {"podLabels": {"a": "c"}}}, "builds"),
        ({}, "reads"),
        ({"builds": {"annotations": {"a/b": "c"}}, "reads": READS}, "reads"),
        ({"reads": {"create": False}}, "builds"),
    ],
)
def test_readers_have_another_account_other_keys_and_a_read_only_mount(accounts: Any, name: str) -> None:
    values = {**renders.sample("minimal"), "serviceAccounts": accounts, "site": {"enabled": True}}
    objects = renders.objects(renders.rendered(values))
    assert f"enginesmith-{name}" in {item["metadata"]["name"] for item in objects if item["kind"] == "ServiceAccount"}
    for component in ("site", "metrics"):
        (pod,) = [
            item["spec"]["template"] for item in objects
            if item["kind"] == "Deployment" and item["metadata"]["name"] == f"enginesmith-{component}"
        ]  # fmt: skip
        assert pod["spec"]["serviceAccountName"] == f"enginesmith-{name}"
        assert accounts.get(name, {}).get("podLabels", {}).items() <= pod["metadata"]["labels"].items()
        (mount,) = [item for item in pod["spec"]["containers"][0]["volumeMounts"] if item["name"] == "registry"]
        assert mount["readOnly"] is True
    keys = with_value("registry.readSecret", "read-keys", base="onprem")
    for spec in pod_specs(renders.objects(renders.rendered(keys))):
        if key := environment(spec).get("AWS_SECRET_ACCESS_KEY"):
            reads = spec["containers"][0]["name"] in ("exporter", "site")
            assert (key["valueFrom"]["secretKeyRef"]["name"] == "read-keys") is reads
