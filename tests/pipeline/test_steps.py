"""Single steps on the driver's side, with executors that do what the test says."""

from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from builders.errors import EngineryError, IntegrityError, ModelError, StepError, UnavailableError
from builders.types import BuildRequest, Job, Target, TensorSpec, nothing
from pipeline import steps
from pipeline.registry.store import open_store
from pipeline.spec_file import load_spec
from pipeline.values import Built, Exported, Flavour, Graph, OnnxModel, Proof, Unit
from pipeline.workshop import Workshop
from tests.pipeline.projects import Project

MODEL, GOLDEN, ENGINE = "a" * 64, "b" * 64, "c" * 64
TENSOR = (TensorSpec("x", "float32", ("batch", 8)),)


class Raising:
    """An executor in which every job ends in the same error."""

    def __init__(self, error: EngineryError) -> None:
        self.error = error

    def run(self, job: Job, started: Callable[[], None] = nothing) -> NoReturn:
        raise self.error

    def cancel(self) -> None: ...


def workshop(folder: Path, error: EngineryError) -> Workshop:
    return Workshop(open_store(folder / "registry", create=True), Raising(error), Raising(error))


def built() -> Built:
    request = BuildRequest(MODEL, "fp32", Target("cpu"), "onnxruntime", TENSOR, TENSOR, ())
    return Built(Unit(request, Graph(Flavour("fp32"), MODEL), "build", ""), ENGINE, 1, ".onnx")


EXPORTED = Exported(OnnxModel(MODEL, TENSOR, TENSOR, 20, carries_qdq=False), GOLDEN, Proof())


@pytest.mark.parametrize("error", [ModelError("it cannot be read"), StepError("it died", "crash")])
def test_an_engine_that_cannot_be_run_has_failed_and_stops_nobody_else(project: Project, error: EngineryError) -> None:
    judged = steps.validate(built(), load_spec(project.spec), EXPORTED, workshop(project.folder.parent, error))
    assert judged.verdict == "failed"
    assert str(error) in judged.reason


@pytest.mark.parametrize(
    "error", [UnavailableError("disk full"), IntegrityError("bad blob"), StepError("stopped", "cancelled")]
)
def test_what_says_nothing_about_the_engine_ends_the_run(project: Project, error: EngineryError) -> None:
    with pytest.raises(type(error), match=str(error)):
        steps.validate(built(), load_spec(project.spec), EXPORTED, workshop(project.folder.parent, error))
