import logging
from contextlib import nullcontext

import helm_python
import pytest

from charts import renders
from tests.charts.test_extra import ADDED, INIT, LICENSE
from tests.charts.test_nodecache import L4
from tests.cluster.api import RefusedError, wait_for
from tests.cluster.conftest import PODS, Cluster
from tests.cluster.flow_runs import start
from tests.cluster.release import Release, Values, sample

log = logging.getLogger("cluster")
IDENTITY = {"azure.workload.identity/use": "true"}
ONE = {"example.com/scrape": "yes"}
SPREAD = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}


def with_all() -> Values:
    """The sample values with everything that can be added to pods, two Ingresses, and a node's cache on a claim."""
    values = {**sample(), **ADDED, "caBundle": {"configMap": "cas"}, "metrics": {"extraContainers": [INIT]}}
    values["ray"]["head"] = {"extraContainers": [INIT]}
    values["site"] = {"enabled": True, "host": "site.example", "ingress": {"enabled": True}, "serviceAnnotations": ONE}
    pull = {**L4, "nodeSelector": {"kubernetes.io/hostname": "l4-1"}}
    values["nodeCache"] = {"enabled": True, "existingClaim": "engines", "pulls": [pull]}
    values["serviceAccounts"] = {"builds": {"podLabels": IDENTITY}}
    values["podSecurity"] = {"runAsUser": 1000680000, "runAsGroup": None, "fsGroup": None}
    values["cpuGroup"] = {"cpu": 2, "extraEnv": [{"name": "LICENSE", "value": "none"}]}
    router = {"from": [{"namespaceSelector": {"matchLabels": {"router": "yes"}}}]}
    values["networkPolicy"] = {"prefect": router, "site": router}
    values["prefect"] = {
        "logLevel": "DEBUG",
        "server": {
            "uiApiUrl": "https://prefect.example/api",
            "auth": {"existingSecret": "prefect-auth"},
            "ingress": {"enabled": True, "className": "nginx", "tlsSecret": "prefect-tls"},
        },
        "worker": {"topologySpreadConstraints": [SPREAD]},
    }
    return values


def test_all_optional_values_are_accepted_and_run(cluster: Cluster, namespace: str, helm: Release) -> None:
    for name, keys in {"hub": {"TOKEN": "t"}, "license": {"key": "k"}, "prefect-auth": {"auth-string": "a:b"}}.items():
        cluster.api.create("secrets", namespace, {"metadata": {"name": name}, "stringData": keys})
    cluster.api.create("configmaps", namespace, {"metadata": {"name": "cas"}, "data": {"ca.crt": "PEM"}})
    shared_fields = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    cluster.api.create("persistentvolumeclaims", namespace, {"metadata": {"name": "engines"}, "spec": shared_fields})
    helm.install(with_all())
    beside_names = set()
    for pod in cluster.running(namespace, PODS + 2).values():
        component, spec = pod["metadata"]["labels"]["app.kubernetes.io/component"], pod["spec"]
        beside_names |= {component} if INIT["name"] in {item["name"] for item in spec["containers"]} else set()
        assert {"name": "SSL_CERT_FILE", "value": "/etc/enginesmith/trust/ca.crt"} in spec["containers"][0]["env"]
        claims = {item.get("persistentVolumeClaim", {}).get("claimName") for item in spec["volumes"]}
        assert ("engines" in claims and spec["nodeName"] == "l4-1") is (component == "node-cache")
    assert beside_names == {"metrics", "ray-head"}
    assert ONE.items() <= cluster.api.get("services", namespace, "enginesmith-site")["metadata"]["annotations"].items()
    build_pods = cluster.pods(namespace, "azure.workload.identity/use=true")
    assert {pod["spec"]["serviceAccountName"] for pod in build_pods.values()} == {"enginesmith-builds"}
    job = start(cluster, namespace, "validate-pending/l4")
    (pod,) = wait_for("the flow run's pod", lambda: list(cluster.pods(namespace, f"job-name={job}").values()) or None)
    assert LICENSE in pod["spec"]["containers"][0]["env"]
    assert pod["spec"]["initContainers"][0]["name"] == "warm"
    log.info("a flow run's pod has a variable from a Secret, and an init container")
    ingress = cluster.api.ask("GET", f"/apis/networking.k8s.io/v1/namespaces/{namespace}/ingresses")
    assert {item["spec"]["rules"][0]["host"] for item in ingress["items"]} == {"prefect.example", "site.example"}


REFUSED = ("10.0.0.1/24", "10.0.0.0/33", "10.0.0.01/32", "10.0.0/24", "fd00::1/64", "1:2:3:4::5:6:7:8/64", ":fd00::/8")
TAKEN = ("10.0.0.0/24", "10.0.0.130/31", "0.0.0.0/0", "::/0", "fd00:ff00::/24", "1:2:3:4:5:6:7:8/128")


@pytest.mark.parametrize(("cidr", "taken"), [*((cidr, False) for cidr in REFUSED), *((cidr, True) for cidr in TAKEN)])
def test_networks_that_the_chart_refuses_are_refused_by_the_server(cluster, namespace, cidr, taken):
    spec = {"podSelector": {}, "egress": [{"to": [{"ipBlock": {"cidr": cidr}}]}]}
    policy = {"metadata": {"name": "one"}, "spec": spec}
    values = {**sample(), "networkPolicy": {"apiServer": {"cidrs": [cidr]}}}
    with nullcontext() if taken else pytest.raises(helm_python.HelmError, match=f"apiServer.cidrs: {cidr}"):
        renders.rendered(values)
    if taken:
        cluster.api.create("networkpolicies", namespace, policy)
        return
    with pytest.raises(RefusedError, match=r"ipBlock\.cidr"):
        cluster.api.create("networkpolicies", namespace, policy)
