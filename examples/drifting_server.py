"""A server of the digits model whose clients change: it records its requests, refuses those that fit no engine, and
sends Prefect an event when these become too many. (With `Policy(fallback="onnx")` the model's graph would answer them,
but this channel serves proven engines only.)

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

IMAGES = Path(__file__).resolve().parent / "digits" / "golden.npz"
# Requests before the clients change, and at most after that; shares of requests larger than any engine takes.
BEFORE, AFTER = 1500, 3000
USUALLY, THEN = 0.01, 0.15
LARGEST, LARGER = 32, 64
PER_SECOND = 500
# The share of refused requests is checked after each WINDOW, and is too large above TOO_MANY times the usual one.
WINDOW, TOO_MANY = 200, 5


def requests() -> Iterator[np.ndarray]:
    """Images [samples, 1, 8, 8] of each request: mostly few; 64 in 1 % of the requests, and later in 15 %."""
    rng = np.random.default_rng(0)
    with np.load(IMAGES) as data:
        images = data["image"]
    for number in range(BEFORE + AFTER):
        is_large = rng.random() < (USUALLY if number < BEFORE else THEN)
        size = LARGER if is_large else min(int(rng.geometric(0.15)), LARGEST)
        yield images[rng.integers(0, len(images), size)]


def event(rate: float, since: datetime, version: str, registry: str) -> dict[str, object]:
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
            "rate": f"{rate:.6g}",
            "reference": f"{USUALLY:.6g}",
            "since": since.isoformat(timespec="seconds"),
            "by": socket.gethostname(),
        },
    }


def main(registry: str, traffic: str, server: str) -> None:
    """Serve until the event is sent."""
    client = enginesmith.Client(registry)
    with tempfile.TemporaryDirectory() as folder:
        pulled_engines = client.pull_all("digits:stable", folder)
        version = pulled_engines[0].located.manifest.version
        router = enginesmith.Router.opened(pulled_engines)
        start_time, unanswered_before, rate = datetime.now(UTC), 0, 0.0
        with router, enginesmith.Recorder(Path(traffic) / "digits.jsonl", model="digits") as recorder:
            for number, images in enumerate(requests()):
                inputs = {"image": images}
                recorder.append(inputs, number / PER_SECOND)
                with suppress(DataError):  # a real server would tell its client
                    router.run(inputs)
                counts = router.counts()
                if counts.requests % WINDOW:
                    continue
                rate = (counts.unanswered - unanswered_before) / WINDOW
                if rate > TOO_MANY * USUALLY:
                    break
                start_time, unanswered_before = datetime.now(UTC), counts.unanswered
    if rate <= TOO_MANY * USUALLY:
        sys.exit(f"no rise in {counts.requests} requests, of which {100 * counts.fallback_rate:.1f} % fit no engine")
    # In its own thread, so that no request waits for it.
    body = json.dumps([event(rate, start_time, version, registry)]).encode()
    request = Request(f"{server}/events", body, {"Content-Type": "application/json"})
    sender = Thread(target=urlopen, args=(request,), kwargs={"timeout": 10.0})
    sender.start()
    print(
        f"digits@{version} got {counts.requests} requests; of the last {WINDOW}, {100 * rate:.0f} % fit no engine "
        f"(before: {100 * USUALLY:.0f} %); event sent",
        flush=True,
    )
    sender.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
