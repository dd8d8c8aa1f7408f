from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
import pytest
import torch

from enginesmith.core.state import Padding
from enginesmith.core.types import ShapeProfile, Tensors, TensorSpec
from enginesmith.serving.batcher import Batcher
from enginesmith.serving.buckets import RoutedEngine
from enginesmith.serving.router import Router
from tests.waiting import PATIENCE_S

EXAMPLES = Path(__file__).parents[2] / "examples"
MASKED = Padding(
    {"input_ids": {"batch": 0.0, "sequence": 0.0}, "attention_mask": {"batch": "repeat", "sequence": 0.0}},
    {"sequence": (8, 32)},
)
TOKENS = tuple(TensorSpec(name, "int64", ("batch", "sequence")) for name in ("input_ids", "attention_mask"))
IMAGE = (TensorSpec("image", "float32", ("batch", 1, 8, 8)),)
EMBEDDING = TensorSpec("embedding", "float32", ("batch", 384))
HIDDEN = TensorSpec("last_hidden_state", "float32", ("batch", "sequence", 64))


def model_of(name: str) -> torch.nn.Module:
    place = spec_from_file_location(f"padded_{name}", EXAMPLES / name / "model.py")
    module = module_from_spec(place)
    place.loader.exec_module(module)
    torch.manual_seed(0)
    return module.build().eval()


def run_of(name: str, output: str, shapes: list[tuple[int, ...]]) -> Callable[[Tensors], Tensors]:
    model = model_of(name)

    def run(inputs: Tensors) -> Tensors:
        shapes.append(next(iter(inputs.values())).shape)
        with torch.no_grad():
            result = model(*(torch.from_numpy(array) for array in inputs.values()))
        return {key: value.numpy() for key, value in (result if isinstance(result, dict) else {output: result}).items()}

    return run


def tokens(batch: int, sequence: int) -> Tensors:
    """Sentences of unequal lengths: masked at their ends already."""
    rng = np.random.default_rng(batch * 100 + sequence)
    lengths = rng.integers(1, sequence + 1, (batch, 1))
    mask = (np.arange(sequence) < lengths).astype(np.int64)
    return {"input_ids": rng.integers(1, 257, (batch, sequence)) * mask, "attention_mask": mask}


def images(batch: int, _: int) -> Tensors:
    return {"image": np.random.default_rng(batch).standard_normal((batch, 1, 8, 8), np.float32)}


CASES = {
    "digits": ("logits", IMAGE, (TensorSpec("logits", "float32", ("batch", 10)),), Padding({"image": {"batch": 0.0}})),
    "encoder": ("", TOKENS, (HIDDEN, TensorSpec("embedding", "float32", ("batch", 64))), MASKED),
    "minilm": ("embedding", TOKENS, (EMBEDDING,), MASKED),
}


@pytest.mark.parametrize("name", ["digits", "encoder", pytest.param("minilm", marks=pytest.mark.slow)])
def test_answers_are_those_of_the_unpadded_request(name: str) -> None:
    output, inputs, outputs, padding = CASES[name]
    shapes: list[tuple[int, ...]] = []
    run, make = run_of(name, output, shapes), images if name == "digits" else tokens
    high = {spec.name: spec.at({"batch": 4, "sequence": 32}) for spec in inputs}
    low = {spec.name: spec.at({"batch": 4, "sequence": 1}) for spec in inputs}
    profile = ShapeProfile(tuple((key, low[key], high[key], high[key]) for key in high))
    router = Router([RoutedEngine(name, run, inputs, outputs, (profile,))], padding)
    sizes = [(batch, sequence) for batch in (1, 3, 4) for sequence in ((3, 8, 21) if name != "digits" else (1,))]
    for batch, sequence in sizes:
        arguments = make(batch, sequence)
        expected, result = run(arguments), router.run(arguments)
        assert expected.keys() == result.keys()
        for key in expected:
            np.testing.assert_allclose(result[key], expected[key], rtol=2e-4, atol=2e-5)
    assert router.counts().padding_share > 0 and router.counts().requests == len(sizes)
    with Batcher(router, most=4, wait_s=0.05) as batcher:
        requests = [make(1, 3 + index) for index in range(6)]
        futures = [batcher.submit(arguments) for arguments in requests]
        for arguments, future in zip(requests, futures, strict=True):
            for key, array in run(arguments).items():
                np.testing.assert_allclose(future.result(PATIENCE_S)[key], array, rtol=2e-4, atol=2e-5)


def test_a_mask_padded_with_ones_is_detected() -> None:
    """The comparison above can fail."""
    shapes: list[tuple[int, ...]] = []
    run = run_of("encoder", "", shapes)
    wrong_padding = Padding({**MASKED.inputs, "attention_mask": {"batch": 1.0, "sequence": 1.0}})
    profile = ShapeProfile(tuple((spec.name, (1, 1), (4, 32), (4, 32)) for spec in TOKENS))
    engine = RoutedEngine("encoder", run, TOKENS, CASES["encoder"][2], (profile,))
    result = Router([engine], Padding(wrong_padding.inputs, {"sequence": (32,)})).run(tokens(2, 9))
    assert not np.allclose(result["embedding"], run(tokens(2, 9))["embedding"], rtol=1e-2, atol=1e-3)
