import copy
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import enginesmith
from enginesmith.core.errors import DataError, SpecError
from enginesmith.generation import Prompt
from pipeline.spec.model import load_spec
from tests.masked import CACHES, HEADS, VOCABULARY, WIDTH, export_masked, make_masked, write_masked_data
from tests.pipeline.projects import exit_code

MASK = ["batch", "past_sequence_length + sequence_length"]


@pytest.fixture(scope="module")
def drafted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `init` writes for the file, with data and small bounds."""
    folder = tmp_path_factory.mktemp("masked")
    export_masked(folder / "model.onnx")
    assert exit_code("init", folder / "model.onnx", "--out", folder / "model.yaml") == 0
    write_masked_data(folder / "golden.npz", 4, 0)
    write_masked_data(folder / "calibration.npz", 8, 1)
    spec = yaml.safe_load((folder / "model.yaml").read_text())
    assert spec["inputs"]["attention_mask"]["shape"] == MASK
    assert spec["state"]["past_key_values.0.key"] == {"output": "present.0.key", "initial": 0}
    end_fields = {"batch": (1, 1, 4), "sequence_length": (1, 1, 8), "past_sequence_length": (0, 8, 40)}
    spec["dims"] = {name: dict(zip(("min", "opt", "max"), sizes, strict=True)) for name, sizes in end_fields.items()}
    data = {"sequence": "text", "steps": {"sequence_length": "step"}}
    spec |= {"precisions": ["fp32", "int8"], "backends": {"onnxruntime": {}}, "validation": {"latency": "off"}}
    spec |= {name: {"data": f"{name}.npz", **data} for name in ("golden", "calibration")}
    return {"folder": folder, "spec": spec}


def write(drafted: dict[str, Any], name: str, spec: dict[str, Any]) -> Path:
    path = drafted["folder"] / f"{name}.yaml"
    path.write_text(yaml.safe_dump(spec, sort_keys=False))
    return path


@pytest.fixture(scope="module")
def built(drafted: dict[str, Any]) -> tuple[Path, Any]:
    registry = drafted["folder"] / "registry"
    return registry, enginesmith.build(write(drafted, "built", drafted["spec"]), registry=registry)


@pytest.mark.slow
def test_a_masked_model_is_proven_on_steps(built: tuple[Path, Any]) -> None:
    expected = {"fp32": "proven", "int8": "proven"}
    assert {item.entry.precision: item.entry.status for item in built[1].engines} == expected


@pytest.mark.slow
def test_a_pulled_engine_answers_a_padded_prompt_like_the_module(built, tmp_path) -> None:
    pulled_engine = enginesmith.pull(f"{built[1].model}@1", registry=built[0], dest=tmp_path, precision="fp32")
    streams = enginesmith.Streams.described(enginesmith.open_onnx(pulled_engine), pulled_engine.description)
    ids = np.random.default_rng(2).integers(VOCABULARY, size=(2, 6))
    mask, places = np.ones((2, 6), np.int64), np.arange(6)[None].repeat(2, 0)
    mask[1, :2] = 0  # the second row's prompt is shorter
    items = []
    for begin, end in ((0, 4), (4, 5), (5, 6)):
        step = {"input_ids": ids[:, begin:end], "attention_mask": mask[:, :end], "position_ids": places[:, begin:end]}
        items.append(streams.run(step)["logits"])
    empty_arrays = [torch.zeros(2, HEADS, 0, WIDTH // HEADS)] * len(CACHES)
    with torch.no_grad():
        expected = make_masked()(*map(torch.tensor, (ids, mask, places)), *empty_arrays)[0].numpy()
    seen_mask = mask.astype(bool)
    np.testing.assert_allclose(np.concatenate(items, 1)[seen_mask], expected[seen_mask], atol=1e-5)


def go_on(prompt: list[int], count: int) -> list[int]:
    """The likeliest tokens behind a prompt, by the module."""
    tokens, empty_arrays = list(prompt), [torch.zeros(1, HEADS, 0, WIDTH // HEADS)] * len(CACHES)
    with torch.no_grad():
        for _ in range(count):
            ids = torch.tensor([tokens])
            logits = make_masked()(ids, torch.ones_like(ids), torch.arange(len(tokens))[None], *empty_arrays)[0]
            tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.slow
def test_a_generator_fills_mask_and_places_for_prompts_of_several_lengths(built, tmp_path) -> None:
    pulled_engine = enginesmith.pull(f"{built[1].model}@1", registry=built[0], dest=tmp_path, precision="fp32")
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [7, 8]]
    generator = enginesmith.Generator.opened(pulled_engine, ids="input_ids")
    result = generator.generate([Prompt(prompt, most=7) for prompt in prompts])
    assert result == [go_on(prompt, 7) for prompt in prompts]


def test_a_mask_of_another_length_than_the_sum_is_refused(drafted: dict[str, Any]) -> None:
    data = dict(np.load(drafted["folder"] / "golden.npz"))
    np.savez(drafted["folder"] / "long.npz", **data | {"attention_mask": np.ones((40, 2), np.int64)})
    spec = drafted["spec"] | {"golden": drafted["spec"]["golden"] | {"data": "long.npz"}}
    with pytest.raises(SpecError, match=r"attention_mask.* sequence_length = 2"):
        enginesmith.build(write(drafted, "long", spec), registry=drafted["folder"] / "registry")


@pytest.mark.parametrize(
    ("name", "axis", "total", "message"),
    [
        ("attention_mask", 1, "past_sequence_length - 1", "must be a size from 1 up, the name of a dim"),
        ("attention_mask", 1, "2 * past_sequence_length + 1", "must be a sum of dims and of sizes from 1 up"),
        ("attention_mask", 1, "past_sequence_length + 0", "must be a sum of dims and of sizes from 1 up"),
        ("attention_mask", 1, "1 + 2", "is a sum of numbers only; write the total"),
        ("attention_mask", 1, "batch + gone", "'batch + gone' has dim 'gone', which is not an axis of any input"),
        ("past_key_values.0.key", 2, "past_sequence_length + 1", "a size of a state is one number or one dim"),
    ],
)
def test_an_impossible_sum_is_reported_with_its_key(drafted, name: str, axis: int, total: str, message: str) -> None:
    spec = copy.deepcopy(drafted["spec"])
    spec["inputs"][name]["shape"][axis] = total
    with pytest.raises(SpecError, match=re.escape(message)):
        load_spec(write(drafted, "wrong", spec))


def test_a_wrong_sum_stops_the_export_with_a_sentence(drafted: dict[str, Any]) -> None:
    spec = copy.deepcopy(drafted["spec"])
    spec["inputs"]["attention_mask"]["shape"][1] = "past_sequence_length + 1"
    with pytest.raises((DataError, SpecError), match=r"attention_mask"):
        enginesmith.build(write(drafted, "wrong", spec), registry=drafted["folder"] / "registry")
