import json
import re
import textwrap
from functools import reduce
from typing import Any

import jsonschema
import pytest
import yaml

from charts import renders
from pipeline.orchestration.deployments.deploy import template
from tests.charts.kube import (
    MANIFESTS,
    Object,
    containers,
    flow_run_job,
    job_variables,
    label,
    pod_specs,
    pods,
    with_value,
)
from tests.charts.restricted import violations
from tests.charts.test_objects import VERSIONS, built_in, crds

DOCS = MANIFESTS.parent / "docs/guides/kubernetes.md"
BUILDS = {"flow-run", "ray-worker", "metrics", "site", "deploy", "test"}
TOKEN = {
    "name": "aws-token",
    "projected": {"sources": [{"serviceAccountToken": {"path": "token", "audience": "sts.amazonaws.com"}}]},
}
AT = {"name": "aws-token", "mountPath": "/var/run/aws", "readOnly": True}
ROLE = {"name": "AWS_ROLE_ARN", "value": "arn:aws:iam::111122223333:role/engines"}
LICENSE = {"name": "LICENSE", "valueFrom": {"secretKeyRef": {"name": "license", "key": "key"}}}
INIT = {"name": "warm", "image": "registry.example/warm@sha256:" + "0" * 64, "command": ["true"]}
WITHOUT_PROXY = (
    "localhost,127.0.0.1,.svc,.cluster.local,$(KUBERNETES_SERVICE_HOST),enginesmith-prefect-server,"
    "enginesmith-ray-head-svc,.example"
)
ADDED: dict[str, Any] = {
    "extraEnv": [ROLE, LICENSE],
    "extraEnvFrom": [{"secretRef": {"name": "hub"}}],
    "extraVolumes": [TOKEN],
    "extraVolumeMounts": [AT],
    "extraInitContainers": [INIT],
}


def rendered(base: str = "aws", **values: Any) -> list[Object]:
    """The objects of a sample with more values."""
    return renders.objects(renders.rendered({**renders.sample(base), **values}))


def flow_runs(objects: list[Object]) -> list[Object]:
    """Job variables of every command that registers flows."""
    (config,) = [item for item in objects if label(item) == "ConfigMap enginesmith-deploy"]
    return [job_variables(words) for words in json.loads(config["data"]["commands.json"])]


def by_component(objects: list[Object]) -> list[tuple[str, Object]]:
    return [(pod["metadata"]["labels"]["app.kubernetes.io/component"], pod) for item in objects for pod in pods(item)]


def test_identity_labels_are_only_on_pods_of_its_account() -> None:
    identity = {"azure.workload.identity/use": "true"}
    objects = rendered(serviceAccounts={"builds": {"podLabels": identity}}, commonLabels={"team": "inference"})
    result = by_component(objects)
    assert {name for name, _ in result} >= BUILDS - {"flow-run"} | {"prefect-server", "prefect-worker", "ray-head"}
    for name, pod in result:
        assert (identity.items() <= pod["metadata"]["labels"].items()) == (name in BUILDS), name
        assert pod["metadata"]["labels"]["team"] == "inference"
    assert all(identity.items() <= variables["labels"].items() for variables in flow_runs(objects))


def test_users_and_groups_can_be_the_clusters_to_assign() -> None:
    objects = rendered(podSecurity={"runAsUser": None, "runAsGroup": None, "fsGroup": None})
    assigned_names = {"runAsUser", "runAsGroup", "fsGroup"}
    for _, pod in by_component(objects):
        assert not assigned_names & pod["spec"]["securityContext"].keys()
        assert not violations(pod["spec"])
    for variables in flow_runs(objects):
        assert not {"run_as_user", "run_as_group", "fs_group"} & variables.keys()


