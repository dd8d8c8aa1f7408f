"""A fleet of real raylets on this machine: a head and one node, then a node a generation; GPUs are numbers."""

from pathlib import Path

import pytest

from builders.execution.ray import RayExecutor

GENERATIONS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90")
ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="package")
def fleet():
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    import ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", str(ROOT))
        cluster = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "node_name": "head"})
        add_node(cluster, GENERATIONS[0])
        yield cluster
        ray.shutdown()  # a test alone may still be connected
        cluster.shutdown()


def add_node(fleet, generation):
    labels = {"enginesmith/sm": generation, **({"enginesmith/product": "l4"} if generation == "sm_89" else {})}
    # sm_80 has room for two jobs of CPU and one GPU's memory: what keeps them apart is what a test looks at.
    fleet.add_node(num_cpus=2, num_gpus=1, memory=2 << 30, labels=labels, node_name=generation)


@pytest.fixture(scope="package")
def generations(fleet):
    """The fleet, with a node of every generation; each takes 2 s of CPU time."""
    for generation in GENERATIONS[1:]:
        add_node(fleet, generation)


@pytest.fixture(scope="package")
def executor(fleet):
    with RayExecutor(fleet.address) as ray_executor:
        yield ray_executor
