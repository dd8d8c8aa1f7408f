from enginesmith.core.text import pluralize


def test_a_count_of_one_is_singular() -> None:
    assert [pluralize(count, "model") for count in (0, 1, 2)] == ["0 models", "1 model", "2 models"]
    assert [pluralize(count, "criterion", "criteria") for count in (1, 3)] == ["1 criterion", "3 criteria"]
