"""OpenTelemetry spans of a run, its steps and units, where the SDK is installed and asked for; nothing otherwise.

They are asked for by the variables that every OpenTelemetry program reads (OTEL_TRACES_EXPORTER, or the address of a
collector in OTEL_EXPORTER_OTLP_ENDPOINT), or by a program that set a tracer provider of its own before it called us.

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

from builders.jobs import Usage
from pipeline.progress.events import VERDICT, Silent, state_of

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

    from pipeline.outcome import Outcome
    from pipeline.values import BuildPlan

NAME = "enginery"
# A collector that does not answer may hold up the end of a run for so long.
FLUSH_S = 5.0
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


@contextmanager
def spans(environment: Mapping[str, str] = os.environ) -> Iterator["Spans | None"]:
    """What makes spans of a run, or None where nobody wants them; what is left of them is sent at the end."""
    found = _tracer(environment)
    if found is None:
        yield None
        return
    tracer, close = found
    made = Spans(tracer)
    try:
        yield made
    except BaseException as error:
        made.close(error)
        raise
    finally:
        made.close(None)
        close()


class Spans(Silent):
    """One span for the run and, under it, one for each step and unit that runs."""

    def __init__(self, tracer: "Tracer") -> None:
        self._tracer = tracer
        self._lock = threading.Lock()
        self._run: Span | None = None
        self._open: dict[str, Span] = {}
        self._units: dict[str, dict[str, str]] = {}

    def began(self, model: str, run: str) -> None:
        """Open the run's span."""
        about = {"enginery.model": model, "enginery.run": run}
        self._run = self._tracer.start_span(f"build {model}", attributes=about)

    def planned(self, plan: "BuildPlan") -> None:
        """Remember what the units are, for their attributes."""
        for unit in plan.units:
            request = unit.request
            about = {"target": request.target.name, "precision": request.precision, "backend": request.backend}
            self._units[unit.name] = {f"enginery.{name}": value for name, value in about.items()}

    def started(self, name: str, where: str = "here") -> None:
        """Open a span; of a job that is started again, the one that is open goes on."""
        from opentelemetry.trace import set_span_in_context

        with self._lock:
            if name not in self._open:
                context = set_span_in_context(self._run) if self._run else None
                about = {"enginery.unit": name, "enginery.where": where, **self._units.get(name, {})}
                self._open[name] = self._tracer.start_span(name, context, attributes=about)

    def phase(self, name: str, phase: str) -> None:
        """An event in its span."""
        self._event(name, "phase", {"enginery.phase": phase})

    def retrying(self, name: str, why: str) -> None:
        """An event in its span."""
        self._event(name, "retry", {"enginery.why": why})

    def ended(self, name: str, usage: Usage) -> None:
        """Note the memory; the span stays open until what it gave is in the registry."""
        with self._lock:
            span = self._open.get(name)
        if span:
            span.set_attribute("enginery.peak_mib", round(usage.peak_mib, 1))

    def finished(self, name: str, outcome: str) -> None:
        """Close its span, with the outcome."""
        if name.startswith(VERDICT):
            if self._run:
                self._run.add_event(
                    "verdict", {"enginery.unit": name.removeprefix(VERDICT), "enginery.verdict": outcome}
                )
            return
        with self._lock:
            span = self._open.pop(name, None)
        if span:
            state, reason = state_of(outcome)
            span.set_attribute("enginery.outcome", state)
            _end(span, reason if state == "failed" else None)

    def concluded(self, outcome: "Outcome") -> None:
        """Put the version on the run's span."""
        if self._run:
            self._run.set_attributes({"enginery.version": outcome.version or "", "enginery.cached": outcome.cached})

    def close(self, error: BaseException | None) -> None:
        """Close what is open."""
        with self._lock:
            left, self._open = list(self._open.values()), {}
        run, self._run = self._run, None
        for span in (*left, run):
            if span:
                _end(span, None if error is None else str(error) or type(error).__name__)

    def _event(self, name: str, event: str, about: dict[str, str]) -> None:
        with self._lock:
            span = self._open.get(name)
        if span:
            span.add_event(event, about)


def _end(span: "Span", failure: str | None) -> None:
    from opentelemetry.trace import Status, StatusCode

    if failure is not None:
        span.set_status(Status(StatusCode.ERROR, failure[:1000]))
    span.end()


def _tracer(environment: Mapping[str, str]) -> tuple["Tracer", Callable[[], None]] | None:
    """The tracer of a provider that is set, or of one that the environment asks for, and how to close that."""
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
    """A provider for this run alone: the program that uses us keeps its own."""
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