@pytest.mark.parametrize("base", renders.SAMPLES)
def test_extra_values_reach_every_pod_that_uses_the_registry(base: str) -> None:
    objects = rendered(base, **{**ADDED, "extraEnv": [*renders.sample(base).get("extraEnv", ()), ROLE, LICENSE]})
    for name, pod in by_component(objects):
        (container,) = pod["spec"]["containers"]
        flag = name in BUILDS
        assert (LICENSE in container["env"]) is flag and (ROLE in container["env"]) is flag, name
        assert (TOKEN in pod["spec"].get("volumes", ())) is flag and (AT in container["volumeMounts"]) is flag, name
        assert (container.get("envFrom") == ADDED["extraEnvFrom"]) is flag, name
        assert ("warm" in {item["name"] for item in pod["spec"].get("initContainers", ())}) is (name == "ray-worker")
        assert not violations(pod["spec"]), name
    for variables in flow_runs(objects):
        pod = flow_run_job(variables)["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        assert LICENSE in container["env"] and ADDED["extraEnvFrom"][0] in container["envFrom"]
        assert TOKEN in pod["volumes"] and AT in container["volumeMounts"]
        assert [item["name"] for item in pod["initContainers"]] == ["warm"]
        assert not violations(pod)


@pytest.mark.parametrize("base", renders.SAMPLES)
def test_variables_of_flow_runs_match_the_schema_of_the_work_pool(base: str) -> None:
    """Prefect's server refuses a deployment otherwise."""
    variable_names = template("kubernetes")["variables"]["properties"]
    for variables in flow_runs(rendered(base, **ADDED)):
        for name, value in variables.items():
            jsonschema.validate(value, variable_names[name])
        for version in VERSIONS:
            job = flow_run_job(variables)
            assert not [error.message for error in built_in(version, "batch/v1", "Job").iter_errors(job)], version


def test_the_documented_external_bucket_works() -> None:
    (block,) = re.findall(r"```yaml\n(  extraEnv:.*?)```", DOCS.read_text(), re.DOTALL)
    for _, pod in by_component(rendered("gke", **yaml.safe_load(textwrap.dedent(block)))):
        container = pod["spec"]["containers"][0]
        files = [item["value"] for item in container["env"] if item["name"] == "AWS_WEB_IDENTITY_TOKEN_FILE"]
        assert not files or (f"{AT['mountPath']}/token" in files and AT in container["volumeMounts"])


def group_of(objects: list[Object], name: str) -> Object:
    (cluster,) = [item for item in objects if item["kind"] == "RayCluster"]
    (result,) = [item for item in cluster["spec"]["workerGroupSpecs"] if item["groupName"] == name]
    return dict(result)


def test_values_of_a_group_override_global_ones_only_in_this_group() -> None:
    values = renders.sample("onprem")
    cache = {"name": "kernels", "persistentVolumeClaim": {"claimName": "kernels"}}
    fields = {"name": "kernels", "mountPath": "/kernels"}
    values["extraEnv"] = [{"name": "MODE", "value": "all"}, {"name": "OTHER", "value": "all"}]
    values["gpuGroups"][2] |= {
        "extraEnv": [{"name": "MODE", "value": "h100"}], "extraVolumes": [cache], "extraVolumeMounts": [fields]
    }  # fmt: skip
    objects = renders.objects(renders.rendered(values))
    own_spec, other_specs = (next(pod_specs(group_of(objects, name))) for name in ("h100", "b200"))
    env = [item["value"] for item in own_spec["containers"][0]["env"] if item["name"] in ("MODE", "OTHER")]
    assert sorted(env) == ["all", "h100"]
    assert cache in own_spec["volumes"] and fields in own_spec["containers"][0]["volumeMounts"]
    for pod in [other_specs, *[flow_run_job(item)["spec"]["template"]["spec"] for item in flow_runs(objects)]]:
        assert cache not in pod["volumes"]
        assert {"name": "MODE", "value": "all"} in pod["containers"][0]["env"]


def test_a_group_may_claim_its_gpus() -> None:
    """Ray counts what its container's resources name, and a claim is none: it is told."""
    values = renders.sample("onprem")
    values["gpuGroups"][2]["resourceClaimTemplate"] = "one-h100"
    group = group_of(renders.objects(renders.rendered(values)), "h100")
    assert group["rayStartParams"] == {"num-gpus": "1"}
    by_hand = {
        "image": "registry.example/worker",
        "resource_claims": [{"name": "gpu", "resourceClaimTemplateName": "one-h100"}],
        "container_claims": [{"name": "gpu"}],
    }  # a pool of pods with a GPU each, without Ray
    job = flow_run_job(by_hand)
    for spec in (group["template"]["spec"], job["spec"]["template"]["spec"]):
        assert spec["resourceClaims"] == [{"name": "gpu", "resourceClaimTemplateName": "one-h100"}]
        resources = spec["containers"][0]["resources"]
        assert resources["claims"] == [{"name": "gpu"}]
        assert "nvidia.com/gpu" not in {*resources.get("limits", ()), *resources.get("requests", ())}
    assert not [error.message for error in built_in("1.34", "batch/v1", "Job").iter_errors(job)]


def test_extra_values_of_workers_are_valid_for_the_operator() -> None:
    schema = crds()["ray.io/v1", "RayCluster"]
    values = {**renders.sample("onprem"), **ADDED, "podSecurity": {"runAsUser": None}}
    values["gpuGroups"][2]["resourceClaimTemplate"] = "one-h100"
    (cluster,) = [item for item in renders.objects(renders.rendered(values)) if item["kind"] == "RayCluster"]
    errors = jsonschema.Draft202012Validator(schema).iter_errors({**cluster, "metadata": {}})
    assert not [f"{list(error.path)}: {error.message[:200]}" for error in errors]


def test_one_log_level_applies_to_the_server_the_worker_and_flow_runs() -> None:
    values = renders.sample("aws")
    values["prefect"]["logLevel"] = "DEBUG"
    objects = renders.objects(renders.rendered(values))
    env = {
        name: {item["name"]: item.get("value") for item in pod["spec"]["containers"][0]["env"]}
        for name, pod in by_component(objects)
    }
    assert env["prefect-server"]["PREFECT_SERVER_LOGGING_LEVEL"] == "DEBUG"
    assert env["prefect-worker"]["PREFECT_LOGGING_LEVEL"] == "DEBUG"
    assert all({"name": "PREFECT_LOGGING_LEVEL", "value": "DEBUG"} in item["env"] for item in flow_runs(objects))
    assert not [item for item in rendered() if "LOGGING_LEVEL" in json.dumps(item)]


@pytest.mark.parametrize("base", renders.SAMPLES)
def test_a_proxy_and_the_authorities_to_trust_reach_every_container(base: str) -> None:
    proxy = {"http": "http://proxy.example:3128", "https": "http://proxy.example:3129", "except": [".example"]}
    objects = rendered(base, proxy=proxy, caBundle={"configMap": "trust"})
    (cluster,) = [item for item in objects if item["kind"] == "RayCluster"]
    scaler, head = cluster["spec"]["autoscalerOptions"], cluster["spec"]["headGroupSpec"]["template"]["spec"]
    runs = [flow_run_job(variables)["spec"]["template"]["spec"] for variables in flow_runs(objects)]
    for spec in [*pod_specs(objects), *runs, {**head, "containers": [scaler]}]:
        assert {"name": "trust", "configMap": {"name": "trust"}} in spec["volumes"]
        for container in containers(spec):
            if container.get("name") == "own":  # chown reaches nothing
                continue
            env = {item["name"]: item.get("value") for item in container["env"]}
            assert len(container["env"]) == len(env) and env["NO_PROXY"] == WITHOUT_PROXY
            assert (env["HTTP_PROXY"], env["HTTPS_PROXY"]) == (proxy["http"], proxy["https"])
            assert env["SSL_CERT_FILE"] == "/etc/enginesmith/trust/ca.crt"
            assert "/etc/enginesmith/trust" in [item["mountPath"] for item in container["volumeMounts"]]
    (policy,) = [item for item in objects if label(item) == "NetworkPolicy enginesmith-to-proxy"]
    assert {item["port"] for item in policy["spec"]["egress"][0]["ports"]} == {3128, 3129}


@pytest.mark.parametrize(
    ("component", "place"),
    [(f"prefect-{name}", f"prefect.{name}") for name in ("server", "worker")]
    + [("ray-head", "ray.head"), ("metrics", "metrics"), ("site", "site"), ("ray-worker", "cpuGroup")],
)
def test_extra_values_of_a_component_are_valid_and_only_in_its_pods(component: str, place: str) -> None:
    """The main container stays the first one, which KubeRay takes for Ray's."""
    volume, at, variable = {"name": "spool", "emptyDir": {}}, {**AT, "name": "spool"}, {"name": "MODE", "value": "x"}
    values = with_value(f"{place}.extraContainers", [{**INIT, "volumeMounts": [at]}])
    spread = {"maxSkew": 1, "topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "ScheduleAnyway"}
    reduce(dict.__getitem__, place.split("."), values).update(
        extraEnv=[variable], extraVolumes=[volume], extraVolumeMounts=[at], topologySpreadConstraints=[spread]
    )
    for name, pod in by_component(
        renders.objects(renders.rendered({**values, "extraEnv": [{**variable, "value": "y"}]}))
    ):
        main, *other_containers = pod["spec"]["containers"]
        flag = name == component and pod["metadata"]["labels"].get("enginesmith.io/group", "cpu") == "cpu"
        assert main["name"] != INIT["name"] and ([item["name"] for item in other_containers] == [INIT["name"]]) is flag
        assert (variable in main["env"]) is (at in main["volumeMounts"]) is (volume in pod["spec"]["volumes"]) is flag
        if flag:
            assert not violations(pod["spec"])
            (result,) = pod["spec"]["topologySpreadConstraints"]
            assert result["labelSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
            whole_fields = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": pod["spec"]}
            assert not [error.message for error in built_in("1.36", "v1", "Pod").iter_errors(whole_fields)]


@pytest.mark.parametrize("base", renders.SAMPLES)
def test_global_annotations_are_on_every_object_beside_its_own(base: str) -> None:
    fields, values = {"example.com/owner": "inference"}, renders.sample(base)
    values.setdefault("metrics", {})["serviceAnnotations"] = {"example.com/name": "x"}
    own = [item["metadata"].get("annotations", {}) for item in renders.objects(renders.rendered(values))]
    objects = renders.objects(renders.rendered({**values, "commonAnnotations": fields}))
    assert [item["metadata"]["annotations"] for item in objects] == [{**annotations, **fields} for annotations in own]
    (service,) = [item for item in objects if label(item) == "Service enginesmith-metrics"]
    assert service["metadata"]["annotations"] == {**fields, "example.com/name": "x"}
