import pytest

from enginesmith.core.text import (
    find_nearest,
    format_bytes,
    format_checks,
    format_metrics,
    format_plain,
    join_first,
    suggest,
)


@pytest.mark.parametrize(
    ("word", "names", "otherwise", "expected"),
    [
        ("fp61", ["fp32", "fp16"], None, "did you mean 'fp16'?"),
        ("xyz", ["fp32", "fp16"], None, "known: fp32, fp16"),
        ("xyz", ["fp32"], "look it up", "look it up"),
        ("xyz", [], None, "known: none"),
        ("xyz", ["fp32"], "", ""),
    ],
)
def test_the_nearest_word_or_all_known_words_are_suggested(word, names, otherwise, expected):
    assert suggest(word, names, otherwise) == expected


@pytest.mark.parametrize(
    ("word", "names", "meant"),
    [
        ("modle", ["model", "source"], "model"),
        ("FP16", ["fp32", "fp16"], "fp16"),
        ("logit", ["labels", "logits"], "logits"),
        ("xxyy", ["xyxy", "cxcywh"], "xyxy"),
        ("sqnr", ["cosine", "centered_sqnr_db", "sqnr_db"], "sqnr_db"),
        ("time", ["mig", "time-slicing"], "time-slicing"),
        ("MatMull", ["Gemm_0", "MatMul_1"], "MatMul_1"),
        ("input", ["output"], None),
        ("candidate", ["calibrate"], None),
        ("heads", ["hidden", "seeds"], None),
        ("mask", ["tokens", "labels"], None),
        ("x", ["y", "xs"], None),
        ("l5", ["l4", "l40"], None),
        ("", ["x"], None),
    ],
)
def test_only_a_near_word_is_suggested(word, names, meant):
    assert find_nearest(word, names) == meant


def test_a_long_list_is_shortened_with_a_count():
    assert join_first([], 2) == "" and join_first(["a", "b"], 2) == "a, b"
    assert join_first(["a", "b", "c"], 2) == "a, b and 1 more"
    assert join_first(["a", "b", "c", "d"], 2, "; ") == "a; b; and 2 more"


def test_bytes_are_shown_in_powers_of_1024():
    sizes = (None, 0, 512, 1023, 2048, 5 << 20, 40 << 30, 2 << 40)
    texts = ["", "0 B", "512 B", "1023 B", "2.0 KiB", "5.0 MiB", "40.0 GiB", "2048.0 GiB"]
    assert [format_bytes(size) for size in sizes] == texts


def test_task_metrics_are_one_line_with_their_units():
    assert format_metrics({"accuracy": 0.98333, "si_sdr_db": 41.25}) == "accuracy 0.9833, si_sdr_db 41.2 dB"
    assert format_metrics({}) == ""


@pytest.mark.parametrize(
    ("value", "text"),
    [(2334.0, "2,330"), (1.54, "1.54"), (999.9, "1,000"), (2e9, "2,000,000,000"), (0.000123, "0.000123"), (0, "0"),
     (-4100.0, "-4,100"), (5.0, "5"), (float("inf"), "inf"), (float("nan"), "nan"), (100.0, "100")],
)  # fmt: skip
def test_a_plain_number_has_no_exponent(value, text) -> None:
    assert format_plain(value) == text


def test_checks_are_counted_as_passed_of_all() -> None:
    assert format_checks({"passed": 38, "failed": 1, "not_measured": 1}) == "38/40"
    assert format_checks({"passed": 0, "failed": 0}) == ""
