"""A load report with made-up figures."""

from enginesmith.core.reports.latency import MachineKind, SystemLoad
from enginesmith.core.reports.load import LoadReport, LoadTerms, SendDelay, ServerMemory, ServerOverhead


def load_report() -> LoadReport:
    return LoadReport(
        unit="cpu fp32 onnxruntime",
        engine="0" * 64,
        machine=MachineKind("CPU", "x86-64-v3", 2, "Linux", ()),
        created_at="2026-01-02T03:04:05Z",
        terms=LoadTerms(100.0, 10.0, 1.0, 2.0, 10.0, "poisson", 8, 0.002, 0, {"batch": 1}),
        seconds=10.0,
        answered=100.0,
        phases=(),
        sending=SendDelay(0.0, 0.0, 0.0, 0.0, ""),
        memory=ServerMemory(1 << 20, 1 << 20, (), None),
        cold_start_s=1.0,
        first_s=0.1,
        batch=2.0,
        load=SystemLoad(1.0, 0.1, 0.0, 0.0, 1.0, None, 2),
        server=ServerOverhead(0.0, 0.0),
    )
