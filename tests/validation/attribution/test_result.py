import json
import math
from dataclasses import replace

import pytest

from enginesmith.core.codec import decode, encode_document
from enginesmith.core.errors import IntegrityError
from tests.validation.page_data import attribution
from tests.validation.reporting.test_html import Page, bare, render
from validation.attribution.result import (
    NamedAttribution,
    Proposal,
    Taps,
    TensorError,
    describe_attribution,
    describe_taps,
    format_error,
    format_row,
    rank_segments,
    summarize,
)
from validation.limits.budget import Budgets
from validation.limits.terms import Budget

FOUND = decode(attribution(), NamedAttribution)


def test_an_attribution_is_read_back_unchanged_without_bare_nan() -> None:
    odd_errors = [
        TensorError(math.nan, math.nan, 0, 0.0, "it is missing"),
        TensorError(math.inf),
        TensorError(-math.inf, 1.0, 3),
    ]
    rows = tuple(replace(FOUND.rows[0], local=error) for error in odd_errors)
    result = replace(FOUND, rows=rows, segments=3, taps=Taps(3, {"logits": TensorError(91.0, 1e-6)}))
    document = json.loads(json.dumps(encode_document(result), allow_nan=False))
    again = decode(document, NamedAttribution)
    assert encode_document(again) == document and again.taps == result.taps and again.rows[1:] == result.rows[1:]
    assert document["format"] == 1 and document["segments"] == 3
    assert document["rows"][0]["local"]["sqnr_db"] == "nan" and document["rows"][2]["local"]["sqnr_db"] == "-inf"
    empty_proposal = replace(FOUND, proposal=Proposal(3, 7, False, None))
    empty_name = dict.fromkeys(("leave", "overrides", "snippet", "quality"))
    counts = {"groups": 3, "runs": 7, "minimal": False, "searched": False, "ended_early": False}
    assert encode_document(empty_proposal)["proposal"] == counts | empty_name


@pytest.mark.parametrize("change", [{"format": 2}, {"rows": [{}]}, {"taps": None}])
def test_anything_else_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(IntegrityError):
        decode({**attribution(), **change}, NamedAttribution)


def test_rows_without_a_result_come_first_then_what_is_not_finite_then_by_error() -> None:
    texts = TensorError(note="it does not run"), TensorError(unequal=0.5)
    errors = [TensorError(50.0), TensorError(-math.inf), TensorError(60.0, 0.0, 2), *texts]
    rows = [replace(FOUND.rows[0], local=error) for error in errors]
    assert [rows.index(row) for row in rank_segments(rows)] == [3, 2, 4, 1, 0]
    assert [format_error(error) for error in errors[2:]] == ["2 not finite", "no result", "50.00% unequal"]
    assert format_error(TensorError()) == "exact" and format_error(errors[0]) == "50.0 dB"


def test_the_headline_says_blamed_spread_or_nothing() -> None:
    node = "/encoder/layers.0/attention/output/dense/MatMul"
    assert summarize(FOUND) == f"{node} (MatMul): 9.0 dB by itself, limit 15 dB"
    rows = tuple(replace(row, blamed="") for row in FOUND.rows)
    spread = summarize(replace(FOUND, rows=rows, finding="spread"))
    assert "the errors of 20 parts add up" in spread and f"{node}'s (MatMul, 9.0 dB)" in spread
    assert summarize(replace(FOUND, finding="nothing-failed")).startswith("no golden case fails")
    assert format_row(0, FOUND.rows[0])[:5] == ("1", f"{node} + 1", "MatMul", "9.0 dB", "8.0 dB")


def test_the_result_always_says_whether_tapping_changed_the_outputs() -> None:
    assert "changed no bit" in describe_taps(FOUND) and describe_taps(FOUND) in describe_attribution(FOUND)
    changed_value = replace(FOUND, taps=Taps(4, {"logits": TensorError(91.04, 1e-6)}))
    assert (
        describe_taps(changed_value)
        == "tapping changed the outputs (logits by 91.0 dB): the ranking is of the tapped model"
    )
    assert "not known" in describe_taps(replace(FOUND, taps=Taps()))


def test_the_page_has_the_table_the_proposal_and_nothing_where_nothing_failed() -> None:
    text = " ".join(Page(render(bare())).text.split())
    assert "Which node drifted" in text and "8 more parts have smaller own errors." in text
    assert "with 1 of 24 groups in float the graph passes (7 graphs tried; no group can be left out)" in text
    assert "12.1, limit 15 -> 21.5" in text and "precision: fp16}" in text
    assert text.count("✕ 9.0 dB") == 1
    assert "Which node drifted" not in render({**bare(), "attributions": []})


def test_a_part_has_the_tightest_limit_of_the_outputs() -> None:
    tight_entries = {("a", "golden"): Budget(sqnr_db=104.0), ("b", "edge"): Budget(sqnr_db=None)}
    assert Budgets(Budget(max_rel=0.1, sqnr_db=80.0), tight_entries).tightest == Budget(sqnr_db=104.0)
    assert Budgets(Budget()).tightest.sqnr_db is None
