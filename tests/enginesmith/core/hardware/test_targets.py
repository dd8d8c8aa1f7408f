"""Names of targets: what they stand for, which of a spec's serve them, and why others are none."""

import pytest

from enginesmith.core.errors import UnknownNameError
from enginesmith.core.hardware.machine import GENERATIONS, OTHER_PRODUCTS, match_targets, names, parse_targets
from enginesmith.core.types import Target


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("v100", "is a GPU of sm_70: sm_70 is not supported; known: sm_75, sm_80"),
        ("Tesla-P100", "known"),
        ("volta", "sm_70 is not supported"),
        ("sm_70", "'sm_70' is not supported"),
        ("7.0", "sm_70 is not supported"),
        ("sm_999", "known"),
        ("a30", "it is sm_80: name that"),
        ("h10", "did you mean 'h100'"),
        ("amper", "did you mean 'ampere'"),
    ],
)
def test_a_gpu_that_is_no_target_is_not_taken_for_another_one(name: str, words: str) -> None:
    with pytest.raises(UnknownNameError, match=words):
        parse_targets(name)


def test_products_that_are_no_targets_are_none_and_no_others_are_suggested_for_them() -> None:
    known = set(names())
    for products in OTHER_PRODUCTS.values():
        for name in products:
            assert name not in known
            with pytest.raises(UnknownNameError) as error:
                parse_targets(name)
            assert "did you mean" not in str(error.value)
    assert OTHER_PRODUCTS.keys() & {item.compute_capability for item in GENERATIONS}


@pytest.mark.parametrize(
    ("name", "known", "found"),
    [
        ("t4", ["turing", "cpu"], ["sm_75"]),
        ("turing", ["t4", "cpu"], ["t4"]),
        ("t4", ["t4", "turing"], ["t4"]),
        ("l4", ["l40s", "sm_80"], []),
        ("ampere", ["a10", "sm_80"], ["sm_80"]),
        ("ampere", ["a10", "a100"], ["a10", "a100"]),
        ("cpu", ["turing", "cpu"], ["cpu"]),
        ("avx2", ["cpu"], []),
        ("sm_90", ["turing"], []),
    ],
)
def test_a_name_is_served_by_what_is_or_holds_its_generation(name: str, known: list[str], found: list[str]) -> None:
    targets: list[Target] = [target for text in known for target in parse_targets(text)]
    assert [target.name for target in match_targets(name, targets)] == found
