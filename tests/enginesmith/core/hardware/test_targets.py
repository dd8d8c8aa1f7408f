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
        ("a30", "give sm_80"),
        ("h10", "did you mean 'h100'"),
        ("amper", "did you mean 'ampere'"),
    ],
)
def test_a_gpu_without_a_target_is_not_mistaken_for_another(name: str, words: str) -> None:
    with pytest.raises(UnknownNameError, match=words):
        parse_targets(name)


def test_unknown_products_are_refused_without_suggestions() -> None:
    target_names = set(names())
    for products in OTHER_PRODUCTS.values():
        for name in products:
            assert name not in target_names
            with pytest.raises(UnknownNameError) as error:
                parse_targets(name)
            assert "did you mean" not in str(error.value)
    assert OTHER_PRODUCTS.keys() & {item.compute_capability for item in GENERATIONS}


@pytest.mark.parametrize(
    ("name", "spec_targets", "expected"),
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
def test_a_name_matches_targets_that_equal_or_contain_its_generation(
    name: str, spec_targets: list[str], expected: list[str]
) -> None:
    targets: list[Target] = [target for text in spec_targets for target in parse_targets(text)]
    assert [target.name for target in match_targets(name, targets)] == expected
