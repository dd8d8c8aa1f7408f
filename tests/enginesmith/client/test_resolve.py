from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginesmith.client.resolve import PORTABLE, Policy, Resolution, rank_engines
from enginesmith.core.errors import UnknownNameError
from enginesmith.core.hardware.machine import GENERATIONS, Machine, parse_targets
from enginesmith.core.requirements import Cpu, Gpu, WideSums, for_target
from enginesmith.core.types import PRECISIONS, Target
from enginesmith.registry.evidence.attestations import JudgedEntry
from enginesmith.registry.evidence.latencies import MeasuredSpeed
from enginesmith.registry.manifest import EngineEntry

L4 = parse_targets("l4")[0]
L40S = parse_targets("l40s")[0]
SM89 = parse_targets("sm_89")[0]
CPU = parse_targets("cpu")[0]


def entry(target: str, precision: str = "fp16", status: str = "proven") -> EngineEntry:
    value = Target(PORTABLE) if target == PORTABLE else parse_targets(target)[0]
    requires = (Gpu(PORTABLE, (0, 0), "at_least") if target == PORTABLE else for_target(value),)
    return EngineEntry(
        value.name, precision, "any", status, "because", value.compute_capability, value.product,  # type: ignore[arg-type]
        requires=requires,
    )  # fmt: skip


def resolve(
    entries: list[EngineEntry],
    target: Target,
    precision: str | None = None,
    *,
    proven_only: bool = False,
    what: str = "this version",
) -> Resolution:
    """Choose for a machine of which only its kind is known."""
    return rank_engines(entries, Machine.of(target), Policy(precision, proven_only=proven_only), what).resolution()


def chosen(entries: list[EngineEntry], target: Target, precision: str | None = None, **options: bool) -> EngineEntry:
    return resolve(entries, target, precision, **options).chosen


def test_products_rank_before_capability_other_products_and_portable() -> None:
    order = [entry("l4"), entry("sm_89"), entry("l40s"), entry(PORTABLE)]
    entries = list(reversed(order))
    for best in order:
        assert chosen(entries, L4) == best
        entries.remove(best)


def test_a_gpu_of_unknown_product_takes_the_general_engine_first() -> None:
    assert chosen([entry("l4"), entry("sm_89")], SM89) == entry("sm_89")
    assert chosen([entry("l4")], SM89) == entry("l4")
    assert "another product" in resolve([entry("l4")], L40S).why


@pytest.mark.parametrize("target", ["sm_89", "cpu"])
def test_without_evidence_of_speed_the_more_accurate_comes_first(target: str) -> None:
    target_place, order = parse_targets(target)[0], ("fp32", "fp16", "bf16", "int8-dynamic", "fp8", "int8", "int4")
    for index, best_entry in enumerate(order):
        resolution = resolve([entry(target, precision) for precision in reversed(order[index:])], target_place)
        assert resolution.chosen.precision == best_entry
        assert len(order) - index < 2 or f"more accurate than {target} {order[index + 1]} any" in resolution.why


@pytest.mark.parametrize("backends", [("iree", "onnxruntime"), ("onnxruntime", "iree")])
def test_among_compilers_the_first_in_the_spec_ranks_first(backends: tuple[str, str]) -> None:
    """Not by the alphabet: that would serve a slower engine wherever somebody adds a compiler to compare with."""
    entries = [replace(entry("cpu", "fp32"), backend=name) for name in backends]
    assert chosen(entries, CPU).backend == backends[0]


def test_proven_ranks_before_accurate_but_not_before_fit() -> None:
    assert chosen([entry("sm_89", "fp32", "unproven"), entry("sm_89", "int8")], SM89).precision == "int8"
    assert chosen([entry("l4", status="unproven"), entry(PORTABLE)], L4).target == "l4"
    assert chosen([entry("l4", status="unproven"), entry(PORTABLE)], L4, proven_only=True).target == PORTABLE


def test_every_rejection_has_its_reason() -> None:
    entries = [entry("sm_80"), entry("cpu"), entry("sm_89", "int8", "failed"), entry("sm_89", "fp32", "unproven")]
    entries += [entry("sm_89", "bf16"), entry("sm_89")]
    resolution = resolve(entries, SM89, "fp16", proven_only=True)
    assert resolution.chosen == entries[-1] and resolution.ranked == (entries[-1],)
    assert dict(resolution.rejected) == {
        "sm_80 fp16 any": "built for sm_80; this is sm_89",
        "cpu fp16 any": "built for cpu; this is sm_89",
        "sm_89 int8 any": "precision int8, not fp16",
        "sm_89 fp32 any": "precision fp32, not fp16",
        "sm_89 bf16 any": "precision bf16, not fp16",
    }
    with pytest.raises(UnknownNameError) as error:
        resolve(entries[:4], SM89, proven_only=True, what="digits@1")
    assert str(error.value).splitlines() == [
        "digits@1 has no proven engine for sm_89: sm_89 fp32 any: unproven, and only proven engines may be used: "
        "because; `enginesmith validate digits@1` on such a machine proves engines that never ran there",
        "  also: sm_89 int8 any: failed: because; it has engines for sm_80, cpu",
    ]
    with pytest.raises(UnknownNameError, match=r"proven on random inputs, and only .* real inputs in golden.data$"):
        resolve([entry("sm_89", "fp32", "proven on random inputs")], SM89, proven_only=True)


