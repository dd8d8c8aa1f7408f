from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders.backends import discovery
from builders.backends.known_faults import Verdict
from builders.backends.request_checks import profiles
from builders.execution.local import LocalExecutor
from builders.execution.ray import RayExecutor
from enginesmith.core.codec import encode
from enginesmith.core.types import CPU_KIND, BuildRequest, Dim, ShapeProfile, Target, TensorSpec
from enginesmith.registry.store.base import Store, open_store
from pipeline.compile import plan
from pipeline.compile.causes import Causes, explain_change
from pipeline.compile.plan import candidates
from pipeline.compile.run_context import RunContext, Work
from pipeline.orchestration.run import RunOptions, depends_on_workers, find_ray_workers
from pipeline.spec.model import ModelSpec, load_spec, matches_unit
from pipeline.values import Exported, Graph, GraphVariant, OnnxModel, Proof, Selection
from tests.pipeline.projects import Project
from tests.pipeline.quantization.small_nets import build

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


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model": "c" * 64}, "its graph changed"),
        ({"profiles": (ShapeProfile((("x", (1, 4), (2, 4), (9, 4)),)),)}, "the shapes changed"),
        ({"options": (("tf32", True), ("workspace_mib", 0))}, "option tf32: False -> True"),
        ({"toolchain": (("tensorrt-rtx", "1.7.2"),)}, "version of tensorrt-rtx: 1.7.1 -> 1.7.2"),
        ({"toolchain": ((CPU_KIND, "cpu_avx2"), ("tensorrt-rtx", "1.7.1"))}, "kind of CPU: none -> cpu_avx2"),
        ({}, "its engine is no longer in the registry"),
    ],
)
def test_the_reason_names_what_changed_since_the_last_build(change: dict[str, Any], reason: str) -> None:
    assert explain_change(REQUEST, replace(REQUEST, **change)) == reason


def test_equal_graphs_are_one_build_for_all_ranges_and_methods() -> None:
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
    first_request, second_request = (plan._request(spec, unit, replace(graph, scales=digit * 64)) for digit in "bc")
    assert first_request.key == second_request.key


@pytest.mark.parametrize(("precision", "reason"), [("fp32", "file: 1 -> 2"), ("int8", "file: 1 -> 2; rows: 1 -> 2")])
def test_new_calibration_data_are_no_cause_where_nothing_is_calibrated(precision: Any, reason: str) -> None:
    old_request = replace(REQUEST, precision=precision)
    sources = SimpleNamespace(onnx="1", inputs={"export": {"file": 1}, "calibration": {"rows": 1}})
    work: Any = None
    causes, inputs = Causes(work), {"export": {"file": 2}, "calibration": {"rows": 2}}
    vars(causes).update(before={old_request.unit: SimpleNamespace(request=old_request, sources=sources)}, inputs=inputs)
    assert causes.of_build(replace(old_request, model="c" * 64), "2") == reason


def test_the_reason_is_the_known_cause_and_a_first_build_has_none() -> None:
    changed_value = replace(REQUEST, model="c" * 64)
    assert explain_change(REQUEST, changed_value, ["weights w changed"]) == "weights w changed"
    assert explain_change(None, REQUEST) == "no engine for this unit yet"


def test_a_build_record_of_other_code_counts_as_missing(project: Project, tmp_path: Path) -> None:
    spec = load_spec(project.spec)
    context = RunContext(open_store(tmp_path / "other", create=True), LocalExecutor(1), LocalExecutor(1))
    request = {**encode(REQUEST), "field of another release": 1}
    value = {"units": {REQUEST.unit: {"request": request, "from": "x"}}, "from": {"x": {}}}
    context.remember("latest-builds", {"model": spec.model}, value, [])
    assert Causes(Work(spec, context)).before == {}


def test_wide_means_one_profile_over_all_buckets() -> None:
    inputs = (TensorSpec("ids", "int64", ("batch", "seq")),)
    dims = (Dim("batch", 1, 2, 4), Dim("seq", 1, 48, 64, (32, 64)))
    wide_backend = discovery.configure("tensorrt-rtx", {"profiles": "wide"})
    (first_profile,) = profiles(inputs, plan._buckets_for(wide_backend, dims))
    assert first_profile.inputs[0][1:] == ((1, 1), (2, 48), (4, 64))
    for name in ("tensorrt-rtx", "onnxruntime"):
        assert len(list(profiles(inputs, plan._buckets_for(discovery.configure(name, {}), dims)))) == 2


@given(st.lists(st.integers(1, 64), min_size=1, max_size=6, unique=True), st.integers(1, 64))
def test_buckets_cover_every_size_once(edges: list[int], low: int) -> None:
    edges = sorted(edge for edge in edges if edge >= low) or [low]
    dim = Dim("n", low, edges[-1], edges[-1], tuple(edges))
    covered_sizes = [size for first_size, _, last_size in dim.buckets() for size in range(first_size, last_size + 1)]
    assert covered_sizes == list(range(low, edges[-1] + 1))
    assert {first_size for first_size, _, _ in dim.buckets()} | set(edges) == set(dim.test_sizes())


