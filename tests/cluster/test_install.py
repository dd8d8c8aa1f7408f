import logging

from tests.cluster.conftest import PODS
from tests.cluster.release import sample

log = logging.getLogger("cluster")
GROUPS = ("t4", "a100", "l4", "rtx4090", "rtx5090")


def test_every_worker_is_on_its_generation_and_a_no_op_upgrade_touches_no_pod(cluster, namespace, helm):
    helm.install(sample())
    result = cluster.running(namespace, PODS)
    nodenames = {
        pod["metadata"]["labels"].get("ray.io/group", name): pod["spec"]["nodeName"] for name, pod in result.items()
    }
    for group in GROUPS:
        log.info("group %s: its worker is on %s", group, nodenames[group])
        assert nodenames[group].startswith(f"{group}-")
    uids = {name: pod["metadata"]["uid"] for name, pod in result.items()}
    helm.upgrade(sample())
    after = cluster.running(namespace, PODS)
    assert {name: pod["metadata"]["uid"] for name, pod in after.items()} == uids
    log.info("a second `helm upgrade` with the same values left all %d pods as they were", len(uids))
