"""From a torch module to a pulled engine, in Python: `python examples/api.py FOLDER` makes the folder."""

import shutil
import sys
from pathlib import Path

import numpy as np
import torch

import enginesmith

SPEC = """
model: net
source: {torch: "api.py:make"}
inputs: {input: {dtype: float32, shape: [batch, 8]}}
outputs: [y]
dims: {batch: {max: 64}}
precisions: [fp32, int8]
targets: [cpu]
calibration: {data: calibration.npz}
golden: {data: golden.npz}
"""


def make() -> torch.nn.Module:
    """The module, which a build imports from the copy of this file beside the spec."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))


def main(folder: Path) -> None:
    """Build, prove and publish the module's engines, then pull and run the int8 one."""
    folder.mkdir(parents=True)
    shutil.copy(__file__, folder / "api.py")
    (folder / "net.yaml").write_text(SPEC)
    samples = np.random.default_rng(0).normal(size=(128, 8)).astype(np.float32)
    np.savez(folder / "calibration.npz", input=samples[:64])
    np.savez(folder / "golden.npz", input=samples[64:])
    place = folder / "registry"
    outcome = enginesmith.build(folder / "net.yaml", registry=place)
    version = f"{outcome.model}@{outcome.version}"
    pulled_engine = enginesmith.pull(version, registry=place, target="cpu", precision="int8", dest=folder / "engines")
    y = enginesmith.open_onnx(pulled_engine)({"input": samples[64:]})["y"]
    expected = make()(torch.from_numpy(samples[64:])).detach().numpy()
    print(f"{pulled_engine.path.name} is {pulled_engine.engine.status}; largest error {np.abs(y - expected).max():.3f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
