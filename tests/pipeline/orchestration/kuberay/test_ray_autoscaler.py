"""Ray's autoscaler, whose behaviour is why `kuberay.changes` refuses some changes of a RayCluster."""

from typing import Any

import pytest

ray_scheduler = pytest.importorskip("ray.autoscaler.v2.scheduler")


def instance(group: str, number: int) -> Any:
    """A worker whose one GPU is at work."""
    from ray.autoscaler.v2.schema import AutoscalerInstance
    from ray.core.generated.autoscaler_pb2 import NodeState
    from ray.core.generated.instance_manager_pb2 import Instance, NodeKind

    ray_instance = Instance(
        instance_id=str(number), instance_type=group, status=Instance.RAY_RUNNING, node_id=str(number),
        node_kind=NodeKind.WORKER,
    )  # fmt: skip
    node = NodeState(ray_node_type_name=group, total_resources={"GPU": 1.0}, available_resources={"GPU": 0.0})
    return AutoscalerInstance(im_instance=ray_instance, ray_node=node, cloud_instance_id=str(number))


def ends(most: dict[str, int], running: dict[str, int]) -> list[str]:
    """Groups of the workers that the autoscaler ends. most, running: workers by group."""
    from ray.autoscaler.v2.instance_manager.config import NodeTypeConfig

    groups = {
        name: NodeTypeConfig(name=name, min_worker_nodes=0, max_worker_nodes=count, resources={"GPU": 1.0})
        for name, count in most.items()
    }
    instances = [instance(group, number) for group, count in running.items() for number in range(count)]
    request = ray_scheduler.SchedulingRequest(
        node_type_configs=groups, resource_requests=[], gang_resource_requests=[], cluster_resource_constraints=[],
        current_instances=instances, disable_launch_config_check=True, max_num_nodes=None,
    )  # fmt: skip
    return [item.instance_type for item in ray_scheduler.ResourceDemandScheduler(None).schedule(request).to_terminate]


def test_the_autoscaler_ends_busy_workers_above_the_maximum() -> None:
    assert not ends({"l4": 2}, {"l4": 2}) and ends({"l4": 1}, {"l4": 2}) == ["l4"]


def test_one_worker_of_an_unknown_group_fails_the_autoscaler_for_all_groups() -> None:
    with pytest.raises(KeyError, match="gone"):
        ends({"l4": 2}, {"l4": 2, "gone": 1})
