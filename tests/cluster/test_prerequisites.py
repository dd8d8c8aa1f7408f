import json
import logging
import re
import shlex

from charts import renders
from tests.cluster.api import Object, wait_for
from tests.cluster.conftest import Cluster

log = logging.getLogger("cluster")
CLASSES = ("priorityclasses", "runtimeclasses")


def commands() -> list[list[str]]:
    """The words of each `kubectl create` at the sample's head."""
    text = (renders.CHART / "ci/onprem-values.yaml").read_text()
    return [shlex.split(line)[2:] for line in re.findall(r"^#   (kubectl create .*)$", text, re.M)]


def made_by(words: list[str]) -> tuple[str, Object]:
    """The kind, and the object that `kubectl create` would make of such words."""
    options = [word[2:].split("=", 1) for word in words if word.startswith("--") and "=" in word]
    inputs = {name: value for name, value in options if not name.startswith("from-")}
    keys = {value.split("=")[0]: "x" for name, value in options if name.startswith("from-")}
    match words:
        case ["secret", "docker-registry", name, *_]:
            data = {".dockerconfigjson": json.dumps({"auths": {inputs["docker-server"]: {}}})}
            return "secrets", {"metadata": {"name": name}, "type": "kubernetes.io/dockerconfigjson", "stringData": data}
        case ["secret", "generic", name, *_]:
            return "secrets", {"metadata": {"name": name}, "stringData": keys}
        case ["configmap", name, *_]:
            return "configmaps", {"metadata": {"name": name}, "data": keys}
        case ["priorityclass", name, *_]:
            resource = {"value": int(inputs["value"]), "description": inputs["description"]}
            return "priorityclasses", {"metadata": {"name": name}, **resource}
        case ["--filename", "-", "<<<", text]:
            return "runtimeclasses", json.loads(text)
    raise ValueError(f"kubectl create {shlex.join(words)}: of no kind that this test knows")


def create(cluster: Cluster, namespace: str, kinds: tuple[str, ...]) -> None:
    for words in commands():
        kind, body = made_by(words)
        name = body["metadata"]["name"]
        inner_text = "" if kind in CLASSES else namespace
        if kind in kinds and not cluster.api.find(kind, inner_text, name):
            cluster.api.create(kind, inner_text, body)
            log.info("made %s %s", kind, name)


def test_a_worker_is_refused_without_the_classes_in_the_samples_head(cluster, namespace, helm, kubelet):
    create(cluster, namespace, ("secrets", "configmaps"))
    helm.install(renders.sample("onprem"))

    def said() -> list[str]:
        events = cluster.api.list("events", namespace)
        items = [item["message"] for item in events if item["reason"] == "FailedToCreateWorkerPod"]
        return [message for message in items if "builds-low" in message or "nvidia" in message]

    log.info("without them: %s", wait_for("a worker that is refused for want of a class", said)[0][-200:])
    create(cluster, namespace, CLASSES)
    labels = "ray.io/node-type=worker,ray.io/group=l40s"
    try:
        # KubeRay tries again at once when the RayCluster changes, else after up to a quarter of an hour.
        touched_fields = {"metadata": {"annotations": {"test/touched": "yes"}}}
        cluster.api.patch("rayclusters", namespace, "enginesmith-ray", touched_fields)
        (name,) = wait_for("the worker that the sample asks for", lambda: cluster.pods(namespace, labels))
        log.info("with them: pod %s", name)
        wait_for("the deployments to be registered", lambda: [
            item for item in cluster.api.list("jobs", namespace) if item["status"].get("succeeded")
        ])  # fmt: skip
    finally:
        cluster.api.delete("priorityclasses", "", "builds-low")
        cluster.api.delete("runtimeclasses", "", "nvidia")
