import re
from pathlib import Path

import pytest

from charts import renders
from pipeline.fleet import inventory
from pipeline.fleet.catalog import load_catalog
from tests.charts.kube import Object, deploy_commands, job_variables, label, sample_objects
from tests.pipeline.orchestration.deployments.planned import deployed


def fleet_command(sample: str) -> list[str]:
    (words,) = [words for words in deploy_commands(sample) if "--only=reconcile-fleet" in words]
    return words


def found(sample: str, kind: str) -> list[Object]:
    return [item for item in sample_objects(sample) if item["kind"] == kind]


@pytest.mark.parametrize("sample", ("minimal", "gke", "aks"))
def test_the_fleet_objects_exist_only_if_enabled(sample: str) -> None:
    assert not found(sample, "ClusterRole") and not found(sample, "ClusterRoleBinding")
    assert not [words for words in deploy_commands(sample) if "--only=reconcile-fleet" in words]
    assert "fleet" not in " ".join(label(item) for item in sample_objects(sample))


@pytest.mark.parametrize("sample", ("aws", "onprem"))
def test_fleet_rights_equal_the_calls_in_the_code(sample: str) -> None:
    code = Path(inventory.__file__).read_text()
    assert set(re.findall(r"CoreV1Api\(connection\)\.([a-z_]+)\(", code)) == {"list_node"}
    (role,), (binding,) = found(sample, "ClusterRole"), found(sample, "ClusterRoleBinding")
    assert role["rules"] == [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["list"]}]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    (subject,) = binding["subjects"]
    variables = job_variables(fleet_command(sample))
    assert (subject["name"], subject["namespace"]) == (variables["service_account_name"], variables["namespace"])


def test_two_releases_share_no_object_of_the_cluster() -> None:
    values = renders.sample("aws")
    names = [
        {item["metadata"]["name"] for item in items if item["kind"].startswith(("ClusterRole", "ValidatingAdmission"))}
        for name, namespace in (("a", "b-c"), ("a-b", "c"), ("a", "b"), ("a-b", "b"))
        for items in [renders.objects(renders.rendered({**values, "fullnameOverride": name}, namespace=namespace))]
    ]
    assert all(names) and len(set.union(*names)) == sum(map(len, names))


@pytest.mark.parametrize("sample", renders.SAMPLES)
def test_only_the_fleets_flow_run_has_a_token_and_access_to_the_api_server(sample: str) -> None:
    policies = [item for item in found(sample, "NetworkPolicy") if "api-server" in item["metadata"]["name"]]
    for words in deploy_commands(sample):
        variables, reads = job_variables(words), "--only=reconcile-fleet" in words
        assert variables.get("automount_service_account_token", False) is reads
        open_to = [
            item
            for item in policies
            if item["spec"]["podSelector"]["matchLabels"].items() <= variables["labels"].items()
        ]
        components = {"prefect-worker", "ray-head"}
        assert {label(item) for item in open_to if "matchExpressions" not in item["spec"]["podSelector"]} == (
            {"NetworkPolicy enginesmith-fleet-to-api-server"} if reads else set()
        )
        assert variables["labels"]["app.kubernetes.io/component"] not in components


def test_the_fleet_flow_builds_nothing_and_has_no_ray_token() -> None:
    variables, build_variables = job_variables(fleet_command("onprem")), job_variables(deploy_commands("onprem")[0])
    env, own_names = ({item["name"] for item in text["env"]} for text in (build_variables, variables))
    assert "RAY_AUTH_TOKEN_PATH" in env and "RAY_AUTH_TOKEN_PATH" not in own_names
    assert "ray-token" not in {item["name"] for item in [*variables["volumes"], *variables["volume_mounts"]]}
    assert {item["name"] for item in variables["volume_mounts"]} == {item["name"] for item in variables["volumes"]}
    assert (variables["memory_request"], variables["memory_limit"]) == ("512Mi", "2Gi") and "cpu_limit" not in variables


def test_the_catalog_is_mounted_where_the_flow_reads_it(tmp_path: Path) -> None:
    """YAML reads the bare key `on` as true, and Helm writes that down as the text "true"."""
    words = fleet_command("onprem")
    path = words[words.index("--fleet-catalog") + 1]
    variables = job_variables(words)
    (mount,) = [item for item in variables["volume_mounts"] if item["name"] == "catalog"]
    (volume,) = [item for item in variables["volumes"] if item["name"] == "catalog"]
    (item,) = [
        item for item in found("onprem", "ConfigMap") if label(item) == f"ConfigMap {volume['configMap']['name']}"
    ]
    name = path.removeprefix(mount["mountPath"] + "/")
    file = tmp_path / name
    file.write_text(item["data"][name])
    ranker, digits = load_catalog(file).demands
    assert {target.name for target in ranker.on} == {"l40s", "h100", "b200"}
    assert ranker.proven and digits.reference.channel == "stable"


def test_a_users_catalog_is_mounted_and_none_means_the_whole_registry() -> None:
    values = renders.sample("aws")
    assert "--fleet-catalog" not in fleet_command("aws")
    assert "catalog" not in {item["name"] for item in job_variables(fleet_command("aws"))["volumes"]}
    values["fleet"] = {"enabled": True, "catalog": {"existingConfigMap": "mine", "key": "all.yaml"}}
    text = renders.rendered(values)["prefect/deploy.yaml"]
    assert "/etc/enginesmith/fleet/all.yaml" in text and '\\"name\\":\\"mine\\"' in text
    assert "ConfigMap" not in renders.rendered(values)["prefect/fleet.yaml"]


@pytest.mark.parametrize(("sample", "apply", "cron"), [("aws", False, "30 * * * *"), ("onprem", True, "*/20 * * * *")])
def test_the_command_registers_the_flow_with_its_schedule(sample: str, apply: bool, cron: str) -> None:
    output, plan = deployed(*fleet_command(sample)[3:])
    assert plan, output
    (entry,) = plan.deployments()
    assert entry.entrypoint == "pipeline.orchestration.flows.reconcile_fleet.reconcile_fleet"
    assert entry.parameters["apply"] is apply and entry.cron == cron
