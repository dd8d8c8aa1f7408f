"""Checks with findings of every kind, for the tests of rules and of formats."""

from enginesmith.core.reports.latency import MachineKind
from pipeline.regressions.findings import AnswerDrift, BucketTimes, EnginePair, Finding, MetricPair, RegressionCheck

UNIT = "cpu int8 onnxruntime"
MACHINE = MachineKind("a CPU", "x86-64-v3", 2, "Linux", ())


def times(low: float | None, ratio: float | None, high: float | None, **more: object) -> BucketTimes:
    fields = {"bucket": "batch=8", "new_s": 2e-4, "served_s": 1e-4, "detectable": 0.02, "runs": 900} | more
    return BucketTimes(ratio=ratio, low=low, high=high, **fields)


def pair(**parts: object) -> EnginePair:
    return EnginePair(**({"unit": UNIT, "against": UNIT, "pulled": True} | parts))


def sample(spec: str = "digits.yaml", findings: tuple[Finding, ...] | None = None) -> RegressionCheck:
    all_findings = (
        Finding("latency", "error", "200 µs, served version 100 µs: 2.0 times | 100 % [slower]", UNIT, "batch=8", 17),
        Finding("too-noisy", "warning", "neither shown nor ruled out", UNIT, "batch=32", 17),
        Finding(
            "coverage", "note", "digits@3 has this engine,\nand this spec does not give it", "cpu fp16 onnxruntime"
        ),
    )
    measured_pair = pair(
        metrics=(MetricPair("accuracy", 0.99, 0.9961, 0.005),),
        drift=(AnswerDrift("batch=8", "logits", "sqnr_db", 30.0, 15.0, True),),
        times=(times(1.9, 2.0, 2.1), times(0.9, 1.0, 1.1, bucket="batch=32")),
    )
    return RegressionCheck(
        model="digits",
        spec=spec,
        against="digits@3",
        channel="stable",
        machine=MACHINE,
        created_at="2026-11-20T18:23:01+00:00",
        slower=0.03,
        seconds=2.0,
        statuses={UNIT: "proven"},
        pairs=(measured_pair,),
        findings=all_findings if findings is None else findings,
    )
