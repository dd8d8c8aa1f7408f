import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders.backends.tvm import tuning
from enginesmith.core.errors import EnginesmithError

KERNELS = st.lists(st.sampled_from(["a", "b", "c", "d"]), min_size=1, max_size=4, unique=True)


def document(kernels, seconds):
    """Kernels by hash, and for each of them schedules that took so long; a trace is unique to its kernel and time."""
    measured = [
        [at, [f"trace of {kernel} {second}", [second], {"kind": "llvm"}, []]]
        for at, kernel in enumerate(kernels)
        for second in seconds
    ]
    return json.dumps(
        {"format": 1, "kernels": [[kernel, "module"] for kernel in kernels], "measured": measured}
    ).encode()


def known(data):
    """(hash of a kernel, seconds) of everything that was measured."""
    value = json.loads(data)
    return {(value["kernels"][at][0], rest[1][0]) for at, rest in value["measured"]}


@given(KERNELS, KERNELS, st.sets(st.floats(1e-6, 1.0), max_size=5), st.sets(st.floats(1e-6, 1.0), max_size=5))
def test_merging_keeps_what_both_know_under_one_number_for_each_kernel(first, second, times, others):
    merged = tuning.merge(document(first, times), document(second, others))
    assert known(merged) == known(document(first, times)) | known(document(second, others))
    hashes = [kernel[0] for kernel in json.loads(merged)["kernels"]]
    assert sorted(hashes) == sorted({*first, *second})
    assert tuning.merge(merged, document(second, others)) == merged


def test_the_quickest_of_each_kernel_are_kept_and_none_that_did_not_run():
    many = [float(number) for number in range(1, 40)]
    merged = tuning.merge(document(["a"], many), document(["b"], [1e10, 5.0]))
    assert known(merged) == {("a", second) for second in many[:16]} | {("b", 5.0)}


def test_files_and_document_are_the_same(tmp_path):
    data = tuning.merge(document(["a", "b"], [2.0, 1.0]), document(["c"], [3.0]))
    tuning.unbundle(data, tmp_path)
    assert all((tmp_path / name).read_text().endswith("\n") for name in tuning.FILES)
    assert tuning.bundle(tmp_path) == data


def test_a_search_that_found_nothing_leaves_an_empty_document(tmp_path):
    assert json.loads(tuning.bundle(tmp_path)) == {"format": 1, "kernels": [], "measured": []}


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\xff", b"[]", b"{}", b"[" * 100_000, b'{"format":2,"kernels":[],"measured":[]}',
        b'{"format":1,"kernels":[["a"]],"measured":[[1,["t",[1.0]]]]}', b'{"format":1,"kernels":["a"],"measured":[]}',
        b'{"format":1,"kernels":[["a"]],"measured":[[0,["t",["x"]]]]}',
        b'{"format":1,"kernels":[["a"]],"measured":[[-1,["t",[1]]]]}',
        b'{"format":1,"kernels":[["a"]],"measured":[[0]]}', b'{"format":1,"kernels":3,"measured":[]}',
    ],
)  # fmt: skip
def test_what_is_no_document_is_an_error_and_writes_nothing(data, tmp_path):
    with pytest.raises(EnginesmithError, match="no records of TVM's tuning"):
        tuning.unbundle(data, tmp_path)
    assert list(tmp_path.iterdir()) == []


@given(
    st.recursive(
        st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_any_json_is_a_document_or_an_error(value):
    with pytest.raises(EnginesmithError, match="no records"):
        tuning.merge(json.dumps(value).encode(), document(["a"], [1.0]))
