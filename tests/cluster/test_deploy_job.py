import logging
from typing import Any

from tests.cluster.api import wait_for
from tests.cluster.conftest import Cluster
from tests.cluster.release import Release, Values, sample

log = logging.getLogger("cluster")


def values(**catalog: Any) -> Values:
    return {**sample(), "prefect": {"deployments": {"hook": False}}, "catalog": catalog}


def done(cluster: Cluster, namespace: str) -> dict[str, str]:
    """The Jobs by name, with their uid, as soon as there is one alone and it has succeeded."""

    def look() -> dict[str, str] | None:
        jobs = cluster.api.list("jobs", namespace)
        excess_jobs = [job for job in jobs if job["status"].get("succeeded")]
        uids = {job["metadata"]["name"]: job["metadata"]["uid"] for job in excess_jobs}
        return uids if len(jobs) == len(excess_jobs) == 1 else None

    return wait_for("one Job that succeeded", look)


def test_the_deploy_job_runs_again_after_a_change(cluster: Cluster, namespace: str, helm: Release) -> None:
    helm.install(values())
    first_pods = done(cluster, namespace)
    helm.upgrade(values())
    assert done(cluster, namespace) == first_pods
    log.info("the same values: still %s", *first_pods)
    helm.upgrade(values(enabled=False))
    (name,) = done(cluster, namespace)
    log.info("other values: %s", name)
    assert name not in first_pods
