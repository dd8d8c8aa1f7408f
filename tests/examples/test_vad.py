"""The voice detector from its spec to a loop that carries the states."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml

import enginesmith
from enginesmith.user_code.entry_point import call_entry_point, importing_from

FOLDER = Path(__file__).parents[2] / "examples" / "vad"


@pytest.mark.slow
def test_pulled_engines_hear_the_voices(tmp_path: Path) -> None:
    project = shutil.copytree(FOLDER, tmp_path / "vad", ignore=shutil.ignore_patterns("__pycache__"))
    spec = yaml.safe_load((FOLDER / "vad.yaml").read_text())
    spec |= {"precisions": ["fp32", "int8"], "targets": ["cpu"], "validation": {"latency": "off"}}
    (project / "vad.yaml").write_text(yaml.safe_dump(spec))
    with np.load(FOLDER / "golden.npz") as arrays:
        np.savez(
            project / "golden.npz",
            **{name: array.reshape(-1, 50, *array.shape[1:])[0] for name, array in arrays.items()},
        )
    outcome = enginesmith.build(project / "vad.yaml", registry=tmp_path / "registry")
    assert [item.entry.status for item in outcome.engines] == ["proven", "proven"]
    with importing_from(FOLDER, "listen.py"), np.load(FOLDER / "golden.npz") as arrays:
        sounds = call_entry_point(FOLDER, "listen.py", "frames_of", {"path": None})
        pulled = enginesmith.pull("vad", registry=tmp_path / "registry", precision="int8", dest=tmp_path / "dest")
        streams = enginesmith.Streams.described(enginesmith.open_onnx(pulled), pulled.description)
        heard = call_entry_point(FOLDER, "listen.py", "listen", {"sounds": sounds, "streams": streams})
        assert np.mean(heard.ravel() == arrays["voice"]) > 0.94
