"""OpenTelemetry spans of a run, its steps and units, where the SDK is installed and traces are asked for.

They are asked for by the variables that every OpenTelemetry program reads (OTEL_TRACES_EXPORTER, or the address of a
collector in OTEL_EXPORTER_OTLP_ENDPOINT), or by a program that set a tracer provider of its own before the run.

https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/
"""

import importlib.metadata
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pipeline.progress import events

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

    from enginesmith.core.types import BuildRequest

NAME = "enginesmith"
# A collector that does not answer holds up the end of a run for so many seconds at most.
FLUSH_S = 5.0
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


@contextmanager
def spans(environment: Mapping[str, str] = os.environ) -> Iterator["Spans | None"]:
    """The listener that makes a run's spans, or None where traces are not asked for; all are sent at the end."""
    tracer_pair = _tracer(environment)
    if tracer_pair is None:
        yield None
        return
    tracer, close = tracer_pair
    run_spans = Spans(tracer)
    try:
        yield run_spans
    except BaseException as error:
        run_spans.close(error)
        raise
    finally:
        run_spans.close(None)
        close()


class Spans(events.Progress):
    """One span for the run and, under it, one for each step and unit that runs."""

    def __init__(self, tracer: "Tracer") -> None:
        self._tracer = tracer
        self._lock = threading.Lock()
        self._run: Span | None = None
        self._open: dict[str, Span] = {}
        self._units: dict[str, dict[str, str]] = {}

    def emit(self, event: events.Event) -> None:
        """Open, close and annotate spans."""
        match event:
            case events.RunBegan(model, run):
                about = {"enginesmith.model": model, "enginesmith.run": run}
                self._run = self._tracer.start_span(f"build {model}", attributes=about)
            case events.Planned(plan):
                self._units |= {unit.name: _attributes(unit.request) for unit in plan.units}
            case events.VerdictReached(name):
                if self._run:
                    self._run.add_event("verdict", {"enginesmith.unit": name, "enginesmith.verdict": event.outcome})
            case events.RunConcluded(outcome):
                if self._run:
                    self._run.set_attribute("enginesmith.version", outcome.version or "")
                    self._run.set_attribute("enginesmith.cached", outcome.cached)
            case _:
                if isinstance(event, events.StepEvent):
                    self._follow(event)

    def _follow(self, event: events.StepEvent) -> None:
        """Annotate the span of a step or unit, and close it when its result is in the registry."""
        if isinstance(event, events.Started):
            self._open_span(event)
            return
        with self._lock:
            span = (
                self._open.pop(event.name, None) if isinstance(event, events.Finished) else self._open.get(event.name)
            )
        if span is None:
            return
        match event:
            case events.PhaseEntered(_, phase):
                span.add_event("phase", {"enginesmith.phase": phase})
            case events.Retrying(_, why):
                span.add_event("retry", {"enginesmith.why": why})
            case events.ProcessEnded(_, usage):
                span.set_attribute("enginesmith.peak_mib", round(usage.peak_mib, 1))
            case events.Finished(_, state, reason):
                span.set_attribute("enginesmith.outcome", state)
                _end(span, reason if state == "failed" else None)

    def _open_span(self, event: events.Started) -> None:
        """Open a span; a job that is started again keeps the one that is open."""
        from opentelemetry.trace import set_span_in_context

        name = event.name
        with self._lock:
            if name not in self._open:
                context = set_span_in_context(self._run) if self._run else None
                about = {"enginesmith.unit": name, "enginesmith.where": event.where, **self._units.get(name, {})}
                self._open[name] = self._tracer.start_span(name, context, attributes=about)

    def close(self, error: BaseException | None) -> None:
        """Close all open spans. error: what ended the run, None for nothing."""
        with self._lock:
            open_spans, self._open = list(self._open.values()), {}
        run, self._run = self._run, None
        for span in (*open_spans, run):
            if span:
                _end(span, None if error is None else str(error) or type(error).__name__)


def _attributes(request: "BuildRequest") -> dict[str, str]:
    about = {"target": request.target.name, "precision": request.precision, "backend": request.backend}
    return {f"enginesmith.{name}": value for name, value in about.items()}


def _end(span: "Span", failure: str | None) -> None:
    from opentelemetry.trace import Status, StatusCode

    if failure is not None:
        span.set_status(Status(StatusCode.ERROR, failure[:1000]))
    span.end()


def _tracer(environment: Mapping[str, str]) -> tuple["Tracer", Callable[[], None]] | None:
    """A tracer of the provider that is set, else of one that the environment asks for, and what closes the provider."""
    if "opentelemetry.sdk.trace" in sys.modules:
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider

        provider = trace.get_tracer_provider()
        if isinstance(provider, TracerProvider):
            return provider.get_tracer(NAME), lambda: None
    name = environment.get("OTEL_TRACES_EXPORTER") or ("otlp" if any(map(environment.get, _ENDPOINTS)) else "none")
    if name == "none" or environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    return _own(name)


def _own(name: str) -> tuple["Tracer", Callable[[], None]] | None:
    """As `_tracer`, of a new provider with the exporter `name`, for this run alone."""
    exporters = {entry.name: entry for entry in importlib.metadata.entry_points(group="opentelemetry_traces_exporter")}
    if importlib.util.find_spec("opentelemetry.sdk") is None or name not in exporters:
        package = "opentelemetry-sdk" if name == "console" else "opentelemetry-exporter-otlp"
        print(f"warning: no traces: exporter {name!r} is not installed; pip install {package}", file=sys.stderr)
        return None
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    exporter: Any = exporters[name].load()
    resource = Resource.create({"service.name": NAME}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter()))

    def close() -> None:
        # A daemon: a collector that hangs must not keep the run from ending.
        thread = threading.Thread(target=provider.shutdown, daemon=True)
        thread.start()
        thread.join(FLUSH_S)

    return provider.get_tracer(NAME), close
