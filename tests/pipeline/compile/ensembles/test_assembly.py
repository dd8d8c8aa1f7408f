"""What becomes of the errors of a graph that is built as a part of an ensemble."""

from pathlib import Path

import pytest

import enginesmith
from enginesmith.core.errors import DataError
from pipeline.orchestration import catalog
from tests.ensembles import write_ensemble


def test_data_that_does_not_suit_a_graph_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise DataError("state 'past' has come to length=5")

    monkeypatch.setattr(catalog, "compile_locked", refuse)
    with pytest.raises(DataError, match=r"^graph 'encoder': state 'past' has come to length=5$"):
        enginesmith.build(write_ensemble(tmp_path / "project"), registry=tmp_path / "registry")
