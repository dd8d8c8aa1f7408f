import json
import resource
from pathlib import Path

import pytest

from enginesmith.client.layouts.triton_config import read_warmup
from enginesmith.core.errors import IntegrityError
from enginesmith.core.golden import golden_prefix
from enginesmith.core.types import TensorSpec

X = TensorSpec("x", "float32", ("n",))


def written(path: Path, shape: list[int], offsets: list[int], size: int | None = None) -> Path:
    item = {"dtype": "F32", "shape": shape, "data_offsets": offsets}
    header = json.dumps({f"{golden_prefix(0, 'in')}x": item}).encode()
    path.write_bytes((len(header) if size is None else size).to_bytes(8, "little") + header + bytes(8))
    return path


def test_a_true_header_is_read(tmp_path: Path) -> None:
    warmup = read_warmup(written(tmp_path / "golden", [2], [0, 8]), [X])
    assert warmup is not None and warmup["x"].data == bytes(8)


@pytest.mark.parametrize(
    ("shape", "offsets"),
    [([2], [0, 1 << 62]), ([2], [8, 0]), ([2], [1 << 62, 1 << 62]), ([0], [0, 8]), ([3], [0, 8]), ([1 << 62], [0, 8])],
)
def test_offsets_beyond_the_file_are_refused(tmp_path: Path, shape: list[int], offsets: list[int]) -> None:
    with pytest.raises(IntegrityError, match="golden set: input 'x' of shape"):
        read_warmup(written(tmp_path / "golden", shape, offsets), [X])


def test_a_header_of_any_length_is_refused(tmp_path: Path) -> None:
    peak_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(IntegrityError, match=r"a header has .* bytes"):
        read_warmup(written(tmp_path / "golden", [2], [0, 8], (1 << 63) - 1), [X])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_before < 1 << 16
