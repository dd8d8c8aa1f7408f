from dataclasses import replace

import pytest

from enginesmith.client.resolve import FALLBACK, PORTABLE, Policy, rank_engines, remarks
from enginesmith.core.errors import UnknownNameError
from enginesmith.core.hardware import cpu_kinds
from enginesmith.core.hardware import machine as module
from enginesmith.core.hardware.cpu_kinds import this_kind
from enginesmith.core.hardware.cuda import GpuDevice
from enginesmith.core.hardware.machine import Machine
from enginesmith.core.requirements import Gpu, Runtime
from enginesmith.registry.manifest import EngineEntry
from tests.enginesmith.registries import with_requirements

GIB = 1 << 30
RUNTIMES = {"tensorrt": "10.16.1.11", "tensorrt-rtx": "1.7.1"}
H200 = Machine((9, 0), "h200", "580.65.06", "13.0", RUNTIMES, memory_bytes=141 * GIB)
L4 = Machine((8, 9), "l4", "580.65.06", "13.0", RUNTIMES, memory_bytes=22 * GIB)
TRT = EngineEntry("h200", "fp16", "tensorrt", "proven", "", (9, 0), "h200", size_bytes=GIB,
                  toolchain={"tensorrt-cu13-libs": "10.16.1.11", "tensorrt": "10.16.1.11"})  # fmt: skip
RTX = EngineEntry("sm_89", "fp16", "tensorrt-rtx", "proven", "", (8, 9), size_bytes=GIB,
                  toolchain={"tensorrt-rtx-cu13-bindings": "1.7.1.116"})  # fmt: skip


def rejection(entry: EngineEntry, machine: Machine, policy: Policy) -> str | None:
    return dict(rank_engines([entry], machine, policy).rejected).get(entry.unit)


def unmet(entry: EngineEntry, machine: Machine) -> str | None:
    return rejection(with_requirements(entry), machine, Policy())


def said(entry: EngineEntry, machine: Machine) -> tuple[str, ...]:
    return remarks(with_requirements(entry), machine)


def test_unknown_facts_refuse_nothing_and_are_reported() -> None:
    unknown_machine = Machine((9, 0), "h200")
    assert unmet(TRT, unknown_machine) is None
    assert said(TRT, unknown_machine) == (
        "needs TensorRT 10.16.1.11; the version here is unknown",
        "needs driver >= 580; the driver here is unknown",
        "the GPU's memory is unknown",
    )
    assert said(TRT, H200) == ()
    assert said(replace(TRT, toolchain={}), H200) == ("its TensorRT version is not on record",)
    onnx = EngineEntry("cpu", "fp32", "onnxruntime", "proven", toolchain={"onnxruntime": "1.31.1"})
    assert said(onnx, Machine(runtimes={"onnxruntime": "1.31.1"})) == ()
    for other in ("1.30", "1.32"):
        there = Machine(runtimes={"onnxruntime": other})
        assert said(onnx, there) == (f"saved by onnxruntime 1.31.1; {other} is here",) and unmet(onnx, there) is None


def test_a_ranking_gives_the_reason_of_each_rejection() -> None:
    model = EngineEntry(FALLBACK, "fp32", "onnxruntime", "unproven", "as exported")
    h100 = replace(TRT, target="h100", product="h100")
    old_trt = replace(TRT, toolchain={"tensorrt": "9.0"}, precision="int8")
    portable_entry = EngineEntry(PORTABLE, "fp16", "any", "proven")
    portable_entry = replace(portable_entry, requires=(Gpu(PORTABLE, (0, 0), "at_least"),))
    h100, trt, old_trt, rtx = map(with_requirements, (h100, TRT, old_trt, RTX))
    entries = [model, portable_entry, h100, trt, old_trt, rtx]
    ranking = rank_engines(entries, H200, Policy(fallback="onnx"), "m@1")
    assert [candidate.entry for candidate in ranking.candidates] == [trt, h100, portable_entry, model]
    assert "tuned for h100, another product of sm_90" in ranking.candidates[1].fit
    assert ranking.candidates[2].fit == "portable"
    assert dict(ranking.rejected) == {
        "h200 int8 tensorrt": "needs TensorRT 9.0, found 10.16.1.11",
        "sm_89 fp16 tensorrt-rtx": "built for sm_89; this is sm_90 (h200)",
    }
    assert ranking.to_json()["candidates"][0]["unit"] == "h200 fp16 tensorrt"
    assert ranking.to_json()["machine"]["target"] == "h200"
    empty_ranking = rank_engines([model], H200, Policy(proven_only=True, fallback="onnx"), "m@1")
    with pytest.raises(UnknownNameError, match="unproven, and only proven"):
        empty_ranking.resolution()


