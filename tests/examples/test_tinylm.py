import importlib.util
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

import enginesmith
from enginesmith.generation import Prompt
from enginesmith.user_code.entry_point import call_entry_point, importing_from
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
    """The example's own spec with less data: of two texts the end of the prompt, and some bytes after it."""
    folder = tmp_path_factory.mktemp("tinylm")
    shutil.copytree(FOLDER, folder / "project", ignore=shutil.ignore_patterns("__pycache__"))
    spec = yaml.safe_load((FOLDER / "tinylm.yaml").read_text())
    spec |= {"precisions": ["fp32", "int8"], "targets": ["cpu"], "validation": {"latency": "off"}}
    (folder / "project" / "tinylm.yaml").write_text(yaml.safe_dump(spec, sort_keys=False))
    for name in ("calibration", "golden"):
        actual = arrays(FOLDER / f"{name}.npz")
        indices = [index for index in range(128) if 33 <= index % 64 < 41]
        np.savez(folder / "project" / f"{name}.npz", **{key: array[indices] for key, array in actual.items()})
    return folder / "registry", enginesmith.build(folder / "project" / "tinylm.yaml", registry=folder / "registry")


@pytest.mark.slow
def test_engines_are_proven_with_the_same_perplexity(built: tuple[Path, Any]) -> None:
    _, outcome = built
    assert {item.entry.precision: item.entry.status for item in outcome.engines} == {"fp32": "proven", "int8": "proven"}
    assert all(item.metrics["perplexity"] < 20 for item in outcome.engines), "labels are those of their bytes"


@pytest.mark.slow
def test_the_pulled_engine_continues_a_prompt_as_the_module_does(built, decoder, generate, tmp_path) -> None:
    (answer,) = generate.pull(str(built[0]), "fp32", str(tmp_path)).generate([Prompt(PROMPT, most=32)])
    text = PROMPT
    with torch.no_grad():
        for _ in range(32):
            logits, _ = decoder.read(torch.tensor([[*text]]))
            text += bytes([int(logits[0, -1].argmax())])
    assert PROMPT + bytes(answer) == text


@pytest.mark.slow
def test_the_script_reproduces_text_from_its_seed(built, capsys, generate, monkeypatch) -> None:
    items = ["The value of", "A", "--registry", str(built[0]), "--count", "20", "--temperature", "0.7"]
    texts = []
    for seed in ("1", "1", "2"):
        monkeypatch.setattr("sys.argv", ["generate.py", *items, "--seed", seed])
        generate.main()
        texts.append(capsys.readouterr().out)
    assert texts[0].startswith("The value of")
    assert texts[0] == texts[1] != texts[2]


def test_hardly_any_paragraph_is_both_trained_on_and_held_out() -> None:
    with importing_from(FOLDER, "train.py"):
        splits = call_entry_point(FOLDER, "train.py", "splits", {})
    trained_texts, held_out = ({part.strip() for part in text.tobytes().split(b"\n\n")} for text in splits)
    assert len(held_out) > 50
    assert sum(map(len, trained_texts & held_out)) < 0.02 * len(splits[1])
