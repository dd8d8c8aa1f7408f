"""Plans: profiles from buckets, and the reason why an engine has to be built."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders.backends import discovery
from builders.backends.optional_methods import profiles
from builders.execution.local import LocalExecutor
from enginesmith.core.codec import decode, encode
from enginesmith.core.types import CPU_KIND, BuildRequest, Dim, ShapeProfile, Target, TensorSpec
from enginesmith.registry.store.base import open_store
from pipeline.compile import plan
from pipeline.compile.causes import Causes, explain_change
from pipeline.compile.plan import candidates
from pipeline.compile.run_context import RunContext, Work
from pipeline.spec.model import ModelSpec, load_spec, matches_unit
from pipeline.values import Exported, Graph, GraphVariant, OnnxModel, Proof, Selection
from tests.pipeline.projects import Project

REQUEST = BuildRequest(
    model="a" * 64,
    precision="int8",
    target=Target("sm_89", (8, 9)),
    backend="tensorrt-rtx",
    inputs=(TensorSpec("x", "float32", ("batch", 4)),),
    outputs=(TensorSpec("y", "float32", ("batch", 2)),),
    profiles=(ShapeProfile((("x", (1, 4), (2, 4), (8, 4)),)),),
    options=(("tf32", False), ("workspace_mib", 0)),
    toolchain=(("tensorrt-rtx", "1.7.1"),),
)

# Each of these makes another engine, so each must give another key.
CHANGES = {
    "model": {"model": "c" * 64},
    "precision": {"precision": "fp16"},
    "target": {"target": Target("sm_86", (8, 6))},
    "product": {"target": Target("l4", (8, 9), "l4")},
    "backend": {"backend": "tensorrt"},
    "input name": {"inputs": (TensorSpec("z", "float32", ("batch", 4)),)},
    "input dtype": {"inputs": (TensorSpec("x", "float16", ("batch", 4)),)},
    "output shape": {"outputs": (TensorSpec("y", "float32", ("batch", 3)),)},
    "profile": {"profiles": (ShapeProfile((("x", (1, 4), (2, 4), (9, 4)),)),)},
    "no profile": {"profiles": ()},
    "option": {"options": (("tf32", True), ("workspace_mib", 0))},
    "version": {"toolchain": (("tensorrt-rtx", "1.7.2"),)},
    "cpu": {"toolchain": ((CPU_KIND, "cpu_avx2"), ("tensorrt-rtx", "1.7.1"))},
}


@pytest.mark.parametrize("change", sorted(CHANGES))
def test_everything_an_engine_depends_on_changes_the_key(change: str) -> None:
    assert replace(REQUEST, **CHANGES[change]).key != REQUEST.key


def test_a_request_survives_json_with_its_key() -> None:
    import json

    again = decode(json.loads(json.dumps(encode(REQUEST))), BuildRequest)
    assert again == REQUEST
    assert again.key == REQUEST.key


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("model", "its graph is another one"),
        ("profile", "the shapes changed"),
        ("option", "option tf32: False -> True"),
        ("version", "version of tensorrt-rtx: 1.7.1 -> 1.7.2"),
        ("cpu", "kind of CPU: none -> cpu_avx2"),
    ],
)
def test_the_reason_names_what_changed_since_the_last_build(change: str, reason: str) -> None:
    assert explain_change(REQUEST, replace(REQUEST, **CHANGES[change])) == reason


def test_equal_graphs_are_one_build_whatever_ranges_and_method_they_came_from() -> None:
    spec = ModelSpec.model_validate(
        {
            "model": "m",
            "source": {"onnx": "m.onnx"},
            "targets": ["sm_89"],
            "precisions": ["int8"],
            "calibration": {"data": "c.npz"},
            "backends": {"tensorrt-rtx": {}},
            "inputs": {"x": {"dtype": "float32", "shape": [1, 4]}},
        }
    )
    (unit,) = candidates(spec, Selection())
    graph = Graph(unit.variant, "a" * 64, REQUEST.inputs, REQUEST.outputs, scales="b" * 64)
    first, second = (plan._request(spec, unit, replace(graph, scales=digit * 64)) for digit in "bc")
    assert first.key == second.key


def test_the_reason_is_the_cause_where_that_is_known() -> None:
    now = replace(REQUEST, **CHANGES["model"])
    assert explain_change(REQUEST, now, ["weights w changed"]) == "weights w changed"


def test_a_record_of_builds_that_other_code_wrote_counts_as_forgotten(project: Project, tmp_path: Path) -> None:
    spec = load_spec(project.spec)
    context = RunContext(open_store(tmp_path / "other", create=True), LocalExecutor(1), LocalExecutor(1))
    request = {**encode(REQUEST), "field of another release": 1}
    value = {"units": {REQUEST.unit: {"request": request, "from": "x"}}, "from": {"x": {}}}
    context.remember("latest-builds", {"model": spec.model}, value, [])
    assert Causes(Work(spec, context)).before == {}


def test_the_reason_without_a_change_or_without_a_past() -> None:
    assert explain_change(None, REQUEST) == "no engine for this unit yet"
    assert explain_change(REQUEST, REQUEST) == "its engine is no longer in the registry"


def test_wide_is_one_profile_that_spans_every_bucket_and_is_tuned_for_opt() -> None:
    inputs = (TensorSpec("ids", "int64", ("batch", "seq")),)
    dims = (Dim("batch", 1, 2, 4), Dim("seq", 1, 48, 64, (32, 64)))
    wide = discovery.configure("tensorrt-rtx", {"profiles": "wide"})
    (one,) = profiles(inputs, plan._buckets_for(wide, dims))
    assert one.inputs[0][1:] == ((1, 1), (2, 48), (4, 64))
    for name in ("tensorrt-rtx", "onnxruntime"):
        assert len(list(profiles(inputs, plan._buckets_for(discovery.configure(name, {}), dims)))) == 2


@given(st.lists(st.integers(1, 64), min_size=1, max_size=6, unique=True), st.integers(1, 64))
def test_buckets_cover_every_size_once(edges: list[int], low: int) -> None:
    edges = sorted(edge for edge in edges if edge >= low) or [low]
    dim = Dim("n", low, edges[-1], edges[-1], tuple(edges))
    covered = [size for first, _, last in dim.buckets() for size in range(first, last + 1)]
    assert covered == list(range(low, edges[-1] + 1))
    assert {first for first, _, _ in dim.buckets()} | set(edges) == set(dim.test_sizes())


def test_a_required_pattern_covers_groups_and_products() -> None:
    assert matches_unit("ada int8", "sm_89 int8 tensorrt-rtx")
    assert matches_unit("cpu", "cpu fp32 onnxruntime")
    assert not matches_unit("sm_89 fp16", "sm_89 int8 tensorrt-rtx")
    assert not matches_unit("sm_89 int8 tensorrt", "sm_89 int8 tensorrt-rtx")


def test_the_tables_name_every_unit_and_its_reason(built: Project) -> None:
    out = built.run("plan", built.spec).out
    assert "5 cached, 1 refused" in out
    assert "an engine with this build key is in the registry" in out
    assert "use fp16" in out
    out = built.run("build", built.spec).out
    for word in ("proven", "unproven", "refused", "accuracy"):
        assert word in out
    *_, note, last = out.splitlines()
    assert note.startswith("accuracy: of the engine") and last.startswith("tiny@1 unchanged: everything was cached; ")
    assert "report.html" in last, "where nothing is new: the table and one line"


def test_more_profiles_than_any_compiler_takes_are_refused_before_they_are_made() -> None:
    names = list("abcdef")
    spec = ModelSpec.model_validate(
        {
            "model": "wide",
            "source": {"onnx": "wide.onnx"},
            "inputs": {"x": {"shape": names}},
            "dims": {name: {"buckets": list(range(1, 100))} for name in names},
            "targets": ["sm_89"],
        }
    )
    (item,) = candidates(spec, Selection())
    tensor = (TensorSpec("x", "float32", tuple(names)),)
    exported = Exported(OnnxModel("0" * 64, tensor, tensor, 20, carries_qdq=False), "1" * 64, Proof())
    request = plan._request(spec, item, Graph(GraphVariant("fp32"), "0" * 64, tensor, tensor))
    assert "combine to more than 64 profiles" in (plan._refusal(exported, item, request) or "")


@pytest.mark.parametrize("command", ["plan", "build"])
def test_backends_that_build_for_none_of_the_targets_are_told_of_before_any_work(project, command):
    project.change_spec(targets=["cpu"], backends={"tensorrt": {}, "tensorrt-rtx": {}})
    done = project.run(command, project.spec)
    told = "none of the backends (tensorrt, tensorrt-rtx) builds for cpu; `enginesmith backends list` says what does"
    assert done.code == 2 and told in done.err and "export" not in done.err


def test_a_target_that_no_backend_of_the_spec_builds_for_is_not_left_out_in_silence(project: Project) -> None:
    project.change_spec(precisions=["fp32"], calibration=None, targets=["cpu", "sm_89"], backends={"onnxruntime": {}})
    done = project.run("plan", project.spec)
    assert done.code == 0 and "1 build, 0 cached, 0 refused" in done.out
    assert "sm_89: left out: no backend of the spec (onnxruntime) builds for it" in done.err
    assert "left out" not in project.run("plan", project.spec, "--target", "cpu").err
