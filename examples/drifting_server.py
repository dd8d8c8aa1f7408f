"""A server of the digits model whose clients change: it records its requests, refuses those that fit no engine, and
tells Prefect when those become too many. (The model's graph would answer them, `Policy(fallback="onnx")`, but on a
channel that serves proven engines only.)

    python examples/drifting_server.py REGISTRY TRAFFIC_FOLDER PREFECT_API_URL
"""

import json
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from threading import Thread
from urllib.request import Request, urlopen
from uuid import uuid4

import numpy as np

import enginesmith
from enginesmith.core.errors import DataError
from enginesmith.serving.drift import RateDrift

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


def event(drift: RateDrift, version: str, registry: str) -> dict[str, object]:
    """The event that starts the flow `choose-buckets`, as Prefect's API takes it."""
    return {
        "id": str(uuid4()),
        "occurred": datetime.now(UTC).isoformat(),
        "event": "enginesmith.traffic.drifted",
        "resource": {"prefect.resource.id": "enginesmith.model.digits", "prefect.resource.name": "digits"},
        "payload": {
            "model": "digits",
            "version": version,
            "registry": registry,
            "rate": f"{drift.rate:.6g}",
            "reference": f"{drift.reference:.6g}",
            "since": drift.since_at,
            "by": socket.gethostname(),
        },
    }


def main(registry: str, traffic: str, server: str) -> None:
    """Serve until the alarm is sent."""
    client = enginesmith.Client(registry)
    with tempfile.TemporaryDirectory() as folder:
        pulled = client.pull_all("digits:stable", folder)
        version = pulled[0].located.manifest.version
        sent: list[Thread] = []

        def alarm(drift: RateDrift) -> None:
            """Send the event by a thread of its own: the request that raised the alarm does not wait."""
            body = json.dumps([event(drift, version, registry)]).encode()
            asked = Request(f"{server}/events", body, {"Content-Type": "application/json"})
            sent.append(Thread(target=urlopen, args=(asked,), kwargs={"timeout": 10.0}))
            sent[0].start()

        router = enginesmith.Router.opened(pulled, reference_rate=USUALLY, on_drift=alarm)
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
