from collections.abc import Callable
from dataclasses import dataclass

import pytest

from enginesmith.core.errors import InputError
from enginesmith.core.hardware.machine import parse_targets
from enginesmith.core.types import BuildRequest
from enginesmith.registry.store.base import Store
from pipeline.fleet.catalog import Catalog, read_served, whole_registry
from pipeline.fleet.coverage import Hours
from pipeline.fleet.groups import Fleet
from pipeline.fleet.plan import FleetPlan, StateChange, make_plan, parse_nodes
from tests.pipeline.fleet.fleets import built, nothing_known, published, without_engine
from tests.pipeline.fleet.test_coverage import group


@dataclass(frozen=True)
class Took:
    seconds: float | None
    builds: int
    basis: str = "3 builds of this unit"


@pytest.fixture
def fleet() -> Fleet:
    return Fleet(()).with_groups(
        [
            group("h200", 4),
            group("l4", 40, cuda="13.0"),
            group("l4", 6, driver="575.57.08", cuda="12.9"),
            group("t4", 8, driver="575.1"),
        ]
    )


@pytest.fixture
def store(store: Store) -> Store:
    full_fields = {"status": "proven", "backend": "tensorrt"}
    published(
        store,
        "digits",
        [built(store, "l4", **full_fields), built(store, "h200", **full_fields), built(store, "t4", **full_fields)],
        targets=["l4", "h200", "sm_75", "sm_100"],
    )
    published(store, "ranker", [built(store, "sm_89", status="proven")], targets=["sm_89"])
    return store


def plan(
    store: Store, fleet: Fleet, predict: Callable[[str, BuildRequest], Took | None] = nothing_known, **change: object
) -> FleetPlan:
    catalog: Catalog = whole_registry(store)
    return make_plan(fleet, read_served(store, catalog.demands), catalog, StateChange(**change), predict)


def dead(fleet_plan: FleetPlan) -> dict[tuple[str, str], str]:
    return {(item.served.name, item.group.name): item.reason for item in fleet_plan.dying}


def ready_work(fleet_plan: FleetPlan) -> list[str]:
    return [f"{item.unit.kind} {item.name}" for item in fleet_plan.work if item.ready]


def test_another_tensorrt_stops_engines_and_each_unit_is_rebuilt_once(store: Store, fleet: Fleet) -> None:
    newer_fleet = Fleet(()).with_groups([group("h200", 4), group("l4", 40), group("l4", 6, memory_bytes=24 << 30)])
    actual = plan(store, newer_fleet, runtimes={"tensorrt": "11.4"})
    reason = "needs TensorRT 10.16.1.11, found 11.4"
    assert dead(actual) == {("digits@1", "h200"): reason, ("digits@1", "l4"): reason}
    assert ready_work(actual) == ["build digits@1 l4 fp16 tensorrt", "build digits@1 h200 fp16 tensorrt"]
    (l4, h200) = (item for item in actual.work if item.ready)
    assert (l4.nodes, l4.groups, h200.nodes) == (46, ("l4",), 4)
    assert {group.machine.runtimes["tensorrt"] for group in actual.after.groups} == {"11.4"}
    # What serves nobody now is not called dying: ranker has nothing for h200.
    assert ("ranker@1", "h200") in {(item.served.name, item.group.name) for item in actual.waiting}


def test_a_newer_driver_stops_nothing_and_lets_old_nodes_serve(store: Store, fleet: Fleet) -> None:
    plan_before = plan(store, fleet, runtimes={"tensorrt": "10.16.1"})
    assert ("digits@1", "l4") in {(item.served.name, item.group.name) for item in plan_before.waiting}
    actual = plan(store, fleet, driver="590.44")
    assert dead(actual) == {} and {item.served.name for item in actual.waiting} == {"ranker@1"}
    (l4,) = (item for item in actual.after.groups if item.name == "l4")
    assert (l4.nodes, l4.machine.driver, l4.machine.cuda) == (46, "590.44", None)
    older_plan = plan(store, fleet, driver="550.1")
    assert dead(older_plan)[("digits@1", "h200")] == "needs driver >= 580, found 550.1"
    assert not ready_work(older_plan) and "newer driver" in older_plan.work[0].remedy


def test_only_named_nodes_change(store: Store, fleet: Fleet) -> None:
    actual = plan(store, fleet, runtimes={"tensorrt": "11.4"}, on=parse_targets("hopper"))
    assert set(dead(actual)) == {("digits@1", "h200")}


