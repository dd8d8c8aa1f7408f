"""What a unit's build asks of a node, and how it is built when memory ran out."""

from dataclasses import replace

import pytest

from builders import backends
from builders.errors import UnavailableError
from builders.jobs import Needs, Reduced, WorkerContext
from builders.targets import parse_targets
from builders.types import BuildRequest
from pipeline.history import Expectation
from pipeline.jobs.engines import BuildEngine
from pipeline.registry.store import open_store
from pipeline.spec.file import load_spec
from pipeline.steps.engines import (
    LEAN_WORKSPACE_MIB,
    LEAST_MEMORY_MIB,
    USUAL_MEMORY_MIB,
    memory_request,
    needs,
    reduce_workspace,
)
from tests.builders import graphs


def request(target: str, backend: str, model: str = "0" * 64, **options: object) -> BuildRequest:
    made = backends.configure(backend, options)
    fields = {"options": backends.options_of(made), "toolchain": backends.toolchain_of(made)}
    shapes = (graphs.IMAGE,), (graphs.LOGITS,), (graphs.BATCHES,)
    return BuildRequest(model, "fp32", parse_targets(target)[0], backend, *shapes, **fields)


@pytest.mark.parametrize(
    ("target", "backend", "wanted"),
    [
        ("cpu", "onnxruntime", Needs(memory_mib=7)),
        ("sm_89", "tensorrt-rtx", Needs({"enginery/sm": "sm_89"}, memory_mib=7)),
        ("sm_89", "tensorrt", Needs({"enginery/sm": "sm_89"}, required=True, gpus=1, memory_mib=7)),
        ("l4", "tensorrt", Needs({"enginery/sm": "sm_89", "enginery/product": "l4"}, True, 1, 7)),
    ],
)
def test_a_compiler_that_tunes_needs_its_gpu_and_others_prefer_it(target, backend, wanted):
    assert needs(request(target, backend), 7) == wanted


def test_memory_set_aside_is_the_limit_only_where_the_spec_sets_one(project):
    assert memory_request(load_spec(project.spec)) == USUAL_MEMORY_MIB
    project.change_spec(build={"memory_mib": 4096})
    assert memory_request(load_spec(project.spec)) == 4096
    took = Expectation(seconds=3.0, peak_mib=1000.4, builds=2, basis="2 builds of this unit")
    assert memory_request(load_spec(project.spec), took) == 1251
    assert memory_request(load_spec(project.spec), replace(took, peak_mib=9000.0)) == 4096
    assert memory_request(load_spec(project.spec), replace(took, peak_mib=0.0)) == LEAST_MEMORY_MIB
    assert memory_request(load_spec(project.spec), replace(took, seconds=None, peak_mib=60.0)) == 4096


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
    reduced = reduce_workspace(BuildEngine(unit))
    assert reduced == (mib and Reduced(BuildEngine(unit, mib), f"with workspace_mib {mib}"))


def test_an_engine_built_leaner_keeps_its_key_and_says_so(tmp_path):
    pytest.importorskip("tensorrt_rtx")
    store = open_store(str(tmp_path / "registry"), create=True)
    wanted = request("sm_89", "tensorrt-rtx", store.put_file(graphs.mlp(tmp_path / "model.onnx")))
    built = BuildEngine(wanted, workspace_mib=64).run(WorkerContext(tmp_path, store.uri))
    note = "built with workspace_mib 64 instead of 0: a first build had run out of memory"
    assert note in built.notes and built.request == wanted


def test_the_wait_for_nodes_is_a_duration_and_reaches_the_executor(project, monkeypatch):
    from builders import dispatch

    made = []

    class Recorded(dispatch.RayExecutor):
        def __init__(self, *arguments: object) -> None:
            made.append(arguments)
            super().__init__(None, 1)

        def run(self, *_: object) -> None:
            raise UnavailableError("no cluster")

    monkeypatch.setattr(dispatch, "RayExecutor", Recorded)
    project.change_spec(targets=["cpu"], precisions=["fp32"])
    words = ("--executor", "ray", "--ray-address", "head:6379", "--runner", "inprocess", "--quiet")
    assert project.build(*words, "--wait-for-nodes", "15m").code == 3
    assert made == [("head:6379", None, 900.0)]
    refused = project.build(*words, "--wait-for-nodes", "a while")
    assert refused.code == 2 and "'a while' is no duration" in refused.err
