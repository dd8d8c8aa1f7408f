from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginery.client.resolve import PORTABLE, Policy, Resolution, rank_engines
from enginery.core.errors import UnknownNameError
from enginery.core.hardware.gpu_generations import GENERATIONS
from enginery.core.hardware.machine import Machine
from enginery.core.hardware.targets import parse_targets
from enginery.core.requirements import Cpu, Gpu, WideSums, for_target
from enginery.core.types import PRECISIONS, Target
from enginery.registry.evidence.attestations import JudgedEntry
from enginery.registry.evidence.latencies import MeasuredSpeed
from enginery.registry.manifest import EngineEntry

L4 = parse_targets("l4")[0]
L40S = parse_targets("l40s")[0]
SM89 = parse_targets("sm_89")[0]
CPU = parse_targets("cpu")[0]


def entry(target: str, precision: str = "fp16", status: str = "proven") -> EngineEntry:
    found = Target(PORTABLE) if target == PORTABLE else parse_targets(target)[0]
    requires = (Gpu(PORTABLE, (0, 0), "at_least") if target == PORTABLE else for_target(found),)
    return EngineEntry(
        found.name, precision, "any", status, "because", found.compute_capability, found.product,  # type: ignore[arg-type]
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


def test_product_then_capability_then_another_product_then_portable() -> None:
    order = [entry("l4"), entry("sm_89"), entry("l40s"), entry(PORTABLE)]
    entries = list(reversed(order))
    for best in order:
        assert chosen(entries, L4) == best
        entries.remove(best)


def test_a_gpu_of_unknown_product_takes_the_general_engine_first() -> None:
    assert chosen([entry("l4"), entry("sm_89")], SM89) == entry("sm_89")
    assert chosen([entry("l4")], SM89) == entry("l4")
    assert "another product" in resolve([entry("l4")], L40S).why


@pytest.mark.parametrize(
    ("target", "order"),
    [
        ("sm_89", ("int8", "fp8", "int4", "fp16", "bf16", "fp32", "int8-dynamic")),
        ("cpu", ("int8", "int8-dynamic", "fp32", "int4", "bf16", "fp16", "fp8")),
    ],
)
def test_precision_by_kind_of_hardware(target: str, order: tuple[str, ...]) -> None:
    where = parse_targets(target)[0]
    for index, best in enumerate(order):
        assert chosen([entry(target, precision) for precision in reversed(order[index:])], where).precision == best


@pytest.mark.parametrize("backends", [("iree", "onnxruntime"), ("onnxruntime", "iree")])
def test_of_several_compilers_the_one_that_the_spec_names_first(backends: tuple[str, str]) -> None:
    """Not by the alphabet: that would serve a slower engine wherever somebody adds a compiler to compare with."""
    entries = [replace(entry("cpu", "fp32"), backend=name) for name in backends]
    assert chosen(entries, CPU).backend == backends[0]


def test_proven_before_narrow_but_not_before_fit() -> None:
    assert chosen([entry("sm_89", "int8", "unproven"), entry("sm_89", "fp32")], SM89).precision == "fp32"
    assert chosen([entry("l4", status="unproven"), entry(PORTABLE)], L4).target == "l4"
    assert chosen([entry("l4", status="unproven"), entry(PORTABLE)], L4, proven_only=True).target == PORTABLE


def test_every_rejection_has_its_reason() -> None:
    entries = [
        entry("sm_80"),
        entry("cpu"),
        entry("sm_89", "int8", "failed"),
        entry("sm_89", "fp32", "unproven"),
        entry("sm_89", "bf16"),
        entry("sm_89"),
    ]
    found = resolve(entries, SM89, "fp16", proven_only=True)
    assert found.chosen == entries[-1] and found.ranked == (entries[-1],)
    assert dict(found.rejected) == {
        "sm_80 fp16 any": "built for sm_80; this is sm_89",
        "cpu fp16 any": "built for cpu; this is sm_89",
        "sm_89 int8 any": "int8, and fp16 was asked for",
        "sm_89 fp32 any": "fp32, and fp16 was asked for",
        "sm_89 bf16 any": "bf16, and fp16 was asked for",
    }
    with pytest.raises(UnknownNameError) as error:
        resolve(entries[:4], SM89, proven_only=True, what="digits@1")
    assert str(error.value).splitlines() == [
        "digits@1 has no engine for sm_89; add the target to the spec and build, or choose:",
        "  sm_80 fp16 any: built for sm_80; this is sm_89",
        "  cpu fp16 any: built for cpu; this is sm_89",
        "  sm_89 int8 any: failed: because",
        "  sm_89 fp32 any: unproven, and only proven engines may be used: because",
    ]


def test_the_why_names_what_it_was_preferred_to() -> None:
    found = resolve([entry("sm_89", "int8", "unproven"), entry("sm_89")], SM89)
    assert found.why == "built for sm_89; fp16, proven; preferred to sm_89 int8 any (unproven)"
    assert resolve([entry("cpu")], CPU).why == "built for cpu; fp16, proven; the only one that fits"
    many = resolve([replace(entry("cpu"), backend=f"b{n}") for n in range(6)], CPU)
    assert "and 2 more" in many.why


def test_a_cpu_takes_no_portable_gpu_engine() -> None:
    with pytest.raises(UnknownNameError, match="built for gpu; this is cpu"):
        resolve([entry(PORTABLE)], CPU)
    with pytest.raises(UnknownNameError, match="no engines at all"):
        resolve([], CPU)


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
def test_never_an_engine_that_does_not_fit_and_never_by_order(
    entries: list[EngineEntry], name: str, proven_only: bool, random
) -> None:
    target = parse_targets(name)[0]
    try:
        found = resolve(entries, target, proven_only=proven_only)
    except UnknownNameError:
        assert not [e for e in entries if e.status == "proven" and e.compute_capability == target.compute_capability
                    and e.target != PORTABLE]  # fmt: skip
        return
    best = found.chosen
    assert best.status == "proven" or (best.status == "unproven" and not proven_only)
    assert best.compute_capability == target.compute_capability or best.target == PORTABLE
    assert len(found.ranked) + len(found.rejected) == len(entries)
    random.shuffle(entries)
    assert resolve(entries, target, proven_only=proven_only).chosen == best


V3, VNNI = Machine(cpu="x86-64-v3"), Machine(cpu="x86-64-v4-vnni")


def on_cpus(precision: str, built_for: str = "x86-64-v4-vnni", **on: str) -> JudgedEntry:
    """A CPU engine and its status on kinds of CPU, whose names have '_' for '-' behind 'x86'."""
    statuses = {f"x86-64-{kind.replace('_', '-')}": (status, "because") for kind, status in on.items()}
    status = statuses.get(built_for, ("unproven", ""))[0]
    return JudgedEntry(
        "cpu", precision, "onnxruntime", status, "because", digest=precision.encode().hex().ljust(64, "0"),
        toolchain={"enginery-cpu": built_for}, requires=(Cpu("cpu"),), on=statuses,
    )  # type: ignore[arg-type]  # fmt: skip


def test_an_engine_whose_sums_saturate_there_is_given_out_to_no_such_cpu() -> None:
    """Whatever proofs say of it: one that was made there is not to be trusted either."""
    engine = replace(on_cpus("int8", v4_vnni="proven", v3="proven"), requires=(Cpu("cpu"), WideSums()))
    found = rank_engines([engine], V3, Policy())
    assert not found.candidates and "its int8 sums saturate on x86-64-v3" in found.rejected[0][1]
    assert rank_engines([replace(engine, requires=(Cpu("cpu"),))], V3, Policy()).candidates
    assert not rank_engines([engine], VNNI, Policy()).candidates[0].remarks
    assert "the CPU is unknown" in rank_engines([engine], Machine(), Policy()).candidates[0].remarks[0]


def test_an_engine_proven_on_one_kind_of_cpu_is_not_proven_on_another() -> None:
    engine = on_cpus("int8", v4_vnni="proven")
    assert rank_engines([engine], VNNI, Policy(proven_only=True)).candidates[0].fit == "built for x86-64-v4-vnni CPUs"
    found = rank_engines([engine], V3, Policy()).candidates[0]
    assert found.entry.status == "unproven" and found.fit == "built for x86-64-v4-vnni CPUs, and this is x86-64-v3"
    refused = dict(rank_engines([engine], V3, Policy(proven_only=True)).rejected)
    assert "never run on x86-64-v3, this kind of CPU (proven on x86-64-v4-vnni)" in refused["cpu int8 onnxruntime"]
    assert rank_engines([engine], Machine(), Policy(proven_only=True)).candidates, "a CPU of which nothing is known"


def test_what_is_proven_on_this_kind_of_cpu_comes_first() -> None:
    foreign = on_cpus("int8", v4_vnni="proven")
    attested = on_cpus("fp32", v4_vnni="proven", v3="proven")
    own = on_cpus("fp16", "x86-64-v3", v3="proven")
    order = [item.entry.precision for item in rank_engines([foreign, attested, own], V3, Policy()).candidates]
    assert order == ["fp32", "fp16", "int8"]


def test_among_equals_the_fastest_as_timed_on_this_kind_of_machine() -> None:
    engines = [on_cpus(precision, v4_vnni="proven") for precision in ("fp32", "fp16", "int8")]
    times = dict(zip([item.digest for item in engines], (2.0, 1.0, 3.0), strict=True))

    def timed(entries, *missing, odd=()):  # type: ignore[no-untyped-def]
        sizes = {item.digest: ("batch=1",) if item.precision in odd else ("batch=1", "batch=8") for item in entries}
        return {str(d): MeasuredSpeed(times[d], sizes[d]) for d in sizes if d not in missing}

    found = rank_engines(engines, VNNI, Policy(), timed=timed)
    assert [item.entry.precision for item in found.candidates] == ["fp16", "fp32", "int8"]
    assert found.resolution().why.endswith(
        "the fastest as timed on such a machine: cpu fp32 onnxruntime takes 2.00 times as long, "
        "cpu int8 onnxruntime takes 3.00 times as long"
    )
    for incomparable in (lambda e: timed(e, engines[1].digest), lambda e: timed(e, odd=("fp32",)), lambda _: {}):
        found = rank_engines(engines, VNNI, Policy(), timed=incomparable)
        assert [item.entry.precision for item in found.candidates] == ["int8", "fp32", "fp16"]
        assert "timed" not in found.resolution().why


def test_what_was_timed_on_a_busy_machine_is_not_ranked_by_speed_and_says_so() -> None:
    engines = [on_cpus(precision, v4_vnni="proven") for precision in ("fp32", "int8")]
    speeds = {
        str(engines[0].digest): MeasuredSpeed(1.0, ("batch=1",)),
        str(engines[1].digest): MeasuredSpeed(9.0, ("batch=1",), True),
    }
    found = rank_engines(engines, VNNI, Policy(), timed=lambda _: speeds)
    assert [item.entry.precision for item in found.candidates] == ["int8", "fp32"]
    assert [bool(item.remarks) for item in found.candidates] == [True, False]
    assert found.candidates[0].remarks == ("timed on a busy machine, and so not ranked by speed",)
    assert "times as long" not in found.resolution().why


def test_a_gpu_int8_engine_that_is_larger_than_fp16_comes_behind_it_until_asked_for_or_timed() -> None:
    sizes = {"int8": 17_200_000, "fp16": 5_000_000, "fp32": 9_000_000}
    engines = [replace(entry("sm_89", name), size_bytes=size, digest=name * 16) for name, size in sizes.items()]
    ranked = rank_engines(engines, Machine.of(SM89), Policy()).candidates
    assert [item.entry.precision for item in ranked] == ["fp16", "int8", "fp32"]
    assert "larger than the fp16 engine (16.4 MiB against 4.8 MiB)" in ranked[1].remarks[-1]
    assert ranked[0].remarks == ranked[2].remarks == ()
    assert chosen(engines, SM89, "int8").precision == "int8"
    speeds = {str(item.digest): MeasuredSpeed(1.0 + (item.precision != "int8"), ("batch=1",)) for item in engines}
    timed = rank_engines(engines, Machine.of(SM89), Policy(), timed=lambda _: speeds).candidates
    assert timed[0].entry.precision == "int8", "measured faster"
    small = [replace(item, size_bytes=4_000_000) if item.precision == "int8" else item for item in engines]
    assert chosen(small, SM89).precision == "int8"
    other = [replace(item, backend="another") if item.precision == "fp16" else item for item in engines]
    assert chosen(other, SM89).precision == "int8", "of another compiler"
