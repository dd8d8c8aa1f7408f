import json
from pathlib import Path
from typing import Any

import pytest

import enginesmith
from enginesmith.core.names import parse_reference
from enginesmith.generation import Prompt, SamplingSettings
from enginesmith.registry.store.base import open_store
from enginesmith.registry.versions.lookup import locate
from tests.decoding import DECODER, write_decoder

PROMPTS = [Prompt([3, 1, 4], SamplingSettings(1.2, 6, 0.9), 6, seed=2), Prompt([5], most=6)]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    registry = tmp_path_factory.mktemp("decoder") / "registry"
    return registry, enginesmith.build(write_decoder(registry.parent / "project", DECODER), registry=registry)


def test_a_pulled_decoder_answers_prompts_like_its_model(built: tuple[Path, Any], tmp_path: Path) -> None:
    registry, outcome = built
    assert [item.entry.status for item in outcome.engines] == ["proven"]
    manifest = locate(open_store(registry), parse_reference("decoder@1")).manifest
    assert [spec.name for spec in manifest.engines[0].inputs] == ["ids", "past"]
    pulled_engine = enginesmith.pull("decoder@1", registry=registry, dest=tmp_path)
    assert [state["input"] for state in json.loads(pulled_engine.description.read_text())["state"]] == ["past"]
    answers = enginesmith.Generator.opened(pulled_engine).generate(PROMPTS)
    assert [len(answer) for answer in answers] == [6, 6]
    engine = enginesmith.pull("decoder@1", registry=registry, dest=tmp_path / "onnx", target="sm_89", fallback="onnx")
    assert enginesmith.Generator.opened(engine).generate(PROMPTS) == answers
