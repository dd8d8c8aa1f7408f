from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from enginesmith.core.reports.proof import Check
from pipeline.compile.steps.attributions import find_suspects
from pipeline.outcome import JudgedUnit
from pipeline.values import Recipe


def task(place: str) -> Check:
    return Check("task", "accuracy", "logits", f"golden, {place}", 0.1, 0.9, False)


def drift(stage: str, name: str = "sqnr_db") -> Check:
    return Check(stage, name, "logits", "golden", 3.0, 15.0, False)


@pytest.mark.parametrize(
    ("failed", "taken"),
    [
        ([task("exported model"), task("graph"), task("engine")], []),  # wrong labels: nobody's drift
        ([task("graph"), task("engine")], ["quantization"]),
        ([task("engine")], ["engine"]),
        ([drift("quantization"), task("graph"), task("engine")], ["quantization"]),
        ([task("graph"), task("engine"), drift("engine")], ["quantization", "engine"]),
        ([task("exported model"), drift("engine")], ["engine"]),
        ([drift("engine", "contract ece")], []),
        ([drift("engine", "calls repeated")], []),
        ([drift("engine", "sizes")], ["engine"]),
        ([drift("engine", "magnitudes")], ["engine"]),
        ([replace(drift("engine", "magnitudes"), case="batch=4 values=nan")], ["engine"]),
        ([drift("engine", "padding")], []),
        ([drift("export")], []),
    ],
)
def test_inherited_failures_are_not_attributed(failed: list[Check], taken: list[str]) -> None:
    request = SimpleNamespace(model="a" * 64, backend="onnxruntime")
    graph = SimpleNamespace(recipe=Recipe("b" * 64))
    built_stub = SimpleNamespace(unit=SimpleNamespace(name="cpu int8 onnxruntime", request=request, graph=graph))
    judged_unit = cast("JudgedUnit", SimpleNamespace(built=built_stub, report=SimpleNamespace(failed=tuple(failed))))
    suspects = find_suspects([judged_unit])
    assert [item.stage for item in suspects] == taken
    cases = tuple(c.case for c in failed if c.name in ("sizes", "magnitudes") and not c.case.endswith("nan"))
    assert all(item.cases == cases for item in suspects)
