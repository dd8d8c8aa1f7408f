import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from enginesmith.core.codec import encode
from enginesmith.core.errors import DataError
from enginesmith.core.state import State, state_ends
from enginesmith.generation import Generator, Prompt, SamplingSettings
from tests.decoding import REQUEST, make_decoder

DRAWN = SamplingSettings(1.5, top_k=8, top_p=0.95, repetition_penalty=1.2)
PROMPTS = [
    Prompt([3, 1, 4, 1, 5], DRAWN, 6, seed=1),
    Prompt([9], SamplingSettings(), 7),
    Prompt([2, 6, 5], DRAWN, 5, seed=3),
    Prompt(bytes([2, 6, 5]), DRAWN, 5, seed=4),
    Prompt([8, 8], SamplingSettings(repetition_penalty=3.0), 4),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder and its description."""
    folder, states = tmp_path_factory.mktemp("generation"), (State("past", "present"),)
    onnx.save(make_decoder(), folder / "decoder.onnx")
    result = encode(REQUEST) | {
        "state": [vars(state) for state in states],
        "ends": state_ends(REQUEST.inputs, states, REQUEST.profiles),
    }
    (folder / "decoder.json").write_text(json.dumps(result, default=vars))
    return folder


def make(folder: Path, calls: list[tuple[int, ...]] | None = None) -> Generator:
    session = ort.InferenceSession(str(folder / "decoder.onnx"))
    names = [output.name for output in session.get_outputs()]

    def run(inputs):
        if calls is not None:
            calls.append(inputs["ids"].shape)
        return dict(zip(names, session.run(names, inputs), strict=True))

    return Generator.described(run, folder / "decoder.json")


def alone(folder: Path, prompt: Prompt) -> list[int]:
    return make(folder).generate([prompt])[0]


def test_greedy_answers_are_the_likeliest_tokens_of_the_model(folder):
    session, text = ort.InferenceSession(str(folder / "decoder.onnx")), [9, 3]
    for _ in range(6):
        (logits,) = session.run(["logits"], {"ids": np.array([text]), "past": np.zeros((1, 0, 8), np.float32)})
        text.append(int(logits[0].argmax()))
    assert make(folder).generate([Prompt([9, 3], most=6)]) == [text[2:]]


def test_an_answer_is_independent_of_other_prompts(folder):
    answers = make(folder).generate(PROMPTS)
    assert answers == [alone(folder, prompt) for prompt in PROMPTS]
    assert [len(answer) for answer in answers] == [6, 7, 5, 5, 4]
    assert answers[2] != answers[3]  # of another seed


def test_tokens_are_yielded_at_once_and_prompts_read_in_the_fewest_calls(folder):
    calls: list[tuple[int, ...]] = []
    stream = make(folder, calls).stream([Prompt(range(6), most=2), Prompt([*range(6), 1], most=2)])
    assert next(stream)[0] == 0
    assert calls == [(2, 4), (2, 2)]
    assert [index for index, _ in stream] == [0, 1, 1]
    assert calls[2:] == [(2, 1), (1, 1)]


def test_two_streams_of_one_generator_alternate(folder):
    generator = make(folder)
    turns = zip(*(generator.stream([prompt]) for prompt in PROMPTS[:2]), strict=False)
    tokens = [(token, other_token) for (_, token), (_, other_token) in turns]
    assert tokens == list(zip(alone(folder, PROMPTS[0]), alone(folder, PROMPTS[1]), strict=False))


def test_more_prompts_than_rows_are_answered_in_batches(folder):
    calls: list[tuple[int, ...]] = []
    make(folder, calls).generate(PROMPTS)
    assert {rows for rows, _ in calls} == {1, 2, 3}


def test_a_stop_token_is_the_last_one(folder):
    whole = alone(folder, PROMPTS[0])
    assert make(folder).generate([replace(PROMPTS[0], stop={whole[2]})]) == [whole[: whole.index(whole[2]) + 1]]


def test_an_answer_ends_when_the_cache_is_full(folder):
    generator = make(folder)
    (answer,) = generator.generate([Prompt([1, 2, 3])])
    assert len(answer) == 16 - 3  # 14 places, the token that is read, and the last one
    with pytest.raises(DataError, match=r"prompt 1 has 3 tokens and asks for 14; .* length=14 .* dims\.length\.max"):
        generator.generate([Prompt([1]), Prompt([1, 2, 3], most=14)])


def test_nan_logits_are_an_error(folder):
    def run(inputs):
        return {"logits": np.full((len(inputs["ids"]), 12), np.nan, np.float32), "present": inputs["past"]}

    with pytest.raises(DataError, match="prompt 0: no token can follow"):
        Generator.described(run, folder / "decoder.json").generate([PROMPTS[1]])


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (Prompt([]), "prompt 0 has no token"),
        (Prompt([12]), "prompt 0 has token 12; the vocabulary's token ids are whole numbers from 0 to 11"),
        (Prompt("class"), "prompt 0 is text; give its token ids"),
        (Prompt([1.5]), "prompt 0 has token 1.5; the vocabulary's token ids are whole numbers"),
        (Prompt([1], stop={12}), "prompt 0 has stop token 12; the vocabulary's token ids"),
        (Prompt([1], stop=3), "stop is 3; give the tokens that end an answer, as {0}"),
        (Prompt([1], seed=-1), "seed is -1; it must be a whole number from 0"),
        (Prompt([1], seed=2**128), "it must be a whole number from 0 to 2"),
        (Prompt([1], most=-1), "most is -1; it must be a whole number, 0 or more"),
        (Prompt([1], SamplingSettings(-1.0)), "temperature is -1.0; it must be from 0 to 3.4"),
        (Prompt([1], SamplingSettings(float("nan"))), "temperature is nan"),
        (Prompt([1], SamplingSettings(1e39)), r"temperature is 1e\+39"),
        (Prompt([1], SamplingSettings(1.0, 1.5)), "top_k is 1.5; it must be a whole number, 0 for all tokens"),
        (Prompt([1], SamplingSettings(1.0, 2**63)), "top_k is 9223372036854775808"),
        (Prompt([1], SamplingSettings(repetition_penalty=1e-46)), "repetition_penalty is 1e-46; it must be above 0"),
        (Prompt([1], SamplingSettings(top_p=1.1)), "top_p is 1.1; it must be from 0 to 1"),
        (Prompt([1], SamplingSettings(repetition_penalty=0.0)), "repetition_penalty is 0.0; it must be above 0"),
    ],
)
def test_invalid_prompts_are_reported_before_anything_runs(folder, prompt, words):
    calls: list[tuple[int, ...]] = []
    with pytest.raises(DataError, match=words):
        make(folder, calls).generate([prompt])
    assert not calls


def test_an_engine_without_a_decoder_is_reported(folder, tmp_path):
    document = json.loads((folder / "decoder.json").read_text())
    with pytest.raises(DataError, match="no input 'tokens', or no output 'logits'"):
        Generator.described(dict, folder / "decoder.json", ids="tokens")
    fields = {**document, "inputs": [*document["inputs"], {"name": "speaker", "dtype": "int64", "shape": ["batch"]}]}
    (tmp_path / "more.json").write_text(json.dumps(fields))
    with pytest.raises(DataError, match=r"the model also needs speaker; .* use Streams"):
        Generator.described(dict, tmp_path / "more.json")
    del document["state"]
    (tmp_path / "none.json").write_text(json.dumps(document))
    with pytest.raises(DataError, match="describes no engine: state"):
        Generator.described(dict, tmp_path / "none.json")
