"""The main job on real input, as a person would type it: build, prove, publish, pull, classify.

The first run shows the real thing: a Prefect flow on a server that it starts for itself, engines built by Ray workers.
Their log goes to a file. A run that finds everything built shows the table and one line.
"""

import os
import shlex
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import onnxruntime as ort
from logged import run_logged, show_end

HERE = Path(__file__).resolve().parent
SPEC = HERE / "digits" / "digits.yaml"
REGISTRY = Path(os.environ.get("ENGINESMITH_REGISTRY", "registry"))
LOG = Path("build/demo.log")
ENGINESMITH = str(Path(sys.executable).with_name("enginesmith"))


def run(*words: object, announce: bool = True) -> str:
    """Run a command, and return what it printed. announce: print the command first."""
    command = ["enginesmith", *map(str, words)]
    if announce:
        print(f"\n$ {shlex.join(command)}", flush=True)
    # The table gets the width of this terminal, although the output goes through a pipe.
    size = {"COLUMNS": str(shutil.get_terminal_size().columns), "FORCE_COLOR": "1", "PREFECT_LOGGING_COLORS": "0"}
    env = size if sys.stdout.isatty() and command[1] != "pull" else None
    code, text = run_logged([ENGINESMITH, *command[1:]], LOG, shorten=step_of, capture=True, env=env)
    if code:
        print(text, end="")
        show_end(LOG)
        sys.exit(f"the command ended with exit code {code}")
    return text


def step_of(line: str) -> str:
    """The message about the model in a line of Prefect's log; '' for lines about its tasks and its manual."""
    return "" if "Task run" in line or line.startswith("See http") else line.strip().rpartition(" - ")[2]


def classify(engine: Path) -> float:
    """Accuracy of the pulled engine on digits that neither training, calibration nor golden set has seen."""
    held_out = np.load(HERE / "digits" / "held_out.npz", allow_pickle=False)
    session = ort.InferenceSession(str(engine), providers=["CPUExecutionProvider"])
    answers = []
    for start in range(0, len(held_out["label"]), 32):
        (logits,) = session.run(None, {"image": held_out["image"][start : start + 32]})
        answers.append(logits.argmax(axis=-1))
    return float(np.mean(np.concatenate(answers) == held_out["label"]))


def show_site() -> None:
    """Print how to look at the registry as a website."""
    print(f"look at what is in the registry: {os.path.relpath(ENGINESMITH)} site serve --registry {REGISTRY}")


def main() -> None:
    """Run the demo."""
    start_s, is_first = time.monotonic(), not REGISTRY.exists()
    if is_first:
        print("Enginesmith demo: handwritten digits, from a trained PyTorch model to proven engines.")
        print(f"What Prefect, Ray and the compilers print: {LOG}")
    words = ("build", os.path.relpath(SPEC), "--registry", REGISTRY, "--runner", "prefect", "--executor", "ray")
    build_output = run(*words, announce=is_first)
    print(build_output, end="")
    if "everything was cached" in build_output:
        show_site()
        return
    dest = REGISTRY / "pulled"
    pull_output = run("pull", "digits", "--target", "cpu", "--registry", REGISTRY, "--dest", dest)
    print(pull_output, end="")
    path = pull_output.splitlines()[0].partition(" (")[0]
    print(f"accuracy of the pulled engine on held-out digits: {classify(Path(path)):.1%}")
    print(f"\ndemo finished in {time.monotonic() - start_s:.0f} s; run it again, and everything is cached")
    show_site()


if __name__ == "__main__":
    main()
