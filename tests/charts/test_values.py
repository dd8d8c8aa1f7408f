"""Wrong values are refused, by the schema or by the templates, with a message that names the value."""

from typing import Any

import helm_python as helm
import pytest

from charts import renders
from tests.charts.kube import label, with_value

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
NO_VALUES = {"matchExpressions": [{"key": "app", "operator": "In"}]}
SECRET = {"secretKeyRef": {"name": "s", "key": "k"}}
SCRAPES = {"enabled": True, "interval": "30s", "scrapeTimeout": "1m"}
INIT = {"name": "a", "image": "registry.example/a:1"}
L4 = {"name": "l4", "generation": "sm_89", "max": 1}
SPREAD = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}
BIG = {"name": "BIG", "value": "x" * 120_000}


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("images.control.digset", "sha256:0", "digset"),
        ("images.control.digest", "sha256:abc", "pattern"),
        ("images.control.repository", "registry.example/x@sha256:1", "pattern"),
        ("images.control.repository", "https://registry.example/x", "pattern"),
        ("images.control.repository", "registry.example/Control", "pattern"),
        ("images.control.pullPolicy", "Sometimes", "IfNotPresent"),
        ("nameOverride", "A", "pattern"),
        ("gpuGroups.0.cpu", "0", "pattern"),
        ("cpuGroup.cpu", "0.0", "pattern"),
        ("cpuGroup.cpu", "0m", "pattern"),
        ("prefect.flowRuns.cpuRequest", 1_000_000, "maximum"),
        ("gpuGroups.0.memory", "0Gi", "pattern"),
        ("registry.region", "eu central", "pattern"),
        ("imagePullSecrets", "harbor", "want array"),
        ("podSecurity.runAsUser", 0, "minimum"),
        ("registry.bucket", "Upper_Case", "pattern"),
        ("registry.prefix", "a/../b", "'a/../b' does not match pattern"),
        ("registry.prefix", "a//b", "pattern"),
        ("registry.prefix", "a/.hidden", "pattern"),
        ("serviceAccounts.rayHead", {"create": True}, "create"),
        ("registry.endpoint", "minio:9000", "pattern"),
        ("registry.endpoint", "https://minio?x=1", "pattern"),
        ("registry.sse", "yes", "aws:kms"),
        ("registry.pathStyle", "on", "want null or boolean"),
        ("prefect.externalApi.url", "prefect.example", "pattern"),
        ("prefect.worker.replicas", 0, "minimum"),
        ("prefect.server.resources.requests.cpu", 0.5, "want integer or string"),
        ("prefect.server.resources.requests.memory", 16, "want string"),
        ("prefect.server.resources.requests.memory", "512m", "pattern"),
        ("prefect.server.resources.requests.cpu", "1Gi", "pattern"),
        ("cpuGroup.memory", "16", "pattern"),
        ("prefect.server.resources.limit", {}, "limit"),
        ("prefect.server.tolerations", [{"key": "a", "effekt": "NoSchedule"}], "effekt"),
        ("prefect.server.tolerations", [{"key": "a", "effect": "Never"}], "NoSchedule"),
        ("prefect.server.nodeSelector", {"a": 1}, "want string"),
        ("prefect.flowRuns.scratch.size", "fifty", "pattern"),
        ("ray.version", "2.60", "pattern"),
        ("canary.channel", "My Channel", "pattern"),
        ("canary.channel", "--dry-run", "pattern"),
        ("ray.waitForNodes", "soon", "pattern"),
        ("ray.autoscaler.upscalingMode", "Fast", "Aggressive"),
        ("gpuGroups", {"l4": {}}, "want array"),
        ("gpuGroups.0.generation", "sm89", "sm_89"),
        ("gpuGroups.0.name", "T4", "pattern"),
        ("gpuGroups.0.name", "t" * 21, "pattern"),
        ("gpuGroups.0.max", 0, "minimum"),
        ("cpuGroup.max", 0, "minimum"),
        ("gpuGroupDefaults.gpusPerWorker", 2**63, "maximum"),
        ("podSecurity.fsGroup", 2**31, "maximum"),
        ("gpuGroups.0.gpus", 1, "gpus"),
        ("gpuGroups.0.gpuResource", "amd.com/gpu", "pattern"),
        ("gpuGroups", [{"name": "l4", "generation": "sm_89"}], "max"),
        ("canary.traffic", "/some/where", "pattern"),
        ("canary.duration", "0m", "pattern"),
        ("canary.duration", "soon", "pattern"),
        ("metrics.serviceMonitor.interval", "60", "pattern"),
        ("metrics.rules.failedBuildsPerHour", "many", "want integer"),
        ("networkPolicy.registry.ports", [], "minItems"),
        ("ray.gcsFaultTolerance.redisAddress", "redis.example", "pattern"),
        ("networkPolicy.apiServer.cidrs", [], "minItems"),
        ("networkPolicy.apiServer.cidrs", ["everywhere"], "pattern"),
        ("networkPolicy.metrics.from", [{}], "minProperties"),
        ("networkPolicy.prefect.cidrs", ["10.0.0.0"], "pattern"),
        ("networkPolicy.prefect.from", [{"namespaceSelektor": {}}], "namespaceSelektor"),
        ("networkPolicy.prefect.from", [{"ipBlock": {"cidr": "10.0.0.0/08"}}], "pattern"),
        ("networkPolicy.extraEgress", [{"ports": [{"port": 80}]}], "to"),
        ("networkPolicy.extraEgress", [{"to": []}], "minItems"),
        ("extraEnv", [{"value": "x"}], "name"),
        ("extraEnv", [{"name": "A=B", "value": "x"}], "pattern"),
        ("extraEnv", [{"name": "A", "valueFrom": {"secretKey": {}}}], "secretKey"),
        ("commonLabels", {"team": "not valid!"}, "pattern"),
        ("commonLabels", {"-team": "a"}, "'-team' not allowed"),
        ("commonLabels", {"team": "a" * 64}, "pattern"),
        ("kueue.queueName", "My Queue", "pattern"),
        ("ray.head.priorityClassName", "high_priority", "pattern"),
        ("registry.existingSecret", "a..b", "pattern"),
        ("prefect.server.affinity", {"nodeAfinity": {}}, "nodeAfinity"),
        ("prefect.worker.affinity", {"podAntiAffinity": {"required": []}}, "required"),
        ("gpuGroups.0.affinity", {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": []}}}, "minItems"),
        ("gpuGroups.0.affinity", {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [{}]}}}, "minProperties"),
        *(
            ("gpuGroups.0.affinity", {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [{field: [term]}]}}}, said)
            for field, term, said in (
                ("matchExpressions", {"key": "é", "operator": "Exists"}, "key"),
                ("matchExpressions", {"key": "a", "operator": "In", "values": ["b c"]}, "values"),
                ("matchFields", {"key": "a", "operator": "In", "values": ["b"]}, "key"),
                ("matchFields", {"key": "metadata.name", "operator": "In", "values": ["a", "b"]}, "values"),
            )
        ),
        ("prefect.server.tolerations", [{"operator": "Equal", "value": "x"}], "key"),
        ("prefect.server.tolerations", [{"operator": "Exists", "key": "a", "value": "x"}], "value"),
        ("prefect.server.tolerations", [{"operator": "Exists", "key": "é"}], "key"),
        ("prefect.server.tolerations", [{"operator": "Equal", "key": ""}], "key"),
        ("prefect.server.tolerations", [{"key": "a", "value": "b c"}], "value"),
        ("prefect.server.nodeSelector", {"not a key": "x"}, "'not a key' not allowed"),
        ("catalog.place", "registred", "pattern"),
        ("extraVolumes", [{"name": "a"}], "minProperties"),
        ("extraVolumes", [{"name": "a", "emptyDri": {}}], "emptyDri"),
        ("extraInitContainers", [{"name": "a", "image": "b", "comand": []}], "comand"),
        ("prefect.server.tolerations", [{"key": "a", "operator": "Exists", "tolerationSeconds": 1}], "effect"),
        (
            "cpuGroup.affinity",
            {"podAffinity": {REQUIRED: [{"topologyKey": "a", "labelSelector": NO_VALUES}]}},
            "values",
        ),
        ("extraEnvFrom", [{"prefix": "A_"}], "secretRef"),
        ("prefect.logLevel", "debug", "DEBUG"),
        ("prefect.worker.topologySpreadConstraints", [{"topologyKey": "zone"}], "maxSkew"),
        ("site.topologySpreadConstraints", [{**SPREAD, "minDomains": 2}], "DoNotSchedule"),
        ("site.extraContainers", [{**INIT, "restartPolicy": "Always"}], "restartPolicy"),
        ("fleet.schedule", "61 * * * *", "pattern"),
        ("fleet.schedule", "0 24 * * *", "pattern"),
        ("ray.finishSchedule", "0 0 * * 7", "finishSchedule"),
        ("fleet.schedule", "0 0 * 13 *", "pattern"),
        ("fleet.catalog.content", {"serve": [{"model": "digits", "on": ["l44"]}]}, "'l40s'"),
        ("fleet.catalog.content", {"serve": [{"model": "digits", True: ["l44"]}]}, "'l40s'"),
        ("fleet.catalog.content", {"serve": [{"model": "digits", "precisions": ["fp17"]}]}, "'fp16'"),
        ("fleet.catalog.content", {"serve": [{"modell": "digits"}]}, "modell"),
        ("fleet.schedule", "hourly", "pattern"),
        ("fleet.catalog.configMap", "c", "configMap"),
        ("fleet.catalog.key", "../x", "pattern"),
        ("fleet.apply", "yes", "want boolean"),
        ("fullnameOverride", "Not_A_Name", "pattern"),
        ("replicas", 1, "replicas"),
        ("prefect.server.resources.limits", {"memori": "1Gi"}, "memori"),
        ("extraEnvFrom", [{"secretRef": {"name": "a"}, "configMapRef": {"name": "b"}}], "oneOf"),
        ("extraEnv", [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodename"}}}], "pattern"),
        (
            "extraVolumes",
            [{"name": "a", "configMap": {"name": "c", "items": [{"key": "k", "path": "../x"}]}}],
            "pattern",
        ),
        ("extraVolumes", [{"name": "a", "hostPath": {"path": "/a/../b"}}], "pattern"),
        ("extraVolumes", [{"name": "a", "secret": {"name": "s"}}], "secretName"),
        ("extraVolumeMounts", [{"name": "a", "mountPath": "/a", "subPath": "a/../.."}], "pattern"),
        ("extraInitContainers", [{**INIT, "securityContext": {"runAsRoot": True}}], "runAsRoot"),
        ("extraInitContainers", [{**INIT, "resources": {"limits": {"memori": "1Gi"}}}], "memori"),
        ("imagePullSecrets", ["a", "a"], "equal"),
        ("serviceAccounts.builds.name", "31", "not"),
        ("registry.caBundle.key", "..", "pattern"),
        *(
            ("networkPolicy.extraEgress", [{"to": [{"podSelector": {}}], "ports": [port]}], said)
            for port, said in (
                ({"port": 0}, "minimum"),
                ({"port": 65536}, "maximum"),
                ({"port": "80"}, "pattern"),
                ({"port": "Http_alt"}, "pattern"),
                ({"endPort": 90}, "port"),
                ({"port": "http", "endPort": 90}, "want integer"),
            )
        ),
        ("networkPolicy.prefect.from", [{"ipBlock": {"cidr": "10.0.0.0/8"}, "podSelector": {}}], "maxProperties"),
    ],
)
def test_the_schema_refuses(path: str, value: Any, said: str) -> None:
    with pytest.raises(helm.HelmError) as refused:
        renders.rendered(with_value(path, value))
    message = str(refused.value)
    assert said in message
    assert path.split(".")[0] in message, "the message does not say which value"


