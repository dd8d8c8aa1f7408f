import importlib.util
import json
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from benchmarks import figures
from benchmarks.zoo import rehearsal

ROOT = Path(__file__).parents[2]
# Arguments of each benchmark; FOLDER is a folder to be made, TEXT a model with its calibration and golden data.
SMALL = {
    "bench_buckets": "--requests 600 --seconds 0.01 --traces bimodal",
    "bench_calibration": "FOLDER --model small --only cost --samples 2",
    "bench_canary": "--simulations 1 --workers 1 --cells 'all fail after 50 % of the run'",
    "bench_canary_in_flight": "--canaries 12 --requests 300 --in-flight 2 --loads 0.3",
    "bench_capacity": "digits --seconds 0.3",
    "bench_cpu_int8": "digits --rounds 1",
    "bench_dispatch": "--isolated 2 --in-worker 4 --mib 1",
    "bench_drift": "--megabytes 2",
    "bench_formats": "--points 2 --mixes 'fp8, floats'",
    "bench_gc": "--documents 300",
    "bench_growth": "--only units --factors 1 2",
    "bench_intervals": "--times 1 --seconds 0.01",
    "bench_large": "FOLDER --gb 0.01 --width 64 --precisions fp32 --once",
    "bench_latency": "--seconds 0.002 --rounds 3",
    "bench_list": "--models 20 --pause 0",
    "bench_minilm": "CPU --spec examples/encoder/encoder.yaml",
    "bench_pipeline": "digits --runs 1",
    "bench_planning": "--models 3",
    "bench_proof": "--seeds 1 --clean 1 --family mlp --workers 1",
    "bench_pull": "--mib 1 --rounds 1",
    "bench_rollout": "--nodes 5000 --seeds 1 --only good",
    "bench_router": "",
    "bench_scale": "--models 10 --nodes 20 --minutes 1 --part one --part writer",
    "bench_sessions": "onnxruntime",
    "bench_site": "20",
    "bench_streams": "",
    "bench_swaps": "--swaps 3",
    "bench_tensorrt_monitor": "--rounds 1",
    "bench_trend": "--series 2",
    "bench_warm_start": "conv --rounds 1",
    "bench_whole_build": "TEXT --runs 1",
}
# Of these the exit code says whether a bar was met, which is no matter of so few, beside other tests.
BARS = ("bench_proof", "bench_rollout", "bench_router", "bench_streams", "bench_trend")


def text_model(folder: Path) -> list[str]:
    """A product of embedded ids, [batch, sequence] -> [batch, sequence, 8], with its calibration and golden data."""
    rng, weight = np.random.default_rng(0), onnx.numpy_helper.from_array
    graph = onnx.parser.parse_graph(
        "text (int64[batch, sequence] ids) => (float[batch, sequence, 8] y)"
        "{ embedded = Gather(table, ids)  y = MatMul(embedded, weight) }"
    )
    table, matrix = (rng.standard_normal(shape, np.float32) for shape in ((10, 16), (16, 8)))
    graph.initializer.extend([weight(table, "table"), weight(matrix, "weight")])
    opset = [onnx.helper.make_opsetid("", 20)]
    onnx.save(onnx.helper.make_model(graph, ir_version=10, opset_imports=opset), folder / "text.onnx")
    for name in ("calibration", "golden"):
        np.savez(folder / f"{name}.npz", ids=rng.integers(0, 10, (8, 32)))
    return [str(folder / name) for name in ("text.onnx", "calibration.npz", "golden.npz")]


def test_each_benchmark_has_its_arguments() -> None:
    assert {*SMALL} == {path.stem for path in (ROOT / "benchmarks").glob("bench_*.py")}


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_a_benchmark_prints_its_table(name: str, tmp_path: Path) -> None:
    if name == "bench_tensorrt_monitor" and not importlib.util.find_spec("tensorrt_rtx"):
        pytest.skip("TensorRT for RTX is not installed")
    places = {"FOLDER": lambda: [str(tmp_path / "new")], "TEXT": lambda: text_model(tmp_path)}
    words = [text for word in shlex.split(SMALL[name]) for text in places.get(word, lambda word=word: [word])()]
    command = [sys.executable, "-m", f"benchmarks.{name}", *words]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0 or (name in BARS and result.returncode == 1), result.stderr
    assert "Traceback" not in result.stderr, result.stderr
    assert any(character.isdigit() for character in result.stdout), "no figure was printed"


def test_a_table_of_one_run_lists_what_was_not_measured() -> None:
    printed = json.dumps({"digits": {"pipeline_over_script_cpu": 1.36}, "encoder": {"cached_cpu_s": 0.4}}, indent=2)
    drift = json.dumps({"read": {"gb_per_cpu_s": 9.0}, "enginesmith, one thread": {"gb_per_cpu_s": 3.0}}, indent=2)
    rows = figures.table({figures.PIPELINE: printed, "bench_drift": drift, "bench_router": "Traceback"}).splitlines()
    cells = {row.split(" | ")[0][2:]: row.split(" | ")[1:3] for row in rows}
    assert cells["build of digits, over a script"] == ["1.36 times", "1.3 times, missed"]
    assert cells["build, nothing to do, CPU"] == ["0.4 s", "0.5 s, met"]
    assert cells["drift, one thread, CPU over reading"] == ["3 times", "3.2 times, met"]
    assert cells["added by the router"] == ["failed", "20 µs"]
    assert cells["added to ONNX Runtime's call"] == [figures.NOT_MEASURED, "10 µs"]
    row, router = "| router | 10.1 | -0.3 | 11.2 | 0.5 |", next(one for one in figures.FIGURES if "router" in one.what)
    assert router.cells(row) == "-0.3 µs | 20 µs, met", "the least's, not the median's"
    for code, expected in (("exit(1)", "1\n"), ("1 / 0", ""), ("exit(3)", "")):
        assert figures.printed([sys.executable, "-c", f"print(1); {code}"]) == expected


def test_a_draft_that_was_cut_short_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "spec.yaml").write_text("model: m\nprecisions: [fp32, fp16]\n")
    place = tmp_path / "registry" / "specs" / "m"
    with monkeypatch.context() as cut_context, pytest.raises(SystemExit):
        cut_context.setattr(rehearsal, "narrow", lambda _: sys.exit())
        rehearsal.copy_narrow(tmp_path, place)
    assert not place.exists()
    rehearsal.copy_narrow(tmp_path, place)
    assert "precisions: [fp32]\n" in (place / "spec.yaml").read_text()
