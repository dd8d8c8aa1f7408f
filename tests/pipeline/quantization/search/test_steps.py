import math

from hypothesis import given
from hypothesis import strategies as st

from pipeline.quantization.search.steps import FLOAT, find_steps

NOISE = st.floats(0, 1) | st.sampled_from([math.inf, math.nan])


def test_a_group_omits_formats_that_pay_less_than_the_next_one() -> None:
    left_out_numbers = [(worse_number, 1, ["mxfp8", FLOAT]) for worse_number in (5, math.nan)]
    for fp8, mxfp8, formats in ((1.1, 1, ["fp8", "mxfp8", FLOAT]), *left_out_numbers, (8, 9, [FLOAT])):
        noises = {"nvfp4": {"g": 10.0}, "fp8": {"g": fp8}, "mxfp8": {"g": mxfp8}}
        assert [step.format for step in find_steps({"g": 1.0}, noises).values()] == formats


def test_groups_step_in_turn_from_their_first_format() -> None:
    steps = find_steps(
        {"a": 1, "b": 1, "c": 1}, noises := {"nvfp4": {"a": 9, "b": 4}, "fp8": {"a": 1, "b": 0, "c": 0.5}}
    )
    assert [(name, step.format) for name, step in steps.items()] == [
        ("a", "fp8"), ("b", "fp8"), ("a fp16", FLOAT), ("c", FLOAT), ("b fp16", FLOAT)
    ]  # fmt: skip
    assert steps["a"].macs + steps["a fp16"].macs == steps["c"].macs == 1, "all multiplications of a group"
    assert next(iter(find_steps({"a": 100, "b": 1, "c": 1}, noises))) == "b", "much work for what it saves"


@given(st.dictionaries(st.sampled_from("abcde"), st.tuples(NOISE, NOISE, NOISE, st.floats(0, 100)), min_size=1))
def test_steps_of_a_group_keep_their_order_despite_noise(groups: dict[str, tuple]) -> None:
    formats = ("mxfp8", "fp8", "int8", FLOAT)
    noises = {name: {group: row[index] for group, row in groups.items()} for index, name in enumerate(formats[:3])}
    steps = [*find_steps({group: row[3] for group, row in groups.items()}, noises).values()]
    assert steps == sorted(steps, key=lambda step: -step.utility)
    for group in groups:
        places = [formats.index(step.format) for step in steps if step.group == group]
        assert places == sorted({*places}) and places[-1] == 3