def test_a_required_pattern_covers_groups_and_products() -> None:
    assert matches_unit("ada int8", "sm_89 int8 tensorrt-rtx") and matches_unit("cpu", "cpu fp32 onnxruntime")
    assert not matches_unit("sm_89 fp16", "sm_89 int8 tensorrt-rtx")
    assert not matches_unit("sm_89 int8 tensorrt", "sm_89 int8 tensorrt-rtx")


def test_the_tables_name_every_unit_and_its_reason(built: Project) -> None:
    output = built.run("plan", built.spec).out
    assert "5 cached, 1 refused" in output and "an engine with this build key is in the registry" in output
    assert "use fp16" in output
    output = built.run("build", built.spec).out
    for word in ("proven", "unproven", "refused", "accuracy"):
        assert word in output
    *_, note, last_line = output.splitlines()
    assert note.startswith("SQNR, accuracy: measured on the engine") and last_line.startswith(
        "tiny@1 unchanged: everything was cached; "
    )
    assert "report.html" in last_line, "where nothing is new: the table and one line"


def test_too_many_profiles_are_refused_early() -> None:
    names = list("abcdef")
    spec = ModelSpec.model_validate(
        {
            "model": "wide",
            "source": {"onnx": "wide.onnx"},
            "inputs": {"x": {"shape": names}},
            "dims": {name: {"buckets": list(range(1, 100))} for name in names},
            "targets": ["sm_89"],
            "serve": "rtx",
        }
    )
    (item,) = candidates(spec, Selection())
    tensor = (TensorSpec("x", "float32", tuple(names)),)
    export_value = Exported(OnnxModel("0" * 64, tensor, tensor, 20, carries_qdq=False), "1" * 64, Proof())
    request = plan._request(spec, item, Graph(GraphVariant("fp32"), "0" * 64, tensor, tensor))
    assert "combine to more than 64 profiles" in (plan._refusal(export_value, item, request) or "")


def test_the_plan_names_known_compiler_faults_with_their_source(store: Store) -> None:
    text = 'y = GridSample<mode="{mode}">(x, g)'
    shapes = "float[n,c,h,w] x, float[n,k,l,2] g", "float[n,c,k,l] y"
    executor = LocalExecutor(1)
    context = RunContext(store, executor, executor)
    entries = {}
    for mode in ("linear", "cubic", "nearest"):
        model = store.put_bytes(build(*shapes, text.format(mode=mode), {}).SerializeToString())
        full_request = replace(REQUEST, model=model, backend="tensorrt", toolchain=(("tensorrt", "11.1.0"),))
        entries[mode] = plan._judge_known(full_request, context)
    assert entries["linear"].refusal is None and "(GridSample) " in entries["linear"].notes[0]
    assert "https://github.com/NVIDIA/TensorRT/issues/" in entries["linear"].notes[0]
    assert "opset 18" in (entries["cubic"].refusal or "") and "/issues/4646" in (entries["cubic"].refusal or "")
    assert entries["nearest"] == plan._judge_known(REQUEST, context) == Verdict()


@pytest.mark.parametrize("command", ["plan", "build"])
def test_backends_without_a_target_are_reported_before_any_work(project, command):
    project.change_spec(targets=["cpu"], backends={"tensorrt": {}, "tensorrt-rtx": {}})
    result = project.run(command, project.spec)
    message = "none of the backends (tensorrt, tensorrt-rtx) builds for cpu; `enginesmith backends list` says what does"
    assert result.code == 2 and message in result.err and "export" not in result.err


def test_a_target_without_a_backend_is_reported(project: Project) -> None:
    project.change_spec(precisions=["fp32"], calibration=None, targets=["cpu", "sm_89"], backends={"onnxruntime": {}})
    result = project.run("plan", project.spec)
    assert result.code == 0 and "1 build, 0 cached, 0 refused" in result.out
    assert "sm_89: left out: no backend of the spec (onnxruntime) builds for it" in result.err
    assert "left out" not in project.run("plan", project.spec, "--target", "cpu").err


def served(serve: str | None = None, targets: tuple[str, ...] = ("l4",), **parts: object) -> ModelSpec:
    spec = {"model": "m", "source": {"onnx": "m.onnx"}, "inputs": {"x": {"shape": [1, 4]}}, "targets": [*targets]}
    return ModelSpec.model_validate({**spec, **({"serve": serve} if serve else {}), **parts})


def units_of(spec: ModelSpec, *workers: str) -> list[str]:
    return [item.unit for item in candidates(spec, Selection(workers=tuple((name, "here") for name in workers)))]


