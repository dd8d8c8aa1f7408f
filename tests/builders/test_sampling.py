"""Engines with a sampler: what they are built from, and that they are opened as engines of the model alone."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from builders.backends.compatibility import open_engine, open_sampler
from builders.backends.onnxruntime import OnnxRuntime
from builders.reference import ReferenceSession
from builders.sampling import build_engine, with_sampler
from enginery.core.types import Engine
from tests.decoding import REQUEST, make_decoder

INPUTS = {"ids": np.array([[1], [2]]), "past": np.ones((2, 3, 8), np.float32)}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("sampled")
    onnx.save(make_decoder(), folder / "model.onnx")
    return build_engine(OnnxRuntime(), REQUEST, folder / "model.onnx", folder)


def test_an_engine_is_opened_as_one_of_the_model_alone(engine: Engine) -> None:
    assert engine.request is REQUEST
    with open_engine(engine) as actual, ReferenceSession(engine.path.with_name("model.onnx")) as expected:
        assert [spec.name for spec in actual.inputs] == ["ids", "past"]
        assert [spec.name for spec in actual.outputs] == ["logits", "present"]
        found, wanted = actual.run(INPUTS), expected.run(INPUTS)
        assert found.keys() == wanted.keys()
        np.testing.assert_allclose(found["logits"], wanted["logits"], atol=1e-6)
        call = actual.prepare_call(INPUTS)
        assert call is not None
        call()


def test_the_sampler_is_there_for_those_who_ask(engine: Engine) -> None:
    with open_sampler(engine) as session:
        answer = session.run(with_sampler(engine, INPUTS)[1])
    np.testing.assert_array_equal(answer["next_token"], answer["logits"].argmax(-1))


def test_a_request_without_a_sampler_is_built_as_ever(tmp_path: Path) -> None:
    from dataclasses import replace

    onnx.save(make_decoder(), tmp_path / "model.onnx")
    plain = build_engine(OnnxRuntime(), replace(REQUEST, sampling=None), tmp_path / "model.onnx", tmp_path)
    assert plain.request.key != REQUEST.key
    with open_sampler(plain) as session:
        assert [spec.name for spec in session.inputs] == ["ids", "past"]
