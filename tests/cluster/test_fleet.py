import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from enginesmith.registry.store.base import open_store
from tests.cluster.nodes import DRIVER

log = logging.getLogger("cluster")


def fleet(kubeconfig: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """What `enginesmith fleet` says of a catalog with one model that is on every GPU and in no registry."""
    catalog = folder / "catalog.yaml"
    catalog.write_text("serve: [{model: digits, on: [gpu]}]")
    open_store(folder / "registry", create=True)
    words = ["fleet", "--kubeconfig", str(kubeconfig), "--catalog", str(catalog), "--json"]
    environment = {**os.environ, "ENGINESMITH_REGISTRY": f"file://{folder}/registry"}
    command = [sys.executable, "-m", "enginesmith", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("account", ["enginesmith-builds", "enginesmith-prefect-worker"])
def test_the_fleet_equals_the_clusters_nodes_and_one_account_reads_it(cluster, installed, tmp_path, account):
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(cluster.plane.kubeconfig_of(account, cluster.token(installed.namespace, account)))
    output = fleet(kubeconfig, tmp_path)
    log.info("enginesmith fleet as %s: exit code %d %s", account, output.returncode, output.stderr.strip()[-150:])
    if account != "enginesmith-builds":
        assert output.returncode == 3 and "nodes" in output.stderr
        return
    assert output.returncode == 1, "digits is in no registry"
    document = json.loads(output.stdout)
    groups = {item["name"]: (item["nodes"], item["gpus"], item["driver"]) for item in document["fleet"]["groups"]}
    assert groups == {
        "cpu": (2, 0, None), "t4": (1, 1, "535.183.06"), "a100": (1, 2, DRIVER), "l4": (2, 2, DRIVER),
        "rtx4090": (1, 1, DRIVER), "rtx5090": (1, 1, DRIVER),
    }  # fmt: skip
    assert document["counts"] == {"missing": 5}
