"""Faults beside the engine: in the registry's files, in what was frozen, between rebuilds, and in production."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from builders.execution.local import LocalExecutor
from enginesmith.core.errors import DataError, IntegrityError
from enginesmith.registry.manifest import Manifest
from enginesmith.registry.store.base import FileStore, open_store
from enginesmith.registry.store.layout import manifest_key
from enginesmith.registry.verification import verify
from pipeline.compile.run_context import RunContext, Work
from pipeline.compile.steps.exports import settle_golden
from pipeline.operations.golden import write_frozen
from pipeline.spec.model import load_spec
from tests.enginesmith.registries import engine, publish_engines
from tests.faults.bench import Bench
from tests.faults.nets import mlp, rows
from tests.faults.table import Caught, Fault, number
from tests.pipeline.projects import write_project
from tests.validation.canary.reports import observations, report
from tests.validation.contracts.test_rebuilds import rebuilt
from validation.canary.judging.judge import judge
from validation.canary.judging.pairing import evidence_of
from validation.canary.report import read_report
from validation.contracts.repeats import reproducibility
from validation.limits.budget import Budgets, default_budget


def in_registry(spoil: Callable[[FileStore, Manifest], None]) -> Callable[[Path], Caught]:
    """Publish two engines, spoil a file where it lies, and verify."""

    def plant(folder: Path) -> Caught:
        store = open_store(folder / "registry", create=True)
        entries = [engine(store), engine(store, "sm_89", status="unproven")]
        spoil(store, publish_engines(store, entries, channel=None).manifest)
        problems = verify(store).problems
        if not problems:
            return Caught("nothing", "", "", "")
        first_problem, *other_problems = sorted(problems, key=lambda problem: problem.kind)
        place = first_problem.affects[0] if first_problem.affects else first_problem.what
        extra_texts = frozenset(f"verify {problem.kind}" for problem in other_problems)
        return Caught(f"verify {first_problem.kind}", place, "", "", extra_texts)

    return plant


def truncated(store: FileStore, manifest: Manifest) -> None:
    path = store.path(str(manifest.engines[1].digest))
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-1])


def edited(store: FileStore, manifest: Manifest) -> None:
    path = store.root / manifest_key(manifest.model, manifest.version)
    path.chmod(0o644)
    path.write_bytes(path.read_bytes().replace(b'"unproven"', b'"proven"'))


def frozen_golden(folder: Path) -> Caught:
    """The spec has frozen the golden set of version 1; the source is version 2's."""
    old_bench, bench = (Bench(folder / name, mlp(seed), rows()) for name, seed in (("old", 0), ("new", 7)))
    bench.store.put_bytes(old_bench.store.read_blob(old_bench.golden))
    write_project(folder / "project")
    write_frozen(folder / "project" / "tiny.yaml", old_bench.golden)
    executor = LocalExecutor(1)
    try:
        settle_golden(
            bench.golden, Work(load_spec(folder / "project" / "tiny.yaml"), RunContext(bench.store, executor, executor))
        )
    except DataError as error:
        message = next(part for part in str(error).split("; ") if "expected outputs" in part)
        return Caught("golden.frozen", message.partition(": ")[2], "", "")
    return Caught("nothing", "", "", "")


def other_rebuild(folder: Path) -> Caught:
    """One of three builds of the same engine answers otherwise at one size."""
    rebuilds = [rebuilt("a"), rebuilt("a"), rebuilt("b", lambda x, y: y * (1 + 1e-3 * (len(x) == 5)))]
    message = reproducibility(rebuilds, Budgets(default_budget("engine", "fp32")))
    checks = [check for check in message.failed if check.name == "sqnr_db"]
    if not checks:
        return Caught("nothing", "", "", "")
    extra_texts = frozenset(f"rebuild {check.name}" for check in message.failed) - {"rebuild sqnr_db"}
    place = ", ".join(f"{check.output} at {check.case}" for check in checks)
    measured_text, limit = (f"{number(float(value or 0.0))} dB" for value in (checks[0].value, checks[0].limit))
    return Caught("rebuild sqnr_db", place, measured_text, f"at least {limit}", extra_texts)


def in_production(**fault: Any) -> Callable[[Path], Caught]:
    """12,000 simulated requests to a candidate with a fault and to the baseline, as the canary's judge sees them."""

    def plant(folder: Path) -> Caught:
        candidate, baseline = observations(folder, 12_000, 0, **fault)
        evidence, _ = evidence_of(candidate, baseline, 15.0)
        report = judge(evidence, replicates=200)
        failed_items = [item for item in report.criteria if item.verdict == "FAIL"]
        if report.verdict != "FAIL":
            return Caught(f"canary {report.verdict}", "", "", "")
        first, extra_texts = failed_items[0], frozenset(f"criterion {item.name}" for item in failed_items[1:])
        measured = f"{_percent(first.estimate)}, at least {_percent(first.low)}"
        return Caught("canary judge", f"criterion {first.name}", measured, f"at most {first.margin:.1%}", extra_texts)

    return plant


def _percent(share: float | None) -> str:
    return "" if share is None else f"{number(100 * share)}%"


def edited_report(folder: Path) -> Caught:
    """A FAIL that was made a PASS by hand, to promote by."""
    folder.mkdir()
    document = report(folder, 2000, failing=0.02)
    assert document.verdict == "FAIL"
    try:
        read_report(replace(document, verdict="PASS").to_bytes())
    except IntegrityError as error:
        return Caught("canary report", "its digest" if "digest is" in str(error) else "", "", "")
    return Caught("nothing", "", "", "")


FAULTS = (
    Fault("an engine without its last byte", in_registry(truncated), "verify corrupt",
          "digits@1 engine sm_89 fp32 tensorrt-rtx", frozenset({"verify size"})),
    Fault("an edited manifest", in_registry(edited), "verify edited", "digits@1"),
    Fault("a frozen golden set of another version", frozen_golden, "golden.frozen",
          "16 of 16 cases have other expected outputs"),
    Fault("a rebuild that computes something else", other_rebuild, "rebuild sqnr_db", "y at batch=5",
          frozenset({"rebuild max_rel"})),
    Fault("3 % slower", in_production(slower=0.03), "canary judge", "criterion latency p50"),
    Fault("0.5 % errors", in_production(failing=0.005), "canary judge", "criterion errors"),
    Fault("other answers in production", in_production(differing=0.03), "canary judge",
          "criterion answers that differ"),
    Fault("a canary's verdict edited by hand", edited_report, "canary report", "its digest"),
)  # fmt: skip
