import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from builders.backends import discovery
from builders.backends.onnxruntime import OnnxRuntime
from builders.reference import ReferenceSession
from enginesmith.core.hardware import cpu_kinds
from enginesmith.core.hardware.cpu_kinds import (
    CPU,
    KINDS,
    flags_of_level,
    kind_named,
    kind_of,
    refusal,
    this_kind,
    why_no_proof,
)
from enginesmith.core.hardware.machine import parse_targets
from enginesmith.core.types import CPU_KIND, Target
from tests import emulated_cpu
from tests.builders import graphs

DEPTH = 64
EXACT = DEPTH * 255 * 127


def has(monkeypatch: pytest.MonkeyPatch, *flags: str, machine: str = "x86_64") -> None:
    monkeypatch.setattr("enginesmith.core.hardware.cpu_kinds.machine_flags", lambda: frozenset(flags))
    monkeypatch.setattr("platform.machine", lambda: machine)


@pytest.mark.parametrize(
    ("level", "more", "kind"),
    [
        ("x86-64-v2", (), "x86-64"),
        ("x86-64-v3", (), "x86-64-v3"),
        ("x86-64-v3", ("avx_vnni",), "x86-64-v3-vnni"),
        ("x86-64-v3", ("avx512f",), "x86-64-v3"),
        ("x86-64-v4", (), "x86-64-v4"),
        ("x86-64-v4", ("avx512_vnni",), "x86-64-v4-vnni"),
        ("x86-64-v4", ("avx512_vnni", "avx_vnni", "amx_tile", "amx_int8"), "x86-64-v4-amx"),
    ],
)
def test_a_cpu_belongs_to_the_last_kind_whose_flags_it_has(monkeypatch, level, more, kind):
    has(monkeypatch, *flags_of_level(level), *more)
    assert this_kind().name == kind


def test_arm_cpus_are_distinguished_too(monkeypatch):
    for flags, kind in (((), "arm64"), (("asimddp",), "arm64-dotprod"), (("asimddp", "i8mm"), "arm64-i8mm")):
        has(monkeypatch, *flags, machine="aarch64")
        assert this_kind().name == kind and not this_kind().saturates
    has(monkeypatch, machine="riscv64")
    assert this_kind().name == "riscv64"


def test_the_flags_of_an_arm_cpu_are_read(tmp_path, monkeypatch):
    text = "processor\t: 0\nBogoMIPS\t: 243.75\nFeatures\t: fp asimd asimddp i8mm\n"
    monkeypatch.setattr(Path, "read_text", lambda self: text)
    assert cpu_kinds.machine_flags.__wrapped__() == {"fp", "asimd", "asimddp", "i8mm"}


def test_code_for_a_level_runs_on_the_kinds_that_have_it():
    runs = {kind.name for kind in KINDS if kind.has_level("x86-64-v3")}
    assert runs == {kind.name for kind in KINDS if "v3" in kind.name or "v4" in kind.name}
    assert [kind.name for kind in KINDS if kind.has_level("aarch64")] == ["arm64", "arm64-dotprod", "arm64-i8mm"]


def test_compilers_target_a_kinds_level_or_give_the_reason():
    request = graphs.request("x86-64-v3", backend="tvm", options=(("cpu", "host"),), toolchain=(("cpu", "x86-64-v3"),))
    assert refusal(request, "TVM") is None
    assert "'x86-64-v4', beyond x86-64-v3" in str(refusal(replace(request, options=(("cpu", "x86-64-v4"),)), "TVM"))
    assert "not for arm64" in str(refusal(graphs.request("arm64", backend="tvm"), "TVM"))
    assert refusal(graphs.request("cpu", backend="tvm", options=(("cpu", "x86-64-v4"),)), "TVM") is None


def test_names_and_aliases_name_one_kind_each():
    names = [name for kind in KINDS for name in (kind.name, *kind.aliases)]
    assert len(set(names)) == len(names) and kind_named("avx2") is kind_named("x86-64-v3")


def test_cpu_means_this_machine_and_a_run_proves_no_other_kind():
    other = next(kind.name for kind in KINDS if kind.name != this_kind().name)
    assert kind_of(CPU) == this_kind().name and kind_of(Target(other)) == other
    assert why_no_proof(graphs.request("cpu")) is None and why_no_proof(graphs.request("sm_89")) is None
    output = str(why_no_proof(graphs.request(other)))
    assert f"needs a run on {other}; the CPU on this machine is {this_kind().name}" in output
    request = graphs.request("cpu", toolchain=((CPU_KIND, other),))
    assert other in str(why_no_proof(request)), "what an engine was built for counts, not what its target is called"


