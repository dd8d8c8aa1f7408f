"""Values that are refused before anything is made: by the schema, and by the templates. tests/charts has each value."""

import helm_python
import pytest

from tests.cluster.conftest import Cluster
from tests.cluster.objects import everything
from tests.cluster.release import Release, sample


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"imags": {}}, "imags"),
        ({"registry": {"bucket": "one", "existingClaim": "two"}}, "both bucket and existingClaim"),
    ],
)
def test_a_wrong_value_is_refused_and_nothing_is_made(cluster, namespace, helm, changed, message):
    with pytest.raises(helm_python.HelmError, match=message):
        helm.install({**sample(), **changed})
    assert not everything(cluster, namespace)


def test_a_wrong_value_in_an_upgrade_changes_nothing(cluster: Cluster, installed: Release) -> None:
    uids_before = {name: pod["metadata"]["uid"] for name, pod in cluster.pods(installed.namespace).items()}
    with pytest.raises(helm_python.HelmError, match="cidrs"):
        installed.upgrade({**sample(), "networkPolicy": {"apiServer": {"cidrs": ["everywhere"]}}})
    assert installed.status() == "deployed"
    assert {name: pod["metadata"]["uid"] for name, pod in cluster.pods(installed.namespace).items()} == uids_before
