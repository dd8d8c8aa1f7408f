"""`enginesmith traffic capacity` over made-up latency reports of several kinds of machines, and every bad input."""

import json
from dataclasses import replace

import numpy as np
import pytest

from enginesmith.core.codec import encode
from enginesmith.core.errors import canonical_json
from enginesmith.core.reports.latency import BucketLatency, MachineKind, Quantile, SystemLoad
from enginesmith.registry.evidence.latencies import attach_latency
from enginesmith.registry.versions.lookup import load
from tests.pipeline.projects import Project
from tests.validation.latency.reports import latency_report

CPU, L4 = MachineKind("CPU", "x86-64-v3", 2, "Linux", ()), MachineKind("CPU", "x86-64-v3", 8, "Linux", ("NVIDIA L4",))
PRICES = "currency: USD\ncpu: {per_hour: 0.2, count: 30}\nl4: {per_hour: 0.7, count: 2}\nt4: {per_hour: 0.4}\n"


def bucket(batch: int, seconds: float) -> BucketLatency:
    quiet_load = SystemLoad(1.0, 0.1, 0.0, 0.0, 1.0, None, 2)
    curve = tuple((seconds * np.linspace(0.95, 1.1, 101)).tolist())
    medians = tuple(seconds * factor for factor in (0.99, 1.0, 1.01, 1.0, 0.995))
    quantile = (Quantile(0.5, seconds, seconds, seconds, 500.0, 10),)
    return BucketLatency(
        f"batch={batch}", {"batch": batch}, batch, seconds, 500, 10, True, seconds, quantile, curve, 0, quiet_load,
        process_medians_s=medians,
    )  # fmt: skip


def tell(project: Project, unit: str, machine: MachineKind, one_s: float, more_s: float) -> None:
    """Put a latency report on record: one_s for a batch, more_s for each sample of it."""
    store, manifest = project.published()
    entry = next(entry for entry in manifest.engines if entry.unit == unit)
    buckets = tuple(bucket(batch, one_s + more_s * batch) for batch in (1, 4, 8))
    report = replace(latency_report(), engine=str(entry.digest), machine=machine, unit=unit, buckets=buckets)
    attach_latency(store, manifest, store.put_bytes(canonical_json(encode(report))))


@pytest.fixture
def timed(built: Project) -> Project:
    tell(built, "cpu fp32 onnxruntime", CPU, 0.002, 0.0002)
    tell(built, _unit(built, "sm_89"), L4, 0.0005, 0.00005)
    built.folder.joinpath("prices.yaml").write_text(PRICES)
    return built


def _unit(project: Project, target: str) -> str:
    engines = load(project.store, "tiny", "1").engines
    return next(entry.unit for entry in engines if entry.usable and entry.target == target)


def test_capacity_prints_rates_machines_costs_and_the_mix(timed: Project) -> None:
    words = ("traffic", "capacity", "tiny", "--rate", 9000, "--p99", "20ms", "--prices", timed.folder / "prices.yaml")
    result = timed.run(*words, "--wait", "0ms", "--headroom", "20%", "--out", timed.folder / "cost.svg", "--json")
    assert result.code == 0, result.err
    actual = result.json
    rows = {(row["unit"], row["machine"]): row for row in actual["engines"]}
    cpu = rows["cpu fp32 onnxruntime", "x86-64-v3, 2 cores"]
    rate = cpu["greatest"]["rate"]
    assert rate["low"] < rate["value"] < rate["high"] and 1500 < rate["value"] <= 8 / 0.0036 * 1.02
    assert cpu["machines"]["value"] == int(np.ceil(9000 / (0.8 * rate["value"]))) + 1
    assert cpu["per_million"]["value"] == pytest.approx(cpu["machines"]["value"] * 0.2 / 9000 / 3600 * 1e6)
    gpu = next(row for (unit, machine), row in rows.items() if machine == "l4")
    assert gpu["price"] == "l4" and gpu["greatest"]["rate"]["value"] > 2 * rate["value"]
    missing = [row for row in actual["engines"] if row["machine"] == "t4"]
    assert missing and all(not row["greatest"] for row in missing)
    assert (
        "not measured; run on this kind of machine: enginesmith validate tiny@1 --target sm_75" in missing[0]["reason"]
    )
    assert set(actual["mix"]["machines"]) <= {"cpu", "l4"} and actual["mix"]["machines"].get("l4", 0) <= 2
    assert "<svg" in timed.folder.joinpath("cost.svg").read_text()
    second_result = timed.run(*words, "--wait", "0ms", "--batch", 1, "--quiet")
    assert "simulating" in result.err and "simulating" not in second_result.err
    assert second_result.code == 0 and "cheapest mix:" in second_result.out and "1.0 of 1" in second_result.out