@pytest.mark.parametrize(
    ("entries", "precision", "words"),
    [
        ([entry("sm_80"), entry("cpu")], None, "it has engines for sm_80, cpu; add sm_89 to the targets of its spec"),
        ([entry("cpu"), entry("sm_89", "int8", "failed")], None, "failed: because; change that and build again"),
        ([entry("cpu"), entry("sm_89")], "int8", "not int8; add int8 to the precisions of its spec and build"),
        ([], None, "it has no engines at all; build it"),
    ],
)
def test_the_nearest_rejection_comes_first_with_a_working_remedy(entries, precision, words) -> None:
    with pytest.raises(UnknownNameError) as error:
        resolve(entries, SM89, precision)
    assert words in str(error.value).splitlines()[0] and len(str(error.value).splitlines()) <= 2


def test_the_reason_names_the_engine_it_was_preferred_to() -> None:
    resolution = resolve([entry("sm_89", "int8", "unproven"), entry("sm_89")], SM89)
    assert resolution.why == "built for sm_89; fp16, proven; preferred to sm_89 int8 any (unproven)"
    assert resolve([entry("cpu")], CPU).why == "built for cpu; fp16, proven; the only engine that fits"
    many_path = resolve([replace(entry("cpu"), backend=f"b{n}") for n in range(6)], CPU)
    assert "and 2 more" in many_path.why


NAMES = ["cpu", PORTABLE, "l4", "l40s", *(generation.sm for generation in GENERATIONS)]
ENTRIES = st.builds(
    entry,
    st.sampled_from(NAMES),
    st.sampled_from(PRECISIONS),
    st.sampled_from(["proven", "unproven", "failed", "refused"]),
)


