from errno import ENOSPC
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml

from enginesmith.core.errors import InputError, UnavailableError
from pipeline.spec.model import load_spec
from pipeline.traffic.buckets import write_buckets
from tests.pipeline.projects import weights, write_model

HEAD = """\
# A model.
model: tiny   # its name
source: {onnx: tiny.onnx}
inputs: {x: {dtype: float32, shape: [batch, length]}}
targets: [cpu]
"""


def spec_with(folder: Path, dims: str) -> Path:
    write_model(folder / "tiny.onnx", weights())
    (folder / "tiny.yaml").write_text(HEAD + dims)
    return folder / "tiny.yaml"


@pytest.mark.parametrize(
    ("dims", "expected"),
    [
        ("dims: {batch: {min: 1, max: 8}, length: {min: 2, opt: 4, max: 9}}  # so\n",
         "dims: {batch: {min: 1, max: 8}, length: {min: 2, buckets: [3, 8]}}  # so\n"),
        ("dims:\n  batch: {max: 8}\n  length: {buckets: [2,9], min: 2}   # of words\n",
         "dims:\n  batch: {max: 8}\n  length: {buckets: [3, 8], min: 2}   # of words\n"),
        ("dims:\n  batch: {max: 8}\n  length: {max: 9, opt: 4}\n",
         "dims:\n  batch: {max: 8}\n  length: {buckets: [3, 8]}\n"),
        ("dims:\n  length:\n    # why\n    opt: 4   # tuned\n    max: 9   # most\n    min: 2\n  batch: {max: 8}\n",
         "dims:\n  length:\n    # why\n    buckets: [3, 8]   # most\n    min: 2\n  batch: {max: 8}\n"),
        ("dims:\n  length:\n    min: 2\n    max: 9   # most\n    opt: 4   # tuned\n  batch: {max: 8}\n",
         "dims:\n  length:\n    min: 2\n    buckets: [3, 8]   # most\n  batch: {max: 8}\n"),
        ("dims:\n  length:\n    buckets:\n      - 4\n      - 9\n    # the batch\n  batch: {max: 8}\n",
         "dims:\n  length:\n    buckets: [3, 8]\n    # the batch\n  batch: {max: 8}\n"),
    ],
)  # fmt: skip
def test_the_line_is_put_in_its_place_and_nothing_else_changes(tmp_path, dims, expected):
    path = spec_with(tmp_path, dims)
    path.chmod(0o640)
    write_buckets(path, {"length": (3, 8)})
    assert path.read_text() == HEAD + expected and path.stat().st_mode & 0o777 == 0o640
    assert load_spec(path).dims["length"].buckets == (3, 8) and [*tmp_path.glob(".*")] == []


@pytest.mark.parametrize("dims", ["dims: {batch: &all {max: 8}, length: *all}\n", "base: &all {max: 8}\n"])
def test_a_spec_that_cannot_be_edited_is_reported_and_not_changed(tmp_path, dims):
    path = spec_with(tmp_path, dims)
    with pytest.raises(InputError, match=r"under dims.length: buckets: \[3, 8\]"):
        write_buckets(path, {"length": (3, 8)})
    assert path.read_text() == HEAD + dims and [*tmp_path.glob(".*")] == []


def test_a_disk_that_is_full_leaves_the_file(tmp_path, monkeypatch):
    path = spec_with(tmp_path, dims := "dims: {batch: {max: 8}, length: {max: 9}}\n")
    with monkeypatch.context() as patch, pytest.raises(UnavailableError, match=f"writing {path}"):
        patch.setattr(Path, "replace", Mock(side_effect=OSError(ENOSPC, "No space left on device")))
        write_buckets(path, {"length": (3, 8)})
    assert path.read_text() == HEAD + dims and [*tmp_path.glob(".*")] == []


def test_several_dims_are_edited_at_once(tmp_path):
    path = spec_with(tmp_path, "dims: {batch: {max: 8}, length: {max: 9}}\n")
    write_buckets(path, {"length": (3, 9), "batch": (1, 8)})
    result = yaml.safe_load(path.read_text())["dims"]
    assert result == {"batch": {"buckets": [1, 8]}, "length": {"buckets": [3, 9]}}
