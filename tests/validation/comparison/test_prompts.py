"""Golden prompts: what a planted difference gives, position by position."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from builders.onnx_graphs.sampler import append_sampler
from builders.reference import ReferenceSession
from enginesmith.core.reports.prompts import PromptTerms
from enginesmith.core.state import State
from enginesmith.core.types import Sampling
from tests.decoding import make_decoder
from validation.comparison.prompts import check_grammar, check_prompts
from validation.golden.golden_set import GoldenSequences, GoldenSet
from validation.metrics.likelihood import kl_divergence

SEQUENCES = GoldenSequences((State("past", "present"),), {"length": (0, 14)}, GoldenSet(()))
PROMPTS = ((3, 1, 4), (5,))


def answer(path: Path, noise: float, limits: dict[str, float], rows: int = 1, text: tuple[int, ...] = ()):
    """The checks by name and the drift of a decoder whose head is off by a random `noise`; and both models' logits
    behind `text`."""
    model = make_decoder()
    onnx.save(model, path / "model.onnx")
    (head,) = [item for item in model.graph.initializer if item.name == "head"]
    weights = numpy_helper.to_array(head)
    moved = weights + noise * np.random.default_rng(3).normal(size=weights.shape)
    head.CopyFrom(numpy_helper.from_array(moved.astype(np.float32), "head"))
    onnx.save(model, path / "engine.onnx")
    terms = PromptTerms("ids", "logits", PROMPTS, 6, rows, limits)
    with ReferenceSession(path / "model.onnx") as first, ReferenceSession(path / "engine.onnx") as second:
        checks, drift = check_prompts(first, second, terms, SEQUENCES)
        given = {"ids": np.array([text or (0,)]), "past": np.zeros((1, 0, 8), np.float32)}
        logits = [session.run(given)["logits"] for session in (first, second)]
    return {check.name: check for check in checks}, drift, logits


def test_the_same_model_answers_the_same(tmp_path):
    checks, drift, _ = answer(tmp_path, 0.0, {"kl_nats": 0.0, "top_1_agreement": 1.0, "same_tokens": 6})
    assert all(check.passed for check in checks.values())
    assert (drift.firsts, drift.agreement, drift.kl_nats) == ((None, None), ((1, 1.0), (5, 1.0)), (0.0,) * 6)
    assert drift.text.endswith("all 2 answers are the same, 6 tokens each")


def test_another_one_is_measured_at_each_position_of_the_models_answer(tmp_path):
    checks, drift, _ = answer(tmp_path, 0.4, {"kl_nats": 1e-4, "same_tokens": 6})
    assert checks["kl_nats"].value == pytest.approx(np.mean(drift.kl_nats), rel=1e-3)
    assert not checks["kl_nats"].passed
    assert "KL " in checks["kl_nats"].note
    assert checks["top_1_agreement"].limit is None
    assert checks["top_1_agreement"].passed
    assert checks["same_tokens"].value == min(first for first in drift.firsts if first is not None) < 6
    assert not checks["same_tokens"].passed


def test_the_first_position_is_behind_the_whole_prompt_and_the_second_behind_the_models_first_token(tmp_path):
    *_, logits = answer(tmp_path, 0.4, {}, text=PROMPTS[0])
    token = int(logits[0].argmax())
    _, drift, more = answer(tmp_path, 0.4, {}, text=(*PROMPTS[0], token))
    other = [answer(tmp_path, 0.4, {}, text=(5,))[2]]
    token = int(other[0][0].argmax())
    other.append(answer(tmp_path, 0.4, {}, text=(5, token))[2])
    for at, pair in enumerate((logits, more)):
        wanted = np.mean([kl_divergence(*pair), kl_divergence(*other[at])])
        assert drift.kl_nats[at] == pytest.approx(wanted, rel=1e-3)


def test_a_model_of_several_rows_gives_the_same(tmp_path):
    assert answer(tmp_path, 0.4, {}, rows=3)[1] == answer(tmp_path, 0.4, {})[1]


def test_logits_that_are_no_numbers_fail(tmp_path):
    checks, drift, _ = answer(tmp_path, np.nan, {"kl_nats": 1.0, "top_1_agreement": 0.1})
    assert not checks["kl_nats"].passed
    assert not checks["top_1_agreement"].passed
    assert drift.firsts == (0, 0)


@pytest.mark.parametrize(
    ("pattern", "most", "share", "note"),
    [
        ("[a-c]{3}", 6, 1.0, ""),
        ("[a-c]{7}", 6, 0.0, "prompt 0: cut off after 6 tokens"),
        ("b?", 6, 1.0, ""),
    ],
)
def test_the_engines_own_answers_are_held_to_a_grammar(tmp_path, pattern, most, share, note):
    model, sampling = make_decoder(256), Sampling("ids", "logits", "next_token", 256, 256)
    append_sampler(model, sampling)
    onnx.save(model, tmp_path / "model.onnx")
    terms = PromptTerms("ids", "logits", PROMPTS, most, 1, {}, ("regex", pattern))
    with ReferenceSession(tmp_path / "model.onnx") as engine:
        (check,) = check_grammar(engine, sampling, terms, SEQUENCES)
        assert check_grammar(engine, sampling, replace(terms, grammar=None), SEQUENCES) == []
    assert (check.name, check.value, check.passed) == ("keeps_grammar", share, share == 1.0)
    assert check.note.startswith(note)


def test_a_sampler_that_does_not_mind_what_is_allowed_leaves_the_grammar(tmp_path):
    model, sampling = make_decoder(256), Sampling("ids", "logits", "next_token", 256, 256)
    append_sampler(model, sampling)
    for node in model.graph.node:
        node.input[:] = ["all_of_them" if name == "allowed" else name for name in node.input]
    model.graph.initializer.append(numpy_helper.from_array(np.ones((1, 256), bool), "all_of_them"))
    onnx.save(model, tmp_path / "model.onnx")
    terms = PromptTerms("ids", "logits", PROMPTS, 6, 1, {}, ("regex", "[a-c]{3}"))
    with ReferenceSession(tmp_path / "model.onnx") as engine:
        (check,) = check_grammar(engine, sampling, terms, SEQUENCES)
    assert not check.passed
    assert "does not keep the grammar" in check.note
