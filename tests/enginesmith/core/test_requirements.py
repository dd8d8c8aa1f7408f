import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginesmith.core import codec
from enginesmith.core.codec import encode
from enginesmith.core.hardware.evaluation import evaluate, judge
from enginesmith.core.hardware.machine import Machine, parse_targets
from enginesmith.core.requirements import (
    KINDS,
    Cpu,
    Driver,
    Gpu,
    GpuMemory,
    Installation,
    Instructions,
    Library,
    LibraryBuild,
    Product,
    Requirement,
    Runtime,
    Unknown,
    Weights,
    WideSums,
    driver_for,
    for_target,
    numbers,
    same_version,
)
from enginesmith.core.types import Target

LIBRARY = Library("a.so", "init", (LibraryBuild("linux-x86_64", "a" * 64), LibraryBuild("linux-aarch64", "b" * 64, 13)))
NO_BUILD = (
    "needs the library a.so, which this version has for linux-x86_64, linux-aarch64 with CUDA 13, and not for "
    "linux-aarch64"
)
GPU = Machine((8, 9), "l4", "580.65.06", "13.0", {"there": "2.1"}, memory_bytes=24 << 30)
CPU = Machine(cpu="x86-64-v3")


@pytest.mark.parametrize(
    ("requirement", "machine", "state", "words"),
    [
        (Gpu("l4", (8, 9)), GPU, "met", ""),
        (Gpu("sm_90", (9, 0)), GPU, "unmet", "built for sm_90; this is sm_89 (l4)"),
        (Gpu("sm_89", (8, 9)), CPU, "unmet", "built for sm_89; this is cpu"),
        (Gpu("sm_86", (8, 6), "family"), GPU, "met", ""),
        (Gpu("sm_86", (8, 6), "family"), Machine((9, 0)), "unmet", "built for sm_86; this is sm_90"),
        (Gpu("sm_86", (8, 6), "family"), Machine((8, 0)), "unmet", "built for sm_86; this is sm_80"),
        (Gpu("sm_80", (8, 0), "at_least"), Machine((12, 0)), "met", ""),
        (Gpu("sm_80", (8, 0), "at_least"), Machine((7, 5)), "unmet", "built for sm_80; this is sm_75"),
        (Gpu("gpu", (0, 0), "at_least"), CPU, "unmet", "built for gpu; this is cpu"),
        (
            Gpu("l4", (8, 9), "arch"),
            GPU,
            "unmet",
            "needs a GPU by the rule 'arch', which this enginesmith does not know",
        ),
        (Cpu("cpu"), CPU, "met", ""),
        (Cpu("cpu"), GPU, "unmet", "built for cpu; this is sm_89 (l4)"),
        (Cpu("cpu", "x86-64-v3"), CPU, "met", ""),
        (Cpu("cpu", "x86-64-v4"), CPU, "unmet", "laid out for x86-64-v4 CPUs, and this one is x86-64-v3"),
        (Cpu("cpu", "x86-64-v4"), Machine(), "unknown", "laid out for x86-64-v4 CPUs; the kind of CPU here is unknown"),
        (Instructions("x86-64-v3"), CPU, "met", ""),
        (Instructions("x86-64-v4"), CPU, "unmet", "compiled for x86-64-v4, and the CPU is x86-64-v3"),
        (Instructions("aarch64"), CPU, "unmet", "compiled for aarch64, and the CPU is x86-64-v3"),
        (Instructions("x86-64-v2", ("avx2",)), CPU, "met", ""),
        (Instructions("x86-64-v2", ("amx_int8",)), CPU, "unmet", "compiled for x86-64-v2, and the CPU is x86-64-v3"),
        (Instructions("x86-64-v3"), GPU, "unknown", "compiled for x86-64-v3; the kind of CPU is unknown"),
        (Runtime("there", "2.1.7"), GPU, "met", ""),
        (Runtime("other", "2.1", packages=("there",)), GPU, "met", ""),
        (Runtime("there", "2.2", "There"), GPU, "unmet", "needs There 2.2, found 2.1"),
        (Runtime("there", "2.0", loads=(("2.0", "3"),)), GPU, "met", ""),
        (Runtime("there", "1.9", loads=(("1.9", "2"),)), GPU, "unmet", "needs there 1.9 or later, found 2.1"),
        (Runtime("absent", "1"), GPU, "unknown", "needs absent 1; the version here is unknown"),
        (Runtime("absent", "1"), Machine(here=True), "unknown", "needs absent 1; it is not installed here"),
        (Runtime("there", "", "There"), GPU, "unknown", "its There version is not on record"),
        (Driver("580"), GPU, "met", ""),
        (Driver("590.1", "13"), GPU, "unmet", "needs driver >= 590.1, found 580.65.06"),
        (Driver("580", "13"), Machine((8, 9), cuda="13.1"), "met", ""),
        (Driver("580", "13"), Machine((8, 9), cuda="12.4"), "unmet", "needs CUDA 13, the driver supports 12.4"),
        (Driver("580", "13"), Machine((8, 9)), "unknown", "needs driver >= 580; the driver here is unknown"),
        (GpuMemory(1 << 30), GPU, "met", ""),
        (GpuMemory(48 << 30), GPU, "unmet", "needs at least 48.0 GiB, but the GPU has 24.0 GiB"),
        (GpuMemory(1), Machine((8, 9)), "unknown", "the GPU's memory is unknown"),
        (Product("l4", "errors are warned of"), GPU, "met", ""),
        (Product("l40s", "errors are warned of"), GPU, "unmet", "errors are warned of"),
        (Product("l40s", "errors are warned of"), Machine((8, 9)), "met", ""),
        (LIBRARY, CPU, "met", ""),
        (LIBRARY, GPU, "unknown", "needs the library a.so; the platform there is unknown"),
        (LIBRARY, Machine((8, 9), cpu="arm64"), "unknown", "needs the library a.so; the CUDA there is unknown"),
        (LIBRARY, Machine((9, 0), cpu="arm64", cuda="13.1"), "met", ""),
        (LIBRARY, Machine((9, 0), cpu="arm64", cuda="12.8"), "unmet", NO_BUILD + " with CUDA 12; add one to"),
        (LIBRARY, Machine(cpu="arm64"), "unmet", NO_BUILD + "; add one to source.libraries"),
        (WideSums(), Machine(cpu="x86-64-v4-vnni"), "met", ""),
        (WideSums(), Machine(cpu="arm64"), "met", ""),
        (WideSums(), CPU, "unmet", "its int8 sums saturate on x86-64-v3, which has no VNNI; build it for"),
        (WideSums(), Machine(), "unknown", "its int8 sums are wrong on x86-64 without VNNI; the CPU is unknown"),
        (Weights("d" * 64), Machine(), "met", ""),
        (
            Unknown("qubits", "{}"),
            GPU,
            "unmet",
            "needs 'qubits', which this enginesmith does not know; upgrade enginesmith",
        ),
    ],
)
def test_each_requirement_is_met_unmet_or_unknown_with_the_reason(requirement, machine, state, words) -> None:
    (result,) = evaluate((requirement,), machine)
    assert (result.state, result.words.startswith(words), bool(result.words)) == (state, True, bool(words))
    assert result.rules_out is (state == "unmet" and not isinstance(requirement, Product))


