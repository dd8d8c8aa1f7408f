"""Running an engine, over stand-ins for TensorRT and for libcuda: the order of the calls, and what is refused."""

from types import SimpleNamespace

import numpy as np
import pytest

from builders.backends.tensorrt import TensorRT, TensorRTRTX, session
from builders.backends.tensorrt import session as lanes
from builders.backends.tensorrt.library import Opening
from builders.backends.tensorrt.session import EngineSession, open_engine
from enginesmith.core.errors import DataError, EnginesmithError
from enginesmith.core.hardware import cuda
from enginesmith.core.hardware.cuda import Device
from enginesmith.core.types import Engine, ShapeProfile, TensorSpec
from tests.builders import graphs
from tests.builders.fake_cuda import TRT, FakeContext, FakeEngine, Said, compiled, counter

BUCKETS = tuple(ShapeProfile((("image", (low, 8), (high, 8), (high, 8)),)) for low, high in ((1, 2), (3, 16)))
OUTPUTS = (TensorSpec("logits", "float32", ("batch", 8)),)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def driver(library, monkeypatch):
    monkeypatch.setattr(cuda.ctypes, "CDLL", lambda name: library)
    return library


def images(batch, seed=0):
    return {"image": np.random.default_rng(seed).standard_normal((batch, 8)).astype("f")}


def session_over(device, engine, profiles=BUCKETS, **opening):
    request = graphs.request("sm_89", profiles=profiles, outputs=OUTPUTS)
    return EngineSession(TRT, request, engine, device, Said(), Opening(0, **opening))


def check(opened, batch, seed=0):
    actual = images(batch, seed)
    np.testing.assert_array_equal(opened.run(actual)["logits"], actual["image"] * 2)


def test_each_profile_has_its_own_context_and_memory(driver):
    engine = FakeEngine(driver)
    with Device(0) as device:
        opened_session = session_over(device, engine)
        for batch in (2, 16, 3, 1):
            check(opened_session, batch)
        opened_session.close()
    assert [context.profiles for context in engine.contexts] == [[0], [1]]
    assert {context.strategy for context in engine.contexts} == {"on profile change"}
    assert counter(driver, "live").value == 0


def test_a_model_without_dynamic_dims_sets_no_profile(driver):
    engine = FakeEngine(driver)
    with Device(0) as device:
        check(session_over(device, engine, profiles=()), 4)
    assert engine.contexts[0].profiles == [] and engine.contexts[0].strategy == "static"


def test_a_strided_input_is_made_contiguous(driver):
    image = np.arange(64, dtype="f").reshape(8, 8).T[:4]
    with Device(0) as device:
        result = session_over(device, FakeEngine(driver)).run({"image": image})["logits"]
    np.testing.assert_array_equal(result, image * 2)


def test_a_shape_outside_every_profile_is_a_data_error(driver):
    with Device(0) as device, pytest.raises(DataError, match="no optimization profile holds image"):
        session_over(device, FakeEngine(driver)).run(images(17))


def test_a_run_time_refusal_is_an_error_with_tensorrts_message(driver):
    with Device(0) as device:
        opened_session = session_over(device, FakeEngine(driver))
        check(opened_session, 1)

        def refuse(stream):
            opened_session._logger.messages.append(("ERROR", "Cuda failure: out of memory"))
            return False

        opened_session._loaded.contexts[0].execute_async_v3 = refuse
        with pytest.raises(EnginesmithError, match="out of memory; remedy: free GPU memory"):
            opened_session.run(images(1))


def test_a_failed_context_is_an_error_with_tensorrts_message(driver):
    engine = FakeEngine(driver, make=lambda engine, strategy: None)
    with Device(0) as device, pytest.raises(EnginesmithError, match="an execution context failed"):
        session_over(device, engine).run(images(1))


def test_an_output_may_hold_nothing(driver):
    with Device(0) as device:
        assert session_over(device, FakeEngine(driver), profiles=()).run(images(0))["logits"].shape == (0, 8)


def test_a_shape_that_depends_on_data_is_refused(driver):
    class Dynamic(FakeContext):
        def get_tensor_shape(self, name):
            return (-1, 8)

    with Device(0) as device, pytest.raises(EnginesmithError, match="depends on data"):
        session_over(device, FakeEngine(driver, make=Dynamic)).run(images(1))


def test_a_shape_is_captured_at_its_second_run_and_replayed_with_new_values(driver):
    engine = FakeEngine(driver)
    with Device(0) as device:
        opened_session = session_over(device, engine, cuda_graphs=True)
        for seed in range(4):
            check(opened_session, 2, seed)
        (context,) = engine.contexts
        assert context.calls == ["shape", "address", "address", "execute", "execute"], "bound once, and run once"
        assert len(engine.captured) == 1 and len(engine.launched) == 3
        for seed in range(3):
            check(opened_session, 1, seed)
            check(opened_session, 2, seed)
        assert len(engine.contexts) == 2, "another shape of the same profile has a context of its own"
        assert len(engine.captured) == 2 and counter(driver, "graphs").value == 2
        opened_session.close()
    assert counter(driver, "graphs").value == counter(driver, "live").value == 0


