"""What answers must keep: JSON schemas, regular expressions and grammars over a model's own tokens.

llguidance reads them and computes, token by token, what may follow (docs/decisions/0017-llguidance.md).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.errors import DataError, UnavailableError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# The vocabulary of a model over bytes.
_BYTES = tuple(bytes([value]) for value in range(256))


@dataclass(frozen=True)
class Grammar:
    """What an answer must keep, and the tokens it is made of. Makes a constraint for each answer (`begin`).

    source: as llguidance writes grammars; made by `json_schema`, `regex` or `lark`.
    tokens: the bytes of each token id in turn, or a file `tokenizer.json`; default: 256 tokens of one byte.
    end: id of the token that ends an answer. Without one an answer ends where nothing can follow.
    """

    source: str
    tokens: Sequence[bytes] | Path | str = _BYTES
    end: int | None = None

    @classmethod
    def json_schema(
        cls,
        schema: Mapping[str, object] | str,
        tokens: Sequence[bytes] | Path | str = _BYTES,
        end: int | None = None,
        spaces: bool = False,
    ) -> "Grammar":
        """Of a JSON schema. spaces: allow white space between the parts of an answer, as much as the model likes.

        Raises DataError for a schema that is invalid, that no value satisfies, or with keywords that are not known.
        """
        text = schema if isinstance(schema, str) else json.dumps(schema)
        try:
            source = _matcher().grammar_from_json_schema(text, defaults={"whitespace_flexible": spaces})
        except ValueError as error:
            raise DataError(f"the JSON schema cannot be read: {error}; give a JSON object") from error
        return cls(_checked(source, "JSON schema"), tokens, end)

    @classmethod
    def regex(cls, pattern: str, tokens: Sequence[bytes] | Path | str = _BYTES, end: int | None = None) -> "Grammar":
        """Of a regular expression that a whole answer matches. Raises DataError for one that is invalid."""
        return cls(_checked(_matcher().grammar_from_regex(pattern), "regular expression"), tokens, end)

    @classmethod
    def lark(cls, text: str, tokens: Sequence[bytes] | Path | str = _BYTES, end: int | None = None) -> "Grammar":
        """Of a context-free grammar in llguidance's variant of Lark's syntax. Raises DataError for an invalid one."""
        return cls(_checked(_matcher().grammar_from_lark(text), "grammar"), tokens, end)

    def begin(self, vocabulary: int) -> "GrammarConstraint":
        """A constraint of one answer for logits of this width. Raises DataError where the tokens do not fit these
        logits, and for a grammar that none of them can begin."""
        tokenizer, known = self._tokenizer, self._known
        if known > vocabulary or (self.tokens == _BYTES and vocabulary != known):
            what = f"{self.tokens} has" if isinstance(self.tokens, str | Path) else "the grammar has"
            raise DataError(
                f"{what} {known} tokens and the logits are {vocabulary} wide; give the tokens of this model: its "
                "tokenizer.json, or the bytes of each id"
            )
        found = GrammarConstraint(_matcher()(tokenizer, self.source, log_level=0), vocabulary, known)
        allowed = found.allowed()
        if allowed is not None and not allowed.any():
            raise DataError("no token of the vocabulary can begin an answer that keeps the grammar; change one of them")
        return found

    def is_kept_by(self, answer: Sequence[int]) -> bool:
        """Whether an answer is complete and keeps the grammar; its end token may be there or not."""
        matcher = _matcher()(self._tokenizer, self.source, log_level=0)
        taken = matcher.try_consume_tokens(list(answer))
        return taken == len(answer) and (matcher.is_accepting() or self._ends(answer)) and not matcher.is_error()

    def _ends(self, answer: Sequence[int]) -> bool:
        return self.end is not None and len(answer) > 0 and answer[-1] == self.end

    @cached_property
    def _tokenizer(self) -> "LLTokenizer":
        """Raises DataError for a file that is no tokenizer over bytes, and an end that is not one of the tokens."""
        from llguidance import LLTokenizer, TokenizerWrapper

        if not isinstance(self.tokens, str | Path):
            return LLTokenizer(TokenizerWrapper(_ByteTokens(self.tokens, self.end)))
        if self.end is None:
            # llguidance would take token 0 where it does not find one by its name.
            raise DataError(f"{self.tokens}: which token ends an answer? Give its id as `end`")
        try:
            return LLTokenizer(str(self.tokens), eos_token=self.end)
        except ValueError as error:
            raise DataError(f"{self.tokens}, end {self.end}: no tokenizer over bytes: {error}") from error

    @cached_property
    def _known(self) -> int:
        """Number of tokens."""
        return self._tokenizer.vocab_size if isinstance(self.tokens, str | Path) else len(self.tokens)


def read_grammar(kind: str, text: str) -> Grammar:
    """A grammar over bytes. kind: 'json_schema', 'regex' or 'lark'. Raises as the method of that name."""
    readers: dict[str, Callable[[str], Grammar]] = {
        "json_schema": Grammar.json_schema,
        "regex": Grammar.regex,
        "lark": Grammar.lark,
    }
    return readers[kind](text)


class GrammarConstraint:
    """What a grammar lets follow in one answer. known: tokens that it speaks of; others are never allowed."""

    def __init__(self, matcher: "LLMatcher", vocabulary: int, known: int) -> None:
        self._matcher, self._vocabulary, self._known = matcher, vocabulary, known

    def allowed(self) -> Array | None:
        """Of each token, whether it may come next, bool [vocabulary]; None where the answer is complete and nothing can
        follow. Raises DataError for a grammar that passes llguidance's bounds."""
        if self._is_over():
            return None
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = np.zeros(self._vocabulary, bool)
        if self._matcher.is_error():  # found as the mask was computed; what it holds then is not meant
            self._check_error()
            return allowed
        allowed[: self._known] = bits[: self._known]
        return None if not allowed.any() and self._matcher.is_accepting() else allowed

    def take(self, token: int) -> None:
        """Go on behind this token. Raises DataError for one that is not allowed."""
        if not self._matcher.consume_token(token):
            raise DataError(f"token {token} does not keep the grammar: {_first_line(self._matcher.get_error())}")

    def _is_over(self) -> bool:
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def _check_error(self) -> None:
        """Raises DataError where the matcher failed for another reason than that nothing can follow."""
        if not (text := self._matcher.get_error()).startswith("NoExtension"):
            raise DataError(f"the grammar cannot be followed: {_first_line(text)}")


