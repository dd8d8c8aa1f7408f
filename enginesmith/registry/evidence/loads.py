"""Reports of load tests of published engines."""

from enginesmith.core.reports.load import LOAD_FORMAT, LoadReport
from enginesmith.registry.evidence.engine_reports import EngineReports
from enginesmith.registry.manifest import Manifest
from enginesmith.registry.store.base import Store

_REPORTS = EngineReports("loads", "load report", "run the load test again", LoadReport, LOAD_FORMAT, 4 << 20)

attach_load = _REPORTS.attach


def load_reports(store: Store, manifest: Manifest) -> list[LoadReport]:
    """All load reports of a version, oldest first. Raises IntegrityError for a damaged one."""
    return sorted(_REPORTS.of_version(store, manifest), key=lambda report: report.created_at)
