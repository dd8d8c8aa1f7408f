import json
from typing import Any

import helm_python as helm
import jsonschema
import pytest

from charts import renders
from tests.charts.kube import Object, containers, flow_run_job, job_variables, label, pod_specs, with_value
from tests.charts.test_objects import VERSIONS, built_in, crds

GATEWAY = [{"name": "public", "namespace": "gateways"}]
SITE = {"enabled": True, "exposed": True, "path": "/models"}
ALONE: dict[str, Any] = {"enabled": True, "host": "models.example"}
ROUTER = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ingress"}}}]


def values(way: dict[str, Any], **changed: Any) -> dict[str, Any]:
    """The sample with a password, routed to from outside."""
    result = renders.sample("aws")
    server = {"uiApiUrl": "https://prefect.example/api", **way, **changed}
    result["prefect"]["server"] |= server
    result["networkPolicy"] |= {"prefect": {"from": ROUTER}}
    return result


def made(way: dict[str, Any]) -> dict[str, Object]:
    return {label(item): item for item in renders.objects(renders.rendered(values(way)))}


def test_an_ingress_routes_the_uis_host_to_the_server() -> None:
    way = {"enabled": True, "className": "nginx", "tlsSecret": "prefect-tls", "annotations": {"a.example/b": "c"}}
    result = made({"ingress": way})
    ingress, service = result["Ingress enginesmith-prefect-server"], result["Service enginesmith-prefect-server"]
    (rule,) = ingress["spec"]["rules"]
    (path,) = rule["http"]["paths"]
    assert rule["host"] == "prefect.example" and ingress["spec"]["tls"][0]["hosts"] == ["prefect.example"]
    assert path["backend"]["service"] == {"name": service["metadata"]["name"], "port": {"name": "http"}}
    assert service["spec"]["ports"][0]["name"] == "http"
    assert ingress["metadata"]["annotations"] == way["annotations"]
    for version in VERSIONS:
        assert not list(built_in(version, "networking.k8s.io/v1", "Ingress").iter_errors(ingress)), version
    assert ROUTER[0] in result["NetworkPolicy enginesmith-prefect-server"]["spec"]["ingress"][0]["from"]


def test_the_site_lies_at_its_path_of_the_same_host() -> None:
    actual = values({"ingress": {"enabled": True}, "httpRoute": {"enabled": True, "parentRefs": GATEWAY}})
    objects = {label(item): item for item in renders.objects(renders.rendered({**actual, "site": SITE}))}
    service, pod = objects["Service enginesmith-site"], objects["Deployment enginesmith-site"]["spec"]["template"]
    (rule,) = objects["Ingress enginesmith-prefect-server"]["spec"]["rules"]
    paths = {path["path"]: path["backend"]["service"]["name"] for path in rule["http"]["paths"]}
    assert paths == {"/": "enginesmith-prefect-server", "/models": service["metadata"]["name"]}
    spec = objects["HTTPRoute enginesmith-prefect-server"]["spec"]
    assert spec["parentRefs"] == GATEWAY and spec["hostnames"] == ["prefect.example"]
    server, route = spec["rules"]
    assert server["backendRefs"] == [{"name": "enginesmith-prefect-server", "port": 4200}]
    assert route["matches"][0]["path"]["value"] == "/models"
    assert route["backendRefs"] == [{"name": "enginesmith-site", "port": service["spec"]["ports"][0]["port"]}]
    (container,) = pod["spec"]["containers"]
    assert container["command"][5:7] == ["--prefix", "/models"]
    assert container["readinessProbe"]["httpGet"]["path"] == "/models/"
    assert ROUTER[0] in objects["NetworkPolicy enginesmith-site"]["spec"]["ingress"][0]["from"]


@pytest.mark.parametrize(
    ("site", "message"),
    [
        ({"enabled": False, "exposed": True}, "site.exposed is true and site.enabled is false"),
        ({"enabled": True, "exposed": True}, "neither an Ingress nor an HTTPRoute"),
        ({**ALONE, "enabled": False, "ingress": {"enabled": True}}, "site.ingress.enabled is true and site.enabled is"),
        ({**ALONE, "ingress": {"enabled": True}}, "networkPolicy.site.from is empty, so what routes to the site"),
        ({**ALONE, "httpRoute": {"enabled": True}}, "site.httpRoute.parentRefs is empty"),
    ],
)
def test_an_unreachable_site_is_refused(site: dict[str, Any], message: str) -> None:
    with pytest.raises(helm.HelmRenderError, match=message):
        renders.rendered({**renders.sample("aws"), "site": site})


def test_nothing_is_exposed_by_default() -> None:
    kinds = {
        item["kind"] for name in renders.SAMPLES for item in renders.objects(renders.rendered(renders.sample(name)))
    }
    assert not kinds & {"Ingress", "HTTPRoute", "PodMonitor"}


