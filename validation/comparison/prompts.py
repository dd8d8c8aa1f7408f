"""Compares an engine with the exported model on golden prompts: the model answers greedily, the engine reads along.

While the engine's likeliest token is the model's, its own answer would be the same: so one run in which the model gives
each token (teacher forcing) tells the divergence at every position, and where the engine's own answer leaves.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from enginesmith.arrays import Array, dtype_of
from enginesmith.core.errors import DataError
from enginesmith.core.reports.prompts import PromptDrift, PromptTerms
from enginesmith.core.reports.proof import Check
from enginesmith.core.sampling import sampling_inputs, sampling_states
from enginesmith.core.state import without_states
from enginesmith.core.types import Sampling, Session
from enginesmith.decoders import Decoder, find_progress
from enginesmith.generation import Generator
from enginesmith.grammars import Grammar, read_grammar
from enginesmith.prompts import Prompt
from enginesmith.streams import Streams
from validation.comparison.sessions import run
from validation.golden.golden_set import GoldenSequences
from validation.metrics.likelihood import kl_divergence, top_k_agreement

CASE = "golden prompts"
TOP = (1, 5)


def check_prompts(
    model: Session, engine: Session, terms: PromptTerms, sequences: GoldenSequences
) -> tuple[list[Check], PromptDrift]:
    """The checks of the engine's answers, and what they were made of. Raises what the sessions raise."""
    pairs = [_compare(model, engine, terms, sequences, prompt) for prompt in terms.prompts]
    divergence = np.array([kl_divergence(*pair) for pair in pairs])
    shares = {k: float(np.mean([top_k_agreement(*pair, k) for pair in pairs])) for k in TOP}
    firsts = tuple(_first_other(*pair) for pair in pairs)
    rounded = tuple(float(f"{value:.4g}") for value in divergence.mean(0))
    drift = PromptDrift(terms.logits, rounded, tuple(shares.items()), firsts)
    values = {
        "kl_nats": float(divergence.mean()),
        **{f"top_{k}_agreement": share for k, share in shares.items()},
        "same_tokens": float(min(terms.most if first is None else first for first in firsts)),
    }
    return [_judge(terms, name, value, drift.text) for name, value in values.items()], drift


def check_grammar(engine: Session, sampling: Sampling, terms: PromptTerms, sequences: GoldenSequences) -> list[Check]:
    """One check: the share of the engine's own greedy answers that keep the grammar of the terms, by its own sampler;
    none without a grammar. engine: with its sampler. Raises UnavailableError without llguidance."""
    if terms.grammar is None:
        return []
    grammar, states = read_grammar(*terms.grammar), (*sequences.states, *sampling_states(sampling))
    inputs = tuple(engine.inputs)
    sampler = {spec.name for spec in sampling_inputs(sampling, 1)}
    given = [spec for spec in without_states(inputs, states) if spec.name not in sampler]
    progress, _ = find_progress(given, sampling.ids, states)
    decoder = Decoder(inputs, states, sequences.ends, sampling, False, rows=1, places=1, progress=progress)
    generator = Generator(partial(run, engine), decoder)
    notes = [
        _misses(generator, grammar, Prompt(tokens, most=terms.most, constraint=grammar)) for tokens in terms.prompts
    ]
    told = "; ".join(f"prompt {index}: {note}" for index, note in enumerate(notes) if note)
    return [Check("engine", "keeps_grammar", terms.logits, CASE, notes.count("") / len(notes), 1.0, not told, told)]


def _misses(generator: Generator, grammar: Grammar, prompt: Prompt) -> str:
    """Why the answer to a prompt does not keep the grammar; '' where it does."""
    try:
        (answer,) = generator.generate([prompt])
    except DataError as error:
        return str(error)
    return "" if grammar.is_kept_by(answer) else f"cut off after {len(answer)} tokens, before its answer is complete"


def _judge(terms: PromptTerms, name: str, value: float, text: str) -> Check:
    limit = terms.limits.get(name)
    passed = limit is None or (value <= limit if name == "kl_nats" else value >= limit)
    return Check("engine", name, terms.logits, CASE, value, limit, bool(passed), "" if passed else text)


def _compare(
    model: Session, engine: Session, terms: PromptTerms, sequences: GoldenSequences, prompt: Sequence[int]
) -> tuple[Array, Array]:
    """Logits [most, vocabulary] of both at each position of the model's greedy answer."""
    tokens, expected = _answer(model, terms, sequences, prompt)
    return expected, read_along(engine, terms, sequences, tokens)


def list_read_tokens(model: Session, terms: PromptTerms, sequences: GoldenSequences) -> tuple[tuple[int, ...], ...]:
    """For each prompt, the tokens that both sides read: its own, and the model's greedy answer without its last."""
    return tuple(tuple(_answer(model, terms, sequences, prompt)[0]) for prompt in terms.prompts)


def read_along(session: Session, terms: PromptTerms, sequences: GoldenSequences, tokens: Sequence[int]) -> Array:
    """Logits [most, vocabulary] behind the last of these tokens, which a session reads one by one."""
    read = _reads(session, terms, sequences)
    return np.stack([read(token) for token in tokens][-terms.most :])


def _answer(
    model: Session, terms: PromptTerms, sequences: GoldenSequences, prompt: Sequence[int]
) -> tuple[list[int], Array]:
    """The tokens of a prompt and of the greedy answer to it, which are read, and the logits of that answer."""
    read, tokens = _reads(model, terms, sequences), list(prompt)
    found = [read(token) for token in prompt][-1:]
    while len(found) < terms.most:
        tokens.append(int(found[-1].argmax()))
        found.append(read(tokens[-1]))
    return tokens, np.stack(found)


def _reads(session: Session, terms: PromptTerms, sequences: GoldenSequences) -> Callable[[int], Array]:
    """What reads a token and gives the logits [vocabulary] of the next one, with the session's own states."""
    streams = Streams(partial(run, session), session.inputs, sequences.states, sequences.ends)
    ids = next(spec for spec in session.inputs if spec.name == terms.ids)
    shape, places = (terms.rows, *(1 for _ in ids.shape[1:])), itertools.count()
    progress, _ = find_progress(without_states(session.inputs, sequences.states), terms.ids, sequences.states)

    def read(token: int) -> Array:
        past = next(places)
        context = {item.spec.name: item.value(terms.rows, past, 1) for item in progress}
        given = {terms.ids: np.full(shape, token, dtype_of(ids.dtype)), **context}
        logits = np.asarray(streams.run(given)[terms.logits])
        row: Array = logits[0].reshape(-1, logits.shape[-1])[-1]
        return row

    return read


def _first_other(expected: Array, actual: Array) -> int | None:
    """The first position with another likeliest token."""
    other = top_k_agreement(expected, actual, 1) < 1
    return int(other.argmax()) if other.any() else None