def gpu(**changed: Any) -> list[dict[str, Any]]:
    return [{**L4, **changed}]


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("images.control.digest", "", "images.control.digest is empty; give the digest"),
        ("images.worker.repository", "", "images.worker.repository is empty; build images/worker.Dockerfile"),
        ("images", {"allowTags": True, "control": {"repository": "a"}}, "images.control has neither digest nor tag"),
        ("registry", {"bucket": "one", "existingClaim": "two"}, "both bucket and existingClaim"),
        ("registry", {"bucket": ""}, "neither bucket nor existingClaim"),
        ("prefect.server.enabled", False, "there is no prefect.externalApi.url"),
        ("prefect.externalApi.url", "https://prefect.example/api", "prefect.server.enabled=false to use the external"),
        ("ray.enabled", False, "gpuGroups are workers of the RayCluster"),
        ("ray.gcsFaultTolerance.existingSecret", "redis", "ray.gcsFaultTolerance: a Secret or user is given"),
        ("ray.version", "2.51.0", "2.51.0 has no token authentication; use 2.52.0"),
        ("fullnameOverride", "f" * 41, "has 41 characters"),
        ("gpuGroups", [L4, L4], 'the name "l4" is taken'),
        ("gpuGroups", gpu(name="cpu"), "taken by cpuGroup"),
        ("gpuGroups", gpu(min=2, gpuLabels=True), "gpuGroups.l4: min 2 is more than max 1"),
        ("gpuGroups", gpu(product="h100", gpuLabels=True), '"h100" is no product of sm_89, which has l4, l40s'),
        ("gpuGroups", gpu(), "gpuLabels is false and nodeSelector is empty"),
        ("cpuGroup", {"min": 5}, "cpuGroup: min 5 is more than max 4"),
        ("canary.traffic", "", "canary.traffic is empty"),
        ("metrics.enabled", False, "there is nothing to scrape"),
        ("canary.duration", "9h", "canary.duration: a canary on a GPU group takes up to three times 9h"),
        ("canary.duration", "1d", "give 8h or less"),
        ("registry", {"scheme": "az", "bucket": "one"}, 'registry.account is "" with registry.scheme=az'),
        ("registry", {"bucket": "one", "account": "one"}, 'registry.account is "one" with registry.scheme=s3'),
        ("registry", {"scheme": "gs", "bucket": "one", "existingSecret": "s"}, "annotate serviceAccounts.builds"),
        ("registry", {"scheme": "gs", "bucket": "one", "region": "eu"}, "registry.region is given"),
        ("registry", {"scheme": "gs", "bucket": "one", "pathStyle": True}, "registry.pathStyle is given"),
        ("registry", {"kmsKey": "k", "bucket": "one"}, "registry.kmsKey is given and registry.sse does not ask for it"),
        ("serviceAccounts.builds", {"create": False}, "serviceAccounts.builds: create is false and name is empty"),
        ("fleet.catalog", {"content": {"serve": [{"model": "m"}]}, "existingConfigMap": "c"}, "both content and"),
        ("fleet.catalog.content", {"runtimes": {}}, "fleet.catalog.content has no `serve`"),
        ("fleet", {"apply": True}, "fleet.apply is true and fleet.enabled is false"),
        ("networkPolicy.registry.cidrs", [], "networkPolicy.registry has neither cidrs nor namespaceSelector"),
        ("networkPolicy.postgresql", {"cidrs": []}, r"networkPolicy.postgresql.cidrs is empty.*extraEgress"),
        ("networkPolicy.registry.cidrs", ["10.0.0.1/24"], "registry.cidrs: 10.0.0.1/24 has bits set beyond"),
        ("networkPolicy.apiServer.cidrs", ["10.0.128.0/16"], "10.0.128.0/16 has bits"),
        ("networkPolicy.apiServer.cidrs", ["2001:db8::1/64"], "2001:db8::1/64 has bits"),
        ("networkPolicy.apiServer.cidrs", ["2001:db8:0:8000::/48"], "2001:db8:0:8000::/48 has bits"),
        ("networkPolicy.prefect.from", [{"ipBlock": {"cidr": "10.0.0.9/31"}}], "prefect.from: 10.0.0.9/31 has bits"),
        ("networkPolicy.extraEgress", [{"to": [{"ipBlock": {"cidr": "10.0.0.9/8"}}]}], "extraEgress: 10.0.0.9/8 has"),
        ("prefect.server.resources", {"requests": {"memory": "4Gi"}}, "memory: 4Gi is more than the limit, 2Gi"),
        ("ray.head", {"resources": {"requests": {"cpu": 4}}}, "head.resources.requests.cpu: 4 is more than"),
        ("prefect.flowRuns", {"memoryRequest": "32Gi"}, "flowRuns.memoryRequest: 32Gi is more than the limit, 16Gi"),
        ("serviceAccounts", {"builds": {"name": "a"}, "rayHead": {"name": "a"}}, 'rayHead: "a" is made for serviceAcc'),
        ("serviceAccounts.builds.name", "enginesmith-ray", 'rayHead: "enginesmith-ray" is made for service'),
        (
            "gpuGroups.0.nodeSelector",
            {"nvidia.com/gpu.compute.major": "9"},
            'major is "9", and sm_75 is on nodes with "7"',
        ),
        (
            "gpuGroupDefaults",
            {"nodeSelector": {"nvidia.com/gpu.compute.minor": "0"}},
            't4.nodeSelector: .*minor is "0"',
        ),
        (
            "gpuGroups",
            [{**L4, "name": f"l4-{count}", "gpuLabels": True, "extraEnv": [BIG]} for count in range(9)],
            r"enginesmith-ray takes 1\d{6} bytes with 10 groups.*name fewer groups.*extraEnv",
        ),
        ("serviceAccounts.rayApply", {"name": "enginesmith-builds"}, "rayApply: .* is made for serviceAccounts.builds"),
        ("serviceAccounts.rayApply", {"create": False, "name": "enginesmith-builds"}, ".*made for.*builds, too"),
        ("gpuGroups.0.podAnnotations", {"enginesmith.io/ray-version": "1"}, "t4.podAnnotations: the chart sets"),
        ("ray.head.podAnnotations", {"enginesmith.io/ray-version": "1"}, "ray.head.podAnnotations: the chart sets"),
        ("prefect.workPool", "t4", 'gpuGroups: the name "t4" is that of prefect.workPool, too'),
        ("gpuGroups", gpu(name="headgroup", gpuLabels=True), "KubeRay names the head's group so"),
        ("images.control.repository", "example/x:v1", 'images.control.repository: "example/x:v1" has a tag; put it'),
        ("images.control.tag", "v1", "images.control has both tag v1 and digest"),
        ("metrics.serviceMonitor", SCRAPES, "scrapeTimeout 1m is longer than interval 30s"),
        ("gpuGroups", gpu(product="l4", gpuResource="nvidia.com/mig-1g.10gb"), 'product "l4" is a whole GPU'),
        ("commonLabels", {"app.kubernetes.io/name": "x"}, "commonLabels: the chart sets app.kubernetes.io/name"),
        ("commonLabels", {"app.kubernetes.io/instance": "x"}, "the chart sets app.kubernetes.io/instance"),
        ("commonLabels", {"ray.io/cluster": "x"}, "commonLabels: the operators set ray.io/cluster"),
        ("extraEnv", [{"name": "HOME", "value": "/x"}], "extraEnv: the chart sets HOME; remove it"),
        ("extraEnv", [{"name": "ENGINESMITH_CACHE", "value": "/x"}], "extraEnv: the chart sets ENGINESMITH_CACHE"),
        ("extraEnv", [{"name": "RAY_AUTH_TOKEN_PATH", "value": "/x"}], "extraEnv: the chart sets RAY_AUTH_TOKEN_PATH"),
        ("extraEnv", [{"name": "A", "value": "x"}] * 2, "extraEnv: A is there twice"),
        ("extraEnv", [{"name": "A"}], "extraEnv: A has neither value nor valueFrom"),
        ("extraEnv", [{"name": "A", "value": "x", "valueFrom": SECRET}], "extraEnv: A has both value and valueFrom"),
        ("prefect.worker.extraEnv", [{"name": "PREFECT_WORKER_WEBSERVER_PORT", "value": "1"}], "worker.extraEnv"),
        ("gpuGroups.0.extraEnv", [{"name": "HOME", "value": "/x"}], "gpuGroups.t4.extraEnv: the chart sets HOME"),
        ("cpuGroup", {"extraEnv": [{"name": "HOME", "value": "/x"}]}, "cpuGroup.extraEnv: the chart sets HOME"),
        ("serviceAccounts.builds.podLabels", {"ray.io/x": "y"}, "builds.podLabels: the operators set ray.io/x"),
        ("extraVolumes", [{"name": "tmp", "emptyDir": {}}], "extraVolumes: the chart has a volume tmp"),
        ("extraVolumes", [{"name": "site", "emptyDir": {}}], "extraVolumes: the chart has a volume site"),
        ("extraVolumes", [{"name": "a", "emptyDir": {}}] * 2, "extraVolumes: a is there twice"),
        ("extraVolumeMounts", [{"name": "a", "mountPath": "/a"}], '/a is of volume "a", which extraVolumes does not'),
        ("gpuGroups.0.extraVolumeMounts", [{"name": "a", "mountPath": "/tmp"}], "t4.extraVolumeMounts: the chart"),
        ("gpuGroups", gpu(resourceClaimTemplate="a", gpuResource="nvidia.com/mig-1g.10gb"), "both gpuResource"),
        ("extraInitContainers", [INIT, INIT], "extraInitContainers: a is there twice"),
        ("extraInitContainers", [{**INIT, "name": "wait-gcs-ready"}], "there is a container wait-gcs-ready already"),
        (
            "extraInitContainers",
            [{**INIT, "volumeMounts": [{"name": "b", "mountPath": "/b"}]}],
            'a: /b is of volume "b", which',
        ),
        ("gpuGroups", None, r"gpuGroups: nothing is below this key, or null; .*default, or write gpuGroups: \[\]"),
        ("ray", None, "ray: nothing is below this key, or null; remove the key for its default"),
        ("prefect.server.auth", None, "prefect.server.auth: nothing is below this key"),
        ("extraInitContainers", [{**INIT, "env": [{"name": "A", "value": ""}] * 2}], "a.env: A is there twice"),
        ("extraEnv", [{"name": "ENGINESMITH_CACHE_BYTES", "value": "1"}], "the chart sets ENGINESMITH_CACHE_BYTES"),
        (
            "networkPolicy.extraEgress",
            [{"to": [{"podSelector": {}}], "ports": [{"port": 90, "endPort": 80}]}],
            "endPort 80 is less than port 90",
        ),
        *(
            ("networkPolicy.metrics.from", [{"ipBlock": {"cidr": cidr, "except": [inner]}}], f"except {inner} is not")
            for cidr, inner in (
                ("10.0.0.0/8", "11.0.0.0/16"),
                ("10.0.0.0/8", "10.0.0.0/8"),
                ("10.0.0.0/8", "fd00::/16"),
                ("fd00::/16", "fd01::/32"),
            )
        ),
        ("networkPolicy.kuberay.from", [{"ipBlock": {"cidr": "10.0.0.1/8"}}], "kuberay.from: 10.0.0.1/8 has bits"),
        ("fleet.schedule", "0 0 31 2 *", 'fleet.schedule: "0 0 31 2 \\*" has no day in any year'),
        ("fleet.schedule", "0 0 31 feb,APR-apr *", "has no day in any year"),
        ("fleet.schedule", "0 22-6 * * *", "22-6 in .* ends before it begins"),
        ("ray.finishSchedule", "0 0 30 2 *", "ray.finishSchedule: .* has no day in any year"),
        ("ray.finishSchedule", "0 0 * * fri-sun", "fri-sun in .* ends before it begins"),
        ("gpuGroupDefaults.extraEnv", [{"name": "HOME", "value": "/x"}], "gpuGroups.t4.extraEnv: the chart sets HOME"),
        ("prefect.server.extraEnv", [{"name": "PREFECT_UI_API_URL", "value": "x"}], "chart sets PREFECT_UI_API_URL"),
        ("prefect.server.extraVolumes", [{"name": "data", "emptyDir": {}}], "the chart has a volume data"),
        ("ray.head.extraContainers", [{**INIT, "name": "autoscaler"}], "there is a container autoscaler already"),
        (
            "metrics.extraContainers",
            [{**INIT, "volumeMounts": [{"name": "b", "mountPath": "/b"}]}],
            'a: /b is of volume "b"',
        ),
        ("site.topologySpreadConstraints", [SPREAD, SPREAD], "site.topologySpreadConstraints: zone, ScheduleAnyway is"),
        ("commonAnnotations", {"helm.sh/hook": "test"}, "commonAnnotations: the chart sets helm.sh/hook; remove it"),
        ("networkPolicy.proxy.cidrs", [], "networkPolicy.proxy.cidrs is empty, so nothing could reach the proxy"),
        ("prefect.externalApi.caBundle.configMap", "ca", "prefect.externalApi.caBundle is given and"),
    ],
)
def test_the_templates_refuse(path: str, value: Any, said: str) -> None:
    base = "onprem" if path.startswith("networkPolicy.proxy") else "aws"
    with pytest.raises(helm.HelmError, match=said):
        renders.rendered(with_value(path, value, base))


