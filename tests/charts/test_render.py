import re
import shutil
from pathlib import Path
from typing import Any

import helm_python as helm
import pytest
import yaml

from charts import readme, regenerate, renders
from tests.charts.kube import label, pod_specs, pods, sample_objects


@pytest.mark.parametrize("name", renders.SAMPLES)
def test_lint_finds_nothing(name: str) -> None:
    result = helm.lint(str(renders.CHART), renders.sample(name), strict=True, kube_version="v1.33.0")
    assert not [item for item in result["messages"] if "icon is recommended" not in str(item)]


def test_generated_files_of_the_chart_are_up_to_date() -> None:
    assert not regenerate.outdated(), "run `make chart`"


def test_every_value_is_documented() -> None:
    with pytest.raises(ValueError, match=r"values.yaml:4: a\.c has no"):
        readme.documented("a:\n  # -- Is said.\n  b: 1\n  c: 2\n")
    assert len(readme.documented((renders.CHART / "values.yaml").read_text())) > 100


@pytest.mark.parametrize("name", renders.SAMPLES)
def test_object_names_are_unique(name: str) -> None:
    names = [label(item) for item in sample_objects(name)]
    assert len(names) == len(set(names))


def test_a_long_release_name_is_cut_so_that_every_name_fits() -> None:
    objects = renders.objects(renders.rendered(renders.sample("aws"), name="r" * 53, namespace="n" * 40))
    for item in objects:
        assert len(item["metadata"]["name"]) <= (
            253 if {"Policy", "Role"} & set(re.findall("[A-Z][a-z]+", item["kind"])) else 63
        ), label(item)
    (cluster,) = [item for item in objects if item["kind"] == "RayCluster"]
    assert len(cluster["metadata"]["name"]) <= 53 and len(f"{cluster['metadata']['name']}-head-svc") <= 63


def test_an_upgrade_of_the_chart_changes_no_pod_template() -> None:
    """A version in a pod's labels would restart everything, and change Ray's worker groups, for nothing."""
    for item in sample_objects("aws"):
        for pod in pods(item):
            labels = pod["metadata"].get("labels", {}).keys()
            assert pod is item or not {"helm.sh/chart", "app.kubernetes.io/version"} & labels, label(item)


@pytest.mark.parametrize("name", renders.SAMPLES)
def test_every_container_has_requests_a_memory_limit_and_long_lived_ones_probes(name: str) -> None:
    for item in sample_objects(name):
        for spec in pod_specs(item):
            for container in [*spec.get("initContainers", ()), *spec["containers"]]:
                resources = container["resources"]
                assert {"cpu", "memory"} <= resources["requests"].keys(), (label(item), container["name"])
                assert "memory" in resources["limits"], (label(item), container["name"])
                if item["kind"] == "Deployment" and container in spec["containers"]:
                    assert {"startupProbe", "livenessProbe", "readinessProbe"} <= container.keys(), label(item)


def test_the_notes_name_the_next_three_commands() -> None:
    for name in renders.SAMPLES:
        notes = renders.rendered(renders.sample(name))["NOTES.txt"]
        assert len(re.findall(r"^  # \d\. ", notes, re.MULTILINE)) == 3
    assert "raycluster/enginesmith-ray" in notes
    assert "PREFECT_API_URL=https://prefect.example/api enginesmith prefect register spec.yaml" in notes


def test_the_notes_name_the_password_the_outside_url_and_the_site() -> None:
    values = renders.sample("aws")
    values["prefect"]["server"] |= {"ingress": {"enabled": True}, "uiApiUrl": "https://prefect.example/api"}
    values["networkPolicy"]["prefect"] = {"from": [{"podSelector": {}}]}
    values["site"] = {"enabled": True, "exposed": True}
    notes = renders.rendered(values)["NOTES.txt"]
    assert "PREFECT_API_URL=https://prefect.example/api enginesmith prefect register" in notes
    assert "export PREFECT_API_AUTH_STRING=" in notes and '{{index .data "auth-string" | base64decode}}' in notes
    assert "https://prefect.example/registry/" in notes and "port-forward" not in notes
    inside = renders.rendered(renders.sample("aws"))["NOTES.txt"]
    assert "port-forward service/enginesmith-site 8080" in inside and "http://localhost:8080/registry/" in inside
    assert "export PREFECT_API_KEY=" in renders.rendered(renders.sample("onprem"))["NOTES.txt"]


