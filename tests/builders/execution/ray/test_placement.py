import pytest

from builders.execution.jobs import Needs
from builders.execution.ray.task import RayNode, countdown, find_fitting, none_fits, ray_options


def node(name: str, sm: str | None = None, cpus: float = 4, gpus: float = 0, memory_mib: int = 8192) -> RayNode:
    return RayNode(name, name, ("127.0.0.1", 1), {"enginesmith/sm": sm} if sm else {}, cpus, gpus, memory_mib)


FLEET = (
    node("head", cpus=0),
    node("cpu", memory_mib=4096),
    node("ada", "sm_89", gpus=1, memory_mib=16384),
    node("hopper", "sm_90", gpus=2),
)
ADA = {"enginesmith/sm": "sm_89"}


@pytest.mark.parametrize(
    ("needs", "names"),
    [
        (Needs(), ["cpu", "ada", "hopper"]),
        (Needs(ADA), ["cpu", "ada", "hopper"]),
        (Needs(ADA, required=True), ["ada"]),
        (Needs(gpus=1), ["ada", "hopper"]),
        (Needs(ADA, required=True, gpus=2), []),
        (Needs(memory_mib=1 << 20), ["cpu", "ada", "hopper"]),
    ],
)
def test_a_node_fits_by_cpu_gpus_and_required_labels(needs, names):
    assert [result.name for result in find_fitting(needs, FLEET)] == names


def test_a_required_label_is_a_selector_and_a_preferred_one_falls_back():
    assert ray_options(Needs(ADA, required=True, gpus=1), FLEET) == {
        "num_cpus": 1,
        "num_gpus": 1,
        "label_selector": ADA,
    }
    preferred = ray_options(Needs(ADA), FLEET)
    assert (preferred["label_selector"], preferred["fallback_strategy"]) == (ADA, [{"label_selector": {}}])


def test_a_preferred_label_without_a_node_is_not_requested():
    assert ray_options(Needs({"enginesmith/sm": "sm_75"}), FLEET)["label_selector"] == {}


@pytest.mark.parametrize(
    ("needs", "mib"),
    [
        (Needs(memory_mib=512), 512),
        (Needs(memory_mib=1 << 20), 16384),
        (Needs({"enginesmith/sm": "sm_90"}, required=True, memory_mib=1 << 20), 8192),
        (Needs({"enginesmith/sm": "sm_75"}, required=True, memory_mib=512), 512),
    ],
)
def test_memory_is_requested_up_to_the_largest_suitable_node(needs, mib):
    assert ray_options(needs, FLEET)["memory"] == mib << 20


def test_unknown_memory_is_not_requested():
    assert "memory" not in ray_options(Needs(), FLEET)


def test_a_node_is_avoided_with_its_label():
    assert ray_options(Needs(), FLEET, avoid="cpu")["label_selector"] == {"ray.io/node-id": "!cpu"}
    # 'ada' is to be avoided, so its label is no longer preferred
    avoiding = ray_options(Needs(ADA), FLEET, avoid="ada")
    assert avoiding["label_selector"] == {"ray.io/node-id": "!ada"} and "fallback_strategy" not in avoiding


def test_the_error_for_no_node_names_request_nodes_and_remedy():
    message = none_fits(Needs({"enginesmith/sm": "sm_100"}, required=True, gpus=2), FLEET)
    assert message.startswith("no node with enginesmith/sm=sm_100 and 2 GPUs; the cluster's nodes: 2 with a CPU, ")
    assert "1 with enginesmith/sm=sm_89 and 1 GPU" in message and "1 with enginesmith/sm=sm_90 and 2 GPUs" in message
    assert "ray start --address HEAD --labels enginesmith/sm=sm_100 --num-gpus 2" in message
    assert "or wait for it if an autoscaler adds nodes (`--wait-for-nodes 15m` of `build` and `validate`" in message
    assert "nodes: none;" in none_fits(Needs(), ())
    assert "came in 15:00" in none_fits(Needs(), (), 900) and "wait longer" in none_fits(Needs(), (), 900)


def test_a_countdown_counts_down():
    assert countdown(Needs(ADA, required=True), 872.4) == "a node with enginesmith/sm=sm_89: none yet, 14:32 left"
    assert countdown(Needs(), -3).endswith("a CPU: none yet, 0:00 left")