@pytest.mark.slow
def test_a_servers_overhead_is_counted_if_given(built: Project) -> None:
    tell(built, "cpu fp32 onnxruntime", CPU, 0.002, 0.0002)
    words = ("traffic", "capacity", "tiny", "--rate", 100, "--p99", "20ms", "--batch", 8, "--wait", "0ms")
    assert "the overhead of your server is not counted" in built.run(*words).err
    rates = [_cpu_rate(built, *words, *more) for more in (("--batch-overhead", "4ms", "--request-overhead", "1ms"), ())]
    # A batch of eight takes 3.6 ms, and 12 ms more behind this server.
    assert rates[0] < 8 / 0.0156 * 1.02 and rates[1] > 2 * rates[0]


def _cpu_rate(project: Project, *words: object) -> float:
    rows = project.run(*words, "--json").json["engines"]
    return next(row["greatest"]["rate"]["value"] for row in rows if row["machine"].startswith("x86-64-v3"))


def test_too_few_machines_give_the_missing_number(timed: Project) -> None:
    timed.folder.joinpath("fleet.yaml").write_text(
        "groups:\n  - {product: l4, count: 1}\n  - {product: cpu, count: 1}\n"
    )
    words = ("traffic", "capacity", "tiny", "--rate", 90000, "--p99", "20ms", "--prices", timed.folder / "prices.yaml")
    result = timed.run(*words, "--wait", "0ms", "--batch", 8, "--fleet", timed.folder / "fleet.yaml")
    assert result.code == 1 and "no mix: 1 cpu, 1 l4 carry" in result.out and "more l4" in result.out


def test_a_rate_beyond_a_million_machines_has_no_mix(timed: Project) -> None:
    words = ("traffic", "capacity", "tiny", "--rate", 1e9, "--p99", "20ms", "--prices", timed.folder / "cpu.yaml")
    words += ("--batch", 1)
    timed.folder.joinpath("cpu.yaml").write_text("cpu: {per_hour: 0.2}\n")
    result = timed.run(*words, "--wait", "0ms", "--precision", "fp32")
    assert result.code == 1 and "no mix: 1000000 cpu carry" in result.out


def test_a_limit_below_the_fastest_run_reports_that_time(timed: Project) -> None:
    result = timed.run("traffic", "capacity", "tiny", "--rate", 10, "--p99", "100us")
    assert result.code == 1 and "misses 0.1 ms at every rate: p99 of its fastest run is" in result.out


