"""A server of the digits model whose clients change: it records its requests, refuses those that fit no engine, and
tells Prefect when those become too many. (The model's graph would answer them, `Policy(fallback="onnx")`, but on a
channel that serves proven engines only.)

    python examples/drifting_server.py REGISTRY TRAFFIC_FOLDER PREFECT_API_URL
"""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread

import numpy as np

import enginesmith
from enginesmith.core.errors import DataError
from enginesmith.serving import DriftEvent

IMAGES = Path(__file__).resolve().parent / "digits" / "golden.npz"
# Requests before the clients change, and at most after that; share of them that is larger than any engine takes.
BEFORE, AFTER = 1500, 3000
USUALLY, THEN = 0.01, 0.15
LARGEST, LARGER = 32, 64
PER_SECOND = 500


def requests() -> Iterator[np.ndarray]:
    """Pictures, [samples, 1, 8, 8]: mostly few a request; of 64 in one of a hundred, and then in one of seven."""
    rng = np.random.default_rng(0)
    with np.load(IMAGES) as data:
        images = data["image"]
    for number in range(BEFORE + AFTER):
        large = rng.random() < (USUALLY if number < BEFORE else THEN)
        size = LARGER if large else min(int(rng.geometric(0.15)), LARGEST)
        yield images[rng.integers(0, len(images), size)]


def main(registry: str, traffic: str, server: str) -> None:
    """Serve until the alarm is sent."""
    client = enginesmith.Client(registry)
    with tempfile.TemporaryDirectory() as folder:
        pulled = client.pull_all("digits:stable", folder)
        version = pulled[0].located.manifest.version
        alarm = DriftEvent("digits", version, registry, server)
        sent: list[Thread] = []
        router = enginesmith.Router.opened(
            pulled, reference_rate=USUALLY, on_drift=lambda drift: sent.append(alarm(drift))
        )
        with router, enginesmith.Recorder(Path(traffic) / "digits.jsonl", model="digits") as recorder:
            for number, images in enumerate(requests()):
                inputs = {"image": images}
                recorder.append(inputs, number / PER_SECOND)
                with suppress(DataError):  # a server says so to its client
                    router.run(inputs)
                if sent:
                    break
        counts, drift = router.counts(), router.drift
    if drift is None:
        sys.exit(f"no alarm in {counts.requests} requests, of which {100 * counts.fallback_rate:.1f} % fit no engine")
    before, after = (f"{100 * rate:.0f} %" for rate in (drift.reference, drift.rate))
    print(
        f"digits@{version} got {counts.requests} requests; since request {drift.since}, {after} fit no engine "
        f"(before: {before}); event sent",
        flush=True,
    )
    sent[0].join()


if __name__ == "__main__":
    main(*sys.argv[1:])