def claim(size: str, storage_class: str = "standard") -> dict[str, Any]:
    spec = {"resources": {"requests": {"storage": size}}, "storageClassName": storage_class}
    return {"metadata": {"name": "old"}, "spec": spec}


def installed(rule: str, argument: dict[str, Any], tmp_path: Path, **values: Any) -> str:
    """What a rule about objects that are there says, which `lookup` finds on a cluster alone."""
    chart = tmp_path / "chart"
    shutil.copytree(renders.CHART, chart)
    call = (
        f'said: {{{{ include "enginesmith.problems.{rule}" (merge (dict "root" $) .Values.global) | trim | quote }}}}'
    )
    (chart / "templates/said.yaml").write_text(call)
    with helm.Chart.load(str(chart)) as loaded_text:
        texts = loaded_text.render(
            {**renders.sample("minimal"), "global": argument, **values}, name="enginesmith", namespace="n"
        )
    (text,) = [text for path, text in texts.items() if path.endswith("said.yaml")]
    return str(yaml.safe_load(text)["said"])


@pytest.mark.parametrize(
    ("size", "storage_class", "grows", "message"),
    [
        ("10Gi", "", False, ""),
        ("10Gi", "standard", False, ""),
        ("20Gi", "", True, ""),
        ("20Gi", "", False, 'has 10Gi, and its storage class "standard" lets no claim grow to 20Gi; write 10Gi'),
        ("5Gi", "", True, "a.size: the claim old has 10Gi and cannot shrink to 5Gi; write 10Gi, or name another claim"),
        ("10Gi", "fast", True, 'a.storageClass: the claim old has "standard", which cannot become "fast"'),
    ],
)
def test_the_error_names_a_volume_that_cannot_be_changed(size, storage_class, grows, message, tmp_path):
    values, fields = {"size": size, "storageClass": storage_class}, {"allowVolumeExpansion": grows}
    result = installed("claim", {"path": "a", "values": values, "claim": claim("10Gi"), "class": fields}, tmp_path)
    assert (message in result) if message else not result


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, ""),
        ({"ray": {"enabled": False}}, ""),
        (
            {"nameOverride": "other"},
            "the RayCluster enginesmith-ray would be deleted .* write fullnameOverride: enginesmith,",
        ),
        (
            {"nameOverride": "other", "fullnameOverride": "enginesmith"},
            "selected by app.kubernetes.io/name=enginesmith",
        ),
        (
            {"nameOverride": "other", "fullnameOverride": "enginesmith", "ray": {"enabled": False}},
            "selected by app.kubernetes.io/name=enginesmith",
        ),
    ],
)
def test_another_name_keeps_the_ray_cluster(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    labels = {"app.kubernetes.io/instance": "enginesmith", "app.kubernetes.io/name": "enginesmith"}
    config = {"metadata": {"name": "enginesmith-ray", "labels": labels}, "data": {"raycluster.yaml": ""}}
    test = {"metadata": {"name": "enginesmith-test", "labels": labels}, "data": {"selftest.py": ""}}
    other_fields = {"metadata": {"name": "kube-root-ca.crt"}, "data": {"ca.crt": ""}}
    result = installed("names", {"there": {"items": [other_fields, config, test]}}, tmp_path, **values)
    assert re.search(message, result) if message else not result


def test_plain_manifests_do_not_mention_helm_and_list_configuration_before_jobs() -> None:
    """kubectl sends one object after the other; a Job that is quick would read the ConfigMap of the last time."""
    for path in sorted((renders.CHART.parents[1] / "manifests/enginesmith").glob("*.yaml")):
        text, texts = path.read_text(), set()
        assert "helm.sh/hook" not in text and "managed-by: Helm" not in text, path.name
        for item in yaml.safe_load_all(text):
            texts.add(label(item))
            if item["kind"] == "Job":
                volumes = item["spec"]["template"]["spec"]["volumes"]
                assert {f"ConfigMap {entry['configMap']['name']}" for entry in volumes if "configMap" in entry} <= texts


def test_server_state_waits_for_its_volume_before_a_new_server_starts() -> None:
    """Two servers on one SQLite file, or one ReadWriteOnce volume, would stand in each other's way."""
    (server,) = [item for item in sample_objects("minimal") if label(item) == "Deployment enginesmith-prefect-server"]
    assert server["spec"]["replicas"] == 1 and server["spec"]["strategy"] == {"type": "Recreate"}
