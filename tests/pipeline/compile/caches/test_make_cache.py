"""A process that starts out of a cache compiles nothing; what is judged of that; and what a spec may ask for."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from enginesmith.compile_caches.archive import pack
from enginesmith.compile_caches.recipe import CompileOptions
from enginesmith.core.errors import ModelError, SpecError, digest_of_file
from enginesmith.core.hardware.machine import parse_targets
from enginesmith.core.reports.proof import describe
from enginesmith.core.types import TensorSpec
from enginesmith.user_code.compiling import CompileModel, RanCompiled
from pipeline.compile.caches.make_cache import MOST_RATIO, judge_start
from pipeline.compile.caches.maker import explain_refusal
from pipeline.sources.user_process import CompiledSession
from pipeline.spec.model import load_spec

NET = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(8, 4)
    def forward(self, x):
        return torch.nn.functional.silu(self.fc(x)) * {factor}
def build():
    return Net()
"""
SPEC = """
model: net
source: {source}
inputs: {{x: {{shape: [batch, 8]}}}}
dims: {{batch: {{max: 8}}}}
targets: [cpu]
compile_cache: {{}}
"""
OUTPUTS = (TensorSpec("output", "float32", ("batch", 4)),)


def answers(session: CompiledSession, *rows: int) -> list[np.ndarray]:
    return [session.run({"x": np.ones((count, 8), np.float32)})["output"] for count in rows]


@pytest.mark.slow
def test_a_process_out_of_a_cache_compiles_nothing_and_answers_the_same(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NET.format(factor=2))
    model = CompileModel(tmp_path, "net.py", "build", CompileOptions(dynamic={"x": (0,)}))
    folder, cache = tmp_path / "inductor", tmp_path / "net.cache"
    folder.mkdir()
    with CompiledSession(replace(model, folder=folder), OUTPUTS) as cold:
        expected = answers(cold, 4, 1, 5)
    assert cold.answers[-1].misses["graphs of Inductor"] == 2  # 1 has a graph of its own, and 5 that of 4
    probes = cold.answers[-1].probes
    assert probes and all(name.endswith(".so") for name in probes)
    pack(folder, replace(cold.recipe, probes=probes), cache)
    out_of_cache = replace(model, cache=cache, digest=digest_of_file(cache))
    with CompiledSession(out_of_cache, OUTPUTS) as warm:
        found = dict(zip((1, 5, 4), answers(warm, 1, 5, 4), strict=True))
        assert all(np.array_equal(found[rows], whole) for rows, whole in zip((4, 1, 5), expected, strict=True))
    assert (tmp_path / "net.files").is_dir()  # and nothing is left in the folder of temporary files
    assert warm.answers[-1].misses == {} and warm.answers[-1].frames == cold.answers[-1].frames
    assert [check.passed for check in judge_start(cold, warm)][2:] == [True, True]
    (tmp_path / "net.py").write_text(NET.format(factor=3))
    with (
        pytest.raises(Exception, match="another model: class Net has other source"),
        CompiledSession(out_of_cache, OUTPUTS),
    ):
        pass


def started(cpu_s: float, misses: dict[str, int], frames: int) -> CompiledSession:
    session = CompiledSession(CompileModel(Path(), "net.py", "build", CompileOptions()), OUTPUTS)
    session.answers.append(RanCompiled(cpu_s, 2 * cpu_s, misses, frames))
    return session


@pytest.mark.parametrize(
    ("warm", "failed"),
    [
        ((10 * MOST_RATIO, {}, 2), []),
        ((10 * MOST_RATIO + 0.1, {}, 2), ["warm start, CPU time"]),
        ((1.0, {"C++ kernels": 1}, 2), ["compiled again"]),
        ((1.0, {}, 3), ["recompilations"]),
    ],
)
def test_a_warm_start_is_judged_by_time_and_by_what_was_compiled(
    warm: tuple[float, dict[str, int], int], failed: list[str]
) -> None:
    checks = list(judge_start(started(10.0, {"graphs of Inductor": 2}, 2), started(*warm)))
    assert [check.name for check in checks if not check.passed] == failed
    told = "cold 10.0 CPU seconds (20.0 s), warm 3.1 CPU seconds (6.2 s); no cache saves the imports"
    assert (told in describe(checks[0])) == ("warm start, CPU time" in failed)


def test_a_cache_is_made_on_the_device_that_it_is_for() -> None:
    gpu, arm = parse_targets("l4")[0], parse_targets("arm64")[0]
    assert explain_refusal(parse_targets("cpu")[0]) is None
    assert "torch compiles for this CPU" in str(explain_refusal(arm))
    assert explain_refusal(gpu) is not None  # torch of the tests has no CUDA


@pytest.mark.parametrize(
    ("source", "more", "words"),
    [
        ("{onnx: net.py}", "", "compile_cache is of a module that torch.compile compiles, and the source is onnx"),
        ("{torch: 'net.py:build'}", "state: {x: {output: y, initial: 0}}", "compile_cache of a model with state"),
        ("{torch: 'net.py:build'}", "compile_cahce: {}", "did you mean 'compile_cache'"),
    ],
)
def test_a_spec_that_no_cache_can_be_made_of_is_refused(tmp_path: Path, source: str, more: str, words: str) -> None:
    (tmp_path / "net.py").write_text(NET.format(factor=2))
    (tmp_path / "net.yaml").write_text(SPEC.format(source=source) + more)
    with pytest.raises(SpecError, match=words):
        load_spec(tmp_path / "net.yaml")


def test_the_axes_that_dims_name_are_symbols_unless_the_spec_says_otherwise(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NET.format(factor=2))
    for written, axes in (("{}", {"x": (0,)}), ("{dynamic: false}", {})):
        text = SPEC.format(source="{torch: 'net.py:build'}").replace("compile_cache: {}", f"compile_cache: {written}")
        (tmp_path / "net.yaml").write_text(text)
        spec = load_spec(tmp_path / "net.yaml")
        assert spec.compile_cache and spec.compile_cache.options(spec.tensors()).dynamic == axes


def test_what_cannot_be_compiled_is_the_models_error(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NET.format(factor="(print('said') or 2)"))
    model = CompileModel(tmp_path, "net.py", "build", CompileOptions(fullgraph=True), folder=tmp_path)
    with (
        CompiledSession(model, OUTPUTS) as session,
        pytest.raises(ModelError, match=r"net.py: build's model cannot be"),
    ):
        answers(session, 4)
