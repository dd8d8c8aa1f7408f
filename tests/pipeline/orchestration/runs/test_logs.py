import re
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from builders.execution.scrub import HIDDEN, scrubber
from pipeline.orchestration.runs.views import HEAD_BYTES, LIVE_BYTES, LONGEST_LINE, PIECE, TAIL_BYTES, KeptLog

SECRET = "hunter2hunter2"
SCRUB = scrubber({"MY_TOKEN": SECRET})
KEY = f"-----BEGIN PRIVATE KEY-----\n{SECRET[:7]}\n-----END PRIVATE KEY-----\n"
TEXT = f"one\npassword={SECRET}\r\n{KEY}ends with {SECRET}"
WANTED = f"one\npassword={HIDDEN}\r\n{HIDDEN}\nends with {HIDDEN}"


def kept(*pieces: str) -> KeptLog:
    log = KeptLog(SCRUB)
    for piece in pieces:
        log.feed(piece)
    log.close()
    return log


@given(st.lists(st.integers(0, len(TEXT)), max_size=12))
def test_pieces_cut_anywhere_give_the_same_text(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(TEXT)]
    assert kept(*[TEXT[a:b] for a, b in pairwise(edges)]).text() == WANTED


@given(st.integers(1, len(TEXT)))
def test_a_partial_line_shows_no_part_of_a_secret(cut: int) -> None:
    log = KeptLog(SCRUB)
    log.feed(TEXT[:cut])
    shown_text = log.last()
    assert "hunter" not in shown_text
    assert WANTED.startswith(shown_text.rstrip("\n")) or shown_text.endswith(f"{HIDDEN}\n")


def test_head_and_tail_stay_and_the_middle_is_counted() -> None:
    lines = [f"{number:07d}\n" for number in range((HEAD_BYTES + TAIL_BYTES) // 8 + 50_000)]
    text = kept("".join(lines)).text()
    assert text.startswith("0000000\n0000001\n") and text.endswith(lines[-1])
    (gap,) = re.findall(r"\n\[\.\.\. (\d+) bytes were left out \.\.\.\]\n", text)
    assert len(text) - len(f"\n[... {gap} bytes were left out ...]\n") + int(gap) == 8 * len(lines)
    assert HEAD_BYTES + TAIL_BYTES - 2 * PIECE <= len(text) <= HEAD_BYTES + TAIL_BYTES + 100


def test_a_log_of_exactly_the_limit_is_complete() -> None:
    fitting_text = "1234567\n" * ((HEAD_BYTES + TAIL_BYTES) // 8)
    assert kept(fitting_text).text() == fitting_text and "were left out" in kept(fitting_text, "\n").text()


def test_a_line_without_end_is_cut_and_bounded() -> None:
    log = KeptLog(SCRUB)
    for _ in range(50):
        log.feed("x" * 10_000 + SECRET)
    log.feed("\nnext\n")
    text = log.text()
    assert text.endswith("[the line is longer]\nnext\n") and len(text) < LONGEST_LINE + 100 and "hunter" not in text


def test_a_secret_across_a_long_lines_cut_is_hidden() -> None:
    for part in range(1, len(SECRET)):
        filling = LONGEST_LINE - part + 1  # so that the line is too long when this much of the secret has come
        pieces = ("x" * 1000, "x" * (filling - 1000) + SECRET[:part], SECRET[part:], "\ny\n")
        assert "h" not in kept(*pieces).text().replace("[the line is longer]", ""), part


def test_the_live_end_is_bounded_and_progress_bars_are_lines() -> None:
    log = KeptLog(SCRUB)
    log.feed("".join(f"\r{percent:3d} %" for percent in range(100)))
    assert log.last().endswith("98 %\r"), "the last one has not ended"
    log.feed("\n" + "z\n" * LIVE_BYTES)
    assert len(log.last()) == LIVE_BYTES


def test_a_job_that_printed_nothing_has_no_log() -> None:
    assert KeptLog(SCRUB).empty and kept("").empty and not kept("x").empty
