import logging

import pytest

from tests.cluster.api import Object, RefusedError
from tests.cluster.conftest import Cluster
from tests.cluster.release import Release

log = logging.getLogger("cluster")
READ = {"get", "list", "watch"}
JOBS = {*READ, "create", "update", "patch", "delete"}
# By account: (group, resource) and what it may do with it. Ray's head gets its rights from the KubeRay operator.
RIGHTS = {
    "enginesmith-builds": {("", "nodes"): {"list"}},
    "enginesmith-reads": {("", "configmaps"): {"patch"}},
    "enginesmith-prefect-server": {},
    "enginesmith-prefect-worker": {
        ("batch", "jobs"): JOBS, ("", "pods"): READ, ("", "pods/log"): READ, ("", "pods/status"): READ,
        ("", "events"): READ,
    },
    "enginesmith-ray-apply": {
        ("ray.io", "rayclusters"): {"get", "create", "update"}, ("", "configmaps"): {"get"},
        ("", "pods"): {"list"},
    },
    "enginesmith-ray": {
        ("", "pods"): {*READ, "patch"}, ("", "pods/resize"): {"patch"},
        ("ray.io", "rayclusters"): {"get", "patch"},
    },
}  # fmt: skip


@pytest.mark.parametrize("account", RIGHTS)
def test_an_account_has_its_rights_and_no_others(cluster: Cluster, installed: Release, account: str) -> None:
    review = {"spec": {"namespace": installed.namespace}}
    status = cluster.account(installed.namespace, account).create("selfsubjectrulesreviews", "", review)["status"]
    entries: dict[tuple[str, str], set[str]] = {}
    for rule in status["resourceRules"]:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                entries.setdefault((group, resource), set()).update(rule["verbs"])
    # Everybody may ask who he is and what he may do.
    own_verbs = {key: verbs for key, verbs in entries.items() if not key[1].startswith("selfsubject")}
    assert own_verbs == RIGHTS[account]


def may(cluster: Cluster, account: str, verb: str, resource: str, namespace: str, inside: str) -> bool:
    """A SubjectAccessReview: whether an account of `namespace` may do that in the namespace `inside`."""
    group = "batch" if resource == "jobs" else ""
    attributes = {"verb": verb, "resource": resource, "namespace": inside, "group": group}
    body: Object = {"spec": {"user": f"system:serviceaccount:{namespace}:{account}", "resourceAttributes": attributes}}
    answer = bool(cluster.api.create("subjectaccessreviews", "", body)["status"]["allowed"])
    log.info("%s may %s%s %s in %s", account, "" if answer else "not ", verb, resource, inside)
    return answer


def test_no_account_reads_secrets_or_leaves_the_namespace(cluster: Cluster, installed: Release) -> None:
    namespace = installed.namespace
    assert may(cluster, "enginesmith-prefect-worker", "create", "jobs", namespace, namespace)
    assert not may(cluster, "enginesmith-prefect-worker", "create", "jobs", namespace, "default")
    assert not may(cluster, "enginesmith-ray", "create", "pods", namespace, "default")
    assert not may(cluster, "enginesmith-ray-apply", "delete", "pods", namespace, namespace)
    for account in RIGHTS:
        assert not may(cluster, account, "get", "secrets", namespace, namespace)
        with pytest.raises(RefusedError, match="403"):
            cluster.account(namespace, account).list("secrets", namespace)
