from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from enginesmith.core.errors import DataError, ModelError
from enginesmith.core.state import State
from enginesmith.core.types import TensorSpec
from pipeline.quantization.insertion_points import scale_states
from pipeline.quantization.ranges import Ranges
from pipeline.quantization.statistics.methods import MINMAX
from pipeline.quantization.statistics.methods import ranges as choose_ranges
from pipeline.quantization.statistics.observe import observe
from tests.pipeline.quantization import small_nets as nets
from tests.pipeline.quantization.test_observe import saved
from validation.data.samples import Samples

X = TensorSpec("x", "float32", ("batch", 5))


def calibrate(model: Path, data: Samples, tensors: Sequence[str] | None = None) -> Ranges:
    """Ranges by MinMax, of those tensors that int8 needs where none are named."""
    return choose_ranges(observe(model, data, tensors, histograms=False), MINMAX, "int8")


def test_only_tensors_for_int8_are_measured(tmp_path: Path) -> None:
    result = calibrate(saved(nets.conv_net(), tmp_path), nets.samples(tmp_path, nets.images(), (nets.IMAGE,)))
    # what each weighted node reads, what each convolution writes (behind its Relu), and the integer path between them
    assert set(result.tensors) == {"image", "r1", "c2", "r2", "pooled", "flat"}
    result = calibrate(
        saved(nets.attention_net(), tmp_path), nets.samples(tmp_path, nets.sentences(), (nets.TOKENS, nets.MASK))
    )
    assert set(result.tensors) == {"x", "a", "n", "u5", "y"}


def test_large_finite_values_are_not_nan(tmp_path: Path) -> None:
    model = saved(nets.x_net("big = Mul(x, k) y = MatMul(big, w)", k=np.float32(1e38), w=np.eye(5)), tmp_path)
    reach = calibrate(model, nets.samples(tmp_path, {"x": np.ones((8, 5), np.float32)}, (X,))).reach("big")
    assert reach == pytest.approx(1e38)


def test_a_model_without_sites_is_not_run(tmp_path: Path) -> None:
    samples = nets.samples(tmp_path, nets.x_values(), (X,))
    assert calibrate(saved(nets.x_net("y = Relu(x)"), tmp_path), samples) == Ranges({}, "minmax", samples.digest, 16)


@pytest.mark.parametrize(
    ("name", "message"), [("nothing", "is not an activation"), ("w", "is not an activation"), ("p", "BOOL")]
)
def test_an_unmeasurable_tensor_is_named(tmp_path: Path, name: str, message: str) -> None:
    model = saved(nets.x_net("p = Greater(x, x) q = Not(p) y = Where(q, x, x)"), tmp_path)
    with pytest.raises(ModelError, match=message):
        calibrate(model, nets.samples(tmp_path, nets.x_values(), (X,)), [name])


def test_a_model_that_does_not_run_is_a_model_error(tmp_path: Path) -> None:
    model = saved(nets.x_net("s = Reshape(x, shape) y = MatMul(s, w)", shape=np.array([7, 5])), tmp_path)
    with pytest.raises(ModelError, match="does not run on its calibration samples"):
        calibrate(model, nets.samples(tmp_path, nets.x_values(), (X,), nets.BATCH))


STATE = State("past", "present")


def test_a_states_scale_covers_its_largest_magnitude():
    (result,) = scale_states([STATE], Ranges({"past": (-1.0, 2.0), "present": (-5.08, 2.0)}, "minmax", "", 3))
    assert (result.input, result.output) == ("past", "present")
    assert result.scale == float(np.float32(5.08 / 127)), "as float32 holds it, so that JSON and the graph agree"


@pytest.mark.parametrize("ranges", [None, Ranges({}, "minmax", "", 0), Ranges({"past": (0.0, 0.0)}, "minmax", "", 3)])
def test_an_unobserved_state_is_refused(ranges):
    with pytest.raises(
        DataError, match=r"state\.past\.dtype: calibration samples do not show how large 'past' becomes"
    ):
        scale_states([STATE], ranges)
    assert scale_states([], ranges) == ()
