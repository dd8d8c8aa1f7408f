"""One column of an output wrong at one size inside the dims: found, blamed on its node, and repeated by fuzz."""

from pathlib import Path

import numpy as np
import pytest

from enginesmith.core.types import Precision
from tests.faults.campaign import Subject
from tests.faults.families import FAMILIES
from tests.faults.nets import add_constants, after
from tests.faults.plants import element_type

HALVED_AT_7 = """
    lengths = Shape(image) first = Gather(lengths, k_0i) size = Squeeze(first)
    seven = Squeeze(k_7i) wrong = Equal(size, seven)
    other = Mul(was, halves) found = Where(wrong, other, was)
"""


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_the_scores_beside_boxes_halved_at_one_inner_size(precision: Precision, tmp_path: Path) -> None:
    subject = Subject(tmp_path / "detector", FAMILIES["detector"], 1)
    graph = subject.graph(precision)
    planted = after(graph, "found", HALVED_AT_7)
    kind = np.float16 if element_type(graph, "found") == 10 else np.float32
    add_constants(planted, {"halves": np.array([1, 1, 1, 1, 0.5, 0.5, 0.5], kind)})
    engine = subject.bench.engine(planted, graph, precision)
    (failed,) = [check for check in engine.checks(seconds=2) if not check.passed]
    assert (failed.name, failed.case) == ("sizes", "batch=7 values=realistic")
    (row,) = engine.attribution([failed.case]).blamed
    assert {"Where_found"} <= set(row.computed_by)
    report = engine.fuzzed(only=failed.case)
    assert not report.passed and report.cases[0].failed[-1].name == "slice_sqnr_db"
