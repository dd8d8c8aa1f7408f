import platform

import pytest

from builders.backends.discovery import find_incompatibility
from builders.backends.tvm import Tvm
from enginesmith.core.hardware import cpu_kinds
from enginesmith.core.hardware.cpu_kinds import LEVELS, find_missing_flags, host_level, level_of
from enginesmith.core.requirements import Instructions
from tests.builders import graphs

V2 = {"cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"}
V3 = V2 | {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"}
V4 = V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


@pytest.fixture
def cpu(monkeypatch):
    """Makes this CPU another one: its architecture and its flags."""

    def become(flags, machine="x86_64"):
        monkeypatch.setattr(platform, "machine", lambda: machine)
        monkeypatch.setattr(cpu_kinds, "machine_flags", lambda: frozenset(flags))

    return become


@pytest.mark.parametrize(("flags", "level"), [((), 0), (V2, 1), (V3, 2), (V3 | {"avx512f"}, 2), (V4 | {"amx_int8"}, 3)])
def test_the_highest_level_has_all_its_flags(cpu, flags, level):
    cpu(flags)
    assert host_level() == LEVELS[level]
    assert [name for name in LEVELS if not find_missing_flags(name)] == list(LEVELS[: level + 1])


def test_the_error_names_missing_features(cpu):
    cpu(V3 - {"fma", "avx2"})
    assert find_missing_flags("x86-64-v3") == ("avx2", "fma")
    assert find_missing_flags("aarch64") == ("aarch64",)


def test_another_architecture_is_its_own_level(cpu):
    cpu((), "aarch64")
    assert host_level() == "aarch64" and find_missing_flags("aarch64") == ()
    assert find_missing_flags("x86-64") == ("x86_64",)


def planned(level, toolchain=()):
    return graphs.request("cpu", backend="tvm", options=(("cpu", level),), toolchain=toolchain)


def test_an_engine_for_a_better_cpu_is_refused_with_what_this_one_lacks(cpu, monkeypatch):
    cpu(V3)
    monkeypatch.setattr(Tvm, "versions", lambda self: {"apache-tvm": "1"})
    assert find_incompatibility(Tvm(), planned("x86-64-v3")) is None
    reason = find_incompatibility(Tvm(cpu="x86-64-v4"), planned("x86-64-v4"))
    assert reason.startswith("compiled for x86-64-v4, and this CPU has no avx512bw, ")
    assert reason.endswith("; run it on a node that meets this, or build it again for this node")


def test_host_means_the_level_of_the_planning_machine(cpu):
    cpu(V3)
    request = planned("host", (("cpu", "x86-64-v4"),))
    assert level_of(request) == "x86-64-v4"
    assert Instructions("x86-64-v4") in Tvm(cpu="host").requires(request)
