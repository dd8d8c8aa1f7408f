import json
import math

import numpy as np
import pytest

from enginesmith.core.codec import encode
from enginesmith.core.errors import InputError, IntegrityError, digest_of
from tests.validation.canary.reports import observations, report
from validation.canary.judging.judge import Looks
from validation.canary.report import continue_looks, mann_whitney, read_report

LOOKS = {"requests": [4000], "fractions": [1.0], "level_pass": 0.05, "level_fail": 0.01}


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    return encode(report(tmp_path_factory.mktemp("canary"), 4000, failing=0.02))


def bytes_of(document):
    return json.dumps(document).encode()


def signed(document):
    """As a forger who knows the format would do it."""
    bare_values = {key: value for key, value in document.items() if key != "digest"}
    return bytes_of({**bare_values, "digest": digest_of(bare_values)})


def test_a_report_survives_json(failed):
    actual = read_report(bytes_of(failed))
    assert (actual.verdict, actual.digest) == ("FAIL", failed["digest"])
    assert actual.candidate.manifest == "a" * 64 and (actual.looks.planned, actual.looks.requests) == (None, (4000,))
    assert encode(actual) == failed and list(failed)[:4] == ["format", "kind", "verdict", "reason"]
    assert failed["format"] == 1, "reports of this format are in registries"


def test_an_edit_is_detected(failed):
    with pytest.raises(IntegrityError, match="edited by hand"):
        read_report(bytes_of({**failed, "verdict": "PASS"}))
    with pytest.raises(IntegrityError, match="does not follow from its criteria"):
        read_report(signed({**failed, "verdict": "PASS"}))
    criteria = [{**item, "verdict": "PASS"} if item["name"] == "errors" else item for item in failed["criteria"]]
    with pytest.raises(IntegrityError, match="errors says PASS, but its values give FAIL"):
        read_report(signed({**failed, "verdict": "PASS", "criteria": criteria}))


@pytest.mark.parametrize(
    "bad", [b"", b"{", b"[1]", b"{}", b"[" * 100_000, b'{"format": 1, "kind": "enginesmith-canary"}']
)
def test_invalid_reports_are_refused(bad):
    with pytest.raises(IntegrityError):
        read_report(bad)


def test_a_newer_document_of_another_kind_is_no_report(failed):
    with pytest.raises(IntegrityError, match="not a canary report of format 1"):
        read_report(signed({**failed, "kind": "enginesmith-gpu-check", "format": 2}))


def test_a_contradictory_report_is_refused(failed):
    whole_text = json.dumps(failed)
    with pytest.raises(IntegrityError, match="'verdict' is given twice"):
        read_report(f'{{"verdict": "PASS", {whole_text[1:]}'.encode())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"criteria": [3]}, "criteria.0. is 3"),
        ({"looks": {**LOOKS, "planned": 1.5}}, "looks.planned is 1.5"),
        ({"candidate": {"engine": "x"}}, "engine is 'x'; a SHA-256 is needed"),
        ({"thresholds": {"latency": {"p50": "fast"}}}, "latency.p50 is 'fast'"),
        ({"view": {"more": 1}}, "view has no field 'more'"),
        ({"host": {"cpus": 2}}, "host.cpus is 2"),
    ],
)
def test_a_forged_report_is_refused_with_the_wrong_field(failed, change, message):
    with pytest.raises(IntegrityError, match=f"is invalid .*{message}"):
        read_report(signed({**failed, **change}))


@pytest.mark.parametrize("missing", ["criteria", "looks", "candidate", "thresholds"])
def test_a_report_without_a_part_is_refused(failed, missing):
    with pytest.raises(IntegrityError, match="is invalid"):
        read_report(signed({key: value for key, value in failed.items() if key != missing}))


def test_a_plan_continues_only_with_the_same_engines(tmp_path, failed):
    first = read_report(report(tmp_path, 900, looks=Looks(9000)).to_bytes())
    assert first.verdict == "INSUFFICIENT" and (first.looks.planned, first.looks.requests) == (9000, (900,))
    our_table, their_table = observations(tmp_path, 40)
    assert continue_looks(first, our_table, their_table) == Looks(9000, (900,))
    with pytest.raises(InputError, match="another candidate"):
        continue_looks(first, their_table, their_table)
    with pytest.raises(InputError, match="already decided: FAIL"):
        continue_looks(read_report(bytes_of(failed)), our_table, their_table)
    single_report = read_report(report(tmp_path, 900).to_bytes())
    with pytest.raises(InputError, match="spent the whole allowed error"):
        continue_looks(single_report, our_table, their_table)


def test_mann_whitney_and_the_effect_size_are_computed():
    assert mann_whitney(np.array([3.0, 4.0]), np.array([1.0, 2.0])).cles == 1.0
    whitney = mann_whitney(np.array([1.0, 1.0, 2.0]), np.array([1.0, 2.0, 2.0]))
    # Pairs: 9, of which the candidate is greater in 1, equal in 4.
    assert whitney.u == 3.0 and whitney.cles == pytest.approx(3 / 9)
    # Conover's example of 12 and 36 farm boys is out of reach here; by hand: ranks 1..6, U = 2, sd = sqrt(9 * 7 / 12).
    result = mann_whitney(np.array([1.0, 2.0, 5.0]), np.array([3.0, 4.0, 6.0]))
    assert result.u == 2.0 and result.z == pytest.approx((2 - 4.5) / np.sqrt(9 * 7 / 12))
    assert result.p == pytest.approx(math.erfc(-result.z / math.sqrt(2)))
    assert mann_whitney(np.array([]), np.array([1.0])) is None
