"""Tells a Prefect server that a router's share of fallbacks has risen; its automation answers with new buckets.

::

    alarm = enginesmith.DriftEvent("digits", "4", "s3://models/registry", "http://prefect:4200/api")
    router = enginesmith.Router.opened(pulled, on_drift=alarm)

One POST of JSON to `/events` of Prefect's API, by a thread of its own: a serving node needs no Prefect for it, and the
request that raised the alarm does not wait.
"""

import json
import os
import socket
import time
import warnings
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from threading import Thread
from urllib.parse import urlsplit
from uuid import uuid4

from enginesmith.core.errors import InputError
from enginesmith.serving.drift import RateDrift

EVENT = "enginesmith.traffic.drifted"
# Seconds between tries: of a server that is restarted the event arrives all the same.
RETRIES_S = (1.0, 5.0, 30.0, 120.0)


@dataclass(frozen=True)
class DriftEvent:
    """A listener of a router's alarm that sends it as an event. model, version: that are served.  registry: URI that
    flows reach.  server: URL of Prefect's API; '' takes PREFECT_API_URL.

    Credentials are those that Prefect's own client takes: PREFECT_API_AUTH_STRING ('user:password') or PREFECT_API_KEY.
    Raises InputError without a server, or for one that is not http or https.
    """

    model: str
    version: str
    registry: str
    server: str = ""
    timeout_s: float = 10.0

    def __post_init__(self) -> None:
        if urlsplit(self._server).scheme not in ("http", "https"):
            raise InputError(f"server {self._server!r} is no URL of Prefect's API; give one, or set PREFECT_API_URL")

    @property
    def _server(self) -> str:
        return (self.server or os.environ.get("PREFECT_API_URL", "")).rstrip("/")

    def __call__(self, drift: RateDrift) -> Thread:
        """Send the event by a thread, which is returned; it warns where the server never took the event."""
        thread = Thread(target=self._send, args=(self.body(drift),), name="enginesmith-drift-event", daemon=True)
        thread.start()
        return thread

    def body(self, drift: RateDrift) -> list[dict[str, object]]:
        """What is posted: one event about the model, as Prefect's API takes it."""
        payload = {
            "model": self.model,
            "version": self.version,
            "registry": self.registry,
            "rate": f"{drift.rate:.6g}",
            "reference": f"{drift.reference:.6g}",
            "since": drift.since_at,
            "by": socket.gethostname(),
        }
        about = {"prefect.resource.id": f"enginesmith.model.{self.model}", "prefect.resource.name": self.model}
        occurred = datetime.now(UTC).isoformat()
        return [
            {
                "id": str(uuid4()),
                "occurred": occurred,
                "event": EVENT,
                "resource": about,
                "related": [],
                "payload": payload,
            }
        ]

    def _send(self, body: list[dict[str, object]]) -> None:
        for pause_s in (*RETRIES_S, None):
            if not (reason := self._post(body)):
                return
            if pause_s is not None:
                time.sleep(pause_s)
        warnings.warn(f"{EVENT} of {self.model} did not reach {_plain(self._server)}: {reason}", stacklevel=2)

    def _post(self, body: list[dict[str, object]]) -> str | None:
        """Why the server did not take the event; None where it did."""
        from http.client import HTTPException
        from urllib.error import HTTPError
        from urllib.request import Request, urlopen

        headers = {"Content-Type": "application/json", **_credentials()}
        asked = Request(f"{self._server}/events", json.dumps(body).encode(), headers)  # noqa: S310 - checked
        try:
            with urlopen(asked, timeout=self.timeout_s):  # noqa: S310 - the scheme was checked
                return None
        except HTTPError as error:
            error.close()
            return f"it answers {error.code}"
        except (OSError, HTTPException, ValueError) as error:  # ValueError: it leads to what is no URL
            return f"it does not answer ({getattr(error, 'reason', None) or type(error).__name__})"


def _credentials() -> Mapping[str, str]:
    if user := os.environ.get("PREFECT_API_AUTH_STRING"):
        return {"Authorization": f"Basic {b64encode(user.encode()).decode()}"}
    key = os.environ.get("PREFECT_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def _plain(url: str) -> str:
    """A URL without user, password and query, which may be secret."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname}{f':{parts.port}' if parts.port else ''}{parts.path}"
