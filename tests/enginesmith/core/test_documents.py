import pytest

from enginesmith.core.errors import DataError
from enginesmith.core.parsing import find, put, read

CLUSTER: dict[str, object] = {"metadata": {"name": "ray", "labels": None}, "spec": {"suspend": "yes"}}


def test_the_value_at_a_path_or_a_default() -> None:
    assert read(CLUSTER, "metadata.name", str) == "ray"
    assert find(CLUSTER, "metadata.labels", dict, {}) == {}
    assert find(CLUSTER, "status.phase", str, None) is None
    assert read({"ts": 3}, "ts", float) == 3.0


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (CLUSTER, "spec.suspend is 'yes'; bool is needed"),
        ({"spec": {}}, "spec.suspend is missing"),
        ({"spec": ["suspend"]}, "spec.suspend is missing"),
        ({"spec": {"suspend": 1}}, "spec.suspend is 1; bool is needed"),
        ("text", "spec.suspend is missing from text"),
    ],
)
def test_a_missing_or_mistyped_value_is_named_with_its_path(document: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(document, "spec.suspend", bool)


def test_a_copy_with_another_value() -> None:
    assert put(CLUSTER, "spec.suspend", True)["spec"] == {"suspend": True}
    assert put(CLUSTER, "status.phase", "Failed")["status"] == {"phase": "Failed"}
    assert read(CLUSTER, "spec.suspend", str) == "yes"
