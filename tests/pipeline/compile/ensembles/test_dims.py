"""Sizes of dims that several graphs of an ensemble have."""

import pytest

from enginesmith.core.errors import SpecError
from enginesmith.core.types import Dim
from pipeline.compile.ensembles.assembly import check_connections, whole_inputs
from pipeline.spec.ensembles.model import load_ensemble
from tests.ensembles import DECODER, ENCODER, write_ensemble


@pytest.mark.parametrize(("most", "found"), [(12, (6, 12)), (9, (6, 6)), (5, None)])
def test_a_dim_of_several_graphs_has_sizes_that_each_of_them_takes(most, found, tmp_path):
    """The encoder takes even batches, the decoder multiples of 3."""
    encoder = {**ENCODER, "dims": {"batch": {"multiple": 2, "opt": 8, "max": 12}}}
    decoder = {**DECODER, "dims": {"batch": {"multiple": 3, "opt": 3, "max": most // 3 * 3}}}
    loaded = load_ensemble(write_ensemble(tmp_path / "project", encoder=encoder, decoder=decoder))
    if found is None:
        with pytest.raises(SpecError, match="no size of batch suits all graphs that have it"):
            check_connections(loaded)
        return
    check_connections(loaded)
    _, (batch,) = whole_inputs(loaded)
    assert batch == Dim("batch", found[0], 6, found[1], multiple=6)
