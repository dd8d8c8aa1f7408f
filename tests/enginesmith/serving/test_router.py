from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from enginesmith.core.codec import decode, encode
from enginesmith.core.errors import DataError, EnginesmithError, InputError
from enginesmith.core.state import Padding
from enginesmith.core.types import TensorSpec
from enginesmith.serving.buckets import RoutedEngine
from enginesmith.serving.router import Router, RouterCounts
from tests.enginesmith.serving.engines import INPUTS, OUTPUTS, PADDING, Calls, assert_same, engine, profile, request

EDGES = Padding(PADDING.inputs, {"sequence": (8, 16)})


def test_answers_are_those_of_the_unpadded_request():
    calls = Calls()
    router = Router([engine("a", profile((4, 4), (1, 16)), run=calls)], EDGES)
    for batch in (1, 3, 4):
        for sequence in (1, 7, 8, 9, 16):
            assert_same(router.run(inputs := request(batch, sequence)), inputs)
    assert set(calls.shapes) == {(4, 8), (4, 16)}


def test_every_request_is_counted_with_its_padding():
    router = Router([engine("a", profile((1, 4), (1, 16)))], EDGES, fallbacks=[engine("graph")])
    for sequence in (6, 8, 12, 20):
        router.run(request(2, sequence))
    with pytest.raises(DataError):
        router.run({})
    counts = router.counts()
    assert [(item.requests, item.elements, item.padding) for item in counts.buckets] == [(2, 56, 8), (1, 48, 16)]
    assert counts.fallbacks == {"graph": 1} and counts.requests == 4 and counts.fallback_rate == 0.25
    assert counts.padding_share == pytest.approx(24 / 128)
    assert decode(encode(counts), RouterCounts) == counts


def test_a_request_without_bucket_or_fallback_is_an_error_with_a_remedy():
    router = Router([engine("a", profile((1, 4), (1, 16)))], EDGES)
    with pytest.raises(
        DataError, match=r"no bucket holds a request of batch 9, sequence 3; buckets are a: .*widen dims"
    ):
        router.run(request(9, 3))
    assert router.counts().unanswered == 1 and router.counts().fallback_rate == 1.0


def test_a_failing_fallback_gives_its_reason():
    def out_of_memory(_):
        raise MemoryError("no room")

    router = Router([engine("a", profile((1, 4), (1, 16)))], fallbacks=[engine("graph", run=out_of_memory)])
    with pytest.raises(EnginesmithError, match=r"no fallback answers: graph: MemoryError: no room"):
        router.run(request(9, 3))
    assert router.counts().unanswered == 1


def test_an_engines_error_is_raised_and_counted():
    def broken(_):
        raise RuntimeError("cuda")

    router = Router([engine("a", profile((1, 4), (1, 16)), run=broken)], fallbacks=[engine("graph")])
    with pytest.raises(RuntimeError, match="cuda"):
        router.run(request(1, 3))
    assert router.counts().errors == 1 and router.counts().requests == 0


def test_a_router_that_is_closed_refuses_requests():
    with Router([engine("a", profile((1, 4), (1, 16)))]) as router:
        router.run(request(1, 3))
    with pytest.raises(EnginesmithError, match="closed"):
        router.run(request(1, 3))


def test_floats_are_converted_for_engines_of_other_types():
    halves_specs = tuple(TensorSpec(s.name, s.dtype.replace("float32", "float16"), s.shape) for s in INPUTS)
    items = []

    def run(inputs):
        items.append(inputs["x"].dtype.name)
        return {name: array.astype(np.float16) for name, array in Calls()(inputs).items()}

    outputs = tuple(TensorSpec(spec.name, "float16", spec.shape) for spec in OUTPUTS)
    half_engine = RoutedEngine("half", run, halves_specs, outputs, (profile((1, 4), (17, 32)),))
    router = Router([engine("a", profile((1, 4), (1, 16))), half_engine])
    answer = router.run(request(2, 20))
    assert items == ["float16"] and answer["each"].dtype == np.float32


def test_known_shapes_excuse_no_other_input():
    router = Router([engine("a", profile((1, 4), (1, 16)))], EDGES)
    inputs = request(2, 6)
    router.run(inputs)
    for fields in ({"x": inputs["x"].astype(np.float64)}, {"mask": inputs["mask"].astype(">i8")}, {"z": inputs["x"]}):
        with pytest.raises(DataError):
            router.run({**inputs, **fields})
    with pytest.raises(DataError, match="no array for input 'mask'"):
        router.run({"x": inputs["x"]})
    assert router.counts().requests == 1


def test_many_threads_get_their_own_answers_and_no_request_is_lost():
    router = Router([engine("a", profile((1, 4), (1, 16)))], EDGES, fallbacks=[engine("graph")])

    def one(index):
        inputs = request(1 + index % 5, 1 + index % 17, index)
        assert_same(router.run(inputs), inputs)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(400)))
    assert router.counts().requests == 400


def test_the_sizes_of_a_bucket_are_reported_before_a_request_is_run():
    router = Router([engine("a", profile((2, 4), (1, 16)))], EDGES)
    assert router.padded_sizes({"batch": 1, "sequence": 3}) == {"batch": 2, "sequence": 8}
    assert router.padded_sizes({"sequence": 17, "batch": 1}) is None


def test_bad_engines_are_refused():
    with pytest.raises(InputError, match="no engine"):
        Router([])
    with pytest.raises(InputError, match=r"two engines .* 'a'"):
        Router([engine("a"), engine("a")])
    other_engine = RoutedEngine("b", Calls(), INPUTS[:1], OUTPUTS)
    with pytest.raises(InputError, match="'b' takes"):
        Router([engine("a"), other_engine])


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((None,), {}, "engines is a NoneType; give a list"),
        ((engine("a"),), {}, "engines is a RoutedEngine; give a list"),
        ((["a"],), {}, "engines has a str"),
        (([engine("a")], {"x": 0}), {}, "padding is a dict; give enginesmith.serving.Padding"),
        (([engine("a")],), {"fallbacks": None}, "fallbacks is a NoneType"),
    ],
)
def test_arguments_of_another_kind_are_reported(arguments, options, message):
    with pytest.raises(InputError, match=message):
        Router(*arguments, **options)
    with pytest.raises(InputError, match=r"give the list that Client.pull_all returns"):
        Router.opened(arguments[0] if arguments[0] in (None, ["a"]) else "engines/")


def test_sizes_of_all_dims_are_required():
    router = Router([engine("a", profile((2, 4), (1, 16)))], EDGES)
    for sizes in ({"batch": 1}, {"batch": 1, "sequence": "3"}):
        with pytest.raises(InputError, match="no size of dim 'sequence'"):
            router.padded_sizes(sizes)