@given(
    st.lists(ENTRIES, max_size=12),
    st.sampled_from([name for name in NAMES if name != PORTABLE]),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_an_engine_that_does_not_fit_is_never_chosen(entries, name, proven_only, random):
    target = parse_targets(name)[0]
    try:
        resolution = resolve(entries, target, proven_only=proven_only)
    except UnknownNameError:
        assert not [e for e in entries if e.status == "proven" and e.compute_capability == target.compute_capability
                    and e.target != PORTABLE]  # fmt: skip
        return
    best_chosen = resolution.chosen
    assert best_chosen.status == "proven" or (best_chosen.status == "unproven" and not proven_only)
    assert best_chosen.compute_capability == target.compute_capability or best_chosen.target == PORTABLE
    assert len(resolution.ranked) + len(resolution.rejected) == len(entries)
    random.shuffle(entries)
    assert resolve(entries, target, proven_only=proven_only).chosen == best_chosen


V3, VNNI = Machine(cpu="x86-64-v3"), Machine(cpu="x86-64-v4-vnni")


def on_cpus(precision: str, built_for: str = "x86-64-v4-vnni", **on: str) -> JudgedEntry:
    """A CPU engine and its status on kinds of CPU, whose names have '_' for '-' behind 'x86'."""
    statuses = {f"x86-64-{kind.replace('_', '-')}": (status, "because") for kind, status in on.items()}
    status = statuses.get(built_for, ("unproven", ""))[0]
    return JudgedEntry(
        "cpu", precision, "onnxruntime", status, "because", digest=precision.encode().hex().ljust(64, "0"),
        toolchain={"enginesmith-cpu": built_for}, requires=(Cpu("cpu"),), on=statuses,
    )  # type: ignore[arg-type]  # fmt: skip


def test_an_engine_that_saturates_is_offered_to_no_such_cpu() -> None:
    """Whatever proofs say of it: one that was made there is not to be trusted either."""
    engine = replace(on_cpus("int8", v4_vnni="proven", v3="proven"), requires=(Cpu("cpu"), WideSums()))
    actual = rank_engines([engine], V3, Policy())
    assert not actual.candidates and "its int8 sums saturate on x86-64-v3" in actual.rejected[0][1]
    assert rank_engines([replace(engine, requires=(Cpu("cpu"),))], V3, Policy()).candidates
    assert not rank_engines([engine], VNNI, Policy()).candidates[0].remarks
    assert "the CPU is unknown" in rank_engines([engine], Machine(), Policy()).candidates[0].remarks[0]


def test_an_engine_proven_on_one_kind_of_cpu_is_not_proven_on_another() -> None:
    engine = on_cpus("int8", v4_vnni="proven")
    assert rank_engines([engine], VNNI, Policy(proven_only=True)).candidates[0].fit == "built for x86-64-v4-vnni CPUs"
    result = rank_engines([engine], V3, Policy()).candidates[0]
    assert result.entry.status == "unproven" and result.fit == "built for x86-64-v4-vnni CPUs, and this is x86-64-v3"
    refusals = dict(rank_engines([engine], V3, Policy(proven_only=True)).rejected)
    assert "never run on x86-64-v3, this kind of CPU (proven on x86-64-v4-vnni)" in refusals["cpu int8 onnxruntime"]
    assert rank_engines([engine], Machine(), Policy(proven_only=True)).candidates, "a CPU of which nothing is known"


def test_engines_proven_on_this_kind_of_cpu_rank_first() -> None:
    foreign_entry = on_cpus("int8", v4_vnni="proven")
    entry = on_cpus("fp32", v4_vnni="proven", v3="proven")
    own = on_cpus("fp16", "x86-64-v3", v3="proven")
    order = [item.entry.precision for item in rank_engines([foreign_entry, entry, own], V3, Policy()).candidates]
    assert order == ["fp32", "fp16", "int8"]
    accurate_entry = on_cpus("fp32", v4_vnni="proven")
    own_int8 = on_cpus("int8", "x86-64-v3", v3="proven")
    assert rank_engines([accurate_entry, own_int8], V3, Policy()).candidates[0].entry.precision == "int8"


def spread(
    seconds: float, share: float = 0.05, *, busy: bool = False, buckets: tuple[str, ...] = ("batch=1",)
) -> MeasuredSpeed:
    """A measured time whose interval is this share to both sides."""
    return MeasuredSpeed(seconds, buckets, busy, interval=(seconds * (1 - share), seconds * (1 + share)))


def rank_timed(engines: list[JudgedEntry], *speeds: MeasuredSpeed | None) -> tuple[list[str], str]:
    """The precisions of engines best first, and the reason; speeds: of each engine."""
    by_digest = {str(item.digest): speed for item, speed in zip(engines, speeds, strict=True) if speed}
    actual = rank_engines(engines, VNNI, Policy(), timed=lambda _: by_digest)
    return [item.entry.precision for item in actual.candidates], actual.resolution().why


def test_a_measurably_faster_engine_comes_first_with_the_ratio() -> None:
    engines = [on_cpus(precision, v4_vnni="proven") for precision in ("fp32", "fp16", "int8")]
    order, reason = rank_timed(engines, spread(2.0), spread(1.0), spread(3.0))
    assert order == ["fp16", "fp32", "int8"]
    assert reason.endswith(
        "the fastest on this kind of machine: cpu fp32 onnxruntime takes 2.00 times as long, "
        "cpu int8 onnxruntime takes 3.00 times as long"
    )
    order, reason = rank_timed(engines, spread(2.0), spread(1.0), spread(1.05))
    assert order == ["fp16", "int8", "fp32"]
    assert "faster on this kind of machine: cpu fp32 onnxruntime takes 2.00 times as long" in reason
    assert reason.endswith("more accurate than cpu int8 onnxruntime (not shown to be faster on this kind of machine)")


@pytest.mark.parametrize(
    "speeds",
    [
        (spread(1.0), spread(0.95), spread(0.93)),  # intervals that overlap
        (None, spread(0.1), spread(0.05)),  # the accurate one was not timed
        (spread(1.0), spread(0.1, buckets=("batch=8",)), spread(0.1, buckets=())),  # other sizes
        (MeasuredSpeed(1.0, ("batch=1",)), MeasuredSpeed(0.1, ("batch=1",)), MeasuredSpeed(0.1, ("batch=1",))),
        (None, None, None),
    ],
)
def test_with_overlapping_intervals_the_more_accurate_comes_first(speeds: tuple[MeasuredSpeed, ...]) -> None:
    engines = [on_cpus(precision, v4_vnni="proven") for precision in ("fp32", "fp16", "int8")]
    order, reason = rank_timed(engines, *speeds)
    assert order[0] == "fp32"
    assert "more accurate than cpu" in reason and "times as long" not in reason


def test_measurements_of_a_busy_machine_rank_and_are_marked() -> None:
    """fp32 1.54 times as fast as int8, on a machine that others used as well."""
    engines = [on_cpus(precision, v4_vnni="proven") for precision in ("fp32", "int8")]
    assert rank_timed(engines, spread(1.0), spread(1.54, busy=True))[0] == ["fp32", "int8"]
    assert rank_timed(engines, spread(1.54, busy=True), spread(1.0, busy=True))[0] == ["int8", "fp32"]
    speeds = {str(item.digest): spread(1.0, busy=item.precision == "int8") for item in engines}
    actual = rank_engines(engines, VNNI, Policy(), timed=lambda _: speeds)
    assert [item.remarks for item in actual.candidates] == [(), ("timed on a busy machine",)]
