"""The steps of a small model, run in this process, so that one can see what each calls and what it is given."""

import gc
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from builders.execution.jobs import Job, Watch, WorkerContext, decode_request, encode_request, ignore_event, result_type
from builders.execution.process import spawn
from enginesmith.core.codec import decode, encode
from enginesmith.registry.store.base import open_store
from pipeline.compile.closure.definitions import PACKAGES, is_carrier
from pipeline.compile.composition import Run, compile_model
from pipeline.compile.run_context import RunContext
from pipeline.spec.model import load_spec
from tests.pipeline.projects import Project, write_project

# Every check fails that can, so that what drifted is attributed; nothing is timed, since on a busy machine int8 may not
# pay anywhere, and a graph that is left in float cannot drift.
STRICT = {
    "quantization": {"smoothing": "auto", "floor": {"sqnr_db": 20}},
    "validation": {
        "calls": None,
        # An int8 graph that fails is not built: the engine that fails is another precision's.
        "limits": {"fp16": {"engine": {"sqnr_db": 1000}}, "int8": {"quantization": {"sqnr_db": 1000}}},
    },
}
SPEC = {
    "targets": ["cpu"],
    "precisions": ["fp32", "fp16", "int8"],
    "calibration": {"data": "calibration.npz", "parts": 2},
    "quantization": {"smoothing": "auto", "floor": {"sqnr_db": 20}, "latency": "measure"},
    "validation": {
        "calls": {"seconds": 0.2},
        "contract": {"bitwise": {"runs": 2}, "structured": {"logits": {"range": [-1e6, 1e6]}}},
    },
}


@dataclass
class Traced:
    """Runs each job's request here. called: definitions that ran, by class, module.  done: jobs and results as JSON."""

    called: dict[type, set[tuple[str, str]]] = field(default_factory=lambda: defaultdict(set))
    done: list[tuple[Job, Any]] = field(default_factory=list)

    def run(self, job: Job, watch: Watch = ignore_event) -> Any:
        with traced(self.called[type(job.request)]):
            value = run(job)
        self.done.append((job, value))
        return decode(value, result_type(job.request))

    def cancel(self) -> None:
        """See `Executor`."""


def run(job: Job) -> Any:
    """What a job's request gives, as JSON; the request goes through JSON, too."""
    request = decode_request(json.loads(json.dumps(encode_request(job.request))))
    with tempfile.TemporaryDirectory() as workdir:
        return json.loads(json.dumps(encode(request.run(WorkerContext(Path(workdir), job.store)))))


@contextmanager
def traced(called: set[tuple[str, str]]) -> Iterator[None]:
    """Note module and outermost name of each function of ours that this thread calls, but for carriers and imports."""

    def note(frame: FrameType, event: str, _: Any) -> None:
        name, code = frame.f_globals.get("__name__", ""), frame.f_code
        is_written = code.co_filename.endswith(".py")  # and not made by `dataclass`
        if event == "call" and is_written and name.partition(".")[0] in PACKAGES and not is_behind(frame):
            called.add((name, code.co_qualname.partition(".")[0]))

    gc.disable()  # a generator that another test left half-used is resumed, so called, when it is collected
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
        gc.enable()


def is_behind(frame: FrameType | None) -> bool:
    """Whether a carrier or an import statement is among the callers."""
    while frame is not None and frame.f_code is not run.__code__:
        if is_carrier(frame.f_globals.get("__name__", "")) or frame.f_code.co_name == "<module>":
            return True
        frame = frame.f_back
    return False


@pytest.fixture(scope="session")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Traced:
    """All steps of two runs, one of which fails."""
    folder, executor = tmp_path_factory.mktemp("ran"), Traced()
    for name, parts in (("fine", SPEC), ("strict", {**SPEC, **STRICT})):
        write_project(folder / name)
        project = Project(folder / name)
        project.change_spec(**parts)
        store = open_store(folder / "registry", create=True)
        with pytest.MonkeyPatch.context() as patched_context:  # the tests' own server is in no closure
            patched_context.setattr("pipeline.sources.export.fork_here", lambda: nullcontext(spawn))
            compile_model(Run(load_spec(project.spec), RunContext(store, executor, executor)))
    return executor