def test_a_build_key_depends_on_the_kind_not_the_targets_name():
    backend = OnnxRuntime()
    keys = {}
    for name in ("cpu", *(kind.name for kind in KINDS)):
        request = graphs.request(
            name, backend="onnxruntime", toolchain=discovery.toolchain_of(backend, parse_targets(name)[0])
        )
        keys[name] = request.key
    assert keys["cpu"] == keys[this_kind().name] and len(set(keys.values())) == len(KINDS)


def integers(path: Path, op: str = "MatMulInteger") -> Path:
    """u [n, 64] uint8 times an int8 weight of 127s, or of one that is an input too."""
    weights = [("w", np.full((DEPTH, 4), 127, np.int8))]
    items = [("u", TensorProto.UINT8, ["n", DEPTH]), ("v", TensorProto.INT8, [DEPTH, 4])]
    nodes = [helper.make_node(op, ["u", "w"], ["y"], name="y"), helper.make_node(op, ["u", "v"], ["z"], name="z")]
    shape = (TensorProto.INT32, ["n", 4])
    return graphs.save(path, nodes, items, [("y", *shape), ("z", *shape)], weights)


GIVEN = {"u": np.full((3, DEPTH), 255, np.uint8), "v": np.full((DEPTH, 4), 127, np.int8)}


def test_a_kind_saturates_like_onnxruntimes_kernels_on_this_cpu(tmp_path):
    """What `KINDS` says of this machine, or of the one that it is shown as, is what its kernels do."""
    session = ort.InferenceSession(str(integers(tmp_path / "m.onnx")), providers=["CPUExecutionProvider"])
    is_saturated = {int(value) for name in ("y", "z") for value in session.run([name], GIVEN)[0].flat} != {EXACT}
    assert is_saturated == this_kind().saturates


@pytest.mark.parametrize("level", ["none", "extended", "all"])
def test_integers_are_exact_here_in_references_and_engines(tmp_path, level):
    model = integers(tmp_path / "m.onnx")
    with ReferenceSession(model) as reference:
        assert all((value == EXACT).all() for value in reference.run(GIVEN).values())
    backend = OnnxRuntime(graph_optimization=level)
    request = graphs.request("cpu", backend="onnxruntime", toolchain=tuple(sorted(backend.versions().items())))
    engine = backend.build(request, model, tmp_path)
    with backend.open(engine) as session:
        assert all((value == EXACT).all() for value in session.run(GIVEN).values())


@pytest.mark.parametrize("kind", emulated_cpu.KINDS)
def test_they_are_exact_on_cpus_without_vnni(kind):
    """The tests of this file, and int8 graphs and engines against what they stand for, with that CPU's own kernels."""
    if reason := emulated_cpu.why_not(kind):
        pytest.skip(reason)
    folder = "tests/pipeline/quantization"
    files = [__file__, *(f"{folder}/test_{name}.py" for name in ("qdq", "schemes", "reduced_range"))]
    files.append("tests/builders/test_saturation.py")
    chosen = (
        "(saturates or references or int8 or opset or dynamic or exact) and not without_vnni"  # not this test again
    )
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen, *files]
    run = [sys.executable, "-m", "tests.emulated_cpu", kind, *words]
    result = subprocess.run(run, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]


SEES = """
import faulthandler, threading
from enginesmith.core.hardware.cpu_kinds import this_kind
def show():
    from numpy._core._multiarray_umath import __cpu_features__
    print(this_kind().name, __cpu_features__["AVX512F"], __cpu_features__["AVX512VNNI"])
faulthandler.enable()  # which takes over SIGSEGV
thread = threading.Thread(target=show)
thread.start()
thread.join()
"""
FAULT = "import ctypes, faulthandler; faulthandler.enable(); ctypes.string_at(0)"


@pytest.mark.parametrize(("kind", "wide"), [("avx2", False), ("avx512", True)])
def test_other_libraries_threads_and_children_see_an_emulated_cpu(kind: str, wide: bool):
    shown_kind = kind_named(kind)
    assert shown_kind
    if reason := emulated_cpu.why_not(kind) or (shown_kind.all_flags - cpu_kinds.machine_flags() and f"no {kind} here"):
        pytest.skip(str(reason))
    run = [sys.executable, "-m", "tests.emulated_cpu", kind, "sh", "-c", '"$0" -c "$1"', sys.executable, SEES]
    result = subprocess.run(run, capture_output=True, text=True, check=True)
    assert result.stdout.split() == [shown_kind.name, str(wide), "False"]


def test_a_genuine_fault_still_kills_the_process():
    if reason := emulated_cpu.why_not():
        pytest.skip(reason)
    run = [sys.executable, "-m", "tests.emulated_cpu", "avx2", sys.executable, "-c", FAULT]
    result = subprocess.run(run, capture_output=True, text=True, check=False)
    assert result.returncode == -11 % 256 and "Fatal Python error: Segmentation fault" in result.stderr
