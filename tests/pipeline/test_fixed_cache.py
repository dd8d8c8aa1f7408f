import copy
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import enginesmith
from enginesmith.core.errors import DataError, SpecError
from enginesmith.generation import Prompt
from pipeline.spec.model import load_spec
from tests.fixed_cache import FIXED, PLACES, WIDTH, make_fixed, write_fixed
from tests.pipeline.test_ensemble import opens


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("fixed")
    return folder / "registry", enginesmith.build(write_fixed(folder / "project"), registry=folder / "registry")


@pytest.mark.slow
def test_a_fixed_cache_is_proven_on_prompts_and_steps(built: tuple[Path, Any]) -> None:
    expected = {"fp32": "proven", "int8": "proven"}
    assert {item.entry.precision: item.entry.status for item in built[1].engines} == expected


def answer(prompt: list[int], count: int) -> list[int]:
    """What the module goes on with, the likeliest token each time."""
    module, state, tokens, result = make_fixed(), (torch.zeros(1, PLACES, WIDTH), torch.zeros(1, dtype=int)), prompt, []
    with torch.no_grad():
        for _ in range(count):
            logits, *state = module(torch.tensor([tokens]), *state)
            tokens = [int(logits[0, -1].argmax())]
            result += tokens
    return result


@pytest.mark.slow
def test_a_generator_answers_prompts_of_several_lengths_like_the_module(built, tmp_path) -> None:
    pulled_engine = enginesmith.pull("fixed@1", registry=built[0], dest=tmp_path, precision="fp32")
    prompts = [[3, 1, 4, 1, 5], [9, 2]]
    items = [Prompt(tokens, most=6) for tokens in prompts]
    generator = enginesmith.Generator.opened(pulled_engine)
    assert generator.generate(items) == [answer(tokens, 6) for tokens in prompts]
    assert len(generator.generate([Prompt([3, 1])])[0]) == PLACES - 1, "until the cache is full"
    with pytest.raises(DataError, match=r"takes 16 places in 'cache', which is 17 tokens in all"):
        generator.generate([Prompt([3, 1], most=PLACES)])


@pytest.mark.slow
def test_a_step_beyond_the_end_is_refused_before_it_runs_and_a_row_restarts(built, tmp_path) -> None:
    pulled_engine = enginesmith.pull("fixed@1", registry=built[0], dest=tmp_path, precision="fp32")
    engine, calls = opens(pulled_engine.path), list[int]()

    def run(inputs):
        calls.append(1)
        return engine(inputs)

    streams = enginesmith.Streams.described(run, pulled_engine.description)
    for _ in range(3):
        streams.run({"ids": np.ones((2, 5), int)})
    with pytest.raises(DataError, match=r"'cache' has places 0 to 15, but by 'length' this step writes 15 to 16"):
        streams.run({"ids": np.ones((2, 2), int)})
    assert len(calls) == 3
    streams.reset([0])
    streams.keep([0])
    assert streams.run({"ids": np.array([[7]])})["length_out"].tolist() == [1]


@pytest.mark.slow
def test_golden_sequences_that_are_longer_than_the_cache_are_refused(built, tmp_path: Path) -> None:
    path = write_fixed(tmp_path / "project", (6, 6, 5))
    with pytest.raises(DataError, match="'length' this step writes 12 to 16"):
        enginesmith.build(path, registry=built[0])


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({"axis": 0, "at": "length"}, "has no fixed size on axis 0"),
        ({"axis": 3, "at": "length"}, "has no fixed size on axis 3"),
        ({"axis": 1, "at": "gone"}, "places.at 'gone' is not an input of integers"),
        ({"axis": 1, "at": "cache"}, "places.at 'cache' is not an input of integers"),
        ({"axis": 1, "at": "length", "count": "gone"}, "places.count 'gone' is not a dim that a caller gives"),
    ],
)
def test_impossible_places_are_reported_with_their_key(places: dict[str, Any], message: str, tmp_path: Path) -> None:
    spec = copy.deepcopy(FIXED)
    spec["state"]["cache"]["places"] = places
    with pytest.raises(SpecError, match=re.escape(message)):
        load_spec(write_fixed(tmp_path / "project", spec=spec))
