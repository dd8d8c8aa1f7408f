"""The quantizers that bench_calibration.py sets beside one another: a model and samples in, a Q/DQ model out."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

SIZE = 224


def our_quantize(
    model: Path, data: Path, out: Path, name: str, activation: Any, percentile: float | None = None, reuse: bool = False
) -> Path:
    """reuse: keep what was seen beside the data; another method then costs no inference."""
    import onnx

    from enginesmith.core.types import QuantizationScheme
    from pipeline.quantization.schemes.qdq import quantize_int8
    from pipeline.quantization.statistics.methods import method, ranges
    from pipeline.quantization.statistics.observations import Observations
    from pipeline.quantization.statistics.observe import observe

    chosen, observations = method(name, percentile), data.with_suffix(".observations")
    if reuse and observations.exists():
        seen_observations = Observations.from_bytes(observations.read_bytes())
    else:
        seen_observations = observe(model, our_samples(data), histograms=reuse or chosen.needs_histogram, threads=1)
    if reuse:
        observations.write_bytes(seen_observations.to_bytes())
    scheme = QuantizationScheme(activation, quantize_bias=activation == "uint8", float_precision="fp32")
    onnx.save(quantize_int8(onnx.load(model), ranges(seen_observations, chosen, activation), scheme)[0], out)
    return out


def our_samples(data: Path) -> Any:
    from enginesmith.core.types import Dim, TensorSpec
    from validation.data.samples import Samples

    spec = TensorSpec("x", "float32", ("batch", 3, SIZE, SIZE))
    return Samples.open(data, (spec,), (Dim("batch", 1, 1, 64),))


def reader(data: Path) -> Any:
    """The samples one by one, as onnxruntime's calibrators take them."""
    from onnxruntime.quantization import CalibrationDataReader

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.samples: Iterator[np.ndarray] = iter(np.load(data, mmap_mode="r"))

        def get_next(self) -> dict[str, np.ndarray] | None:
            sample = next(self.samples, None)
            return None if sample is None else {"x": np.ascontiguousarray(sample[None])}

    return Reader()


def ort_quantize(model: Path, data: Path, out: Path, name: str, activation: str) -> Path:
    from onnxruntime.quantization import CalibrationMethod, QuantType, quantize_static

    quantize_static(
        str(model), str(out), reader(data), per_channel=True, weight_type=QuantType.QInt8,
        activation_type=QuantType.QInt8 if activation == "int8" else QuantType.QUInt8,
        calibrate_method=CalibrationMethod[name],
        extra_options={"ActivationSymmetric": activation == "int8"},
    )  # fmt: skip
    return out


def our_search(model: Path, data: Path, out: Path, activation: Any, ranges_by: str = "mse") -> Path:
    """What a spec with `quantization.smoothing: auto` gives, without a floor: every convolution in int8."""
    import onnx

    from enginesmith.core.types import Dim, QuantizationScheme, TensorSpec
    from pipeline.quantization.schemes.qdq import quantize_int8
    from pipeline.quantization.search.selection import choose_each
    from pipeline.quantization.search.trial import SearchTarget
    from pipeline.quantization.settings.runs import group_runs
    from pipeline.quantization.statistics.methods import method, ranges
    from pipeline.quantization.statistics.observations import Observations
    from pipeline.quantization.statistics.observe import observe

    observations_path = data.with_suffix(".observations")
    seen_observations = (
        Observations.from_bytes(observations_path.read_bytes())
        if observations_path.exists()
        else observe(model, our_samples(data), histograms=True, threads=1)
    )
    observations_path.write_bytes(seen_observations.to_bytes())
    scheme = QuantizationScheme(activation, quantize_bias=activation == "uint8", float_precision="fp32")
    samples, dim = np.load(data, mmap_mode="r"), Dim("batch", 1, 8, 64)
    end_runs = ((end + 1, {"x": np.array(samples[end : end + 1])}) for end in range(len(samples)))
    runs = group_runs(end_runs, (TensorSpec("x", "float32", ("batch", 3, SIZE, SIZE)),), (dim,))
    target = SearchTarget(ranges(seen_observations, method(ranges_by), activation), scheme)
    (choices,) = choose_each(onnx.load(model), [target], runs)
    onnx.save(quantize_int8(choices.model, choices.ranges, scheme)[0], out)
    return out


def modelopt_quantize(model: Path, data: Path, out: Path, name: str) -> Path:
    """NVIDIA's ModelOpt, its own placement of Q/DQ, int8 in the TensorRT scheme. Needs `nvidia-modelopt`."""
    from modelopt.onnx.quantization import quantize

    quantize(
        str(model), quantize_mode="int8", calibration_data={"x": np.load(data)}, calibration_method=name,
        calibration_eps=["cpu"], output_path=str(out), high_precision_dtype="fp32", log_level="ERROR",
    )  # fmt: skip
    return out
