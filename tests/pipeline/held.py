"""A calibration that waits as long as a test holds it."""

from pathlib import Path

from tests.pipeline.projects import Project

# Says where it is, and waits as long as the test holds it: a step that takes long, at will.
SLOW = """
import os, pathlib, time
import numpy as np

def samples():
    place = pathlib.Path({place!r})
    (place / "pid").write_text(str(os.getppid()))
    while (place / "hold").exists():
        time.sleep(0.05)
    for seed in range(8):
        yield {{"x": np.random.default_rng(seed).normal(size=(4, 8)).astype(np.float32)}}
"""


def hold(project: Project, place: Path, **parts: object) -> Path:
    """Have the model's calibration wait until this file goes; its process writes its number into PLACE/pid."""
    (project.folder / "slow.py").write_text(SLOW.format(place=str(place)))
    project.change_spec(precisions=["int8"], calibration={"data": "slow.py:samples"}, **parts)
    (place / "hold").touch()
    return place / "hold"
