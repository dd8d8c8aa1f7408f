import importlib.util
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from unittest.mock import Mock

import numpy as np
import pytest
import ray.cluster_utils
import yaml

from tests.validation.canary.cells import both
from validation.canary.judging.judge import judge
from validation.canary.judging.thresholds import Thresholds

PLACE = Path(__file__).parents[2] / "examples" / "demo_cluster.py"


@pytest.fixture
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo_cluster", PLACE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("error", [TimeoutError("Timed out waiting for nodes"), Exception("timed out"), OSError()])
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


def test_its_canary_decides_where_the_difference_in_latency_drifts(demo):
    limits = Thresholds.from_json(yaml.safe_load(demo.MARGINS)["validation"]["canary"])
    latency = 1e-4 * np.exp(np.random.default_rng(0).normal(0.0, 0.2, (2, 9000)))
    drifting = both(latency[0] * np.linspace(1.0, 1.05, 9000), latency[1])
    assert judge(drifting, limits).verdict == "PASS"
    assert judge(drifting, replace(limits, latency={"p50": 0.9})).verdict == "INSUFFICIENT"
    assert judge(both(3 * latency[0], latency[1]), limits).verdict == "FAIL"
