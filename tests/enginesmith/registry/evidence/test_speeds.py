from dataclasses import replace

from enginesmith.core.codec import encode
from enginesmith.core.errors import canonical_json
from enginesmith.core.hardware.machine import Machine
from enginesmith.core.reports.latency import LatencyReport
from enginesmith.registry.evidence.latencies import attach_latency, latencies, measured_speeds
from enginesmith.registry.store.base import Store
from tests.enginesmith.registries import engine, publish_engines
from tests.validation.latency.reports import latency_report


def test_the_newest_report_of_a_machine_of_this_kind_counts(store: Store) -> None:
    entries = [engine(store, "cpu", precision) for precision in ("fp32", "int8")]
    manifest = publish_engines(store, entries).manifest
    result = latency_report()

    def tell(kind: str, scale: float, at: str, own: float | None = None, of: int = 0, **more: object) -> None:
        buckets = tuple(
            replace(
                item,
                quantiles=tuple(replace(q, value=scale) if q.p == 0.5 else q for q in item.quantiles),
                runtime=replace(item.runtime, value=own) if own and item.runtime else None,
            )
            for item in result.buckets
        )
        machine = replace(result.machine, kind=kind, **more)  # type: ignore[arg-type]
        message = replace(result, engine=str(entries[of].digest), created_at=at, buckets=buckets, machine=machine)
        attach_latency(store, manifest, store.put_bytes(canonical_json(encode(message))))

    tell("x86-64-v3", 2.0, "2026-11-20T08:00:00+00:00")
    tell("x86-64-v3", 1.0, "2026-11-21T08:00:00+00:00")
    tell("x86-64-v4-vnni", 5.0, "2026-11-22T08:00:00+00:00")
    speeds = measured_speeds(store, manifest, Machine(cpu="x86-64-v3"), entries)
    assert list(speeds) == [entries[0].digest] and speeds[str(entries[0].digest)].seconds == 3.0
    assert not speeds[str(entries[0].digest)].busy
    assert speeds[str(entries[0].digest)].buckets == ("batch=1", "batch=8", "batch=32")
    assert measured_speeds(store, manifest, Machine(), entries) == {}
    tell("x86-64-v3", 7.0, "2026-11-22T08:00:00+00:00", gpus=("NVIDIA L4",))
    gpu = replace(entries[0], compute_capability=(8, 9))
    assert measured_speeds(store, manifest, Machine((8, 9), "l4"), [gpu])[str(gpu.digest)].seconds == 21.0
    assert measured_speeds(store, manifest, Machine((8, 9), "l40s"), [gpu]) == {}
    tell("x86-64-v3", 1.0, "2026-11-24T08:00:00+00:00", own=0.5)
    fast, slow = (str(entry.digest) for entry in entries)
    single_duration = measured_speeds(store, manifest, Machine(cpu="x86-64-v3"), entries)[fast]
    assert (single_duration.seconds, single_duration.timed) == (1.5, "runtime")
    tell("x86-64-v3", 1.2, "2026-11-24T08:00:00+00:00", of=1)
    both = measured_speeds(store, manifest, Machine(cpu="x86-64-v3"), entries)
    assert {(both[name].seconds, both[name].timed) for name in (fast, slow)} == {(3.0, "session"), (1.2 * 3, "session")}
    entries = entries[:1]
    result = latency_report(others=0.4)
    tell("x86-64-v3", 1.5, "2026-11-25T08:00:00+00:00")
    assert [
        speed.busy for speed in (*measured_speeds(store, manifest, Machine(cpu="x86-64-v3"), entries).values(),)
    ] == [True]


def test_times_at_user_chosen_sizes_hide_no_others(store: Store) -> None:
    entries = [engine(store, "cpu", "fp32")]
    manifest = publish_engines(store, entries).manifest
    usual_report = replace(latency_report(), engine=str(entries[0].digest), created_at="2026-11-20T08:00:00+00:00")
    terms = replace(usual_report.asked, buckets=({"batch": 8},))
    newer = replace(usual_report, asked=terms, buckets=usual_report.buckets[:1], created_at="2026-11-21T08:00:00+00:00")

    def attach(report: LatencyReport) -> list[str]:
        attach_latency(store, manifest, store.put_bytes(canonical_json(encode(report))))
        return [item.created_at for item in latencies(store, manifest)[report.engine]]

    assert attach(newer) == [newer.created_at]
    assert attach(usual_report) == [usual_report.created_at]
