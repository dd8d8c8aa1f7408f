"""The checks of one output of a case beside the golden set."""

import numpy as np

from validation.comparison.sessions import edge_checks
from validation.limits.terms import Budget


def test_decisions_at_an_edge_are_counted_too():
    expected = np.eye(4, 3, dtype=np.float32)
    actual = expected.copy()
    actual[0] = [0.0, 0.0, 1.0]
    checks = edge_checks(
        "engine", ("batch=4", [expected]), "y", (expected, actual), None, (Budget(argmax_agreement=0.9), None)
    )
    (found,) = (check for check in checks if check.name == "argmax_agreement")
    assert (found.value, found.passed) == (0.75, False)
