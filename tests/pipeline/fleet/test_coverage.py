from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from enginesmith.core.codec import encode
from enginesmith.core.errors import UnavailableError, canonical_json
from enginesmith.core.hardware.machine import Machine, parse_targets
from enginesmith.core.names import parse_reference
from enginesmith.registry.store.base import FileStore, Store
from enginesmith.registry.store.layout import channel_key, manifest_key
from enginesmith.registry.versions import channels
from enginesmith.registry.versions.lookup import load
from enginesmith.registry.versions.publish import add_latencies
from pipeline.fleet import coverage
from pipeline.fleet.catalog import SELFTEST, Catalog, Demand, Served, read_served, whole_registry
from pipeline.fleet.coverage import Coverage, list_coverage
from pipeline.fleet.groups import Hardware, NodeGroup
from pipeline.fleet.inventory import fleet_of_nodes
from pipeline.orchestration.fleet import FleetSources, reconcile
from tests.enginesmith.registries import overwrite
from tests.enginesmith.serving.test_buckets import scale
from tests.pipeline.fleet import nodes
from tests.pipeline.fleet.fleets import built, nothing_known, published, without_engine
from tests.pipeline.projects import raising
from tests.validation.latency.reports import latency_report


def group(
    name: str, count: int = 1, mig: str | None = None, runtimes: dict[str, str] | None = None, **facts: str | int
) -> NodeGroup:
    target = parse_targets(name)[0]
    product = None if mig else target.product
    entries: Any = {"driver": "580.95.05", **facts}
    machine = Machine(target.compute_capability, product).with_facts(**entries, runtimes=runtimes)
    return NodeGroup(Hardware(machine, name, target.product, mig), count, count)


def demand(text: str = "digits", *on: str, **options: object) -> Demand:
    targets = tuple(target for name in on or ("gpu",) for target in parse_targets(name))
    return Demand(parse_reference(text), targets, **options)


def stand(store: Store, demanded: Demand, *groups: NodeGroup, **planned: str) -> list[Coverage]:
    catalog = Catalog((demanded,), planned=tuple(planned.items()))
    return list(list_coverage(groups, read_served(store, catalog.demands), catalog))


@pytest.fixture
def digits(store: Store) -> Store:
    published(
        store,
        "digits",
        [
            built(store, "l4", "int8", "proven"),
            built(store, "sm_80"),
            built(store, "h200", status="proven", backend="tensorrt"),
            built(store, "cpu", "fp32", "proven"),
        ],
        others=[without_engine(store, "t4", "failed", "out of memory in the compiler")],
    )
    return store


@pytest.mark.parametrize(
    ("where", "state", "engine", "words"),
    [
        (group("l4"), "covered", "l4 int8 tensorrt-rtx", "built for sm_89 (l4)"),
        (group("l40s"), "covered", "l4 int8 tensorrt-rtx", "tuned for l4, another product"),
        (group("h200"), "covered", "h200 fp16 tensorrt", "built for sm_90 (h200)"),
        (group("a100"), "unproven", "sm_80 fp16 tensorrt-rtx", "no sm_80 here"),
        (group("a100", mig="1g.10gb"), "unproven", "sm_80 fp16 tensorrt-rtx", "no sm_80 here"),
        (group("t4"), "missing", None, "t4 fp16 tensorrt-rtx: failed: out of memory in the compiler"),
        (group("b200"), "missing", None, "no engine for sm_100; digits@1 has cpu, h200, l4, sm_80"),
        (
            group("h200", runtimes={"tensorrt": "11.4.0"}),
            "broken",
            "h200 fp16 tensorrt",
            "needs TensorRT 10.16.1.11, found 11.4.0",
        ),
        (group("h200", runtimes={"tensorrt": "10.16.1"}), "covered", "h200 fp16 tensorrt", "built for sm_90 (h200)"),
        (group("h200", driver="570.124.06"), "broken", "h200 fp16 tensorrt", "needs driver >= 580, found 570.124.06"),
        (
            group("l4", runtimes={"tensorrt-rtx": "1.8"}),
            "broken",
            "l4 int8 tensorrt-rtx",
            "needs TensorRT-RTX 1.7.1.116, found 1.8",
        ),
        (group("l4", memory_bytes=3), "missing", None, "needs at least "),
    ],
)
def test_each_state_has_resolves_reason(digits, where, state, engine, words):
    (result,) = stand(digits, demand(), where)
    assert (result.state, result.engine and result.engine.unit) == (state, engine)
    assert words in result.reason + result.fit
    assert result.serves == (state in ("covered", "unproven"))