def test_only_the_shapes_used_last_keep_their_graph(driver, monkeypatch):
    monkeypatch.setattr(lanes, "MOST_LANES", 2)
    with Device(0) as device:
        opened_session = session_over(device, FakeEngine(driver), cuda_graphs=True)
        for batch in (3, 4, 3, 5, 3, 6, 3):
            for _ in range(2):
                check(opened_session, batch)
        assert counter(driver, "graphs").value == 2
        assert sorted(key[1][0][0] for key in opened_session._lanes._lanes) == [3, 6]
        opened_session.close()
    assert counter(driver, "live").value == 0


def test_an_uncapturable_graph_is_reported_and_leaves_the_stream_usable(driver):
    broken_counter = counter(driver, "uncapturable")
    with Device(0) as device:
        opened_session = session_over(device, FakeEngine(driver), cuda_graphs=True)
        check(opened_session, 2)
        broken_counter.value = 900
        try:
            with pytest.raises(EnginesmithError, match=r"cannot be captured.*CAPTURE_UNSUPPORTED.*cuda_graphs: false"):
                opened_session.run(images(2))
        finally:
            broken_counter.value = 0
        assert counter(driver, "capturing").value == 0
        opened_session.close()


def test_an_input_whose_values_are_shapes_stays_on_the_host_and_is_not_captured(driver):
    class Reads(FakeContext):
        def _double(self, addresses, shape):
            assert addresses["image"] == self.engine.given.ctypes.data
            super()._double(addresses, shape)

    engine = FakeEngine(driver, make=Reads, on_host=("image",), shaping=("image",))
    with Device(0) as device:
        actual = images(2)
        engine.given = actual["image"]
        np.testing.assert_array_equal(session_over(device, engine).run(actual)["logits"], actual["image"] * 2)
        with pytest.raises(EnginesmithError, match=r"'image' decides shapes by its values.*cuda_graphs: false"):
            session_over(device, engine, cuda_graphs=True)


@pytest.mark.parametrize("captures", [False, True])
def test_gpu_time_is_measured_by_events(driver, captures):
    engine = FakeEngine(driver)
    with Device(0) as device:
        opened_session = session_over(device, engine, cuda_graphs=captures)
        assert opened_session.device_seconds(images(2), 3) == pytest.approx([2.5e-3] * 3)
        opened_session.close()
    assert counter(driver, "events").value == 0
    assert engine.contexts[0].calls.count("execute") == (2 if captures else 5)


def test_a_profiler_reaches_every_context(driver):
    engine = FakeEngine(driver)
    with Device(0) as device:
        opened_session = session_over(device, engine)
        check(opened_session, 1)
        opened_session.listen("profiler")
        check(opened_session, 16)
    assert [context.profiler for context in engine.contexts] == ["profiler", "profiler"]


def opened_with(driver, tmp_path, backend, engine, **fields):
    """What `open` of a backend makes of an engine of the fake TensorRT; what was done to its runtime."""
    namespace = SimpleNamespace(engine_host_code_allowed=False)
    namespace.deserialize_cuda_engine = lambda data: engine
    path = tmp_path / "engine.plan"
    path.write_bytes(b"plan")
    trt = SimpleNamespace(**vars(TRT), Runtime=lambda log: namespace)
    proto = Engine(graphs.request("sm_89", backend=backend.name, outputs=OUTPUTS), path, "0" * 64, 4, ".plan", **fields)
    with open_engine(trt, Said(), proto, backend._configure_opening(Opening(0))) as opened_session:
        check(opened_session, 2)
    return namespace


def test_options_reach_the_opening_of_an_engine(driver, tmp_path, monkeypatch):
    refitted_models = []
    monkeypatch.setattr(session, "refit", lambda trt, log, loaded, model: refitted_models.append(model))
    engine = FakeEngine(driver)
    assert not opened_with(driver, tmp_path, TensorRT(), engine).engine_host_code_allowed
    assert engine.weight_streaming_budget_v2 is None and refitted_models == []
    assert opened_with(driver, tmp_path, TensorRT(version_compatible=True), engine).engine_host_code_allowed
    opened_with(driver, tmp_path, TensorRT(weight_streaming=True), engine)
    assert engine.weight_streaming_budget_v2 == 600
    opened_with(driver, tmp_path, TensorRTRTX(weight_streaming=True, weight_budget_mib=1), engine)
    assert engine.weight_streaming_budget_v2 == 1000, "no more than there is to stream"
    opened_with(driver, tmp_path, TensorRT(strip_weights=True), engine, weights=tmp_path / "m.onnx")
    assert refitted_models == [tmp_path / "m.onnx"]
    with pytest.raises(EnginesmithError, match="has no weights of its own"):
        opened_with(driver, tmp_path, TensorRT(strip_weights=True), engine)


def test_rtx_uses_its_own_cuda_graph_capture(driver, tmp_path):
    engine = FakeEngine(driver)
    opened_with(driver, tmp_path, TensorRTRTX(cuda_graphs=True), engine)
    assert engine.contexts[0].strategy.cuda_graph_strategy == "whole graph" and engine.captured == []


def test_an_engine_that_does_not_load_gives_the_reason(driver, tmp_path):
    with pytest.raises(EnginesmithError, match=r"engine\.plan failed"):
        opened_with(driver, tmp_path, TensorRT(), None)
    assert counter(driver, "contexts").value == counter(driver, "streams").value == 0
