import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginesmith.core.errors import InputError, digest_of_bytes
from enginesmith.registry.rollouts.rollout_state import (
    WHOLE,
    ServingNode,
    Slice,
    add_slice,
    check_waves,
    is_reached,
    is_reporter,
    parse_wave,
)

NAMES = [f"node-{number:05}" for number in range(10_000)]
NODES = [ServingNode(name) for name in NAMES]
slices = st.builds(
    lambda share, where: Slice(share, *where),
    st.integers(0, WHOLE),
    st.sampled_from([(None, None), ("eu", None), ("us", None), (None, "canary")]),
)
nodes = st.builds(
    ServingNode, st.sampled_from(NAMES), st.sampled_from(["", "eu", "us"]), st.sampled_from([(), ("canary",)])
)


@given(nodes, st.text(min_size=1, max_size=20), st.lists(slices, max_size=4), slices)
def test_nodes_of_earlier_waves_stay_reached_when_another_wave_opens(node, rollout, reach, more):
    was_set = is_reached(node, rollout, reach)
    assert is_reached(node, rollout, add_slice(reach, more)) == (was_set or is_reached(node, rollout, [more]))


@pytest.mark.parametrize("share", [0.01, 0.05, 0.25, 0.5])
@pytest.mark.parametrize("rollout", ["a", "b"])
def test_a_share_selects_that_share_of_ten_thousand_names(share, rollout):
    reached_total = sum(is_reached(node, rollout, [Slice(int(share * WHOLE))]) for node in NODES)
    assert abs(reached_total - share * 10_000) < 4 * math.sqrt(10_000 * share * (1 - share))


def test_shares_of_0_and_100_percent_select_none_and_all():
    assert all(is_reached(node, "a", [Slice(WHOLE)]) for node in NODES)
    assert not any(is_reached(node, "a", [Slice(0)]) or is_reached(node, "a", []) for node in NODES)


def test_each_rollout_starts_with_other_nodes():
    first_names, second_names = ({n.name for n in NODES if is_reached(n, x, [Slice(50_000)])} for x in ("a", "b"))
    assert len(first_names & second_names) < 0.12 * len(first_names)  # 5 % of them by chance


def test_the_nodes_that_report_are_independent_of_the_wave():
    reached_nodes = [node for node in NODES if is_reached(node, "a", [Slice(250_000)])]
    reporting = sum(is_reporter(digest_of_bytes(node.name.encode()), 100_000) for node in reached_nodes)
    assert abs(reporting - 0.1 * len(reached_nodes)) < 4 * math.sqrt(0.09 * len(reached_nodes))


def test_regions_and_labels_restrict_waves():
    eu, canary = ServingNode("a", "eu-west-1"), ServingNode("b", "us", ("canary", "gpu"))
    for text, reached_canaries in (("region=eu-west-1", [eu]), ("label=canary", [canary]), ("region=eu", [])):
        assert [node for node in (eu, canary) if is_reached(node, "r", [parse_wave(text)])] == reached_canaries
    some_nodes = [ServingNode(name, "eu") for name in NAMES[:2000]]
    share = sum(is_reached(node, "r", [parse_wave("region=eu:10%")]) for node in some_nodes)
    assert 140 < share < 260
    assert not any(is_reached(ServingNode(name, "us"), "r", [parse_wave("region=eu:10%")]) for name in NAMES[:500])


@given(slices.filter(lambda item: item.share_ppm > 0))
def test_a_wave_is_written_as_it_is_read(item):
    assert parse_wave(str(item)) == item


@pytest.mark.parametrize("text", ["", "5", "0%", "101%", "-1%", "zone=eu", "region=", "region=eu:x%", "label=a b"])
def test_invalid_waves_are_refused(text):
    with pytest.raises(InputError, match="wave"):
        parse_wave(text)


@pytest.mark.parametrize(("waves", "why"), [
    ([], "must be 100%"),
    (["5%"], "must be 100%"),
    (["5%", "1%", "100%"], "wave 1% reaches no node"),
    (["100%", "label=a", "100%"], "wave label=a reaches no node"),
    (["region=eu", "100%", "region=eu:5%"], "must be 100%"),
])  # fmt: skip
def test_waves_without_new_nodes_or_without_all_nodes_are_refused(waves, why):
    with pytest.raises(InputError, match=why):
        check_waves([parse_wave(text) for text in waves])
    check_waves([parse_wave(text) for text in ("label=canary", "1%", "region=eu:5%", "5%", "region=eu", "100%")])


def test_a_node_comes_from_the_environment(monkeypatch):
    environment = {"ENGINESMITH_NODE": "n1", "ENGINESMITH_REGION": "eu", "ENGINESMITH_LABELS": "gpu, canary"}
    assert ServingNode.from_environment(environment) == ServingNode("n1", "eu", ("canary", "gpu"))
    assert ServingNode.from_environment({}).name
    for name, wrong_text in (("NODE", "a b"), ("REGION", "x\n"), ("LABELS", "a*")):
        with pytest.raises(InputError, match=f"give another by --{name.lower()} or ENGINESMITH_{name}"):
            ServingNode.from_environment({f"ENGINESMITH_{name}": wrong_text})
    with pytest.raises(InputError, match="40 labels"):
        ServingNode.from_environment({"ENGINESMITH_LABELS": ",".join(NAMES[:40])})
    monkeypatch.setattr("socket.gethostname", lambda: "_box_7")
    assert ServingNode.from_environment({}).name == "box_7"