def test_unproven_engines_suffice_unless_catalog_or_channel_require_proofs(digits: Store) -> None:
    (free_coverage,) = stand(digits, demand(), group("a100"))
    (standings,) = stand(digits, demand(proven=True), group("a100"))
    channels.promote(digits, load(digits, "digits", "1"), "stable", proven_only=True)
    (bound_coverage,) = stand(digits, demand("digits:stable"), group("a100"))
    for result, serves in ((free_coverage, True), (standings, False), (bound_coverage, False)):
        assert (result.state, result.serves, result.reason) == ("unproven", serves, "no sm_80 here")


def test_where_a_proof_is_required_a_proven_engine_precedes_a_better_fit(store: Store) -> None:
    published(store, "digits", [built(store, "l4"), built(store, "sm_89", status="proven")])
    (free_coverage,) = stand(store, demand(), group("l4"))
    (standings,) = stand(store, demand(proven=True), group("l4"))
    assert (free_coverage.state, standings.state) == ("unproven", "covered")
    assert standings.engine is not None and standings.engine.target == "sm_89"


def test_an_old_driver_and_another_runtime_are_distinguished(digits: Store) -> None:
    (old_coverage,) = stand(digits, demand(), group("h200", driver="535.1"))
    (both_coverage,) = stand(digits, demand(), group("h200", driver="535.1", runtimes={"tensorrt": "11.4"}))
    (other_coverage,) = stand(digits, demand(), group("h200", runtimes={"tensorrt": "11.4"}))
    assert (old_coverage.too_old, both_coverage.too_old, other_coverage.too_old) == (True, True, False)


def test_a_planned_change_lists_engines_that_stop_working(digits: Store) -> None:
    result = stand(digits, demand(), group("h200"), group("l4"), tensorrt="11.4")
    assert [(item.state, item.serves) for item in result] == [("breaking", True), ("covered", True)]
    assert result[0].reason == "needs TensorRT 10.16.1.11, found 11.4"
    # A driver that is new enough takes away what its predecessor's CUDA version said.
    (newer_coverage,) = stand(digits, demand(), group("h200", cuda="13.0"), driver="590.44")
    assert newer_coverage.state == "covered"


def test_each_requested_precision_is_a_row(digits: Store) -> None:
    result = stand(digits, demand(precisions=("int8", "fp16")), group("l4"))
    assert [(item.precision, item.state) for item in result] == [("int8", "covered"), ("fp16", "missing")]
    assert result[1].reason == "l4 int8 tensorrt-rtx: precision int8, not fp16"


def test_a_demand_names_the_groups_that_must_serve(digits: Store) -> None:
    fleet = [group("cpu"), group("t4"), group("a100"), group("a100", mig="1g.10gb"), group("h100"), group("h200")]
    unknown_group = NodeGroup(Hardware(Machine((8, 7)), "Orin"), 1, 1)

    def named(*on: str) -> list[str]:
        return [item.group.name for item in stand(digits, demand("digits", *on), *fleet, unknown_group)]

    assert named() == ["t4", "a100", "a100 mig-1g.10gb", "h100", "h200", "sm_87"]
    assert named("all")[0] == "cpu" and named("cpu") == ["cpu"]
    assert named("a100") == ["a100", "a100 mig-1g.10gb"] and named("hopper") == ["h100", "h200"]
    assert named("sm_90", "t4") == ["t4", "h100", "h200"] and named("h200") == ["h200"]


