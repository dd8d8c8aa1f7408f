"""The main job on real input, as a person would type it: build, prove, publish, pull, classify.

The first run shows the real thing: a Prefect flow on a server that it starts for itself, engines built by Ray workers.
"""

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnxruntime as ort

HERE = Path(__file__).resolve().parent
SPEC = HERE / "digits" / "digits.yaml"
REGISTRY = Path(os.environ.get("ENGINERY_REGISTRY", "registry"))
ENGINERY = str(Path(sys.executable).with_name("enginery"))


def run(*words: object, capture: bool = False) -> str:
    """Show a command, run it, and return what it printed when that is asked for."""
    command = ["enginery", *map(str, words)]
    print(f"\n$ {shlex.join(command)}", flush=True)
    done = subprocess.run([ENGINERY, *command[1:]], stdout=subprocess.PIPE if capture else None, text=True)
    if done.returncode:
        sys.exit(f"the command ended with exit code {done.returncode}")
    return done.stdout or ""


def classify(engine: Path) -> float:
    """Accuracy of the pulled engine on digits that neither training, calibration nor golden set has seen."""
    held_out = np.load(HERE / "digits" / "held_out.npz", allow_pickle=False)
    session = ort.InferenceSession(str(engine), providers=["CPUExecutionProvider"])
    answers = []
    for start in range(0, len(held_out["label"]), 32):
        (logits,) = session.run(None, {"image": held_out["image"][start : start + 32]})
        answers.append(logits.argmax(axis=-1))
    return float(np.mean(np.concatenate(answers) == held_out["label"]))


def main() -> None:
    """Run the demo."""
    begun = time.monotonic()
    print("Enginery demo: handwritten digits, from a trained PyTorch model to proven engines.")
    run("build", os.path.relpath(SPEC), "--registry", REGISTRY, "--runner", "prefect", "--executor", "ray")
    run("list", "digits", "--registry", REGISTRY)
    pulled = json.loads(
        run(
            "pull",
            "digits",
            "--target",
            "cpu",
            "--registry",
            REGISTRY,
            "--dest",
            REGISTRY / "pulled",
            "--json",
            capture=True,
        )
    )
    print(f"pulled {pulled['path']}")
    accuracy = classify(Path(pulled["path"]))
    print(f"held-out digits classified by the pulled engine: {accuracy:.1%} right")
    print(
        f"\nThe same build again finds everything cached: enginery build {os.path.relpath(SPEC)} --registry {REGISTRY}"
    )
    print(f"demo finished in {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
