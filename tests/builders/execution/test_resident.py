import os
import subprocess
import sys

import psutil
import pytest

from builders.execution import memory


@pytest.mark.parametrize("measure", [memory.resident_mib, memory._by_psutil])
def test_a_process_counts_with_its_children(measure):
    code = (
        "import subprocess, sys; block = bytearray(50 << 20); block[::4096] = b'x' * len(block[::4096]); "
        "print('here', flush=True); subprocess.run([sys.executable, '-c', sys.argv[1], '']) if sys.argv[1] else input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout and process.stdin
        assert [process.stdout.readline() for _ in range(2)] == ["here\n"] * 2
        found = measure(process.pid)
        assert 100 < found < 300
        assert len(psutil.Process(process.pid).children()) == 1
        process.stdin.write("\n")


def test_what_has_ended_counts_nothing():
    assert memory.resident_mib(2**22 + 1) == memory._by_psutil(2**22 + 1) == 0.0


def test_both_ways_agree():
    ours, theirs = memory.resident_mib(os.getpid()), memory._by_psutil(os.getpid())
    assert abs(ours - theirs) < 0.1 * theirs
