from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from builders.backends import discovery
from builders.execution.jobs import Needs, ReducedRequest, WorkerContext
from builders.execution.local import LocalExecutor
from enginesmith.core.errors import UnavailableError
from enginesmith.core.hardware.machine import parse_targets
from enginesmith.core.types import BuildRequest
from enginesmith.registry.builds.build_history import Expectation
from enginesmith.registry.manifest import request_of
from enginesmith.registry.store.base import open_store
from enginesmith.registry.versions.lookup import load
from pipeline.compile.composition import Run, compile_model
from pipeline.compile.preflight import PRELOADED
from pipeline.compile.run_context import RunContext
from pipeline.compile.steps.engines import (
    LEAN_WORKSPACE_MIB,
    LEAST_MEMORY_MIB,
    USUAL_MEMORY_MIB,
    BuildEngine,
    memory_request,
    needs,
    recall_engine,
    recall_reduced,
    reduce_workspace,
)
from pipeline.spec.model import load_spec
from tests.builders import graphs


def request(target: str, backend: str, model: str = "0" * 64, **options: object) -> BuildRequest:
    compiler = discovery.configure(backend, options)
    fields = {"options": discovery.options_of(compiler), "toolchain": discovery.toolchain_of(compiler)}
    shapes = (graphs.IMAGE,), (graphs.LOGITS,), (graphs.BATCHES,)
    return BuildRequest(model, "fp32", parse_targets(target)[0], backend, *shapes, **fields)


@pytest.mark.parametrize(
    ("target", "backend", "expected"),
    [
        ("cpu", "onnxruntime", Needs(memory_mib=7)),
        ("sm_89", "tensorrt-rtx", Needs({"enginesmith/sm": "sm_89"}, memory_mib=7)),
        ("sm_89", "tensorrt", Needs({"enginesmith/sm": "sm_89"}, required=True, gpus=1, memory_mib=7)),
        ("l4", "tensorrt", Needs({"enginesmith/sm": "sm_89", "enginesmith/product": "l4"}, True, 1, 7)),
    ],
)
def test_a_tuning_compiler_requires_its_gpu_and_others_prefer_it(target, backend, expected):
    assert needs(request(target, backend), 7) == expected


def test_a_reservation_is_a_limit_only_if_the_spec_sets_one(project):
    assert memory_request(load_spec(project.spec)) == USUAL_MEMORY_MIB
    assert memory_request(load_spec(project.spec), shard_bytes=3 << 30) == USUAL_MEMORY_MIB + 3072
    assert memory_request(load_spec(project.spec), shard_bytes=9 << 30) == 8192
    project.change_spec(build={"memory_mib": 4096})
    assert memory_request(load_spec(project.spec)) == 4096
    actual_expectation = Expectation(seconds=3.0, peak_mib=1000.4, builds=2, basis="2 builds of this unit")
    assert memory_request(load_spec(project.spec), actual_expectation) == 1251
    assert memory_request(load_spec(project.spec), replace(actual_expectation, peak_mib=9000.0)) == 4096
    assert memory_request(load_spec(project.spec), replace(actual_expectation, peak_mib=0.0)) == LEAST_MEMORY_MIB
    assert memory_request(load_spec(project.spec), replace(actual_expectation, seconds=None, peak_mib=60.0)) == 4096


@pytest.mark.parametrize(
    ("unit", "mib"),
    [
        (request("cpu", "onnxruntime"), None),
        (request("sm_89", "tensorrt-rtx"), LEAN_WORKSPACE_MIB),
        (request("sm_89", "tensorrt-rtx", workspace_mib=600), 300),
        (request("sm_89", "tensorrt-rtx", workspace_mib=1), 1),
    ],
)
def test_a_reduced_workspace_is_half_the_scratch_memory_and_never_no_limit(unit, mib):
    reduced_build = reduce_workspace(BuildEngine(unit))
    assert reduced_build == (
        mib and ReducedRequest(BuildEngine(unit.with_option("workspace_mib", mib), unit), f"with workspace_mib {mib}")
    )


def test_an_engine_with_a_reduced_workspace_has_its_own_key(store, tmp_path):
    pytest.importorskip("tensorrt_rtx")
    build_request = request("sm_89", "tensorrt-rtx", store.put_file(graphs.mlp(tmp_path / "model.onnx")))
    expected = request("sm_89", "tensorrt-rtx", build_request.model, workspace_mib=64)
    result = BuildEngine(expected, instead_of=build_request).run(WorkerContext(tmp_path, store.uri))
    assert "built with workspace_mib 64 instead of 0: a first build had run out of memory" in result.notes
    assert result.build == expected.key != build_request.key
    context = RunContext(store, LocalExecutor(1), LocalExecutor(1))
    assert recall_engine(build_request, context) is None and recall_engine(expected, context) == result
    assert recall_reduced(build_request, context) == expected and recall_reduced(expected, context) is None


class OutOfMemoryOnce:
    """Runs jobs in this process, as a second try is."""

    def run(self, job, watch=None):
        with TemporaryDirectory() as folder:
            return job.reduced.request.run(WorkerContext(Path(folder), job.store))


def test_a_unit_that_ran_out_of_memory_is_published_with_its_actual_options(project):
    pytest.importorskip("tensorrt_rtx")
    project.change_spec(targets=["sm_89"], precisions=["fp32"], backends={"tensorrt-rtx": {}})
    spec = load_spec(project.spec)
    store = open_store(project.registry, create=True)
    compile_model(Run(spec, RunContext(store, LocalExecutor(1), OutOfMemoryOnce())))
    (entry,) = load(store, spec.model, "1").engines
    assert entry.options["workspace_mib"] == LEAN_WORKSPACE_MIB
    assert request_of(entry).key == entry.build_key
    (planned_unit,) = project.run("plan", project.spec, "--json").json["units"]
    assert (planned_unit["action"], planned_unit["build_key"]) == ("cached", entry.build_key)
    assert planned_unit["reason"].endswith("with workspace_mib 1024, because a build with 0 ran out of memory")
    assert project.build().json["cached"] is True


def test_the_wait_for_nodes_is_a_duration_and_reaches_the_executor(project, monkeypatch):
    from builders.execution import ray

    waits = []

    class Recorded(ray.RayExecutor):
        def __init__(self, *arguments: object) -> None:
            waits.append(arguments)
            super().__init__(None, 1)

        def run(self, *_: object) -> None:
            raise UnavailableError("no cluster")

    monkeypatch.setattr(ray, "RayExecutor", Recorded)
    project.change_spec(targets=["cpu"], precisions=["fp32"])
    words = ("--executor", "ray", "--ray-address", "head:6379", "--runner", "inprocess", "--quiet")
    assert project.build(*words, "--wait-for-nodes", "15m").code == 3
    assert waits == [("head:6379", None, 900.0, PRELOADED)]
    refused_build = project.build(*words, "--wait-for-nodes", "a while")
    assert refused_build.code == 2 and "'a while' is not a duration" in refused_build.err