def test_new_nodes_need_engines_if_spec_and_compiler_allow(store: Store, fleet: Fleet) -> None:
    actual = plan(store, fleet, driver="590.44", add=(parse_nodes("b200=16"), parse_nodes("l4=2")))
    groups = {item.name: item.nodes for item in actual.after.groups}
    assert groups["b200"] == 16 and groups["l4"] == 46 + 2
    by_name = {item.name: item for item in actual.work}
    assert by_name["digits@1 sm_100 fp16 tensorrt"].ready and by_name["digits@1 sm_100 fp16 tensorrt"].nodes == 16
    (ranker,) = (item for item in actual.work if item.unit.model == "ranker" and item.unit.target.name == "sm_100")
    assert "; build it with onnxruntime-cuda, on any machine, or tensorrt, on a worker with sm_100" in ranker.refused
    assert ranker.remedy == "add sm_100 to its spec, and register it again"
    assert not ranker.ready and actual.work.index(ranker) > actual.work.index(by_name["digits@1 sm_100 fp16 tensorrt"])


def test_nodes_with_the_oldest_driver_leave_first(store: Store, fleet: Fleet) -> None:
    actual = plan(store, fleet, driver="590.44", remove=(parse_nodes("t4=8"), parse_nodes("l4=10")))
    assert [(item.name, item.nodes) for item in actual.after.groups] == [("l4", 36), ("h200", 4)]
    rest = plan(store, fleet, runtimes={"tensorrt": "10.16.1"}, remove=(parse_nodes("l4=10"),))
    assert [(item.machine.driver, item.nodes) for item in rest.after.groups if item.name == "l4"] == [("580.95.05", 36)]
    gone_plan = plan(store, Fleet(()).with_groups([group("t4", 8), group("l4", 2)]), remove=(parse_nodes("t4=8"),))
    assert dead(gone_plan) == {}
    with pytest.raises(InputError, match=r"--remove t4=9: there are 8 nodes of t4"):
        plan(store, fleet, remove=(parse_nodes("t4=9"),))


def test_known_durations_are_summed_and_the_rest_is_reported(store: Store, fleet: Fleet) -> None:
    def predict(model: str, request: BuildRequest) -> Took | None:
        return {"l4": Took(600, 3), "h200": Took(1200, 2), "sm_100": None}.get(request.target.name)

    cost = plan(store, fleet, predict, driver="590.44", runtimes={"tensorrt": "11.4"}, add=(parse_nodes("b200=1"),))
    assert cost.hours.hours == pytest.approx(0.5)
    assert cost.hours.words.startswith("about 0.50 GPU hours for 2 units; ")
    assert Hours(0.004, 1, 0).words == "under 0.01 GPU hours for 1 unit"
    names = [item.name for item in cost.work if item.unit.kind == "build" and not item.refused and not item.expected]
    assert cost.hours.unknown == len(names) and "digits@1 sm_100 fp16 tensorrt" in names
    empty_plan = plan(store, fleet, driver="590.44", runtimes={"tensorrt": "11.4"})
    assert empty_plan.hours.words == "unknown, because no similar build is recorded"


def test_changes_are_ordered_by_nodes_channel_and_time(store: Store) -> None:
    published(store, "slow", [built(store, "l4", "int8", "proven", "tensorrt")])
    published(store, "quick", [built(store, "l4", "fp32", "proven", "tensorrt")])
    published(store, "listed", [built(store, "l4", "bf16", "proven", "tensorrt")], channel="stable")

    def predict(model: str, request: BuildRequest) -> Took | None:
        return {"slow": Took(900, 1), "quick": Took(9, 1)}.get(model)

    fleet = Fleet(()).with_groups([group("l4", 5), group("h200", 6)])
    works = ready_work(plan(store, fleet, predict, runtimes={"tensorrt": "11.4"}))
    assert [work.removeprefix("build ") for work in works] == [
        "listed@1 sm_90 bf16 tensorrt", "quick@1 sm_90 fp32 tensorrt", "slow@1 sm_90 int8 tensorrt",
        "digits@1 h200 fp16 tensorrt", "listed@1 l4 bf16 tensorrt", "quick@1 l4 fp32 tensorrt",
        "slow@1 l4 int8 tensorrt", "digits@1 l4 fp16 tensorrt",
    ]  # fmt: skip


def test_failed_builds_are_not_retried_automatically(store: Store) -> None:
    failed_entry = without_engine(store, "h200", "failed", "out of memory", "fp16")
    published(store, "heavy", [built(store, "l4", status="proven")], others=[failed_entry])
    actual = plan(store, Fleet(()).with_groups([group("h200", 1)]), add=(parse_nodes("h200=1"),))
    (heavy,) = (item for item in actual.work if item.unit.model == "heavy")
    assert heavy.remedy == "change its spec: with the present spec, this unit failed"


@pytest.mark.parametrize("text", ["b200", "b200=0", "b200=x", "=3", "b200=-1", "b201=3", "ampere=1", "gpu=1", "b200=²"])
def test_documents_without_nodes_are_refused(text: str) -> None:
    with pytest.raises(InputError):
        parse_nodes(text)