@pytest.mark.parametrize(("here", "state"), [("1.30", "unmet"), ("1.31.1", "met"), ("1.32", "met")])
def test_a_remark_rejects_nothing_and_appears_for_every_other_version(here: str, state: str) -> None:
    saved_runtime = Runtime("ort", "1.31.1", loads=(("1.31.1", ""),), strict=False, remark="saved by ort")
    (result,) = evaluate((saved_runtime,), Machine(runtimes={"ort": here}))
    assert (result.state, result.rules_out) == (state, False)
    assert result.words == ("" if here == "1.31.1" else f"saved by ort 1.31.1; {here} is here")


def test_the_local_machine_checks_its_own_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("enginesmith.core.hardware.cpu_kinds.platform.machine", lambda: "x86_64")
    monkeypatch.setattr("enginesmith.core.hardware.cpu_kinds.machine_flags", lambda: frozenset(["popcnt"]))
    (result,) = evaluate((Instructions("x86-64", ("popcnt", "amx_int8")),), Machine(here=True))
    assert result.words == "compiled for x86-64, and this CPU has no amx_int8"


def test_only_required_distributions_are_looked_up(monkeypatch) -> None:
    requests: list[str] = []
    monkeypatch.setattr(
        "enginesmith.core.hardware.machine._find_installed_version",
        lambda name: requests.append(name) or {"b": "2"}.get(name),
    )
    expected = (Runtime("a", "1", packages=("b", "c")), Runtime("known", "1"), LIBRARY)
    machine = Machine(runtimes={"known": "1"}, here=True).with_installed(expected)
    assert machine.runtimes == {"known": "1", "b": "2"} and requests == ["a", "b"]
    other_machine = Machine()
    assert other_machine.with_installed(expected) is other_machine


