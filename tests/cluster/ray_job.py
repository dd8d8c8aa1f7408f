"""The Job that makes the RayCluster: its pod's own command, as its own service account, on this machine."""

import logging
import os
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.cluster.api import Object

if TYPE_CHECKING:
    from tests.cluster.conftest import Cluster

log = logging.getLogger("cluster")


def run(cluster: "Cluster", pod: Object) -> int:
    """The exit code of a pod's command."""
    namespace, spec = pod["metadata"]["namespace"], pod["spec"]
    folder = cluster.plane.folder / "pods" / pod["metadata"]["uid"]
    folder.mkdir(parents=True, exist_ok=True)  # where the pod's end could not be written, it runs again
    (mounted,) = (item["configMap"]["name"] for item in spec["volumes"] if item["name"] == "raycluster")
    for name, text in cluster.api.get("configmaps", namespace, mounted)["data"].items():
        (folder / name).write_text(text)
    account = spec["serviceAccountName"]
    (folder / "kubeconfig").write_text(cluster.plane.kubeconfig_of(account, cluster.token(namespace, account)))
    (container,) = spec["containers"]
    _python, *words = [word.replace("/etc/enginesmith/ray", str(folder)) for word in container["command"]]
    environment = {**os.environ, "KUBECONFIG": str(folder / "kubeconfig")}
    result = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, timeout=300)
    output = (result.stdout + result.stderr).strip()
    log.info("pod %s: exit code %d: %s", pod["metadata"]["name"], result.returncode, output)
    return result.returncode
