"""Every metric: its name, kind, labels and meaning. Tests compare docs/guides/observability.md and the dashboard.

Labels have few values: the targets and backends of a fleet, our states, and at most `exporter.MOST_MODELS` models. No
digest, version, run or file is a label.
"""

from dataclasses import dataclass
from typing import Literal

Where = Literal["run", "registry"]
_UNIT = ("target", "backend")


@dataclass(frozen=True)
class RegistryMetric:
    """name: without the suffixes that Prometheus adds to counters ('_total') and histograms.

    where: 'run' (a process with `--metrics-port`), 'registry' (`enginesmith registry metrics`), or both.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    where: tuple[Where, ...] = ("run", "registry")

    @property
    def series(self) -> tuple[str, ...]:
        """The names under which Prometheus stores it."""
        suffixes = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
        return tuple(f"{self.name}{suffix}" for suffix in suffixes[self.kind])


BUILDS = RegistryMetric(
    "enginesmith_builds", "counter", "Units that were built or failed, by how they ended.", ("state", *_UNIT)
)
BUILD_SECONDS = RegistryMetric(
    "enginesmith_build_duration_seconds", "histogram", "Wall clock of a unit's build process.", ("state", *_UNIT)
)
CACHE = RegistryMetric(
    "enginesmith_cache_lookups", "counter", "Units that were found built (hit) or had to be built.", ("result",)
)
QUEUE = RegistryMetric("enginesmith_queue_depth", "gauge", "Units of runs that go on which have not started.")
RUNNING = RegistryMetric("enginesmith_units_running", "gauge", "Units that are being built now.")
RETRIES = RegistryMetric("enginesmith_build_retries", "counter", "Builds that were started once more.", _UNIT, ("run",))
PEAK = RegistryMetric("enginesmith_build_peak_bytes", "gauge", "Most memory that the last build held.", _UNIT, ("run",))
ERRORS = RegistryMetric(
    "enginesmith_registry_errors", "counter", "Requests to the registry that failed for good, in this process."
)
REPEATED = RegistryMetric(
    "enginesmith_registry_retries", "counter", "Requests to the registry that were sent again, in this process."
)
UNPROVEN = RegistryMetric(
    "enginesmith_unproven_engines", "gauge", "Engines of the newest versions that never ran on their hardware.", _UNIT
)
ENGINES = RegistryMetric(
    "enginesmith_engines",
    "gauge",
    "Units of the newest versions, by their status of today.",
    ("status", *_UNIT),
    ("registry",),
)
DRIFT = RegistryMetric(
    "enginesmith_drift_sqnr_db",
    "gauge",
    "Lowest SQNR in dB over outputs and cases, at one stage, in the newest proof of the newest version.",
    ("model", "joint", "target", "precision", "backend"),
    ("registry",),
)
RUNS = RegistryMetric(
    "enginesmith_runs", "gauge", "Runs that the registry remembers, by state.", ("state",), ("registry",)
)
LAST_RUN = RegistryMetric(
    "enginesmith_last_run_timestamp_seconds", "gauge", "When a model's newest run began.", ("model",), ("registry",)
)
LAST_RUN_OK = RegistryMetric(
    "enginesmith_last_run_success",
    "gauge",
    "Whether a model's newest run that is over did all it was asked.",
    ("model",),
    ("registry",),
)
ROLLOUTS = RegistryMetric(
    "enginesmith_rollouts", "gauge", "Rollouts that are not finished, by state.", ("state",), ("registry",)
)
ROLLOUT_STEP = RegistryMetric(
    "enginesmith_rollout_step_timestamp_seconds",
    "gauge",
    "When a rollout that is not finished made its last step, or a person decided something of it.",
    ("model", "channel"),
    ("registry",),
)
MODELS = RegistryMetric("enginesmith_models", "gauge", "Models that have a version.", (), ("registry",))
LEFT_OUT = RegistryMetric(
    "enginesmith_models_left_out",
    "gauge",
    "Models without series of their own, since there are too many.",
    (),
    ("registry",),
)
UNREAD = RegistryMetric(
    "enginesmith_models_unread",
    "gauge",
    "Models whose newest version was not read yet, so that no count of engines has it.",
    (),
    ("registry",),
)
UP = RegistryMetric(
    "enginesmith_registry_up", "gauge", "Whether the registry could be read the last time.", (), ("registry",)
)
READ_AT = RegistryMetric(
    "enginesmith_registry_read_timestamp_seconds", "gauge", "When the registry was last read.", (), ("registry",)
)

METRICS = (
    BUILDS, BUILD_SECONDS, CACHE, QUEUE, RUNNING, RETRIES, PEAK, ERRORS, REPEATED, UNPROVEN, ENGINES, DRIFT, RUNS,
    LAST_RUN, LAST_RUN_OK, ROLLOUTS, ROLLOUT_STEP, MODELS, LEFT_OUT, UNREAD, UP, READ_AT,
)  # fmt: skip
