"""Of two forms of int8 that are both right, the one whose engine is faster on this machine is built."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from builders.backends import discovery
from builders.backends.onnxruntime import OnnxRuntime
from builders.execution.jobs import Job, Watch, ignore_event
from enginery.core.errors import EngineryError
from enginery.core.hardware.cpu_kinds import KINDS, this_kind
from enginery.core.reports.proof import Check
from enginery.core.types import Target
from enginery.registry.store.base import open_store
from pipeline.compile.run_context import RunContext
from pipeline.compile.steps.alternatives import Alternative, AlternativeTimes, TimeAlternative, choose_alternatives
from pipeline.spec.model import load_spec
from pipeline.values import Exported, Graph, GraphVariant, OnnxModel, Proof
from tests.pipeline.projects import Project

USUAL = GraphVariant("int8", OnnxRuntime().scheme())
NARROW = GraphVariant("int8", replace(OnnxRuntime().scheme(), weight_levels=64))
ITEM = Alternative(NARROW, USUAL, OnnxRuntime(), Target("cpu"))
MISSED = Proof((Check("quantization", "sqnr_db", "y", "golden", 1.0, 8.0, False),))


class Answering:
    """An executor that answers with times, or raises what it was given instead."""

    def __init__(self, answer: AlternativeTimes | Exception) -> None:
        self.answer, self.jobs = answer, list[Job[AlternativeTimes]]()

    def run(self, job: Job[AlternativeTimes], watch: Watch = ignore_event) -> AlternativeTimes:
        self.jobs.append(job)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def cancel(self) -> None: ...


def chosen(project: Project, answer: AlternativeTimes | Exception, *graphs: Graph) -> tuple[Answering, Sequence[Graph]]:
    executor = Answering(answer)
    context = RunContext(open_store(project.registry, create=True), executor, executor)
    exported = Exported(OnnxModel("a" * 64, (), (), 20, False), "f" * 64, Proof())
    return executor, choose_alternatives(graphs, [ITEM], load_spec(project.spec), exported, context)


def both(**other: object) -> tuple[Graph, Graph]:
    return Graph(USUAL, "b" * 64, (), ()), replace(Graph(NARROW, "c" * 64, (), ()), **other)  # type: ignore[arg-type]


def test_what_is_surely_faster_takes_the_place_of_the_other_and_says_by_how_much(project: Project) -> None:
    executor, found = chosen(project, AlternativeTimes(2.0, 3.0, True), *both())
    request = executor.jobs[0].request
    assert isinstance(request, TimeAlternative) and (request.request.model, request.usual) == ("c" * 64, "b" * 64)
    assert executor.jobs[0].needs.alone
    assert [graph.in_place_of for graph in found] == [None, USUAL] and found[1].variant == NARROW
    assert f"which is faster: side by side on {this_kind().name}" in found[1].notes[0]
    assert f"{NARROW.name} 2 ms" in found[1].notes[0] and f"{USUAL.name} 3 ms" in found[1].notes[0]


def test_what_is_no_faster_is_left_and_the_other_says_so(project: Project) -> None:
    _, found = chosen(project, AlternativeTimes(3.0, 3.0, False), *both())
    assert [graph.variant for graph in found] == [USUAL] and "is no faster" in found[0].notes[0]


@pytest.mark.parametrize("other", [{"idle": "0 nodes"}, {"proof": MISSED}, {"model": "b" * 64}])
def test_only_what_is_right_and_another_graph_is_timed(project: Project, other: dict[str, object]) -> None:
    executor, found = chosen(project, AlternativeTimes(2.0, 3.0, True), *both(**other))
    assert not executor.jobs and found == (both()[0],)


def test_one_that_keeps_limits_that_the_other_missed_is_taken_untimed(project: Project) -> None:
    usual, narrow = both()
    executor, found = chosen(project, AlternativeTimes(9.0, 3.0, False), replace(usual, proof=MISSED), narrow)
    assert not executor.jobs and found[1].in_place_of == USUAL and "missed its limits" in found[1].notes[0]


def test_what_cannot_be_timed_is_not_taken(project: Project) -> None:
    _, found = chosen(project, EngineryError("no memory"), *both())
    assert found == (both()[0],)


def test_the_option_says_whether_it_is_measured_and_only_where_this_machine_saturates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = {}
    for kind in KINDS:
        for name in ("builders.backends.onnxruntime.cpu", "enginery.core.hardware.cpu_kinds"):
            monkeypatch.setattr(f"{name}.this_kind", lambda kind=kind: kind)
        tools = [discovery.configure("onnxruntime", {"reduced_range": how}) for how in ("measured", "always", "never")]
        targets = [Target("cpu"), Target(kind.name), Target(next(item.name for item in KINDS if item != kind))]
        found[kind] = [[tool.other_scheme(target) for target in targets] for tool in tools]  # type: ignore[attr-defined]
    narrow = NARROW.scheme
    for kind, schemes in found.items():
        assert schemes == [[narrow, narrow, None] if kind.saturates else [None] * 3, [None] * 3, [None] * 3], kind


def largest(path: Path) -> int:
    stored = [item for item in onnx.load(path).graph.initializer if item.data_type == TensorProto.INT8 and item.dims]
    return max(int(np.abs(numpy_helper.to_array(item).astype(int)).max()) for item in stored)


@pytest.mark.skipif(not this_kind().saturates, reason="int8 kernels do not saturate here; `test_cpu_kinds` emulates")
def test_an_int8_engine_for_this_machine_is_what_was_measured_and_one_for_another_kind_is_whole(
    project: Project, tmp_path: Path
) -> None:
    """Planned from records, too: the second plan runs nothing."""
    project.change_spec(targets=["cpu", "arm64"], precisions=["int8"])
    built = project.build()
    assert built.code == 0, built.err
    assert "time int8 (uint8 activations, 7-bit weights, fp32 elsewhere): " in built.err
    taken = {}
    for target in ("cpu", "arm64"):
        pulled = project.run("pull", "tiny@1", "--target", target, "--dest", tmp_path / target, "--json").json
        taken[target] = largest(Path(pulled["path"]))
    page = (project.registry / "models" / "tiny" / "versions" / "1" / "report.html").read_text()
    assert f"side by side on {this_kind().name}" in page
    assert taken == {"cpu": 64 if "which is faster: side by side" in page else 127, "arm64": 127}
    assert {unit["action"] for unit in project.run("plan", project.spec, "--json").json["units"]} == {"cached"}
