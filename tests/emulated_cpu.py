"""Run a command as on a CPU without VNNI, on an x86-64 Linux: `python -m tests.emulated_cpu avx2 COMMAND...`.

A small library is compiled and preloaded into the command and all that it starts (`emulated_cpu.c`): the CPUID
instruction, which the kernel lets fault, answers without the features that such a CPU lacks, and so does
`/proc/cpuinfo`. So every library of kernels (ONNX Runtime's, oneDNN, numpy's, what compilers call "native") takes those
of such a CPU, at the speed that they have here. Programs that are linked statically still see the real CPU.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

# Kind -> the flags of /proc/cpuinfo that it lacks, and its bits of CPUID's leaf 7 and leaf 7.1 (Intel SDM, volume 2A,
# CPUID; bits of AMX are 22, 24 and 25 of leaf 7's EDX, 5 and 21 of leaf 7.1's; of AVX10, 19 of leaf 7.1's EDX).
_LACKS: Mapping[str, tuple[str, Mapping[str, Sequence[int]]]] = {
    "avx2": (
        r"\S*(?:avx512|avx10|vnni|amx|avx_ne_convert|avx_ifma)\S*",
        {
            "EBX_7": (16, 17, 21, 26, 27, 28, 30, 31),
            "ECX_7": (1, 6, 11, 12, 14),
            "EDX_7": (2, 3, 8, 22, 23, 24, 25),
            "EAX_7_1": (4, 5, 21, 23),
            "EDX_7_1": (4, 5, 8, 10, 19),
        },
    ),
    "avx512": (
        r"\S*(?:vnni|amx|avx10)\S*",
        {"EBX_7": (), "ECX_7": (11,), "EDX_7": (2, 22, 24, 25), "EAX_7_1": (4, 21), "EDX_7_1": (4, 8, 10, 19)},
    ),
}
KINDS = tuple(_LACKS)


class EmulationError(Exception):
    """This machine cannot show itself as that kind of CPU; the message says why."""


def environment(kind: str, folder: Path) -> dict[str, str]:
    """Variables that show a program and its children such a CPU while `folder` is as written. Raises EmulationError."""
    flags, masks = _LACKS[kind]
    compiler = shutil.which("cc")
    if not compiler:
        raise EmulationError("it takes a C compiler, `cc`")
    library, cpuinfo = folder / "emulated_cpu.so", folder / "cpuinfo"
    cpuinfo.write_text(re.sub(flags, "", Path("/proc/cpuinfo").read_text()))
    defined_texts = [f"-D{name}={sum(1 << bit for bit in bits)}u" for name, bits in masks.items()]
    source = str(Path(__file__).with_suffix(".c"))
    words = [compiler, "-shared", "-fPIC", "-O2", *defined_texts, f'-DCPUINFO="{cpuinfo}"', source, "-o"]
    words += [str(library), "-ldl"]
    variables = {**os.environ, "LD_PRELOAD": f"{library} {os.environ.get('LD_PRELOAD', '')}".strip()}
    try:
        subprocess.run(words, check=True, capture_output=True, text=True)
        subprocess.run("true", check=True, capture_output=True, text=True, env=variables)
    except subprocess.CalledProcessError as error:
        raise EmulationError(error.stderr.strip()) from error
    return variables


@cache
def why_not(kind: str = "avx2") -> str | None:
    """Why this machine cannot emulate that kind; None where it can."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            environment(kind, Path(folder))
        except (EmulationError, OSError) as error:
            return str(error)
    return None


def main(words: Sequence[str]) -> int:
    """Run it, and answer with its exit code; 2 where this machine cannot."""
    if len(words) < 2 or words[0] not in KINDS:
        print(f"usage: python -m tests.emulated_cpu {'|'.join(KINDS)} COMMAND...", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        try:
            variables = environment(words[0], Path(folder))
        except EmulationError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        return subprocess.run(words[1:], check=False, env=variables).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
