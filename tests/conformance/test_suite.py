import dataclasses
import json
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

from enginesmith.core.hardware.machine import parse_targets
from tests.conformance import fakes, manners, openings, repeats
from tests.conformance.items import torture_item
from tests.conformance.survey import survey
from tests.conformance.test_backends import _names_nothing, _refuses_the_plain
from tests.conformance.trial import attempt

(CPU,) = parse_targets("cpu")
AT = "tests.conformance.fakes"


def outcome(backend, graph: str, folder):
    return attempt(backend, CPU, torture_item(graph), folder)


def test_a_correct_backend_gives_no_complaint(tmp_path):
    assert outcome(fakes.Honest(), "plain", tmp_path).kind == "passed"
    assert list(manners.complaints(fakes.Honest(), CPU, tmp_path)) == []
    engine = manners.built(fakes.Honest(), CPU, tmp_path)
    assert list(openings.open_complaints(fakes.Honest(), CPU, engine, tmp_path)) == []
    assert broken(fakes.Honest, tmp_path) == []


@pytest.mark.parametrize(
    ("backend", "graph", "kind", "words"),
    [
        (fakes.WrongAnswers(), "plain", "wrong", "sqnr_db"),
        (fakes.WrongAtOneSize(), "plain", "wrong", r"'x': \(1, 8\)"),
        (fakes.SwapsOutputs(), "outputs_not_in_the_order_of_work", "wrong", "'b': "),
        (fakes.IgnoresShapes(), "plain", "wrong", r"instead of float32 \(1, 3\)"),
        (fakes.FalseDigest(), "plain", "wrong", "digest"),
        (fakes.LeansOnItsModel(), "plain", "refused", "doesn't exist"),
        (fakes.Stumbles(), "plain", "broke", "KeyError"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, fakes.Honest) else "",
)
def test_the_suite_detects_faulty_engines(tmp_path, backend, graph, kind, words):
    result = outcome(backend, graph, tmp_path)
    assert result.kind == kind
    assert re.search(words, result.reason)


def test_an_unjustified_refusal_fails_the_suite(tmp_path):
    assert not outcome(fakes.SaysNothing(), "plain", tmp_path).good
    assert _names_nothing(outcome(fakes.SpeaksOfSomethingElse(), "if_by_an_input", tmp_path))
    assert _refuses_the_plain(outcome(fakes.RefusesThePlain(), "plain", tmp_path))


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        (fakes.WrongAnswers(), "size 2: 'y': max_rel"),
        (fakes.IgnoresShapes(), "outside of the profile"),
        (fakes.ConvertsSilently(), "float64: was answered"),
        (fakes.SharesMemory(), "an answer changed"),
        (fakes.WritesToInputs(), "it wrote to its inputs"),
        (fakes.AnswersByAddress(), "arrays that were filled anew"),
        (fakes.WrongWhenCallsOverlap(), "two threads that call at the same time"),
        (fakes.WrongFromTheSecondThreadOn(), "two threads that call at the same time"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, fakes.Honest) else "",
)
def test_bad_manners_are_detected(tmp_path, backend, words):
    assert [complaint for complaint in manners.complaints(backend, CPU, tmp_path) if words in complaint]


def test_a_backend_that_opens_any_file_is_detected(tmp_path):
    engine = manners.built(fakes.OpensAnything(), CPU, tmp_path)
    result = "\n".join(openings.open_complaints(fakes.OpensAnything(), CPU, engine, tmp_path))
    assert "an engine of tensorrt-rtx: was opened" in result and "an engine for sm_75: was opened" in result
    assert "an engine of versions that are not here: was opened" in result


def broken(cls: type, folder) -> list[str]:
    digests, answers = [], []
    for turn in ("first", "second"):
        (folder / turn).mkdir(exist_ok=True)
        digests.append(
            repeats.build_all(f"{AT}:{cls.__name__}", "cpu", str(folder / f"{turn}.npz"), folder / turn, ("plain",))
        )
        with np.load(folder / f"{turn}.npz") as stored_arrays:
            answers.append(dict(stored_arrays))
    return list(repeats.broken_claims(cls.capabilities.determinism, digests, answers))


@pytest.mark.parametrize(
    ("cls", "words"), [(fakes.LiesAboutBytes, "claims 'bytes'"), (fakes.LiesAboutOutputs, "with other bits")]
)
def test_a_false_determinism_claim_is_detected(tmp_path, cls, words):
    assert [complaint for complaint in broken(cls, tmp_path) if words in complaint]


def test_engines_that_differ_too_much_are_detected():
    one = {"plain/y": np.ones(4, "f")}
    assert list(repeats.broken_claims("budget", [{"plain": "a"}, {"plain": "b"}], [one, {"plain/y": np.zeros(4, "f")}]))
    assert list(repeats.broken_claims("budget", [{"plain": "a"}, {}], [one, {}])), "a build that is refused at times"


@pytest.mark.slow
def test_a_crash_or_hang_costs_one_graph(tmp_path, monkeypatch):
    names = ["scalar_output", "plain_with_one_shape_alone", "plain"]
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    crash_outcome = survey(f"{AT}:Crashes", "cpu", "torture", names, tmp_path / "a")
    assert [crash_outcome[name].kind for name in names] == ["passed", "crashed", "passed"]
    assert "SIGABRT" in crash_outcome[names[1]].reason and not crash_outcome[names[1]].good
    hangs_path = tmp_path / "hangs"

    def clock() -> float:
        """Stands still, and is far ahead for one look once it hangs."""
        if not hangs_path.exists():
            return 0.0
        hangs_path.unlink()
        return time.time() + 10_000

    monkeypatch.setenv("HANGS", str(hangs_path))
    monkeypatch.setattr("tests.conformance.survey.time", SimpleNamespace(time=clock))
    hang_outcome = survey(f"{AT}:Hangs", "cpu", "torture", names[1:], tmp_path / "b", patience_s=4)
    assert [hang_outcome[name].kind for name in names[1:]] == ["hung", "passed"]


def test_an_outcome_is_written_as_it_is_read(tmp_path):
    result = outcome(fakes.Honest(), "plain", tmp_path)
    assert type(result)(**json.loads(json.dumps(result.to_json()))) == result
    assert dataclasses.replace(result, kind="refused", reason=" ").good is False


def test_the_graphs_are_the_same_in_every_process():
    code = (
        "import hashlib; from tests.conformance.torture import GRAPHS\n"
        "print([hashlib.sha256(g.make().SerializeToString(deterministic=True)).hexdigest() for g in GRAPHS.values()])"
    )
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(2)]
    assert runs[0].stdout == runs[1].stdout and len(runs[0].stdout) > 1000
