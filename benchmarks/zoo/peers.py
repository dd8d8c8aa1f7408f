"""Ours, and with `peers` other quantizers, on a graph, judged on the same unseen inputs in another process.

    python -m benchmarks.zoo.peers FOLDER [peers]      (in the environment of `environment`)

Theirs: onnxruntime's `quantize_static` (Q/DQ, MinMax, uint8 activations, int8 weights) on the same calibration samples,
onnxconverter-common's float16, Olive's static quantization on these samples; made where the spec asks for fp16, since
other graphs came quantized or have no weights. A peer's error is a result. Each file is
opened with onnxruntime's default options and one thread. Ours are the engines of
`result-onnxruntime.json`. Writes FOLDER/peers.json.
"""

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from enginesmith.arrays import Array
from enginesmith.core.types import Tensors
from enginesmith.registry.store.base import open_store
from validation.metrics.drift import Drift, measure

_CALIBRATION, _UNSEEN = "calibration.npz", "unseen.npz"


def main() -> int:
    folder = Path(sys.argv[1]).resolve()
    units = _units(folder)
    files: dict[str, Path | str] = {"source": folder / "model.onnx", **_ours(folder, units)}
    if sys.argv[2:] and any(unit["precision"] == "fp16" for unit in units):  # others came quantized, or have no weights
        files |= {name: _made(name, make, folder) for name, make in PEERS.items()}
    (folder / "peers.json").write_text(json.dumps(judge(files, folder), indent=1) + "\n", encoding="utf-8")
    return 0


def _units(folder: Path) -> list[dict[str, Any]]:
    result = folder / "result-onnxruntime.json"
    return list(json.loads(result.read_text(encoding="utf-8")).get("units", ())) if result.is_file() else []


def _ours(folder: Path, units: list[dict[str, Any]]) -> dict[str, Path]:
    """Our engines, by precision."""
    store = open_store(folder / "registry") if units else None
    return {
        f"enginesmith {unit['precision']}": store.path(unit["digest"]) for unit in units if store and unit["digest"]
    }


def _made(name: str, make: Callable[[Path, Path], None], folder: Path) -> Path | str:
    """The file of a peer, or its error in one line."""
    path = folder / f"{name.replace(' ', '-')}.onnx"
    try:
        path.unlink(missing_ok=True)
        make(folder, path)
        return path if path.is_file() else "it wrote no file and said nothing"
    except Exception as error:  # whatever a peer raises is its result
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _samples(path: Path) -> Iterator[Tensors]:
    """Complete inputs of a file."""
    with np.load(path) as stored_arrays:
        arrays = {name: stored_arrays[name] for name in stored_arrays.files}
    for index in range(len(next(iter(arrays.values())))):
        yield {name: np.asarray(array[index]) for name, array in arrays.items()}


def _static(folder: Path, path: Path) -> None:
    from onnxruntime import quantization

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.left = _samples(folder / _CALIBRATION)

        def get_next(self) -> Tensors | None:
            return next(self.left, None)

    quantization.quantize_static(
        folder / "model.onnx", path, Reader(), quant_format=quantization.QuantFormat.QDQ, per_channel=True,
        activation_type=quantization.QuantType.QUInt8, weight_type=quantization.QuantType.QInt8,
    )  # fmt: skip


def _float16(folder: Path, path: Path) -> None:
    from onnxconverter_common import float16

    onnx.save(float16.convert_float_to_float16(onnx.load(folder / "model.onnx"), keep_io_types=True), path)


def _olive(folder: Path, path: Path) -> None:
    from olive.data.registry import Registry
    from olive.workflows import run

    def load(**_: object) -> list[tuple[Tensors, int]]:
        return [(sample, 0) for sample in _samples(folder / _CALIBRATION)]

    Registry.register_dataset("zoo_samples")(load)
    data = {
        "name": "samples",
        "type": "DataContainer",
        "load_dataset_config": {"type": "zoo_samples"},
        "pre_process_data_config": {"type": "skip_pre_process"},
        "post_process_data_config": {"type": "skip_post_process"},
        "dataloader_config": {"type": "no_auto_batch_dataloader"},
    }
    place = folder / "olive"
    config = {
        "input_model": {"type": "ONNXModel", "model_path": str(folder / "model.onnx")},
        "data_configs": [data],
        "passes": {"quantize": {"type": "OnnxStaticQuantization", "data_config": "samples"}},
        "output_dir": str(place / "out"),
        "cache_dir": str(place / "cache"),
        "evaluate_input_model": False,
        "log_severity_level": 4,
    }
    run(config)
    (onnx_path,) = (place / "out").rglob("*.onnx")
    onnx_path.replace(path)


PEERS: Mapping[str, Callable[[Path, Path], None]] = {
    "onnxruntime int8": _static,
    "onnxconverter-common fp16": _float16,
    "olive int8": _olive,
}


def judge(files: Mapping[str, Path | str], folder: Path) -> dict[str, dict[str, Any]]:
    """By file: worst output's SQNR and worst slice's in dB against `source` unoptimised."""
    golden = list(_samples(folder / _UNSEEN))
    reference = _open(folder / "model.onnx", ort.GraphOptimizationLevel.ORT_DISABLE_ALL)
    expected = [_run(reference, sample) for sample in golden]
    judgement = dict[str, dict[str, Any]]()
    for name, file in files.items():
        judgement[name] = {"error": file} if isinstance(file, str) else {}
        if isinstance(file, Path):
            try:
                session = _open(file)
                judgement[name] |= _quality(expected, [_run(session, sample) for sample in golden])
            except Exception as error:  # of onnxruntime, which has no base class for its errors
                judgement[name]["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return judgement


def _open(path: Path, level: Any = ort.GraphOptimizationLevel.ORT_ENABLE_ALL) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _run(session: ort.InferenceSession, sample: Tensors) -> list[Array]:
    taken_names = {item.name for item in session.get_inputs()}
    return session.run(None, {name: value for name, value in sample.items() if name in taken_names})  # type: ignore[no-any-return]


def _quality(expected: list[list[Array]], actual: list[list[Array]]) -> dict[str, float | None]:
    """Over the outputs: the least SQNR, whole and of a slice; of integer outputs the least share of equal elements."""
    whole_infs, slices, equal_values = [math.inf], [math.inf], [1.0]
    for output in range(len(expected[0])):
        drift = Drift(mismatches=0) if expected[0][output].dtype.kind in "biu" else Drift()
        for e, a in zip(expected, actual, strict=True):
            e, a = np.asarray(e[output]), np.asarray(a[output])
            drift = drift.merge(measure(e, a.astype(e.dtype), samples=1 if e.ndim else None))
        if drift.mismatches is None:
            whole_infs.append(-math.inf if drift.nonfinite else drift.sqnr_db)
            slices.append(-math.inf if drift.nonfinite else drift.slice_sqnr_db)
        else:
            equal_values.append(drift.argmax_agreement)
    return {"sqnr_db": _number(min(whole_infs)), "slice_db": _number(min(slices)), "equal": min(equal_values)}


def _number(decibels: float) -> float | None:
    """None for no error at all, which JSON has no number for; -999 for values that are not finite."""
    return None if decibels == math.inf else -999.0 if decibels == -math.inf else round(decibels, 1)


if __name__ == "__main__":
    sys.exit(main())
