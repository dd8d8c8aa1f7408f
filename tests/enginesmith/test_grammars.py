"""Grammars over a model's own tokens: every answer keeps them, and what cannot be kept is told before anything runs."""

import json
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginesmith.core.errors import DataError
from enginesmith.grammars import Grammar

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": -3, "maximum": 70}, "maxItems": 3},
        "kind": {"enum": ["a", "bb", None]},
    },
    "required": ["name", "sizes", "kind"],
    "additionalProperties": False,
}


def answer(grammar: Grammar, seed: int, vocabulary: int, most: int = 400) -> list[int]:
    """Random tokens of those that are allowed."""
    rng, constraint, found = np.random.default_rng(seed), grammar.begin(vocabulary), list[int]()
    while len(found) < most and (allowed := constraint.allowed()) is not None:
        assert allowed.shape == (vocabulary,)
        assert allowed.any()
        found.append(int(rng.choice(np.flatnonzero(allowed))))
        constraint.take(found[-1])
    return found


def write_tokenizer(path: Path) -> Path:
    """A tokenizer of 256 bytes, three longer tokens ('na', 'nam', 'name') and the end, id 259."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [value for value in range(256) if value not in printed]
    letters = {value: chr(value) for value in printed} | {value: chr(256 + at) for at, value in enumerate(rest)}
    vocabulary = {letters[value]: value for value in range(256)} | {"na": 256, "nam": 257, "name": 258}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    model = {"type": "BPE", "vocab": vocabulary, "merges": ["n a", "na m", "nam e"]}
    end = {"id": 259, "content": "<fin>", "special": True, **flags}
    found = {"version": "1.0", "added_tokens": [end], "pre_tokenizer": level, "decoder": level, "model": model}
    path.write_text(json.dumps(found))
    return path


@given(st.integers(0, 2**32))
def test_every_answer_of_allowed_bytes_keeps_the_schema(seed):
    grammar = Grammar.json_schema(SCHEMA)
    found = answer(grammar, seed, 256)
    jsonschema.validate(json.loads(bytes(found)), SCHEMA)
    assert grammar.is_kept_by(found)
    assert not grammar.is_kept_by(found[:-1])


@given(st.integers(0, 2**32))
def test_every_answer_of_tokens_of_a_file_keeps_the_schema_and_ends_with_the_end_token(tmp_path_factory, seed):
    path = write_tokenizer(tmp_path_factory.getbasetemp() / "tokenizer.json")
    grammar = Grammar.json_schema(SCHEMA, path, end=259)
    found = answer(grammar, seed, 300)  # logits that are padded
    text = b"".join(bytes([at]) if at < 256 else (b"na", b"nam", b"name")[at - 256] for at in found if at != 259)
    jsonschema.validate(json.loads(text), SCHEMA)
    assert grammar.is_kept_by(found)


@given(st.integers(0, 2**32))
def test_every_answer_matches_the_regular_expression(seed):
    pattern = r"[a-f]{2,5}(é|xyz)?-[0-9]+\."
    found = answer(Grammar.regex(pattern), seed, 256)
    assert re.fullmatch(pattern, bytes(found).decode())


def test_a_context_free_grammar_is_kept_to_its_depth():
    grammar = Grammar.lark('start: "(" start ")" | "x"')
    assert grammar.is_kept_by(b"((x))")
    assert not grammar.is_kept_by(b"((x)")
    assert not grammar.is_kept_by(b"((x)))")


def test_white_space_between_the_parts_is_allowed_where_it_is_asked_for():
    spaced = b'{ "name" : "" }'
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    assert not Grammar.json_schema(schema).is_kept_by(spaced)
    assert Grammar.json_schema(schema, spaces=True).is_kept_by(spaced)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Grammar.json_schema('{"type":'), "JSON schema"),
        (lambda: Grammar.json_schema("[1]"), "give a JSON object"),
        (lambda: Grammar.json_schema({"type": "strin"}), "JSON schema cannot be used: Invalid type: strin"),
        (lambda: Grammar.json_schema({"type": "integer", "minimum": 5, "maximum": 3}), "Unsatisfiable schema"),
        (lambda: Grammar.json_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (lambda: Grammar.regex("[a-z]+("), "regular expression cannot be used: .*unclosed group"),
        (lambda: Grammar.lark("start: A b\nA: /x/"), 'grammar cannot be used: .*unknown name: "b"'),
    ],
)
def test_what_is_invalid_is_told_as_it_is_read(make, words):
    with pytest.raises(DataError, match=f"(?s){words}"):
        make()


def test_a_grammar_that_no_token_can_begin_is_told_before_anything_runs():
    for end in (None, 2):
        with pytest.raises(DataError, match="no token of the vocabulary can begin"):
            Grammar.regex("[0-9]+", [b"a", b"b", b"<end>"], end).begin(3)
    with pytest.raises(DataError, match="no token of the vocabulary can begin"):
        Grammar.regex("[^\\x00-\\U0010FFFF]").begin(256)


def test_a_dead_end_behind_the_beginning_allows_nothing():
    constraint = Grammar.regex("a[0-9]", [b"a", b"b"]).begin(2)
    constraint.take(0)
    assert not constraint.allowed().any()
    with pytest.raises(DataError, match="token 1 does not keep the grammar"):
        constraint.take(1)


def test_an_answer_of_no_token_is_complete_where_the_grammar_has_it():
    assert Grammar.regex("").begin(256).allowed() is None
    assert Grammar.regex("").is_kept_by(b"")
    assert not Grammar.regex("a").is_kept_by(b"")


def test_a_vocabulary_that_does_not_fit_the_logits_is_told(tmp_path):
    with pytest.raises(DataError, match=r"the grammar has 256 tokens and the logits are 12 wide; .*tokenizer\.json"):
        Grammar.regex("a").begin(12)
    with pytest.raises(DataError, match="256 tokens and the logits are 50257 wide"):
        Grammar.regex("a").begin(50257)  # no model over bytes
    path = write_tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(DataError, match=r"tokenizer\.json has 260 tokens and the logits are 259 wide"):
        Grammar.regex("a", path, 259).begin(259)


def test_a_tokenizer_that_cannot_be_read_or_has_no_end_is_told(tmp_path):
    path = write_tokenizer(tmp_path / "tokenizer.json")
    for end, words in ((None, "which token ends an answer"), (260, "end 260: no tokenizer over bytes: .*range")):
        with pytest.raises(DataError, match=words):
            Grammar.regex("a", path, end).begin(260)
    with pytest.raises(DataError, match="No such file"):
        Grammar.regex("a", tmp_path / "none.json", 0).begin(260)
    with pytest.raises(DataError, match="end 3 is not one of the 2 tokens"):
        Grammar.regex("a", [b"a", b"b"], 3).begin(2)


def test_only_a_grammar_needs_the_library():
    code = (
        "import sys; sys.modules['llguidance'] = None\n"
        "import enginesmith; enginesmith.Generator\n"
        "from enginesmith.core.errors import UnavailableError\n"
        "try: enginesmith.Grammar.regex('a')\n"
        "except UnavailableError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install './enginesmith[grammar]' in a clone" in done.stdout
