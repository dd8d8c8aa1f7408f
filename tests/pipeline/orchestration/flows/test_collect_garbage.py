"""The flow that collects garbage: what its parameters may be."""

import pytest
from prefect.exceptions import ParameterTypeError

from pipeline.orchestration.flows.collect_garbage import collect_garbage


@pytest.mark.parametrize("days", [-1.0, 1e9, float("nan")])
def test_a_grace_period_that_no_calendar_has_is_refused_before_the_run(days: float) -> None:
    with pytest.raises(ParameterTypeError, match="grace_days"):
        collect_garbage.validate_parameters({"grace_days": days})