@pytest.mark.parametrize(
    "cidr",
    [
        "10.0.0.0/33", "10.0.0.256/32", "10.0.0.01/32", "10.0.0/24", "10.0.0.0.0/8", "fd00::/129", "fd00::1::2/64",
        ":fd00::/8", "1:2:3:4:5:6:7/64", "1:2:3:4:5:6:7:8:9/64", "1:2:3:4::5:6:7:8/64", "12345::/16", "::10.0.0.0/104",
    ],
)  # fmt: skip
def test_what_is_no_network_is_refused_in_words(cidr: str) -> None:
    with pytest.raises(helm.HelmError, match=f"networkPolicy.prefect.cidrs: {cidr} is no network; give"):
        renders.rendered(with_value("networkPolicy.prefect.cidrs", [cidr]))


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(helm.HelmError) as refused:
        renders.rendered({})
    assert "images.control.repository" in str(refused.value) and "registry: neither bucket" in str(refused.value)


def test_a_release_named_by_a_number_has_labels_of_text_and_is_told_that_services_want_a_letter() -> None:
    values = {**renders.sample("aws"), "fullnameOverride": "builds"}
    for item in renders.objects(renders.rendered(values, name="2024")):
        assert all(type(value) is str for value in item["metadata"]["labels"].values()), label(item)
    with pytest.raises(helm.HelmError, match="does not begin with a letter"):
        renders.rendered(renders.sample("aws"), name="2024")


def test_a_tag_is_taken_only_when_allowed() -> None:
    values = renders.sample("minimal")
    values["images"] = {"allowTags": True, "control": {"repository": "registry.example/control", "tag": "1.2"}}
    texts = renders.rendered(values)
    assert "image: registry.example/control:1.2" in texts["prefect/server.yaml"]
    assert "images are selected by tag" in texts["NOTES.txt"]