@pytest.mark.parametrize("name", ["cpu", "x86-64-v3", "l4", "sm_120"])
def test_the_usual_requirement_is_the_targets_own_processor(name: str) -> None:
    (target,) = parse_targets(name)
    assert judge(for_target(target), Machine.of(target)).state == "met"
    assert judge(for_target(target), Machine.of(Target("sm_75", (7, 5)))).state == "unmet"


@pytest.mark.parametrize(
    ("toolchain", "driver"),
    [
        ({"x-cu12-libs": "1"}, (Driver("525", "12"),)),
        ({"x-cu12-libs": "1", "x-cu13-libs": "1"}, (Driver("525", "12"),)),
        ({"x-cu13-libs": "1", "driver": "581.2"}, (Driver("581.2", "13"),)),
        ({"torch": "2.13"}, ()),
    ],
)
def test_the_oldest_driver_follows_from_the_toolchain(toolchain: dict[str, str], driver: tuple[Driver, ...]) -> None:
    assert driver_for(toolchain) == driver


version = st.lists(st.integers(0, 30), min_size=1, max_size=4).map(lambda parts: ".".join(map(str, parts)))


@given(version, version)
def test_versions_are_compared_in_their_common_parts(built: str, here: str) -> None:
    judgement = judge(Runtime("x", built, loads=((built, ""),)), Machine(runtimes={"x": here}))
    count = min(len(numbers(built)), len(numbers(here)))
    assert (judgement.state == "met") is (numbers(built)[:count] <= numbers(here)[:count])
    assert same_version(built, here) is (numbers(built)[:count] == numbers(here)[:count])
    same = judge(Runtime("x", built), Machine(runtimes={"x": here}))
    assert judgement.state == "met" or same.state == "unmet"  # what the very version opens, a range from it on does


@given(st.text(max_size=40), st.text(max_size=40))
def test_any_text_can_be_compared_as_a_version(built: str, here: str) -> None:
    for runtime in (Runtime("x", built), Runtime("x", built, loads=((built, here),)), Driver(built, here)):
        judge(runtime, Machine(driver=here, runtimes={"x": here}))


capability = st.tuples(st.integers(0, 30), st.integers(0, 9))


@given(capability, capability)
def test_each_wider_match_includes_the_narrower_one(built: tuple[int, int], here: tuple[int, int]) -> None:
    is_exact, family, is_least = (
        judge(Gpu("x", built, match), Machine(here)).state == "met" for match in ("exact", "family", "at_least")
    )
    assert is_exact <= family <= is_least
    assert not (is_exact and here != built) and not (family and here[0] != built[0]) and not (is_least and here < built)


EVERY: tuple[Requirement, ...] = (
    Gpu("l4", (8, 9)), Cpu("cpu", "x86-64-v3"), Instructions("x86-64-v3", ("amx_int8",)),
    Runtime("x", "1", "X", (("1", "2"),), ("y",), strict=False, remark="saved by"), Driver("580", "13"), GpuMemory(5),
    Product("l4", "warned"), LIBRARY, WideSums(), Weights("d" * 64),
    Installation((("Python", "3.11.7"),)),
)  # fmt: skip


def test_every_kind_is_written_as_json_and_read_back() -> None:
    assert {item.kind for item in EVERY} == KINDS.keys()
    for item in EVERY:
        document = json.loads(json.dumps(encode(item)))
        assert document["kind"] == item.kind and codec.decode(document, type(item)) == item
        assert codec.decode(document, Requirement) == item  # type: ignore[arg-type] # as a worker's result
    assert encode(Unknown("qubits", '{"kind":"qubits","count":9}')) == {"kind": "qubits", "count": 9}