def test_a_limit_that_concurrent_requests_exceed_is_reported(timed: Project) -> None:
    path = timed.folder / "traffic.jsonl"
    path.write_text("\n".join(json.dumps({"at": index // 100, "inputs": {"x": [[0.0] * 8]}}) for index in range(200)))
    words = ("traffic", "capacity", "tiny", "--rate", 10, "--p99", "20ms", "--wait", "0ms", "--precision", "fp32")
    words += ("--batch", 8)
    result = timed.run(*words, "--traffic", path)
    assert "p99 of its fastest run is 2.42 ms, and requests also wait to be batched (--wait)" in result.out


def test_recorded_traffic_gives_arrivals_and_sizes(timed: Project) -> None:
    lines = [json.dumps({"at": 0.01 * index, "inputs": {"x": [[0.0] * 8] * (1 + index % 2)}}) for index in range(200)]
    path = timed.folder / "traffic.jsonl"
    path.write_text("\n".join(lines))
    words = ("traffic", "capacity", "tiny", "--rate", 100, "--p99", "20ms", "--wait", "0ms", "--precision", "fp32")
    words += ("--batch", 8)
    result = timed.run(*words, "--traffic", path, "--json")
    assert result.code == 0 and result.json["arrivals"] == "recorded arrivals, scaled in time (200 requests)"
    path.write_text("\n".join(lines[:50]))
    few_result = timed.run(*words, "--traffic", path)
    assert few_result.code == 2 and "p99 takes at least 100" in few_result.err
    path.write_text("\n".join(['{"kind": "enginesmith-traffic", "format": 1, "model": "other"}', *lines]))
    other_result = timed.run(*words, "--traffic", path)
    assert other_result.code == 2 and "is traffic of 'other', not of 'tiny'" in other_result.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--rate", 0, "--p99", "20ms"), "0.0 is not in the range 0<x<=1000000000.0"),
        (("--p99", "20ms"), "Missing option '--rate'"),
        (("--rate", 1, "--p99", "20"), "'20' is not a time; give a number and us, ms or s"),
        (("--rate", 1, "--p99", "0ms"), "must be above 0 s"),
        (("--rate", 1, "--p99", "1s", "--headroom", "100%"), "is not a share from 0% to below 100%"),
        (("--rate", 1, "--p99", "1s", "--batch", 99), "accepts at most 8 samples"),
        (("--rate", 1, "--p99", "1s", "--at", "length=4"), "the model has no dim 'length'"),
        (("--rate", 1, "--p99", "1s", "--prices", "nothing.yaml"), "nothing.yaml: no such file"),
        (("--rate", 1, "--p99", "1s", "--fleet", "{fleet}"), "give --prices FILE"),
        (("--rate", 1, "--p99", "1s", "--prices", "{t4}"), "has no price for x86-64-v3, 2 cores, l4"),
        (("--rate", 1, "--p99", "1s", "--prices", "{t4}", "--fleet", "{fleet}"), "has no price for a100, of which"),
        (("--rate", 1, "--p99", "1s", "--precision", "fp16"), "no engine in fp16 that was timed"),
        (("--rate", 1, "--p99", "1s", "--out", "x.svg"), "give --prices"),
        (("--rate", 1, "--p99", "1s", "--out", "x.jpg", "--prices", "{t4}"), "pictures are written as .svg"),
        (("--rate", "nan", "--p99", "1s"), "nan is not a finite number"),
        (("--rate", 1, "--p99", "20ms", "--wait", "20ms"), "a request that waits alone would exceed the limit"),
    ],
)
def test_bad_input_is_reported(timed: Project, words: tuple[object, ...], message: str) -> None:
    files = {"t4": "t4: {per_hour: 1}\n", "fleet": "groups:\n  - {product: a100, count: 8}\n"}
    for name, text in files.items():
        timed.folder.joinpath(f"{name}.yaml").write_text(text)
    items = [str(word).format(**{name: timed.folder / f"{name}.yaml" for name in files}) for word in words]
    result = timed.run("traffic", "capacity", "tiny", *items)
    assert message in result.err + result.out and "Traceback" not in result.err
    assert result.code == (1 if message.startswith("has no price for x86") else 2)


def test_without_a_report_the_timing_command_is_named(built: Project) -> None:
    result = built.run("traffic", "capacity", "tiny", "--rate", 1, "--p99", "1s")
    assert result.code == 2 and "time its engines where they run: enginesmith validate tiny@1" in result.err
