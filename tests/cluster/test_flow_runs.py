import logging

import pytest

from tests.cluster import flow_runs
from tests.cluster.api import Object, wait_for
from tests.cluster.conftest import Cluster
from tests.cluster.release import Release

log = logging.getLogger("cluster")
DEPLOYMENTS = (
    "compile-model/enginesmith", "collect-garbage/enginesmith", "reconcile-fleet/enginesmith",
    # Of these groups Ray's workers hold every GPU that there is.
    "validate-pending/t4", "validate-pending/rtx4090",
)  # fmt: skip


@pytest.mark.parametrize("deployment", DEPLOYMENTS)
def test_a_flow_run_ends_without_a_gpu(cluster: Cluster, installed: Release, deployment: str) -> None:
    namespace = installed.namespace
    name = flow_runs.start(cluster, namespace, deployment)

    def ended() -> Object | None:
        job = cluster.account(namespace, "enginesmith-prefect-worker").get("jobs", namespace, name)
        return job if job["status"].get("succeeded") else None

    job = wait_for(f"Job {name}", ended)
    (pod,) = cluster.pods(namespace, f"job-name={name}").values()
    node = pod["spec"]["nodeName"]
    log.info("%s: Job %s ran on %s", deployment, name, node)
    assert node.startswith("cpu-"), "what needs a GPU is done by Ray's workers"
    assert job["spec"]["ttlSecondsAfterFinished"] == 86400
    # The fleet's run lists nodes; the others have no token to talk to the API server with.
    mounts = {item["mountPath"] for item in pod["spec"]["containers"][0]["volumeMounts"]}
    assert ("/var/run/secrets/kubernetes.io/serviceaccount" in mounts) == deployment.startswith("reconcile-fleet")


def test_the_server_accepts_the_job_of_every_deployment(cluster: Cluster, installed: Release) -> None:
    namespace = installed.namespace
    worker = cluster.account(namespace, "enginesmith-prefect-worker")
    for deployment in flow_runs.deployments(cluster, namespace):
        name = flow_runs.start(cluster, namespace, deployment)
        wait_for(f"the pod of {name}", lambda name=name: cluster.pods(namespace, f"job-name={name}"))
        worker.delete("jobs", namespace, name)
        log.info("%s: Job %s has a pod; deleted", deployment, name)
