import logging
import re
from pathlib import Path

import helm_python
import pytest

from tests.cluster import flow_runs
from tests.cluster.api import wait_for
from tests.cluster.conftest import Cluster
from tests.cluster.kubelet import Kubelet
from tests.cluster.objects import still
from tests.cluster.release import Release, sample

log = logging.getLogger("cluster")
ROOT = Path(__file__).parents[2]
# Its one hook is the deploy Job, which so gets all of a short timeout.
WITHOUT_RAY = {**sample(), "ray": {"enabled": False}, "gpuGroups": []}
DOCS, UPGRADING = ROOT / "docs/guides/kubernetes.md", ROOT / "charts/enginesmith/UPGRADING.md"


def clean_up(cluster: Cluster, namespace: str) -> None:
    """The command that UPGRADING.md gives for what `helm uninstall` leaves."""
    pattern = r"^    kubectl delete (\S+) --namespace enginesmith --selector (\S+)$"
    (command,) = re.findall(pattern, UPGRADING.read_text(), re.M)
    log.info("kubectl delete %s --namespace %s --selector %s", command[0], namespace, command[1])
    for kind in command[0].split(","):
        for item in cluster.api.list(f"{kind}s", namespace, command[1]):
            cluster.api.delete(f"{kind}s", namespace, item["metadata"]["name"])


def test_the_same_upgrade_continues_after_a_timeout(cluster, namespace, helm, kubelet):
    kubelet.hold("^enginesmith-deploy-")
    with pytest.raises(helm_python.HelmError, match=r"timed out|deadline|Timeout|not ready"):
        helm.install(WITHOUT_RAY, timeout=15)
    assert helm.status() == "failed"
    log.info("the release is 'failed', its Job waits for an image; now the image comes")
    kubelet.release()
    helm.upgrade(WITHOUT_RAY)
    assert helm.status() == "deployed"
    wait_for("the Job to go when it is done", lambda: not cluster.api.list("jobs", namespace))


def test_a_killed_helm_blocks_until_its_record_is_deleted(cluster, namespace, helm, kubelet):
    (selector,) = set(re.findall(r"kubectl delete secret --namespace enginesmith --selector '(.+)'", DOCS.read_text()))
    for verb in ("install", "upgrade"):
        kubelet.hold("^enginesmith-deploy-")  # or it might be done before it is killed
        helm.kill(verb, sample(), when=lambda: cluster.api.list("secrets", namespace, selector))
        kubelet.release()
        with pytest.raises(helm_python.HelmError, match="another operation"):
            helm.upgrade(sample())
        (record,) = cluster.api.list("secrets", namespace, selector)
        cluster.api.delete("secrets", namespace, record["metadata"]["name"])
        log.info("kubectl delete secret --namespace %s --selector '%s'", namespace, selector)
        getattr(helm, verb)(sample())
    assert helm.status() == "deployed"


def test_uninstall_leaves_only_the_volume(cluster: Cluster, namespace: str, helm: Release, kubelet: Kubelet) -> None:
    helm.install(sample())
    helm.test()
    kubelet.hang("^validate-pending")
    name = flow_runs.start(cluster, namespace, "validate-pending/l4")
    of_run = f"job-name={name}"
    (pod,) = wait_for("the flow run's pod", lambda: list(cluster.pods(namespace, of_run)))
    wait_for("the flow run", lambda: cluster.pods(namespace, of_run)[pod]["status"].get("phase") == "Running")
    helm.uninstall()
    volume = "persistentvolumeclaims/enginesmith-prefect-server"
    remaining_pods = still(cluster, namespace, 3)
    log.info("left after helm uninstall: %s", ", ".join(sorted(remaining_pods)))
    assert remaining_pods == {volume, f"jobs/{name}", f"pods/{pod}"}
    clean_up(cluster, namespace)
    remaining_pods = still(cluster, namespace, 1)
    log.info("left then: %s", ", ".join(sorted(remaining_pods)))
    assert remaining_pods == {volume}


def test_jobs_and_tests_that_failed_are_removed_by_the_same_command(cluster, namespace, helm, kubelet):
    kubelet.hang("^enginesmith-deploy-")
    kubelet.fail("-test-")
    with pytest.raises(helm_python.HelmError):
        helm.install(WITHOUT_RAY, timeout=15)
    with pytest.raises(helm_python.HelmError):
        helm.test()
    (job,) = cluster.api.list("jobs", namespace)
    assert job["spec"]["ttlSecondsAfterFinished"] <= 86400
    helm.uninstall()
    log.info("left after helm uninstall: %s", ", ".join(sorted(still(cluster, namespace, 4))))
    clean_up(cluster, namespace)
    assert still(cluster, namespace, 1) == {"persistentvolumeclaims/enginesmith-prefect-server"}