def test_this_machine_is_described_as_far_as_known(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(
        "enginesmith.core.hardware.cuda.gpus",
        lambda: (GpuDevice(0, "NVIDIA L4", (8, 9), 23 * GIB), GpuDevice(1, "NVIDIA L4", (8, 9), 22 * GIB)),
    )
    monkeypatch.setattr("enginesmith.core.hardware.cuda.cuda_version", lambda: "12.4")
    monkeypatch.setattr(module, "_find_installed_version", {"tensorrt-rtx-cu13-bindings": "1.7.1.116"}.get)
    monkeypatch.setattr(module, "_KERNEL_MODULE", tmp_path / "version")
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5\nGCC 12.2\n"
    )
    machine = Machine.from_name().with_installed(with_requirements(RTX).requires)
    installed = {"tensorrt-rtx-cu13-bindings": "1.7.1.116"}
    assert machine == Machine((8, 9), "l4", "550.54.15", "12.4", installed, memory_bytes=22 * GIB)
    assert machine.list_facts() == {"driver": "550.54.15", "CUDA": "12.4", **installed, "memory": "22.0 GiB"}
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release\n")
    assert module.driver_version() == "580.65.06"
    monkeypatch.setattr("enginesmith.core.hardware.cuda.gpus", tuple)
    name = this_kind().name
    assert Machine.from_name() == Machine.from_name("cpu") == Machine(cpu=name) and Machine.from_name("l4") == Machine(
        (8, 9), "l4"
    )
    monkeypatch.setattr(module, "_find_installed_version", {"onnxruntime": "1.31.1", "tensorrt": "10.16"}.get)
    runtimes = (Runtime("onnxruntime", "1.30"),)
    assert Machine.from_name("cpu").with_installed(runtimes) == Machine(runtimes={"onnxruntime": "1.31.1"}, cpu=name)
    # What is installed here says nothing of another machine.
    assert Machine.from_name("avx2").with_installed(runtimes) == Machine(cpu="x86-64-v3")


PLUS = replace(TRT, target="sm_80", product=None, compute_capability=(8, 0),
               options={"hardware_compatibility": "ampere_plus"})  # fmt: skip


def test_a_compatible_engine_serves_other_generations_after_those_built_for_them() -> None:
    entry, trt = with_requirements(PLUS), with_requirements(TRT)
    ranking = rank_engines((entry, trt), H200, Policy())
    assert [candidate.entry for candidate in ranking.candidates] == [trt, entry]
    other_candidate = ranking.candidates[1]
    assert other_candidate.fit == "built for sm_80, and compatible with every generation from Ampere on"
    assert other_candidate.remarks == ("proven on sm_80, and not tried on sm_90",)
    single_ranking = rank_engines(
        (with_requirements(replace(PLUS, options={"hardware_compatibility": "none"})),), H200, Policy()
    )
    assert single_ranking.rejected == (("sm_80 fp16 tensorrt", "built for sm_80; this is sm_90 (h200)"),)
    portable = replace(PLUS, target=PORTABLE, compute_capability=None, backend="xla")
    portable = replace(portable, requires=(Gpu(PORTABLE, (0, 0), "at_least"),))
    assert [item.entry for item in rank_engines((portable, entry), H200, Policy()).candidates] == [entry, portable]
    fp8 = with_requirements(replace(PLUS, precision="fp8", target="sm_90", compute_capability=(9, 0)))
    ada = replace(H200, compute_capability=(8, 9), product=None)
    (candidate,) = rank_engines((fp8,), ada, Policy()).candidates
    assert candidate.fit == "built for sm_90, and compatible with every generation from Ada on"
    assert rank_engines((fp8,), replace(ada, compute_capability=(8, 6)), Policy()).candidates == ()


