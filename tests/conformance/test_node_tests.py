"""A sample of ONNX's node tests, the list of known failures, and the page. `make node-tests` runs all of them."""

import json

import pytest

from builders.execution.process import run_job
from tests.calls import call_job
from tests.conformance import page
from tests.conformance.node_tests import BACKENDS, known_failures, surprises
from tests.conformance.outcomes import Outcome
from tests.conformance.survey import survey
from tests.conformance.trial import backend_of, target_for

# Of each kind: convolutions, shapes that are inputs, control flow, integers, and a known failure. None whose inputs are
# drawn by chance and which pass or fail with it: what is drawn depends on which tests were made before.
MODULES = ("conv", "slice", "loop", "bitwiseand", "maxunpool")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.slow
def test_a_sample_of_the_node_tests_matches_the_known_failures(backend, tmp_path):
    target = target_for(backend_of(backend))
    if not backend_of(backend).versions() or target is None:
        pytest.skip(f"{backend} is not installed")
    (folder := tmp_path / "names").mkdir()
    names = run_job(call_job("names", "tests.conformance.survey:node_names", {"modules": list(MODULES)}), folder)
    assert len(names) < 100
    result = survey(backend, target.name, f"nodes/{','.join(MODULES)}", names, tmp_path)
    assert result.keys() == set(names)
    known_reasons = {name: reason for name, reason in known_failures(backend).items() if name in names}
    assert surprises(result, known_reasons) == []
    assert any(outcome.kind in ("passed", "built") for outcome in result.values())


def test_a_new_failure_and_an_unexpected_pass_are_both_surprises():
    cases = {name: Outcome(name, kind, "because") for name, kind in (("a", "passed"), ("b", "wrong"), ("c", "crashed"))}
    assert surprises(cases, {"b": "known"}) == ["c: crashed at : because"]
    assert surprises(cases, {"a": "known", "b": "known", "c": "known"}) == ["a: known to fail, and it passed"]


def test_every_known_failure_has_a_reason_and_is_recorded():
    for backend, item in page.stored()["nodes"].items():
        failed_names = {name for name, kind in page.others(item).items() if kind != "refused"}
        assert failed_names == set(known_failures(backend)), "run `make node-tests`"
        assert all(len(reason) > 20 for reason in known_failures(backend).values())


def test_the_page_shows_the_stored_results():
    text = page.PAGE.read_text()
    assert page.with_tables(text, page.stored()) == text, "run `make conformance`"
    assert "| `onnxruntime` | cpu | onnxruntime " in text


def test_stored_results_contain_no_paths_of_this_machine():
    text = page.FOUND.read_text()
    assert not [word for word in ("/tmp", "/home", "/usr", "process0") if word in text]


def test_results_of_the_torture_set_match_the_records(tmp_path):
    """With the versions on record: what the page says of a graph is what happens to it."""
    onnxruntime = page.stored()["torture"]["onnxruntime"]
    if onnxruntime["versions"] != backend_of("onnxruntime").versions():
        pytest.skip("another version of onnxruntime than the one on record")
    result = survey("onnxruntime", "cpu", "torture", [*page.others(onnxruntime), "plain", "if_by_an_input"], tmp_path)
    assert {name: o.kind for name, o in result.items() if o.kind != "passed"} == page.others(onnxruntime)


def test_tables_are_put_between_their_marks_and_nowhere_else():
    item = {"target": "cpu", "versions": {"x": "1", "x-libs": "1"}, "counts": {"passed": 2, "wrong": 1}}
    entries = {"torture": {"x": {**item, "others": [["wrong", "run", "a | b", "g h"]]}}}
    text = (
        "before\n<!-- torture -->\nold\n<!-- /torture -->\nafter\n<!-- torture-refused -->\n<!-- /torture-refused -->\n"
    )
    tables = page.with_tables(text, json.loads(json.dumps(entries)))
    assert "| `x` | cpu | x 1 | 3 | 2 | 0 | 0 | 1 |" in tables and "old" not in tables and tables.startswith("before\n")
    assert "| `x` | g, h | wrong (run) | a \\| b |" in tables and "\nafter\n" in tables


def test_results_of_the_suite_match_the_records(tmp_path):
    entries = {"plain": Outcome("plain", "passed", seconds=0.5), "odd": Outcome("odd", "refused", "no n", "plan")}
    page.keep(tmp_path / "found", "onnxruntime", entries)
    assert dict(page.kept(tmp_path / "found")) == {"onnxruntime": entries}
