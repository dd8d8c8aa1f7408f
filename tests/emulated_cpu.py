"""Run a command as on a CPU without VNNI, on any x86-64 Linux: `python -m tests.emulated_cpu avx2 COMMAND...`.

ONNX Runtime chooses its kernels once, by CPUID, which user space cannot intercept. So a copy of its library is made in
which the branches that CPUID decides are never taken (the instructions that test AVX512F, AVX512-VNNI, AVX-VNNI and
AMX in the constructor of `MLAS_PLATFORM`, onnxruntime/core/mlas/lib/platform.cpp), and the command runs in a mount
namespace of its own where the copy lies over the library, and `/proc/cpuinfo` shows the flags of such a CPU. What is
executed are therefore the very kernels that such a CPU runs. Other libraries still see the real CPU.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

# Kind -> the flags of /proc/cpuinfo that it lacks.
_LACKS = {"avx2": r"\S*(?:avx512|avx10|vnni|amx|avx_ne_convert|avx_ifma)\S*", "avx512": r"\S*(?:vnni|amx|avx10)\S*"}
KINDS = tuple(_LACKS)

# `mov eax, 7; mov ecx, 1; cpuid; test al, 0x10`: leaf 7.1, asked for AVX-VNNI, once in each copy of the constructor.
_LEAF = re.compile(rb"\xb8\x07\x00\x00\x00\xb9\x01\x00\x00\x00\x0f\xa2\xa8\x10", re.DOTALL)
_NO_LEAF = b"\x31\xc0\x31\xd2" + b"\x90" * 8 + b"\xa8\x10"  # xor eax, eax; xor edx, edx
# Behind it, within so many bytes: `test r32, 1 << 16` or `and r32, 1 << 11`; `and r32, 3 << 24`.
_REACH = 0x400
_ASKS = {
    "avx2": re.compile(rb"\xf7[\xc0-\xc7]\x00\x00\x01\x00", re.DOTALL),
    "avx512": re.compile(rb"\x81[\xe0-\xe7]\x00\x08\x00\x00", re.DOTALL),
}
_ASKS_AMX = re.compile(rb"\x81[\xe0-\xe7]\x00\x00\x00\x03", re.DOTALL)
_AND_TO_OR = 0xE0 - 0xC8

_RUN = 'mount --bind "$0" /proc/cpuinfo && mount --bind "$1" "$2" && shift 2 && exec "$@"'


class EmulationError(Exception):
    """This machine cannot show itself as that kind of CPU; the message says why."""


def without(library: bytes, kind: str) -> bytes:
    """The library, without the kernels that `kind` lacks. Raises EmulationError where it is another build."""
    patched = bytearray(library)
    for leaf in _LEAF.finditer(library):
        window = library[leaf.end() : leaf.end() + _REACH]
        asked, amx = _ASKS[kind].search(window), _ASKS_AMX.search(window)
        if not asked or not amx:
            raise EmulationError("onnxruntime asks for the CPU's features in another way; see tests/emulated_cpu.py")
        patched[leaf.start() : leaf.end()] = _NO_LEAF
        end = leaf.end() + asked.end()
        patched[end - 4 : end] = bytes(4)  # a test that finds nothing
        patched[leaf.end() + amx.start() + 1] -= _AND_TO_OR  # never zero: what it guards is jumped over
    if patched == library:
        raise EmulationError("onnxruntime's library has no such constructor; see tests/emulated_cpu.py")
    return bytes(patched)


def command(kind: str, folder: Path, *words: str) -> list[str]:
    """The command that runs `words` as on such a CPU. What it needs is written into `folder`. Raises EmulationError."""
    spec = find_spec("onnxruntime")
    capi = Path(spec.origin or "").parent / "capi" if spec else None
    library = next(iter(sorted(capi.glob("onnxruntime_pybind11_state*.so"))), None) if capi else None
    if library is None or not shutil.which("unshare"):
        raise EmulationError("it takes onnxruntime, and `unshare` of util-linux")
    copy, cpuinfo = folder / library.name, folder / "cpuinfo"
    copy.write_bytes(without(library.read_bytes(), kind))
    copy.chmod(0o755)
    cpuinfo.write_text(re.sub(_LACKS[kind], "", Path("/proc/cpuinfo").read_text()))
    user = () if os.geteuid() == 0 else ("--map-root-user",)
    return ["unshare", *user, "--mount", "sh", "-c", _RUN, str(cpuinfo), str(copy), str(library), *words]


@cache
def why_not(kind: str = "avx2") -> str | None:
    """Why this machine cannot emulate that kind; None where it can."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            subprocess.run(command(kind, Path(folder), "true"), check=True, capture_output=True)
        except (EmulationError, OSError) as error:
            return str(error)
        except subprocess.CalledProcessError as error:
            return f"no mount namespace here: {error.stderr.decode().strip()}"
    return None


def main(words: Sequence[str]) -> int:
    """Run it, and answer with its exit code; 2 where this machine cannot."""
    if len(words) < 2 or words[0] not in KINDS:
        print(f"usage: python -m tests.emulated_cpu {'|'.join(KINDS)} COMMAND...", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = command(words[0], Path(folder), *words[1:])
        except EmulationError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        return subprocess.run(found, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
