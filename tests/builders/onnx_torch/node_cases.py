"""The ONNX project's own node tests (they are in the onnx package) through the conversion to torch.

python -m tests.builders.onnx_torch.node_cases [FILTER]      the table: passed, refused with the reason, failed
"""

import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from onnx import TensorProto, numpy_helper

from builders.onnx_ops.graph import known_operators
from builders.onnx_ops.torch_arrays import to_array, to_tensor
from builders.onnx_torch.arrays import TORCH
from builders.onnx_torch.program import OnnxModule, read_model
from enginesmith.core.errors import ModelError

TORCH_REFUSED = "torch cannot run it"  # as the module says it: no refusal of ours


class Outcome(NamedTuple):
    case: str
    kind: str  # passed, refused, failed
    reason: str


@cache
def cases() -> list:
    from onnx.backend.test.loader import load_model_tests

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what numpy says of overflow while the expected outputs are made
        return load_model_tests(kind="node")


def outcomes(part: str = "") -> Iterator[Outcome]:
    for case in cases():
        if part in case.name:
            yield _outcome(case)


def _outcome(case) -> Outcome:
    try:
        module = OnnxModule(read_model(case.model))
        for inputs, expected in case.data_sets:
            _compare(module(*map(_tensor, inputs)), expected, case.rtol, case.atol)
    except ModelError as error:
        kind = "failed" if TORCH_REFUSED in str(error) else "refused"
        return Outcome(case.name, kind, str(error))
    except Exception as error:
        return Outcome(case.name, "failed", f"{type(error).__name__}: {error}")
    return Outcome(case.name, "passed", "")


def _tensor(value) -> torch.Tensor:
    return to_tensor(_array(value))


def _array(value) -> np.ndarray:
    return numpy_helper.to_array(value) if isinstance(value, TensorProto) else np.asarray(value)


def _compare(got, expected, rtol: float, atol: float) -> None:
    assert len(got) == len(expected), f"{len(got)} outputs for {len(expected)}"
    for tensor, array in zip(got, expected, strict=True):
        out, array = to_array(tensor), _array(array)
        assert out.dtype == array.dtype, f"{out.dtype} for {array.dtype}"
        assert out.shape == array.shape, f"shape {out.shape} for {array.shape}"
        rtol = max(rtol, 2**-6) if array.dtype.name == "bfloat16" else rtol  # as onnx's own runner has it
        rtol = max(rtol, 2**-9) if array.dtype == np.float16 else rtol  # two units in its last place
        with np.errstate(all="ignore"):  # a NaN is cast to NaN
            arrays = (out, array) if array.dtype.kind in "biu" else (out.astype(np.float64), array.astype(np.float64))
        np.testing.assert_allclose(*arrays, rtol=rtol, atol=atol)


def main() -> None:
    expected = sys.argv[1] if len(sys.argv) > 1 else ""
    actual = list(outcomes(expected))
    for outcome in actual:
        if outcome.kind == "failed":
            print(f"FAILED {outcome.case}: {outcome.reason[:600]}")
    reasons = Counter(outcome.reason.split(": ", 1)[-1][:110] for outcome in actual if outcome.kind == "refused")
    for reason, count in reasons.most_common():
        print(f"{count:5} refused: {reason}")
    print(len(known_operators(TORCH)), "operators;", dict(Counter(outcome.kind for outcome in actual)))


if __name__ == "__main__":
    main()
