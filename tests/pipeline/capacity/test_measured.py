"""Which machines' names an engine was built for."""

import pytest

from enginesmith.registry.store.base import Store
from pipeline.capacity.measured import fits
from tests.enginesmith.registries import engine


@pytest.mark.parametrize(("target", "name", "wanted"), [
    ("cpu", "cpu", True), ("cpu", "sm_89", False), ("sm_89", "cpu", False),
    ("sm_89", "sm_89", True), ("sm_89", "l4", True), ("sm_89", "sm_80", False),
])  # fmt: skip
def test_an_engine_fits_the_names_of_its_target(store: Store, target: str, name: str, wanted: bool) -> None:
    assert fits(engine(store, target), name) is wanted
