from pathlib import Path

import pytest

from builders.reference import ONE_THREAD_BYTES, ONE_THREAD_STEP_BYTES, threads_for


@pytest.mark.parametrize(
    ("size", "whole", "step"), [(ONE_THREAD_BYTES - 1, 1, 1), (ONE_THREAD_BYTES, 0, 1), (ONE_THREAD_STEP_BYTES, 0, 0)]
)
def test_small_graphs_and_steps_are_run_in_one_thread(size: int, whole: int, step: int, tmp_path: Path) -> None:
    path = tmp_path / "graph.onnx"
    path.write_bytes(bytes(size))
    assert (threads_for(path), threads_for(path, steps=True)) == (whole, step)
