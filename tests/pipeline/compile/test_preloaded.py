import subprocess
import sys

from pipeline.compile.preflight import PRELOADED

# Each starts threads, or takes time and memory that most steps do not need.
APART = ("onnxruntime", "torch", "sympy", "onnx_ir", "scipy", "pydantic", "prefect", "ray", "tensorrt", "jax")


def test_what_jobs_are_forked_from_has_no_thread_but_numpys():
    code = f"""
import importlib, os, sys
import numpy
before = len(os.listdir("/proc/self/task"))
for name in {PRELOADED}:
    importlib.import_module(name)
print([name for name in {APART} if name in sys.modules], len(os.listdir("/proc/self/task")) - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]", "0"], done.stdout
