"""Which events a fleet sends. `tests/pipeline/orchestration/test_events.py` has how they are sent."""

from enginesmith.registry.store.base import Store
from pipeline.fleet.coverage import work_for
from pipeline.orchestration.fleet import messages
from pipeline.orchestration.gpu_workers import check_payload
from tests.pipeline.fleet.fleets import built, nothing_known, published
from tests.pipeline.fleet.test_coverage import demand, group, stand


def test_one_event_is_sent_per_model_to_build_and_generation_to_prove(store: Store) -> None:
    engines = [built(store, "l4", status="proven"), built(store, "sm_80"), built(store, "a100", "int8")]
    published(store, "digits", engines, targets=["l4", "sm_80", "sm_90", "sm_120"])
    groups = (group("l4"), group("a100", 2), group("a10"), group("h100"), group("rtxpro6000"))
    result = work_for(stand(store, demand(), *groups), nothing_known)
    assert [(item.unit.kind, item.unit.target.name, item.ready) for item in result] == [
        ("prove", "a100", True), ("build", "sm_120", True), ("build", "sm_86", False), ("build", "sm_90", False),
    ]  # fmt: skip
    message = messages(result, "file:///r")
    for item in message:
        check_payload(item.event, {"model", *item.payload})
    output = {"registry": "file:///r", "by": "enginesmith fleet"}
    to_build = {"spec": "registered:digits", "units": ["digits@1 sm_120 fp16 tensorrt-rtx"], **output}
    to_prove = {"version": "1", "target": "sm_80", "engines": [engines[2].digest], **output}
    assert [vars(item) for item in message] == [
        {"event": "enginesmith.model.registered", "model": "digits", "payload": to_build},
        {"event": "enginesmith.engine.unproven", "model": "digits", "payload": to_prove},
    ]


def test_a_model_with_an_unregistered_spec_is_left_to_people(store: Store) -> None:
    published(store, "digits", [built(store, "l4", status="proven")], targets=["l4", "sm_120"], registered=False)
    (item,) = work_for(stand(store, demand(), group("rtxpro6000")), nothing_known)
    assert not item.ready and item.remedy == "register its spec: `enginesmith prefect register SPEC`"
    assert messages([item], "file:///r") == ()
