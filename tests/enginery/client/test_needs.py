import re
from dataclasses import replace

import pytest

from builders.backends import discovery
from enginery.client.needs import remarks, unmet
from enginery.client.resolve import FALLBACK, PORTABLE, Policy, answer
from enginery.core.errors import UnknownNameError
from enginery.core.hardware import cpu_levels
from enginery.core.hardware import machine as module
from enginery.core.hardware.cpu_kinds import this_kind
from enginery.core.hardware.machine import Machine
from enginery.registry.manifest import EngineEntry

GIB = 1 << 30
H200 = Machine((9, 0), "h200", "580.65.06", "13.0", tensorrt="10.16.1.11", memory_bytes=141 * GIB)
TRT = EngineEntry("h200", "fp16", "tensorrt", "proven", "", (9, 0), "h200", size_bytes=GIB,
                  toolchain={"tensorrt-cu13-libs": "10.16.1.11", "tensorrt": "10.16.1.11"})  # fmt: skip
RTX = EngineEntry("sm_89", "fp16", "tensorrt-rtx", "proven", "", (8, 9), size_bytes=GIB,
                  toolchain={"tensorrt-rtx-cu13-bindings": "1.7.1.116"})  # fmt: skip


@pytest.mark.parametrize(
    ("entry", "machine", "reason"),
    [
        (TRT, {}, None),
        (TRT, {"tensorrt": "10.16"}, None),
        (TRT, {"tensorrt": "11.4.0"}, "needs TensorRT 10.16.1.11, found 11.4.0"),
        (TRT, {"tensorrt": "10.16.0.3"}, "needs TensorRT 10.16.1.11, found 10.16.0.3"),
        (TRT, {"tensorrt_rtx": "1.0"}, None),
        (replace(TRT, options={"version_compatible": True}), {"tensorrt": "11.4"}, None),
        (replace(TRT, options={"version_compatible": True}), {"tensorrt": "10.9"}, "needs TensorRT .*, found 10.9"),
        (TRT, {"driver": "570.195.03"}, "needs driver >= 580, found 570.195.03"),
        (replace(TRT, toolchain={**TRT.toolchain, "driver": "585.1"}), {}, "needs driver >= 585.1, found 580.65.06"),
        (TRT, {"memory_bytes": GIB // 2}, "needs at least 1.0 GiB, the GPU has 512.0 MiB"),
        (RTX, {"tensorrt_rtx": "1.7.1"}, None),
        (RTX, {"tensorrt_rtx": "1.8.0.2"}, "needs TensorRT-RTX 1.7.1.116, found 1.8.0.2"),
        (replace(RTX, options={"version_compatible": True}), {"tensorrt_rtx": "1.8"}, "needs TensorRT-RTX"),
    ],
)
def test_what_an_engine_needs(entry: EngineEntry, machine: dict, reason: str | None) -> None:
    found = unmet(entry, H200.stating(**machine))
    assert (found is None) if reason is None else re.match(reason, str(found))


def test_the_cuda_version_stands_in_for_an_unknown_driver() -> None:
    machine = replace(H200, driver=None, cuda="12.4")
    assert unmet(TRT, machine) == "needs CUDA 13, the driver supports 12.4"
    assert unmet(TRT, replace(machine, cuda="13.0")) is None


def test_what_is_unknown_refuses_nothing_and_is_said() -> None:
    unknown = Machine((9, 0), "h200")
    assert unmet(TRT, unknown) is None
    assert remarks(TRT, unknown) == (
        "needs TensorRT 10.16.1.11; the version here is unknown",
        "needs driver >= 580; the driver here is unknown",
        "the GPU's memory is unknown",
    )
    assert remarks(TRT, H200) == ()
    assert remarks(replace(TRT, toolchain={}), H200) == ("its TensorRT version is not on record",)
    onnx = EngineEntry("cpu", "fp32", "onnxruntime", "proven", toolchain={"onnxruntime": "1.31.1"})
    assert remarks(onnx, Machine(onnxruntime="1.31.1")) == ()
    assert remarks(onnx, Machine(onnxruntime="1.30")) == ("saved by onnxruntime 1.31.1; 1.30 is here",)


def test_an_answer_ranks_and_gives_each_reason() -> None:
    model = EngineEntry(FALLBACK, "fp32", "onnxruntime", "unproven", "as exported")
    h100 = replace(TRT, target="h100", product="h100")
    old = replace(TRT, toolchain={"tensorrt": "9.0"}, precision="int8")
    portable = EngineEntry(PORTABLE, "fp16", "any", "proven")
    entries = [model, portable, h100, TRT, old, RTX]
    found = answer(entries, H200, Policy(fallback="onnx"), "m@1")
    assert [candidate.entry for candidate in found.candidates] == [TRT, h100, portable, model]
    assert "tuned for h100, another product of sm_90" in found.candidates[1].fit
    assert dict(found.rejected) == {
        "h200 int8 tensorrt": "needs TensorRT 9.0, found 10.16.1.11",
        "sm_89 fp16 tensorrt-rtx": "built for sm_89; this is sm_90 (h200)",
    }
    assert (
        found.to_json()["candidates"][0]["unit"] == "h200 fp16 tensorrt"
        and found.to_json()["machine"]["target"] == "h200"
    )
    nothing = answer([model], H200, Policy(proven_only=True, fallback="onnx"), "m@1")
    with pytest.raises(UnknownNameError, match="unproven, and only proven"):
        nothing.resolution()


def test_this_machine_is_described_as_far_as_it_can_be_seen(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(
        module,
        "gpus",
        lambda: (module.Gpu(0, "NVIDIA L4", (8, 9), 23 * GIB), module.Gpu(1, "NVIDIA L4", (8, 9), 22 * GIB)),
    )
    monkeypatch.setattr(module, "cuda_version", lambda: "12.4")
    monkeypatch.setattr(module, "_installed", {"tensorrt-rtx": "1.7.1.116"}.get)
    monkeypatch.setattr(module, "_KERNEL_MODULE", tmp_path / "version")
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5\nGCC 12.2\n"
    )
    machine = Machine.named()
    assert machine == Machine((8, 9), "l4", "550.54.15", "12.4", tensorrt_rtx="1.7.1.116", memory_bytes=22 * GIB)
    assert machine.known() == {"driver": "550.54.15", "CUDA": "12.4", "TensorRT-RTX": "1.7.1.116", "memory": "22.0 GiB"}
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release\n")
    assert module.driver_version() == "580.65.06"
    monkeypatch.setattr(module, "gpus", tuple)
    here = this_kind().name
    assert Machine.named() == Machine(tensorrt_rtx="1.7.1.116", cpu=here) and Machine.named("l4") == Machine(
        (8, 9), "l4"
    )
    monkeypatch.setattr(module, "_installed", {"onnxruntime": "1.31.1", "tensorrt": "10.16"}.get)
    assert Machine.named("cpu") == Machine(onnxruntime="1.31.1", cpu=here)
    assert Machine.named("avx2") == Machine(onnxruntime="1.31.1", cpu="x86-64-v3")


PLUS = replace(TRT, target="sm_80", product=None, compute_capability=(8, 0),
               options={"hardware_compatibility": "ampere_plus"})  # fmt: skip


def test_a_compatible_engine_serves_other_generations_after_those_built_for_them() -> None:
    found = answer((PLUS, TRT), H200, Policy())
    assert [candidate.entry for candidate in found.candidates] == [TRT, PLUS]
    other = found.candidates[1]
    assert other.fit == "built for sm_80, and compatible with every generation from Ampere on"
    assert other.remarks == ("proven on sm_80, and not tried on sm_90",)
    alone = answer((replace(PLUS, options={"hardware_compatibility": "none"}),), H200, Policy())
    assert alone.rejected == (("sm_80 fp16 tensorrt", "built for sm_80; this is sm_90 (h200)"),)
    portable = replace(PLUS, target=PORTABLE, compute_capability=None, backend="xla")
    assert [each.entry for each in answer((portable, PLUS), H200, Policy()).candidates] == [PLUS, portable]


def test_a_proof_on_one_generation_is_none_on_another() -> None:
    found = answer((PLUS,), H200, Policy(proven_only=True))
    assert found.candidates == ()
    assert found.rejected == (
        ("sm_80 fp16 tensorrt", "proven on sm_80 and not on sm_90, and only proven engines may be used"),
    )
    assert answer((PLUS,), replace(H200, compute_capability=(8, 0)), Policy(proven_only=True)).candidates


def test_another_product_is_remarked_on_unless_the_engine_was_built_for_that() -> None:
    h100 = replace(H200, product="h100")
    none = replace(TRT, options={"hardware_compatibility": "none"})
    assert remarks(none, h100) == (
        "TensorRT warns of errors on another product, but for engines with hardware_compatibility",
    )
    assert remarks(none, H200) == ()
    assert remarks(replace(TRT, options={"hardware_compatibility": "same_compute_capability"}), h100) == ()


TVM = EngineEntry("sm_90", "fp32", "tvm", "proven", "", (9, 0), size_bytes=GIB,
                  toolchain={"apache-tvm": "0.27", "nvcc": "13.0.48", "enginery-tvm": "2"})  # fmt: skip
TORCH = EngineEntry("cpu", "fp32", "aotinductor", "proven", options={"cpu": "x86-64-v3"},
                    toolchain={"torch": "2.13.0", "c++": "12.2.0", "cpu": "x86-64-v3"})  # fmt: skip
IREE = EngineEntry("cpu", "fp32", "iree", "proven", options={"cpu": "x86-64-v4"},
                   toolchain={"iree-base-runtime": "3.13.0"})  # fmt: skip


def test_what_other_engines_need_is_said_where_it_is_not_known() -> None:
    assert remarks(TVM, H200) == ("needs apache-tvm 0.27; the versions there are unknown",)
    assert unmet(TVM, replace(H200, driver="570.1")) == "needs driver >= 580, found 570.1"
    assert unmet(TVM, replace(H200, memory_bytes=GIB // 2)) == "needs at least 1.0 GiB, the GPU has 512.0 MiB"
    assert remarks(TORCH, Machine()) == ("needs cpu x86-64-v3, torch 2.13.0; the versions there are unknown",)
    assert unmet(TORCH, Machine()) is None and remarks(replace(TORCH, toolchain={}), Machine()) == ()
    unknown = replace(TORCH, backend="theirs")
    assert remarks(unknown, Machine(here=True)) == (
        "needs c++ 12.2.0, cpu x86-64-v3, torch 2.13.0; the versions here are unknown",
    )


def test_on_this_very_machine_the_backend_says_what_opens_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def judged(entry: EngineEntry, versions: dict[str, str]) -> tuple[str | None, tuple[str, ...]]:
        monkeypatch.setattr(type(discovery.configure(entry.backend, {})), "versions", lambda self: versions)
        return unmet(entry, Machine(here=True)), remarks(entry, Machine(here=True))

    monkeypatch.setattr("enginery.core.hardware.cpu_levels.platform.machine", lambda: "x86_64")
    flags = cpu_levels._ADDED["x86-64-v2"] | cpu_levels._ADDED["x86-64-v3"]
    monkeypatch.setattr("enginery.core.hardware.cpu_levels.machine_flags", lambda: flags)
    assert judged(TORCH, {"torch": "2.13.0"}) == (None, ())
    assert "built with torch 2.13.0, here is 2.12" in str(judged(TORCH, {"torch": "2.12"})[0])
    reason, said = judged(TORCH, {})
    assert reason is None and said[0].startswith("needs cpu x86-64-v3, torch 2.13.0; aotinductor is not installed here")
    reason = unmet(IREE, Machine(here=True))
    assert reason is not None and reason.startswith("compiled for x86-64-v4, and this CPU has no avx512bw")
