"""The document for a version's page: its manifest, and the registry's records of the version.

It is only for display: no proof and no publication uses it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Predicate, doc

from enginesmith.core.names import is_name
from enginesmith.core.reports.breakdown import QuantizationRecord
from enginesmith.core.reports.latency import LatencyReport
from enginesmith.core.reports.proof import Report
from enginesmith.core.types import BuildFailure
from enginesmith.registry.evidence.canaries import CanaryVerdict
from enginesmith.registry.manifest import Manifest
from validation.attribution.result import NamedAttribution

KIND = "enginesmith-version"


@dataclass(frozen=True, kw_only=True)
class VersionDocument(Manifest):
    """A manifest with the reports of its engines, and the failed builds. If a run published nothing, its version is ''.

    quantization: records by the name of the graph.  latencies: by the digest of the engine.  canaries: None if they
    were not requested.  failures: builds without an engine.  attributions: nodes that drifted, by graph or engine.
    """

    version: Annotated[str, Predicate(lambda text: not text or is_name(text)), doc("a version, or '' for none")]
    kind: str = KIND
    reports: tuple[Report, ...] = ()
    failures: tuple[BuildFailure, ...] = ()
    quantization: Mapping[str, QuantizationRecord] = field(default_factory=dict)
    attributions: tuple[NamedAttribution, ...] = ()
    latencies: Mapping[str, tuple[LatencyReport, ...]] = field(default_factory=dict)
    canaries: tuple[CanaryVerdict, ...] | None = None

    @property
    def reference(self) -> str:
        """'name@3', or the model's name alone if the run published nothing."""
        return f"{self.model}@{self.version}" if self.version else self.model
