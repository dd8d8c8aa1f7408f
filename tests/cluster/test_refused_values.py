"""Values that are refused before anything is made."""

import helm_python
import pytest

from tests.cluster.conftest import Cluster
from tests.cluster.objects import everything
from tests.cluster.release import Release, sample


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"imags": {}}, "imags"),
        ({"registry": {"bucket": "one", "existingClaim": "two"}}, "both bucket and existingClaim"),
        ({"gpuGroups": [{"name": "l4", "generation": "sm89", "max": 1}]}, "sm_89"),
        ({"gpuGroups": [{"name": "l4", "generation": "sm_89", "min": 2, "max": 1}]}, "min 2 is more than max 1"),
        ({"images": {"control": {"repository": "x", "digest": ""}}}, "images.control.digest is empty"),
        ({"prefect": {"server": {"resources": {"limits": {"memory": 1}}}}}, "memory"),
        ({"extraEnv": [{"name": "HOME", "value": "/x"}]}, "the chart sets HOME"),
        ({"commonLabels": {"app.kubernetes.io/instance": "x"}}, "the chart sets app.kubernetes.io/instance"),
        ({"networkPolicy": {"apiServer": {"cidrs": ["10.0.0.1/24"]}}}, "10.0.0.1/24 has bits set beyond its prefix"),
        ({"gpuGroups": None}, "gpuGroups: nothing is below this key"),
        ({"metrics": {"resources": {"limits": {"memori": "1Gi"}}}}, "memori"),
        ({"nodeCache": {"enabled": True, "hostPath": "/etc"}}, "/etc is not a folder of the cache alone"),
        ({"fleet": {"schedule": "0 0 31 2 *"}}, "has no day in any year"),
    ],
)
def test_a_wrong_value_is_refused_and_nothing_is_made(cluster, namespace, helm, changed, said):
    with pytest.raises(helm_python.HelmError, match=said):
        helm.install({**sample(), **changed})
    assert not everything(cluster, namespace)


def test_a_wrong_value_in_an_upgrade_leaves_the_release_as_it_was(cluster: Cluster, installed: Release) -> None:
    before = {name: pod["metadata"]["uid"] for name, pod in cluster.pods(installed.namespace).items()}
    with pytest.raises(helm_python.HelmError, match="cidrs"):
        installed.upgrade({**sample(), "networkPolicy": {"apiServer": {"cidrs": ["everywhere"]}}})
    assert installed.status() == "deployed"
    assert {name: pod["metadata"]["uid"] for name, pod in cluster.pods(installed.namespace).items()} == before