@pytest.mark.parametrize("way", ["ingress", "httpRoute"])
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"auth": {}}, "whoever reaches the API runs code in this namespace; give prefect.server.auth.existingSecret"),
        ({"uiApiUrl": "http://localhost:4200/api"}, "localhost:4200/api is the browser's own machine"),
        ({"uiApiUrl": "https://example/prefect/api"}, "https://example/prefect/api is not https://HOST/api"),
        ({"uiApiUrl": "https://pre-.example/api"}, "https://pre-.example/api is not https://HOST/api"),
        ({"uiApiUrl": "https://10.0.0.1/api"}, "https://10.0.0.1/api is not https://HOST/api"),
    ],
)
def test_an_unsafe_or_dangling_route_is_refused(way: str, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(helm.HelmError, match=message):
        renders.rendered(values({way: {"enabled": True}}, **changed))


def test_the_sites_own_host_is_not_the_servers() -> None:
    result = {**values({"ingress": {"enabled": True}}), "site": {**ALONE, "ingress": {"enabled": True}}}
    result["networkPolicy"]["site"] = {"from": ROUTER}
    renders.rendered(result)
    with pytest.raises(helm.HelmError, match="is the host of prefect"):
        renders.rendered(with_value("site.host", "prefect.example", result))


@pytest.mark.parametrize("path", ["/api", "/api/models", "/flow-runs", "/docs"])
def test_the_site_uses_no_path_of_prefect(path: str) -> None:
    with pytest.raises(helm.HelmError, match=f"site.path: {path} is a path of the Prefect server"):
        renders.rendered({**values({"ingress": {"enabled": True}}), "site": {**SITE, "path": path}})
    renders.rendered({**values({"ingress": {"enabled": True}}), "site": {**SITE, "path": f"/x{path}"}})


def test_an_external_prefect_behind_a_private_ca_is_trusted_by_all_its_clients() -> None:
    result = renders.sample("onprem")
    result["prefect"]["externalApi"]["caBundle"] = {"configMap": "prefect-ca"}
    objects = renders.objects(renders.rendered(result))
    (config,) = [item for item in objects if label(item) == "ConfigMap enginesmith-deploy"]
    runs = [flow_run_job(job_variables(words)) for words in json.loads(config["data"]["commands.json"])]
    clients = 0
    for spec in pod_specs([*objects, *runs]):
        for container in containers(spec):
            env = {item["name"]: item.get("value") for item in container.get("env", ())}
            if "PREFECT_API_URL" in env or container["name"] == "prefect-job":
                place = str(env["PREFECT_API_SSL_CERT_FILE"]).removesuffix("/ca.crt")
                (mount,) = [item for item in container["volumeMounts"] if item["mountPath"] == place]
                assert {"name": mount["name"], "configMap": {"name": "prefect-ca"}} in spec["volumes"]
                clients += 1
    assert clients > 4


def test_a_route_without_network_policy_clients_is_refused() -> None:
    expected = values({"httpRoute": {"enabled": True}})
    with pytest.raises(helm.HelmError) as error:
        renders.rendered({**expected, "networkPolicy": {}})
    assert "networkPolicy.prefect.from is empty" in str(error.value)
    assert "prefect.server.httpRoute.parentRefs is empty" in str(error.value)


def test_prometheus_scrapes_rays_own_metrics() -> None:
    inputs = renders.sample("aws")
    inputs["ray"] = {"podMonitor": {"enabled": True, "labels": {"release": "prometheus"}}}
    result = {label(item): item for item in renders.objects(renders.rendered(inputs))}
    monitor, policy = result["PodMonitor enginesmith-ray"], result["NetworkPolicy enginesmith-ray-metrics"]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    head = result["RayCluster enginesmith-ray"]["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert {item["name"]: item["containerPort"] for item in head["ports"]}[endpoint["port"]] == 8080
    assert monitor["spec"]["selector"]["matchLabels"] == {"ray.io/cluster": "enginesmith-ray"}
    assert policy["spec"]["podSelector"] == monitor["spec"]["selector"]
    assert policy["spec"]["ingress"][0]["ports"] == [{"port": 8080, "protocol": "TCP"}]
    assert monitor["metadata"]["labels"]["release"] == "prometheus"


def test_the_monitor_of_ray_is_valid_for_its_operator() -> None:
    schema = crds()["monitoring.coreos.com/v1", "PodMonitor"]
    entries = {**renders.sample("aws"), "ray": {"podMonitor": {"enabled": True}}}
    (monitor,) = [item for item in renders.objects(renders.rendered(entries)) if item["kind"] == "PodMonitor"]
    assert not list(jsonschema.Draft202012Validator(schema).iter_errors({**monitor, "metadata": {}}))


def test_the_site_may_have_its_own_host() -> None:
    inputs = renders.sample("aws")
    fields = {"ingress": {"enabled": True, "tlsSecret": "tls"}, "httpRoute": {"enabled": True, "parentRefs": GATEWAY}}
    inputs |= {"site": {**ALONE, **fields}, "networkPolicy": {"site": {"from": ROUTER}}}
    texts = renders.rendered(inputs)
    result = {label(item): item for item in renders.objects(texts)}
    assert not result.keys() & {"Ingress enginesmith-prefect-server", "HTTPRoute enginesmith-prefect-server"}
    ingress, route = result["Ingress enginesmith-site"]["spec"], result["HTTPRoute enginesmith-site"]["spec"]
    (path,) = ingress["rules"][0]["http"]["paths"]
    assert path["path"] == "/registry" and path["backend"]["service"]["name"] == "enginesmith-site"
    assert [ingress["rules"][0]["host"]] == ingress["tls"][0]["hosts"] == route["hostnames"] == ["models.example"]
    assert route["rules"][0]["backendRefs"] == [{"name": "enginesmith-site", "port": 8080}]
    assert result["NetworkPolicy enginesmith-site"]["spec"]["ingress"][0]["from"] == ROUTER
    assert "https://models.example/registry/" in texts["NOTES.txt"]