class _ByteTokens:
    """Tokens by their bytes, as llguidance takes a tokenizer. Without an end token it gets one behind the others."""

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], end: int | None) -> None:
        self.tokens = [*tokens, b"<end>"] if end is None else list(tokens)
        self.eos_token_id = len(tokens) if end is None else end
        if not 0 <= self.eos_token_id < len(self.tokens):
            raise DataError(f"end {end} is not one of the {len(tokens)} tokens; give the id of one")
        self.special_token_ids = [self.eos_token_id]
        self._ids = {token: at for at, token in enumerate(self.tokens)}

    def __call__(self, text: bytes) -> list[int]:
        """The ids of a text, byte by byte, as far as single bytes are tokens."""
        return [self._ids[text[at : at + 1]] for at in range(len(text)) if text[at : at + 1] in self._ids]


def _matcher() -> "type[LLMatcher]":
    """Raises UnavailableError without llguidance."""
    try:
        from llguidance import LLMatcher
    except ImportError as error:
        raise UnavailableError(
            f"grammars need the extra `grammar` ({error}); run `pip install './enginesmith[grammar]' in a clone`"
        ) from error
    matcher: type[LLMatcher] = LLMatcher
    return matcher


def _checked(source: str, what: str) -> str:
    """The grammar's source. Raises DataError for an invalid one."""
    failed, texts = _matcher().validate_grammar_with_warnings(source)
    if failed:
        raise DataError(f"the {what} cannot be used: {texts[0].strip()}")
    return source


def _first_line(text: str) -> str:
    return text.strip().split("\n")[0]
