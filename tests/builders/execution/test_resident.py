import mmap
import os
import subprocess
import sys

import psutil
import pytest

from builders.execution import process as memory


@pytest.mark.parametrize("measure", [memory.held_mib, memory._by_psutil])
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
        drift = measure(process.pid)
        assert 100 < drift < 300
        assert len(psutil.Process(process.pid).children()) == 1
        process.stdin.write("\n")


def test_ended_processes_do_not_count():
    assert memory.held_mib(2**22 + 1) == memory._by_psutil(2**22 + 1) == 0.0


def test_both_ways_to_count_agree():
    our_value, their_value = memory.held_mib(os.getpid()), memory._by_psutil(os.getpid())
    assert abs(our_value - their_value) < 0.1 * their_value


def test_mapped_files_do_not_count_and_shared_memory_does(tmp_path):
    (tmp_path / "weights").write_bytes(bytes(100 << 20))
    with (tmp_path / "weights").open("rb") as stream:
        mapped_memory = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        items = [memory.held_mib(os.getpid())]
        assert not sum(mapped_memory[::4096])
        items.append(memory.held_mib(os.getpid()))
        assert psutil.Process().memory_info().rss > 100 << 20
        mapped_memory.close()
    shared_memory = mmap.mmap(-1, 60 << 20)
    shared_memory[::4096] = b"x" * len(shared_memory[::4096])
    items.append(memory.held_mib(os.getpid()))
    assert abs(items[1] - items[0]) < 20 < 50 < items[2] - items[1]
