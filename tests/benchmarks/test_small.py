"""The benchmarks that need no download, no server and no GPU, and that can be made small, run to their ends."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
SMALL = {
    "bench_buckets": "--requests 600 --seconds 0.01 --traces bimodal",
    "bench_canary_in_flight": "--canaries 12 --requests 300 --in-flight 2 --loads 0.3",
    "bench_drift": "--megabytes 2",
    "bench_gc": "--documents 300",
    "bench_growth": "--only units --factors 1 2",
    "bench_intervals": "--times 1 --seconds 0.01",
    "bench_latency": "--seconds 0.002 --rounds 3",
    "bench_list": "--models 20 --pause 0",
    "bench_planning": "--models 3",
    "bench_rollout": "--nodes 5000 --seeds 1 --only good",
    "bench_router": "",
    "bench_scale": "--models 10 --nodes 20 --minutes 1 --part one --part writer",
    "bench_sessions": "onnxruntime",
    "bench_site": "20",
    "bench_streams": "",
    "bench_swaps": "--swaps 3",
    "bench_traffic_drift": "--streams 2 --quiet 1",
    "bench_trend": "--series 2",
}
# Of these the exit code says whether a bar was met, which is no matter of so few, beside other tests.
BARS = ("bench_rollout", "bench_router", "bench_streams", "bench_traffic_drift", "bench_trend")


@pytest.mark.parametrize("name", SMALL)
def test_it_prints_its_table(name: str, tmp_path: Path) -> None:
    words = [sys.executable, "-m", f"benchmarks.{name}", *SMALL[name].split()]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 or (name in BARS and done.returncode == 1), done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert any(character.isdigit() for character in done.stdout), "no figure was printed"
