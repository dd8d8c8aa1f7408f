import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError
from prefect.states import Failed

from builders.execution.local import QUEUED
from enginesmith.core.errors import EnginesmithError, SpecError, StepError, UnavailableError, UndecidedError
from enginesmith.core.hardware.machine import parse_targets
from enginesmith.core.types import BuildRequest
from pipeline.compile.run_context import Work
from pipeline.compile.steps import engines
from pipeline.orchestration.flows import compile_model, runner
from pipeline.orchestration.flows.api import api_in_reach
from pipeline.orchestration.flows.runner import FlowProgress, PrefectRunner, as_task, helps
from pipeline.progress import Progress
from pipeline.progress.display import Clocks
from pipeline.progress.events import Event, Waiting
from pipeline.values import Graph, GraphVariant, Unit
from tests.pipeline.projects import raising
from tests.waiting import until


def context() -> Any:
    return SimpleNamespace(progress=Progress())


def unit(target: str, action: str = "build") -> Unit:
    request = BuildRequest("0" * 64, "fp32", parse_targets(target)[0], "tensorrt-rtx", (), (), ())
    return Unit(request, Graph(GraphVariant("fp32"), "0" * 64, (), ()), action, "")


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (UnavailableError("the registry does not answer"), True),
        (UndecidedError("the answer was lost"), True),
        (SpecError(["wrong"]), False),
        (StepError("the compiler crashed", "crash"), False),
        (ValueError("a bug"), False),
    ],
)
def test_only_unreachable_services_are_retried(error: Exception, again: bool) -> None:
    task = as_task(pow, "a step", 2, 5)
    assert task.name == "pow" and task.task_run_name == "a step" and task.fn() == 32, "it has no parameters"
    assert task.retries == 3 and task.retry_jitter_factor == 0.5 and task.retry_condition_fn is helps
    assert task.retry_delay_seconds == [2.0, 4.0, 8.0]
    assert helps(task, None, Failed(data=error)) is again


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """Slots that were taken, and whether strictly."""
    items: list[tuple[str, bool]] = []

    @contextmanager
    def concurrency(name: str, *, strict: bool, **_: object) -> Iterator[None]:
        items.append((name, strict))
        if name == "enginesmith-gpu-sm_75":
            raise ConcurrencySlotAcquisitionError("must be created")
        yield

    monkeypatch.setattr(runner, "concurrency", concurrency)
    return items


def test_a_unit_for_a_gpu_is_built_in_a_slot_of_its_generation(taken):
    def build(item: Unit, _work: object) -> str:
        return item.name

    build.__name__ = engines.build.__name__
    placed_slot = PrefectRunner(gpu_slots=True)._with_slot
    for target in ("sm_89", "l4"):
        assert placed_slot(build, unit(target))(unit(target), Work(None, context())).startswith(target)
    assert taken == [("enginesmith-gpu-sm_89", True)] * 2
    for item in (unit("cpu"), unit("sm_89", "cached")):
        assert placed_slot(build, item) is build
    assert placed_slot(pow, unit("sm_89")) is pow, "no other step compiles"
    assert PrefectRunner()._with_slot(build, unit("sm_89")) is build, "a server without limits is asked for none"


def test_a_long_wait_for_a_slot_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*_: object) -> str:
        return "built"

    waits: list[Event] = []
    message = context()
    message.progress.emit = waits.append
    is_slow = False

    @contextmanager
    def concurrency(_name: str, **_: object) -> Iterator[None]:
        if is_slow:
            until(lambda: waits)
        yield

    monkeypatch.setattr(runner, "concurrency", concurrency)
    placed_slot = PrefectRunner(gpu_slots=True)._with_slot(build, unit("sm_89"))
    assert placed_slot(unit("sm_89"), Work(None, message)) == "built" and not waits, "it was free"
    is_slow = True
    monkeypatch.setattr(runner, "_AT_ONCE_S", 0.01)
    assert placed_slot(unit("sm_89"), Work(None, message)) == "built"
    assert waits == [Waiting(unit("sm_89").name, "a slot of enginesmith-gpu-sm_89 on the Prefect server")]


def test_the_log_of_a_flow_explains_waits() -> None:
    logged: list[str] = []
    log = SimpleNamespace(info=lambda text, *words: logged.append(text % words))
    progress = FlowProgress.__new__(FlowProgress)
    progress._logger, progress._clocks = log, Clocks()
    progress.emit(Waiting("check fp16", QUEUED))
    for _ in range(2):
        progress.emit(Waiting("lock", "compiling tiny is running on vm"))
    assert logged == ["lock: waiting: compiling tiny is running on vm"]


def test_a_missing_limit_names_the_remedy(taken: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*_: object) -> str:
        raise AssertionError("not without a slot")

    with pytest.raises(EnginesmithError, match=r"gpu-sm_75: .*`enginesmith prefect deploy` makes") as info:
        PrefectRunner(gpu_slots=True)._with_slot(build, unit("sm_75"))(unit("sm_75"), Work(None, context()))
    assert not isinstance(info.value, UnavailableError), "trying again would not help"
    for status in (None, 401, 404, 422, 429, 500):
        error, flag = ConcurrencySlotAcquisitionError("no slot"), status in (None, 429, 500)
        answer, request = httpx.Response(status or 0), httpx.Request("POST", "http://s")
        error.__cause__ = httpx.HTTPStatusError("", request=request, response=answer) if status else TimeoutError()
        monkeypatch.setattr(runner, "concurrency", raising(error))
        with pytest.raises(EnginesmithError, match="no slot; .* too busy" if flag else "no slot; .* refuses") as info:
            PrefectRunner(gpu_slots=True)._with_slot(build, unit("sm_80"))(unit("sm_80"), Work(None, context()))
        assert isinstance(info.value, UnavailableError) is flag, "422: somebody drains this generation"
    error.__cause__ = ValueError("an answer of another release")
    with pytest.raises(EnginesmithError, match=r"no slot; .* refuses") as info:
        PrefectRunner(gpu_slots=True)._with_slot(build, unit("sm_80"))(unit("sm_80"), Work(None, context()))
    assert not isinstance(info.value, UnavailableError)


def test_a_deployments_run_ends_as_unreachable_from_its_context(monkeypatch: pytest.MonkeyPatch) -> None:
    run, silence = SimpleNamespace(deployment_id="1"), httpx.ReadTimeout("")
    monkeypatch.setattr(compile_model.FlowRunContext, "get", lambda: SimpleNamespace(flow_run=run))
    monkeypatch.setattr(compile_model, "runtime", None)  # asks the API
    for error, message in ((silence, "Prefect's server does not answer (ReadTimeout)"), (UnavailableError("no"), "no")):
        monkeypatch.setattr(compile_model, "start_executors", raising(error))
        assert compile_model.compile_model.fn("tiny.yaml").message == message
    run.deployment_id = None
    with pytest.raises(UnavailableError, match="no"):
        compile_model.compile_model.fn("tiny.yaml")
    with pytest.raises(UnavailableError, match=r"does not answer \(ReadTimeout\)"), api_in_reach():
        raise silence


@pytest.mark.slow
def test_a_workers_flow_run_does_not_import_prefects_server() -> None:
    """Which takes longer than all the rest, for each run, and again for whoever cancels it."""
    flows = [path.stem for path in Path(runner.__file__).parent.glob("*.py") if path.stem != "__init__"]
    code = f"import sys\nfor name in {flows}:\n    __import__(f'pipeline.orchestration.flows.{{name}}')\n"
    result = subprocess.run(
        [sys.executable, "-c", f"{code}print('prefect.server.api.server' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout == "False\n"
