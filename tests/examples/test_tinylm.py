"""tinylm from its spec to text: engines that are proven, and that continue a prompt as the module does."""

import importlib.util
import shutil
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

import enginery
from enginery.user_code.entry_point import call_entry_point, importing_from
from tests.pipeline.projects import arrays

FOLDER = Path(__file__).parents[2] / "examples" / "tinylm"
PROMPT = b"The value of"


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tinylm_generate", FOLDER / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def decoder() -> torch.nn.Module:
    with importing_from(FOLDER, "model.py"):
        module = call_entry_point(FOLDER, "model.py", "build", {})
    module.load_state_dict(load_file(FOLDER / "weights.safetensors"))
    return module


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The example's own spec with less data: the first steps of two texts."""
    folder = tmp_path_factory.mktemp("tinylm")
    shutil.copytree(FOLDER, folder / "project", ignore=shutil.ignore_patterns("__pycache__"))
    spec = yaml.safe_load((FOLDER / "tinylm.yaml").read_text())
    spec |= {"precisions": ["fp32", "int8"], "targets": ["cpu"], "validation": {"latency": "off"}}
    (folder / "project" / "tinylm.yaml").write_text(yaml.safe_dump(spec, sort_keys=False))
    for name in ("calibration", "golden"):
        found = arrays(FOLDER / f"{name}.npz")
        kept = [at for at in range(128) if at % 64 < 6]
        np.savez(folder / "project" / f"{name}.npz", **{key: array[kept] for key, array in found.items()})
    return folder / "registry", enginery.build(folder / "project" / "tinylm.yaml", registry=folder / "registry")


def test_engines_are_proven_and_keep_the_perplexity(built: tuple[Path, Any]) -> None:
    _, outcome = built
    assert {item.precision: item.status for item in outcome.engines} == {"fp32": "proven", "int8": "proven"}


def test_the_pulled_engine_continues_a_prompt_as_the_module_does(built, decoder, generate, tmp_path) -> None:
    streams = generate.pull(str(built[0]), "fp32", str(tmp_path))
    written = bytes(islice(generate.generate(streams, PROMPT, generate.sampler(temperature=0)), 32))
    text = PROMPT
    with torch.no_grad():
        for _ in range(32):
            logits = decoder.read(torch.tensor([[*text]]), bias=torch.full((len(text),) * 2, -torch.inf).triu(1))[0]
            text += bytes([int(logits[0, -1].argmax())])
    assert PROMPT + written == text


def test_a_full_context_goes_on_with_its_later_half(built, generate, tmp_path) -> None:
    streams = generate.pull(str(built[0]), "int8", str(tmp_path))
    greedy = generate.sampler(temperature=0)
    text = PROMPT + bytes(islice(generate.generate(streams, PROMPT, greedy), 140))
    cut = text[generate.CONTEXT // 2 :][: generate.CONTEXT // 2 + 1]
    assert text[129:].startswith(bytes(islice(generate.generate(streams, cut, greedy), 16)))


@pytest.mark.parametrize(
    ("settings", "seen"),
    [
        ({"temperature": 0}, {2}),
        ({"top_k": 1}, {2}),
        ({"top_k": 2}, {1, 2}),
        ({"top_p": 0.5}, {2}),
        ({"top_p": 0.7}, {1, 2}),
        ({"top_p": 0.0001, "temperature": 9}, {2}),
        ({}, {0, 1, 2, 3}),
    ],
)
def test_samples_are_of_the_likeliest_and_follow_the_seed(generate, settings: dict[str, Any], seen: set[int]) -> None:
    logits = np.log(np.array([0.06, 0.3, 0.6, 0.04], np.float32))
    drawn = [[choose(logits) for _ in range(300)] for choose in (generate.sampler(7, **settings) for _ in range(2))]
    assert drawn[0] == drawn[1]
    assert set(drawn[0]) == seen


def test_samples_have_the_probabilities_of_the_temperature(generate) -> None:
    logits, choose = np.log(np.array([0.2, 0.8], np.float32)), generate.sampler(3, temperature=0.5)
    share = np.mean([choose(logits) for _ in range(4000)])
    assert share == pytest.approx(0.64 / 0.68, abs=0.02)  # squares of the probabilities


def test_hardly_a_paragraph_is_trained_on_and_held_out() -> None:
    with importing_from(FOLDER, "train.py"):
        splits = call_entry_point(FOLDER, "train.py", "splits", {})
    trained, held_out = ({part.strip() for part in text.tobytes().split(b"\n\n")} for text in splits)
    assert len(held_out) > 50
    assert sum(map(len, trained & held_out)) < 0.02 * len(splits[1])


def test_the_example_is_small() -> None:
    files = [path for path in FOLDER.iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 1_500_000
    assert {path.suffix for path in files} <= {".py", ".md", ".yaml", ".npz", ".safetensors"}