@pytest.mark.parametrize(
    ("serve", "alone", "with_worker"),
    [
        (None, ["tensorrt-rtx", "onnxruntime-cuda"], ["tensorrt", "onnxruntime-cuda"]),
        ("triton", ["tensorrt", "onnxruntime-cuda"], ["tensorrt", "onnxruntime-cuda"]),
        ("onnxruntime", ["onnxruntime-cuda"], ["onnxruntime-cuda"]),
        ("rtx", ["tensorrt-rtx"], ["tensorrt-rtx"]),
        ("python", ["tensorrt-rtx"], ["tensorrt"]),
    ],
)
def test_the_server_option_selects_the_compilers(serve, alone, with_worker, monkeypatch):
    tensorrt = discovery.load("tensorrt")
    monkeypatch.setattr(tensorrt, "versions", lambda _: {"tensorrt": "11.4"})
    spec = served(serve)
    assert units_of(spec) == [f"l4 fp32 {name}" for name in alone]
    assert units_of(spec, "l4") == [f"l4 fp32 {name}" for name in with_worker]
    assert units_of(served(serve, ("cpu",))) == ["cpu fp32 onnxruntime"]
    monkeypatch.setattr(tensorrt, "versions", lambda _: {})
    assert units_of(spec, "l4") == units_of(spec), "the GPU without the compiler tunes nothing"


def test_a_card_has_its_rtx_engine_beside_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery.load("tensorrt"), "versions", lambda _: {"tensorrt": "11.4"})
    assert "rtx4090 fp32 tensorrt-rtx" in units_of(served(targets=("rtx4090",)), "rtx4090")
    assert "l4 fp32 tensorrt-rtx" not in units_of(served(targets=("l4",)), "l4")


def test_the_portable_engine_has_its_providers_precisions() -> None:
    data = {"precisions": ["fp16", "int8"], "calibration": {"data": "c.npz"}}
    assert units_of(served(**data)) == ["l4 fp16 tensorrt-rtx", "l4 int8 tensorrt-rtx", "l4 fp16 onnxruntime-cuda"]


def test_backends_that_the_server_cannot_open_are_a_mistake() -> None:
    with pytest.raises(ValueError, match="Triton opens no engines of tensorrt-rtx; remove it, or change serve: triton"):
        served("triton", backends={"tensorrt-rtx": {}})
    assert units_of(served("triton", backends={"onnxruntime-tensorrt": {}})) == ["l4 fp32 onnxruntime-tensorrt"]


def test_each_unit_names_its_builder_its_servers_and_gaps_of_the_matrix() -> None:
    spec = served("triton", ("h100",))
    tuned_candidate, portable_candidate = candidates(spec, Selection(workers=(("h100", "on a Ray worker with sm_90"),)))
    assert (tuned_candidate.built_at, tuned_candidate.opens_in) == ("on a Ray worker with sm_90", "Triton, TensorRT")
    assert (portable_candidate.built_at, portable_candidate.opens_in) == ("here", "Triton, ONNX Runtime")
    assert candidates(spec, Selection())[0].built_at == "nowhere in this fleet"
    assert {item.opens_in for item in candidates(served("rtx", ("l4",)), Selection())} == {"TensorRT for RTX only"}
    data = {"precisions": ["fp16", "int8"], "calibration": {"data": "c.npz"}}
    absences = {
        item.unit: item.absence for item in candidates(served("rtx", ("t4", "a100", "l4"), **data), Selection())
    }
    matrix = "is not in NVIDIA's support matrix of TensorRT-RTX (1.0 to 1.5)"
    assert absences == {
        "t4 fp16 tensorrt-rtx": "",
        "t4 int8 tensorrt-rtx": f"int8 on sm_75 {matrix}",
        "a100 fp16 tensorrt-rtx": f"sm_80 {matrix}",
        "a100 int8 tensorrt-rtx": f"sm_80 {matrix}",
        "l4 fp16 tensorrt-rtx": "",
        "l4 int8 tensorrt-rtx": "",
    }


def test_a_unit_for_triton_without_its_gpu_is_refused_with_the_reason(project: Project) -> None:
    project.change_spec(serve="triton", backends=None, targets=["sm_90"], precisions=["fp32"], calibration=None)
    unit, portable_unit = project.run("plan", project.spec, "--json").json["units"]
    assert (unit["backend"], unit["action"], unit["built_at"]) == ("tensorrt", "refused", "nowhere in this fleet")
    assert "no builder of this run has sm_90, on which tensorrt tunes; build it there, or with" in unit["reason"]
    assert (portable_unit["action"], portable_unit["opens_in"]) == ("build", "Triton, ONNX Runtime")


def test_a_clusters_workers_are_its_present_or_awaited_nodes(monkeypatch):
    monkeypatch.setattr(RayExecutor, "has_node", lambda _, needs: needs.labels["enginesmith/sm"] == "sm_90")
    monkeypatch.setattr(discovery.load("tensorrt"), "versions", lambda _: {"tensorrt": "11.4"})
    spec, cluster = served("triton", ("h100", "l4", "cpu")), RayExecutor("ray://head:1")
    texts = ("h100", "on a Ray worker with sm_90")
    assert find_ray_workers(spec, cluster, waits=False) == (texts,)
    assert find_ray_workers(spec, cluster, waits=True) == (texts, ("l4", "on a Ray worker with sm_89, once one comes"))
    assert find_ray_workers(spec, LocalExecutor(), waits=True) == ()
    requests = [
        depends_on_workers(item, RunOptions(executor="ray")) for item in (spec, served("rtx"), served(None, ("cpu",)))
    ]
    assert requests == [True, False, False] and not depends_on_workers(spec, RunOptions())