def test_an_unreadable_model_does_not_hide_others(digits: Store) -> None:
    published(digits, "ranker", [built(digits, "l4", status="proven")])
    overwrite(digits, manifest_key("ranker", "1"), b"{}")
    expected = (demand(), demand("ranker@1"), demand("digit"), demand("digits:stable"))
    served_results = read_served(digits, expected)
    actual = list_coverage([group("l4")], served_results, Catalog(expected))
    assert [item.state for item in actual] == ["covered", "missing", "missing", "missing"]
    assert "manifest of ranker@1 (" in actual[1].reason and "): format is missing; restore it" in actual[1].reason
    assert "no model 'digit' in" in actual[2].reason and "did you mean 'digits'?" in actual[2].reason
    assert "no channel of digits 'stable'" in actual[3].reason


def test_an_unreachable_registry_ends_the_command(digits: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    failing_read = raising(UnavailableError("the disk went away"))
    monkeypatch.setattr(FileStore, "read", failing_read)
    with pytest.raises(UnavailableError, match="went away"):
        read_served(digits, [demand()])


def test_without_a_catalog_each_model_with_a_channel_is_checked_on_every_gpu(digits: Store) -> None:
    published(digits, "ranker", [built(digits, "l4", status="proven")], channel="stable")
    published(digits, "adrift", [built(digits, "l4", status="proven")])
    (digits.root / channel_key("adrift", "candidate")).unlink()
    published(digits, SELFTEST, [built(digits, "cpu", "fp32", "proven")])
    result = whole_registry(digits)
    assert [str(item.reference) for item in result.demands] == ["digits:candidate", "ranker:stable"]


def test_each_manifest_is_read_once_and_judged_once_for_each_kind_of_machine(store, monkeypatch):
    """What keeps 500 nodes and 200 models a matter of seconds."""
    for index in range(5):
        published(store, f"model-{index}", [built(store, "l4", status="proven"), built(store, "sm_80")])
    reads, judged_counts = Counter[str](), Counter[Machine]()
    read_file, judge = FileStore.read, coverage.judge

    def counted_read(self: FileStore, key: str) -> bytes | None:
        reads[key] += 1
        return read_file(self, key)

    def counted_judge(served: Served, group: NodeGroup, *rest: Any) -> Coverage:
        judged_counts[group.machine] += 1
        return judge(served, group, *rest)

    monkeypatch.setattr(FileStore, "read", counted_read)
    monkeypatch.setattr(coverage, "judge", counted_judge)
    copies = [
        {**node, "metadata": {**node["metadata"], "name": f"{index}"}}
        for index in range(50)
        for node in (*nodes.WHOLE.values(), nodes.TIME_SHARED)
    ]
    fleet = fleet_of_nodes(copies, "here")
    monkeypatch.setattr(FleetSources, "fleet", lambda self, catalog: fleet)
    result = reconcile(store, FleetSources(), nothing_known)
    assert sum(group.nodes for group in fleet.groups) == 550 and len(result.standings) == 5 * 11
    assert max(reads.values()) == 1 and set(judged_counts.values()) == {5} and len(judged_counts) == 10


def test_the_same_machine_in_two_groups_is_judged_once_and_counted_twice(digits: Store) -> None:
    whole_group = group("l4", 3)
    shared = replace(whole_group, hardware=replace(whole_group.hardware, sharing="time-slicing", replicas=2), nodes=2)
    result = stand(digits, demand(), whole_group, shared)
    assert [(item.group.name, item.group.nodes, item.state) for item in result] == [
        ("l4", 3, "covered"), ("l4 shared by 2", 2, "covered"),
    ]  # fmt: skip


def test_the_named_engine_equals_a_pulls_choice(store: Store) -> None:
    entries = [built(store, "l4", precision, "proven") for precision in ("fp32", "int8")]
    published(store, "timed", entries)
    expected, local_group = demand("timed", "l4"), group("l4")
    assert stand(store, expected, local_group)[0].engine.precision == "fp32"
    manifest = load(store, "timed", "1")
    for entry, factor in zip(entries, (1.0, 0.5), strict=True):
        usual_report = latency_report()
        machine = replace(usual_report.machine, gpus=("NVIDIA L4",))
        buckets = tuple(scale(factor, bucket) for bucket in usual_report.buckets)
        result = replace(usual_report, engine=str(entry.digest), machine=machine, buckets=buckets)
        add_latencies(store, manifest, [store.put_bytes(canonical_json(encode(result)))])
    assert stand(store, expected, local_group)[0].engine.precision == "int8"
