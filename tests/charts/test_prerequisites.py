import re
from collections.abc import Iterator
from typing import Any

import pytest

from charts import renders
from tests.charts.kube import deploy_commands, job_variables, sample_objects

# Fields that name an object, of pods, claims and flow runs; with the key in what they hold, where that is a mapping.
FIELDS = {
    "secretKeyRef": ("Secret", "name"), "secretRef": ("Secret", "name"), "secret": ("Secret", "secretName"),
    "configMapKeyRef": ("ConfigMap", "name"), "configMapRef": ("ConfigMap", "name"), "configMap": ("ConfigMap", "name"),
    "persistentVolumeClaim": ("PersistentVolumeClaim", "claimName"), "storageClassName": ("StorageClass", ""),
    "priorityClassName": ("PriorityClass", ""), "priority_class_name": ("PriorityClass", ""),
    "runtimeClassName": ("RuntimeClass", ""), "runtime_class_name": ("RuntimeClass", ""),
    "kueue.x-k8s.io/queue-name": ("LocalQueue", ""), "kueue.x-k8s.io/priority-class": ("WorkloadPriorityClass", ""),
}  # fmt: skip
# The KubeRay operator makes it.
MADE = {("Secret", "enginesmith-ray")}


def named(value: Any) -> Iterator[tuple[str, str]]:
    """(kind, name) of everything that an object names, however deep."""
    if isinstance(value, list):
        for inner_value in value:
            yield from named(inner_value)
    if not isinstance(value, dict):
        return
    for field, inner_value in value.items():
        if field in ("imagePullSecrets", "image_pull_secrets"):
            yield from (("Secret", item["name"]) for item in inner_value or ())
        kind, key = FIELDS.get(field, ("", ""))
        result = inner_value.get(key) if isinstance(inner_value, dict) else inner_value
        if kind and isinstance(result, str) and result:
            yield kind, result
        yield from named(inner_value)


@pytest.mark.parametrize("sample", renders.SAMPLES)
def test_each_sample_lists_its_requirements_at_the_head(sample: str) -> None:
    objects = sample_objects(sample)
    existing_objects = {(item["kind"], item["metadata"]["name"]) for item in objects} | MADE
    expected = set(named(list(objects))) | set(named([job_variables(words) for words in deploy_commands(sample)]))
    text = (renders.CHART / "ci" / f"{sample}-values.yaml").read_text()
    head = re.match(r"(#.*\n)+", text)
    assert head
    assert expected - existing_objects, "nothing was found that a sample needs"
    listed_matches = set(re.findall(r"[a-z0-9-]+", head[0].partition("# Before the installation")[2]))
    assert not {(kind, name) for kind, name in expected - existing_objects if name not in listed_matches}
