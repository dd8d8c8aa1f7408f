from typing import Any

import helm_python as helm
import kubernetes_validate
import pytest

from charts import renders
from tests.charts.kube import Object, label, with_value

L4 = {"name": "digits-l4", "reference": "digits:stable", "target": "l4", "args": ["--runtime", "tensorrt=10.16.1"]}
H100 = {**L4, "name": "digits-h100", "target": "h100", "nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H100"}}


def objects(values: dict[str, Any]) -> dict[str, Object]:
    return {label(item): item for item in renders.objects(renders.rendered(values))}


def on_nodes(base: str = "aws", **more: Any) -> dict[str, Any]:
    return {**with_value("nodeCache", {"enabled": True, "pulls": [L4, H100], **more}, base=base)}


def test_nodes_follow_their_channels_through_the_cache_and_the_registry_behind_it() -> None:
    cache = "http://cache.example:8080"
    actual = objects(on_nodes(through=cache))
    spec = actual["DaemonSet enginesmith-node-digits-h100"]["spec"]["template"]["spec"]
    (watch,) = spec["containers"]
    assert spec["nodeSelector"] == H100["nodeSelector"]
    assert watch["command"][:4] == ["enginesmith", "pull", "digits:stable", "--follow"]
    assert watch["command"][-2:] == H100["args"] and "/node/engines/digits-h100" in watch["command"]
    environment = {item["name"]: item.get("value") for item in watch["env"]}
    bucket = "s3://example-engines/enginesmith?region=eu-central-1&sse=aws:kms"
    assert environment["ENGINESMITH_REGISTRY"].split(",") == [cache, bucket]
    assert environment["ENGINESMITH_CACHE_BYTES"] == str(20 << 30)
    # A pod's name, which is its host's, is another after each restart: rollouts would give the node another version.
    (named_source,) = [item["valueFrom"] for item in watch["env"] if item["name"] == "ENGINESMITH_NODE"]
    assert named_source == {"fieldRef": {"fieldPath": "spec.nodeName"}}
    assert watch["command"][watch["command"].index("--interval") + 1] == "120"
    (volume,) = [item for item in spec["volumes"] if "hostPath" in item]
    assert volume["hostPath"] == {"path": "/var/lib/enginesmith", "type": "DirectoryOrCreate"}
    (own_container,) = spec["initContainers"]  # all that runs as root: one program with one capability
    assert own_container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN"]}
    assert watch["securityContext"]["runAsNonRoot"]


def test_with_a_claim_each_node_has_its_own_engines_and_nothing_runs_as_root() -> None:
    actual = objects(on_nodes(existingClaim="engines"))
    spec = actual["DaemonSet enginesmith-node-digits-l4"]["spec"]["template"]["spec"]
    (watch,) = spec["containers"]
    own = "/node/engines/$(ENGINESMITH_NODE)/digits-l4"  # Kubernetes expands it; a rollout gives nodes other versions
    assert watch["command"][watch["command"].index("--dest") + 1] == own
    (probe,) = watch["readinessProbe"]["exec"]["command"][2:]
    assert probe == "test -e /node/engines/${ENGINESMITH_NODE}/digits-l4/current"
    assert "initContainers" not in spec and not [item for item in spec["volumes"] if "hostPath" in item]
    assert {"name": "node", "persistentVolumeClaim": {"claimName": "engines"}} in spec["volumes"]


def test_the_nodes_pods_and_policy_may_have_their_own_namespace() -> None:
    actual = objects(on_nodes(namespace="nodes"))
    names = {name for name, item in actual.items() if item["metadata"].get("namespace") == "nodes"}
    assert names == {f"DaemonSet enginesmith-node-{pull['name']}" for pull in (L4, H100)}
    assert "serviceAccountName" not in actual["DaemonSet enginesmith-node-digits-l4"]["spec"]["template"]["spec"]


@pytest.mark.parametrize("place", ["/mnt/nvme/engines", "/data/x", "/var/lib/enginesmith-cache", "/opt/enginesmith"])
def test_another_folder_is_used(place: str) -> None:
    assert place in str(objects(on_nodes(hostPath=place)))
    assert objects({**on_nodes(existingClaim="engines"), "podSecurity": {"runAsUser": None}})


@pytest.mark.parametrize("rollouts", [False, True])
def test_caches_are_read_only_unless_nodes_report_to_a_rollout(rollouts: bool) -> None:
    values = {**on_nodes("minimal"), "rollouts": {"enabled": rollouts}}
    spec = objects(values)["DaemonSet enginesmith-node-digits-l4"]["spec"]["template"]["spec"]
    (mount,) = [item for item in spec["containers"][0]["volumeMounts"] if item["name"] == "registry"]
    assert mount.get("readOnly", False) is not rollouts
    assert spec["serviceAccountName"] == f"enginesmith-{'builds' if rollouts else 'reads'}"


@pytest.mark.parametrize("version", ["1.31", "1.36"])
@pytest.mark.parametrize("base", ["minimal", "aws", "onprem"])
def test_objects_of_the_node_cache_are_valid_for_kubernetes(base: str, version: str) -> None:
    for name, item in objects(on_nodes(base)).items():
        if "-node-" in name:
            kubernetes_validate.validate(item, version, strict=True)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (on_nodes(pulls=[]), "nothing to follow"),
        (on_nodes(pulls=[L4, L4]), "digits-l4 is there twice"),
        (on_nodes(pulls=[{**L4, "reference": "digits"}]), "is not a channel"),
        (on_nodes(pulls=[{**L4, "target": "l5"}]), "target"),
        (on_nodes("minimal", namespace="nodes"), "existingClaim"),
        (on_nodes(hostPath="relative"), "hostPath"),
        (on_nodes(bytes="many"), "bytes"),
        *(
            (on_nodes(hostPath=place), f"hostPath: {place} is not a folder of the cache alone")
            for place in ("/etc", "/usr/lib", "/var/lib/kubelet", "/var/lib", "/mnt", "/mnt/stateful_partition/etc")
        ),
        (on_nodes(hostPath="/var/lib/enginesmith/../kubelet"), "hostPath"),
        ({**on_nodes(), "podSecurity": {"runAsUser": None}}, "nodeCache.hostPath: the cluster chooses the user"),
    ],
)
def test_invalid_values_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(helm.HelmError, match=message):
        renders.rendered(values)
