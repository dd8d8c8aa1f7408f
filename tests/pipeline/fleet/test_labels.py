from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginesmith.core.hardware.machine import Machine, parse_targets
from pipeline.fleet.groups import GpuPart, LeftOut, parts_of
from pipeline.fleet.inventory import fleet_of_nodes
from tests.pipeline.fleet import nodes

MIB = 1 << 20


def one(node: nodes.Json) -> GpuPart:
    (result,) = parts_of(node)
    assert isinstance(result, GpuPart), result
    return result


@pytest.mark.parametrize(
    ("name", "target", "driver", "cuda", "mib", "gpus"),
    [
        ("t4", "t4", "535.183.06", "12.2", 15360, 1),
        ("a10", "a10", "570.124.06", "12.8", 23028, 1),
        ("a100-40", "a100", "550.127.08", "12.4", 40960, 8),
        ("a100-80", "a100", "570.124.06", "12.8", 81920, 8),
        ("l4", "l4", "580.95.05", "13.0", 23034, 1),
        ("l40s", "l40s", "575.57.08", "12.9", 46068, 4),
        ("h100", "h100", "580.95.05", "13.0", 81559, 8),
        ("h200", "h200", "580.95.05", "13.0", 143771, 8),
        ("b200", "b200", "580.95.05", "13.0", 183359, 8),
        ("rtxpro6000", "rtxpro6000", "580.95.05", "13.0", 97887, 2),
    ],
)
def test_whole_gpus_are_read(name: str, target: str, driver: str, cuda: str, mib: int, gpus: int) -> None:
    result = one(nodes.WHOLE[name])
    expected = parse_targets(target)[0]
    assert result.hardware.machine == Machine(
        expected.compute_capability, expected.product, driver, cuda, memory_bytes=mib * MIB
    )
    assert (result.hardware.name, result.gpus, result.remarks) == (target, gpus, ())


def test_a_mig_slice_is_not_its_product_and_has_its_own_memory() -> None:
    single = one(nodes.MIG_SINGLE)
    assert single.hardware.machine == Machine((8, 0), None, "570.124.06", "12.8", memory_bytes=9728 * MIB)
    assert (single.hardware.name, single.hardware.label, single.gpus) == ("a100 mig-1g.10gb", nodes.A100, 56)
    small_part, large_part = (part for part in parts_of(nodes.MIG_MIXED) if isinstance(part, GpuPart))
    assert (small_part.hardware.name, small_part.gpus, large_part.hardware.name, large_part.gpus) == (
        "h100 mig-1g.10gb", 2, "h100 mig-3g.40gb", 1,
    )  # fmt: skip
    assert large_part.hardware.machine.memory_bytes == 40448 * MIB and large_part.hardware.machine.product is None


def test_sharing_leaves_the_product_and_mps_divides_the_memory() -> None:
    for node in (nodes.TIME_SHARED, nodes.RENAMED):
        shared = one(node)
        assert shared.hardware.machine == one(nodes.WHOLE["t4"]).hardware.machine
        assert (shared.hardware.name, shared.hardware.sharing, shared.gpus) == ("t4 shared by 4", "time-slicing", 1)
    mps = one(nodes.MPS)
    assert mps.hardware.machine.product == "l4" and mps.hardware.machine.memory_bytes == 23034 * MIB // 2


def test_labels_of_an_old_feature_discovery_are_read() -> None:
    hardware = one(nodes.OLD_LABELS).hardware
    assert (hardware.machine.product, hardware.machine.driver, hardware.machine.cuda) == ("t4", "470.82", "11.4")
    assert (hardware.sharing, hardware.replicas) == ("time-slicing", 2)


def test_unplaceable_nodes_give_the_reason_and_a_cpu_node_counts() -> None:
    (invalid,), (bare_parts,) = parts_of(nodes.MIG_INVALID), parts_of(nodes.NO_GFD)
    assert isinstance(invalid, LeftOut) and "not all alike" in invalid.reason
    assert isinstance(bare_parts, LeftOut) and "no labels of GPU feature discovery" in bare_parts.reason
    assert one(nodes.CPU).hardware.machine == Machine() and one(nodes.CPU).hardware.name == "cpu"


def test_conditions_that_keep_pods_away_are_listed_by_group() -> None:
    lifecycle = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
    actual = fleet_of_nodes(
        [
            nodes.node("a", nodes.L4_LABELS, gpus=1, ready="Unknown", taints=[nodes.GPU_TAINT]),
            nodes.node("b", nodes.L4_LABELS, gpus=1, cordoned=True, taints=[nodes.GPU_TAINT, lifecycle]),
            nodes.node("c", nodes.L4_LABELS, gpus=1),
        ],
        "here",
    )
    (group,) = actual.groups
    assert group.remarks == ("1 cordoned", "1 not ready", "2 tainted nvidia.com/gpu=present:NoSchedule")
    assert (group.nodes, group.gpus) == (3, 3)


def test_drivers_memories_and_slices_are_groups_of_their_own() -> None:
    values = [*nodes.WHOLE.values(), nodes.MIG_SINGLE, nodes.MIG_MIXED, nodes.MIG_HALF, nodes.TIME_SHARED, nodes.MPS]
    actual = fleet_of_nodes([*values, nodes.RENAMED, nodes.NO_GFD, nodes.CPU], "here")
    assert [group.name for group in actual.groups] == [
        "cpu", "t4", "t4 shared by 4", "a100", "a100", "a100 mig-1g.10gb", "a100 mig-3g.40gb", "a10", "l4",
        "l4 shared by 2", "l40s", "h100", "h100 mig-1g.10gb", "h100 mig-3g.40gb", "h200", "b200", "rtxpro6000",
    ]  # fmt: skip
    by_name = {group.name: group for group in actual.groups}
    assert by_name["t4 shared by 4"].nodes == 2 and by_name["a100"].nodes == 2
    assert [item.node for item in actual.left_out] == ["no-gfd"]


KEYS = st.sampled_from(list(nodes.WHOLE["h100"]["metadata"]["labels"])) | st.sampled_from(
    ["nvidia.com/mig-1g.10gb.count", "nvidia.com/mig-.count", "nvidia.com/mig-1g.10gb.memory", "x"]
)
VALUES: Any = (
    st.sampled_from(["", "0", "8", "-1", "true", "x" * 300, "9" * 40, "Tesla-T4-SHARED", "A-MIG-"]) | st.text()
)
LEAF: Any = st.none() | st.integers() | st.text()
ANY: Any = LEAF | st.lists(LEAF) | st.dictionaries(st.text(), LEAF)


# Of a good node some labels are changed, of none all are: both go deep.
LABELS = st.builds(
    lambda good, changed: {**good, **changed},
    st.sampled_from([{}, nodes.WHOLE["h100"]["metadata"]["labels"], nodes.MIG_MIXED["metadata"]["labels"]]),
    st.dictionaries(KEYS, VALUES),
)


@given(LABELS, ANY, ANY, ANY)
def test_every_node_is_in_a_group_or_left_out(labels: dict, spec: Any, status: Any, capacity: Any) -> None:
    for node in (
        {"metadata": {"name": "n", "labels": labels}, "spec": spec, "status": {"capacity": capacity}},
        {"metadata": status, "spec": {"taints": spec}, "status": status},
    ):
        result = list(parts_of(node))
        assert result
        for item in result:
            if isinstance(item, GpuPart):
                machine = item.hardware.machine
                assert item.gpus >= 0 and item.hardware.replicas >= 1
                assert machine.memory_bytes is None or machine.memory_bytes > 0
                assert machine.driver is None or machine.driver[0].isdecimal()
