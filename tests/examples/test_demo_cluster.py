"""The demo's cluster where Ray does not start."""

import importlib.util
from pathlib import Path
from types import ModuleType
from unittest.mock import Mock

import pytest
import ray.cluster_utils

PLACE = Path(__file__).parents[2] / "examples" / "demo_cluster.py"


@pytest.fixture
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo_cluster", PLACE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "error", [TimeoutError("Timed out while waiting for nodes"), Exception("timed out"), OSError()]
)
def test_a_node_that_does_not_start_in_time_is_named_and_ray_is_ended(demo, monkeypatch, error):
    def add_node(labels=None, **_: object) -> None:
        if labels == {"enginesmith/sm": "sm_80"}:
            raise error

    cluster = Mock(add_node=add_node)
    monkeypatch.setattr(ray.cluster_utils, "Cluster", lambda **_: cluster)
    expected = r"error: the Ray node 'sm_80' did not start: .*\n.*run the demo again"
    with pytest.raises(SystemExit, match=expected), demo._ray_cluster(6379):
        pass
    cluster.shutdown.assert_called_once_with()
