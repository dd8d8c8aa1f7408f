"""Compiled modules are kept in build/bytecode, and not beside the sources.

The tests start hundreds of processes. Without this, and where PYTHONDONTWRITEBYTECODE is set, each of them compiles all
that it imports: torch takes 1.7 s of CPU time more, a server of Prefect 1.4 s.

Each worker has a core: threads of BLAS and OpenMP would only wait for each other (a sixth of numpy's CPU time).
"""

import os
import sys
from pathlib import Path

_BYTECODE = str(Path(__file__).parents[1] / "build" / "bytecode")

os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = _BYTECODE
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
