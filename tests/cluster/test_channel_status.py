from collections.abc import Callable
from pathlib import Path

import pytest

from enginesmith.core.errors import UnavailableError
from pipeline.fleet.inventory import Access
from pipeline.orchestration.metrics.channel_status import ConfigMap
from tests.cluster.conftest import PODS, Cluster
from tests.cluster.release import Release, sample

NAME = "enginesmith-channels"


def test_the_exporters_account_writes_it_and_helm_keeps_its_data(
    cluster: Cluster, namespace: str, helm: Release, tmp_path: Path
) -> None:
    values = sample()
    helm.install(values)
    cluster.running(namespace, PODS)
    (pod,) = cluster.pods(namespace, "app.kubernetes.io/component=metrics").values()
    (container,) = pod["spec"]["containers"]
    variables = {item["name"]: item.get("value") for item in container["env"]}
    assert variables["ENGINESMITH_CHANNELS_CONFIGMAP"] == f"{namespace}/{NAME}"

    def as_account(account: str) -> Callable[[str, dict[str, str]], None]:
        kubeconfig = tmp_path / account
        kubeconfig.write_text(cluster.plane.kubeconfig_of(account, cluster.token(namespace, account)))
        return lambda name, texts: ConfigMap(namespace, name, Access(kubeconfig, timeout_s=10.0)).write(texts)

    write = as_account(pod["spec"]["serviceAccountName"])
    write(NAME, {"digits": "stable: 1\n", "gone": "stable: 2\n"})
    write(NAME, {"digits": "stable: 3\n"})
    assert cluster.api.get("configmaps", namespace, NAME)["data"] == {"digits": "stable: 3\n"}
    with pytest.raises(UnavailableError, match="403 Forbidden"):
        write("enginesmith-dashboard", {})
    with pytest.raises(UnavailableError, match="403 Forbidden"):
        as_account("enginesmith-prefect-worker")(NAME, {})
    helm.upgrade({**values, "commonAnnotations": {"team": "engines"}})
    upgraded = cluster.api.get("configmaps", namespace, NAME)
    assert upgraded["data"] == {"digits": "stable: 3\n"} and upgraded["metadata"]["annotations"]["team"] == "engines"
    helm.rollback(1)
    assert cluster.api.get("configmaps", namespace, NAME)["data"] == {"digits": "stable: 3\n"}