def test_a_proof_is_not_valid_on_another_generation() -> None:
    plus_entry = with_requirements(PLUS)
    ranking = rank_engines((plus_entry,), H200, Policy(proven_only=True))
    assert ranking.candidates == ()
    assert ranking.rejected == (
        ("sm_80 fp16 tensorrt", "proven on sm_80 and not on sm_90, and only proven engines may be used"),
    )
    assert rank_engines((plus_entry,), replace(H200, compute_capability=(8, 0)), Policy(proven_only=True)).candidates


def test_another_product_gives_a_remark_unless_built_for() -> None:
    h100 = replace(H200, product="h100")
    none = replace(TRT, options={"hardware_compatibility": "none"})
    assert said(none, h100) == (
        "TensorRT warns of errors on another product, but for engines with hardware_compatibility",
    )
    assert said(none, H200) == ()
    assert said(replace(TRT, options={"hardware_compatibility": "same_compute_capability"}), h100) == ()


TVM = EngineEntry("cpu", "fp32", "tvm", "proven", options={"cpu": "x86-64-v3"},
                  toolchain={"apache-tvm": "0.27", "enginesmith-tvm": "2"})  # fmt: skip
TORCH = EngineEntry("cpu", "fp32", "aotinductor", "proven", options={"cpu": "x86-64-v3"},
                    toolchain={"torch": "2.13.0", "c++": "12.2.0", "cpu": "x86-64-v3"})  # fmt: skip
IREE = EngineEntry("cpu", "fp32", "iree", "proven", options={"cpu": "x86-64-v4"},
                   toolchain={"iree-base-runtime": "3.13.0"})  # fmt: skip


def test_installed_versions_are_looked_up_only_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def judged(entry: EngineEntry, versions: dict[str, str]) -> tuple[str, str]:
        monkeypatch.setattr(module, "_find_installed_version", versions.get)
        ranks = rank_engines((with_requirements(entry),), Machine(here=True), Policy())
        assert ranks.machine.runtimes == versions
        return dict(ranks.rejected).get(entry.unit, ""), "; ".join(*[item.remarks for item in ranks.candidates] or [()])

    monkeypatch.setattr("enginesmith.core.hardware.cpu_kinds.platform.machine", lambda: "x86_64")
    flags = cpu_kinds._ADDED["x86-64-v2"] | cpu_kinds._ADDED["x86-64-v3"]
    monkeypatch.setattr("enginesmith.core.hardware.cpu_kinds.machine_flags", lambda: flags)
    assert judged(TORCH, {"torch": "2.13.0"}) == ("", "")
    assert judged(TORCH, {"torch": "2.12"})[0] == "needs torch 2.13.0, found 2.12"
    assert judged(TORCH, {}) == ("", "needs torch 2.13.0; it is not installed here")
    assert judged(TVM, {"apache-tvm": "0.26"})[0] == "needs apache-tvm 0.27, found 0.26"
    assert unmet(TORCH, Machine(cpu="x86-64")) == "compiled for x86-64-v3, and the CPU is x86-64"
    assert judged(IREE, {})[0].startswith("compiled for x86-64-v4, and this CPU has no avx512bw")


def test_an_unproven_engine_with_an_old_driver_names_the_driver() -> None:
    """A proof could not be made there, whatever is validated."""
    for entry, machine in ((TRT, H200), (RTX, L4)):
        engine = replace(with_requirements(entry), status="unproven", reason="no such GPU here")
        old_machine = replace(machine, driver="470.57")
        assert rejection(engine, old_machine, Policy(proven_only=True)) == "needs driver >= 580, found 470.57"
        assert str(rejection(engine, machine, Policy(proven_only=True))).startswith("unproven, and only proven")
