import numpy as np
import pytest

from builders.backends import request_checks
from enginesmith.arrays import InputCheck
from enginesmith.core.codec import decode, encode
from enginesmith.core.errors import DataError, EnginesmithError
from enginesmith.core.types import Dim, ShapeProfile, TensorSpec
from tests.builders import graphs

REQUEST = graphs.request("cpu", backend="tvm")


def check(request=REQUEST):
    return InputCheck(request.inputs, request.profiles)


def image(batch, width=8, dtype="float32"):
    return {"image": np.zeros((batch, width), dtype)}


@pytest.mark.parametrize("batch", [1, 16])
def test_shapes_inside_the_profiles_are_accepted(batch):
    (array,), sizes = request_checks.checked_inputs(check(), image(batch))
    assert array.shape == (batch, 8) and sizes == {"batch": batch}


@pytest.mark.parametrize("inputs", [image(0), image(17), image(2, 9), image(2, 8, "float64"), {}])
def test_every_other_shape_type_and_name_is_a_data_error(inputs):
    with pytest.raises(DataError):
        request_checks.checked_inputs(check(), inputs)


def test_without_profiles_any_size_is_accepted():
    request_checks.checked_inputs(check(graphs.request("cpu", profiles=())), image(1000))


def steps():
    """A request whose image has a width of 32, 64 or 96."""
    dims = [Dim("batch", 1, 2, 4), Dim("width", 32, 64, 96, multiple=32)]
    inputs = (TensorSpec("image", "float32", ("batch", "width")), TensorSpec("mask", "float32", ("batch",)))
    return graphs.request("cpu", inputs=inputs, profiles=tuple(request_checks.profiles(inputs, dims)))


def test_sizes_between_multiples_are_refused_with_the_nearest():
    request = steps()
    assert request.multiples == {"width": 32} and request.profiles[0].multiples == (("image", (1, 32)),)
    for width in (32, 64, 96):
        check(request)({**image(3, width), "mask": np.zeros(3, "f")})
    with pytest.raises(DataError, match=r"size 80 on axis 1 \(shape \(3, 80\)\).*multiples of 32.* to 64 or 96"):
        check(request)({**image(3, 80), "mask": np.zeros(3, "f")})
    free_check = InputCheck(request.inputs, request_checks.unbounded(request.profiles))
    free_check({**image(9, 320), "mask": np.zeros(9, "f")})
    with pytest.raises(DataError, match="multiples of 32 there: pad, crop or scale it to 32"):
        free_check({**image(9, 20), "mask": np.zeros(9, "f")})
    assert request_checks.unbounded(REQUEST.profiles) == ()


def test_profiles_are_written_with_all_their_fields():
    (profile,) = encode(REQUEST)["profiles"]
    assert profile.keys() == {"inputs", "multiples"} == encode(REQUEST.profiles[0]).keys()
    assert decode(encode(steps().profiles[0]), ShapeProfile) == steps().profiles[0]
    assert decode(encode(steps()), type(REQUEST)).key == steps().key


def test_arrays_are_contiguous_in_the_requests_order_and_scalars_stay_scalars():
    inputs = (TensorSpec("b", "float32", ()), TensorSpec("a", "float32", (3, 2)))
    request = graphs.request("cpu", inputs=inputs, profiles=())
    entries = {"a": np.arange(6, dtype="f").reshape(2, 3).T, "b": np.array(1, "f")}
    (scalar, matrix), _ = request_checks.checked_inputs(check(request), entries)
    assert scalar.shape == () and matrix.flags.c_contiguous and (matrix == entries["a"]).all()


@pytest.mark.parametrize(
    "wrong", [np.zeros((1, 3), "f"), np.zeros((2, 4), "f"), np.zeros((2, 3)), np.zeros((2, 3, 1), "f")]
)
def test_an_answer_of_another_shape_or_type_is_refused(wrong):
    right_array = np.zeros((2, 3), "f")
    assert request_checks.checked_outputs(REQUEST, [right_array], {"batch": 2}, "TVM")["logits"] is right_array
    with pytest.raises(EnginesmithError, match=r"TVM gives output 'logits' as .*, not float32 \('batch', 3\)"):
        request_checks.checked_outputs(REQUEST, [wrong], {"batch": 2}, "TVM")


def test_a_data_dependent_size_is_unknown_beforehand():
    request = graphs.request("cpu", outputs=(TensorSpec("logits", "float32", ("found", 3)),))
    request_checks.checked_outputs(request, [np.zeros((7, 3), "f")], {"batch": 2}, "TVM")


def test_more_profiles_than_a_plan_keeps_and_empty_tensors_are_refused():
    many_profiles = tuple(ShapeProfile((("image", (n, 8), (n, 8), (n, 8)),)) for n in range(1, 66))
    assert request_checks.refusal(graphs.request("cpu", profiles=many_profiles[:64]), "TVM") is None
    assert "more than 64 profiles" in request_checks.refusal(graphs.request("cpu", profiles=many_profiles), "TVM")
    empty_specs = (TensorSpec("image", "float32", ("batch", 0)),)
    assert "'image' has shape ('batch', 0)" in request_checks.refusal(graphs.request("cpu", inputs=empty_specs), "TVM")


def test_a_function_session_gives_outputs_by_name_until_it_is_closed():
    taken_names = []

    def function(arrays):
        taken_names.extend(arrays)
        return [np.ones((2, 3), "f")]

    session = request_checks.FunctionSession(REQUEST, "TVM", function)
    assert session.run(image(2))["logits"].shape == (2, 3) and [array.shape for array in taken_names] == [(2, 8)]
    with pytest.raises(DataError):
        session.run(image(17))
    with pytest.raises(EnginesmithError, match="TVM gives output 'logits' as float32"):
        session.run(image(4))
    session.close()
    with pytest.raises(EnginesmithError, match="the session of this TVM engine is closed"):
        session.run(image(2))
    assert len(taken_names) == 2, "neither what fits no profile nor a closed session is run"
