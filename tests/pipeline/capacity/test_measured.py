import re
from pathlib import Path

import pytest

from enginesmith.core.errors import SpecError
from enginesmith.registry.store.base import Store
from pipeline.capacity.measured import fits, read_prices
from tests.enginesmith.registries import engine


@pytest.mark.parametrize(("target", "name", "expected"), [
    ("cpu", "cpu", True), ("cpu", "sm_89", False), ("sm_89", "cpu", False),
    ("sm_89", "sm_89", True), ("sm_89", "l4", True), ("sm_89", "sm_80", False),
])  # fmt: skip
def test_an_engine_fits_the_names_of_its_target(store: Store, target: str, name: str, expected: bool) -> None:
    assert fits(engine(store, target), name) is expected


def file(folder: Path, text: str) -> Path:
    path = folder / "prices.yaml"
    path.write_text(text)
    return path


def test_prices_use_the_narrowest_name(tmp_path: Path) -> None:
    text = "currency: EUR\nL4: {per_hour: 0.71, count: 40}\n'8.9': {per_hour: 1}\ncpu: {per_hour: 0.1}\n"
    prices = read_prices(file(tmp_path, text))
    assert prices.currency == "EUR" and set(prices.machines) == {"l4", "sm_89", "cpu"}
    assert prices.machines["l4"].count == 40 and prices.machines["sm_89"].count is None
    assert prices.name_of(("l4", "sm_89")) == "l4" and prices.name_of(("l40s", "sm_89")) == "sm_89"
    assert prices.name_of(("x86-64-v3", "cpu")) == "cpu" and prices.name_of(("a100", "sm_80")) is None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "has no price; write such as"),
        ("l4: {per_hour: -1}", "prices.yaml:2: l4.per_hour: -1: must be above 0"),
        ("l4: {per_hour: 0}", "l4.per_hour: 0: must be above 0"),
        ("l4: {per_hours: 1}", "l4.per_hours: unknown key; did you mean 'per_hour'?"),
        ("l4: {count: 1}", "l4.per_hour: is missing; add it (write such as `l4: {per_hour: 0.71, count: 40}`)"),
        ("l4: {per_hour: 1, count: -2}", "l4.count: -2: must be 0 or more"),
        ("l4: {per_hour: 1.0e+308}", "l4.per_hour: 1e+308: must be "),
        ("l4: 0.71", "l4: 0.71: must be a mapping"),
        ("l5: {per_hour: 1}", "prices.yaml:2: target 'l5' is not known; known: cpu"),
        ("ampere: {per_hour: 1}", "prices.yaml:2: ampere stands for several: sm_80, sm_86; give a price for each"),
        ("l4: {per_hour: 1}\nl4: {per_hour: 2}", "prices.yaml:3: key 'l4' is given twice; keep one"),
    ],
)
def test_a_mistake_is_named_with_its_line(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(SpecError, match=re.escape(message)):
        read_prices(file(tmp_path, f"currency: USD\n{line}\n"))
