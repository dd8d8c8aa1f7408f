"""Spans of a run, where the SDK is installed and asked for."""

import sys
from types import SimpleNamespace

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from builders.execution.jobs import Usage
from pipeline.orchestration import tracing
from pipeline.orchestration.tracing import Spans, spans
from pipeline.progress.events import (
    Finished,
    PhaseEntered,
    Planned,
    ProcessEnded,
    Retrying,
    RunBegan,
    Started,
    VerdictReached,
)
from tests.pipeline.orchestration.runs.runs import UNIT, plan


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def made(exporter: InMemorySpanExporter) -> Spans:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Spans(provider.get_tracer("enginesmith"))


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


def test_a_unit_is_a_span_under_its_run(made: Spans, exporter: InMemorySpanExporter) -> None:
    made.emit(RunBegan("digits", "run-1"))
    made.emit(Finished("export", "cached"))
    made.emit(Planned(plan()))
    made.emit(Started(UNIT, "node-7"))
    made.emit(PhaseEntered(UNIT, "compiling"))
    made.emit(Retrying(UNIT, "killed"))
    made.emit(Started(UNIT, "node-8"))
    made.emit(ProcessEnded(UNIT, Usage(1.0, 100.0)))
    made.emit(Finished(UNIT, "built", words="built in 1.0 s"))
    made.emit(VerdictReached(UNIT, "unproven", "no GPU"))
    made.close(None)
    found = by_name(exporter)
    assert set(found) == {"build digits", UNIT}, "what was cached took no time"
    run, unit = found["build digits"], found[UNIT]
    assert unit.parent and run.context and unit.parent.span_id == run.context.span_id
    assert [event.name for event in unit.events] == ["phase", "retry"] and run.events[0].name == "verdict"
    assert unit.attributes and unit.attributes["enginesmith.backend"] == "tensorrt-rtx"
    assert unit.attributes["enginesmith.outcome"] == "built" and unit.attributes["enginesmith.peak_mib"] == 100.0
    assert run.attributes and run.attributes["enginesmith.run"] == "run-1"


def test_failures_and_a_run_that_is_stopped_are_errors(made: Spans, exporter: InMemorySpanExporter) -> None:
    made.emit(RunBegan("digits", "run-1"))
    made.emit(Started(UNIT))
    made.emit(Finished(UNIT, "failed", "out of memory"))
    made.emit(Started("export"))
    made.close(KeyboardInterrupt())
    found = by_name(exporter)
    assert found[UNIT].status.status_code is StatusCode.ERROR and found[UNIT].status.description == "out of memory"
    assert found["export"].status.description == "KeyboardInterrupt" == found["build digits"].status.description


def test_nobody_asked_for_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    for environment in (
        {},
        {"OTEL_TRACES_EXPORTER": "none"},
        {"OTEL_TRACES_EXPORTER": "x", "OTEL_SDK_DISABLED": "true"},
    ):
        with spans(environment) as found:
            assert found is None


def test_an_exporter_that_is_not_installed_is_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    with spans({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}) as found:
        assert found is None
    assert "pip install opentelemetry-exporter-otlp" in capsys.readouterr().err


def test_without_the_sdk_there_is_nothing_but_a_warning(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "opentelemetry.sdk.trace")
    monkeypatch.setattr(tracing.importlib.util, "find_spec", lambda _: None)
    with spans({"OTEL_TRACES_EXPORTER": "console"}) as found:
        assert found is None
    assert "pip install opentelemetry-sdk" in capsys.readouterr().err


def test_a_build_makes_spans_for_a_program_that_traces(built, exporter, monkeypatch):
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr("opentelemetry.trace.get_tracer_provider", lambda: provider)
    built.change_spec(targets=["sm_89"], precisions=["fp32"], backends={"tensorrt-rtx": {"workspace_mib": 96}})
    assert built.build("--quiet").code == 0
    found = by_name(exporter)
    unit, run = found["sm_89 fp32 tensorrt-rtx"], found["build tiny"]
    assert unit.attributes and unit.attributes["enginesmith.target"] == "sm_89" and unit.end_time and unit.start_time
    assert unit.end_time > unit.start_time and run.attributes and run.attributes["enginesmith.version"] == "2"


def test_a_provider_of_our_own_sends_what_is_left_at_the_end(exporter, monkeypatch):
    entry = SimpleNamespace(name="memory", load=lambda: lambda: exporter)
    monkeypatch.setattr(tracing.importlib.metadata, "entry_points", lambda group: [entry])
    with spans({"OTEL_TRACES_EXPORTER": "memory"}) as found:
        assert found is not None
        found.emit(RunBegan("digits", "run-1"))
    (span,) = exporter.get_finished_spans()
    assert span.name == "build digits" and span.resource.attributes["service.name"] == "enginesmith"
