"""Notifications over HTTP: they wake a watcher, and a lost, false or hostile one harms nothing."""

import http.client
import random
import socket
import threading
import time
from collections.abc import Iterator
from itertools import pairwise

import pytest

from enginesmith.client.watching.looking import LEAST_GAP_S, keep_looking
from enginesmith.client.watching.notifications import LIMITS, TOKEN, NotificationListener, notify
from enginesmith.core.errors import InputError, UnavailableError


@pytest.fixture
def listener() -> Iterator[NotificationListener]:
    with NotificationListener("127.0.0.1:0", "secret") as found:
        yield found


def url(listener: NotificationListener) -> str:
    return f"http://127.0.0.1:{listener.port}"


def test_a_notification_wakes(listener: NotificationListener) -> None:
    stop = threading.Event()
    assert not listener.wait(0.01, stop)
    assert [reason for _, reason in notify([url(listener)], ["digits:stable"], "secret")] == [None]
    assert listener.wait(30, stop) and not listener.wait(0.01, stop)  # once
    stop.set()
    began = time.monotonic()
    assert not listener.wait(30, stop) and time.monotonic() - began < 10


def test_who_has_not_the_token_wakes_nobody(listener: NotificationListener) -> None:
    for token in ("", "other"):
        ((_, reason),) = notify([url(listener)], ["digits:stable"], token)
        assert str(reason).endswith("answers 401")
    assert not listener.wait(0.01, threading.Event())


@pytest.mark.parametrize(("length", "status"), [(str(LIMITS.body_bytes + 1), 413), ("-1", 400), ("9" * 5000, 400)])
def test_bodies_of_any_size_are_not_read(listener: NotificationListener, length: str, status: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", listener.port, timeout=10)
    connection.request("POST", "/", headers={"Authorization": "Bearer secret", "Content-Length": length})
    assert connection.getresponse().status == status
    connection.close()


def test_beyond_loopback_it_needs_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN, raising=False)
    with pytest.raises(InputError, match=f"0.0.0.0:0 needs a token.*set {TOKEN}"):
        NotificationListener("0.0.0.0:0")
    monkeypatch.setenv(TOKEN, "secret")
    NotificationListener("0.0.0.0:0")
    for wrong in ("8900", "host:", "host:99999", ":1", f"host:{'9' * 5000}"):
        with pytest.raises(InputError, match="is no address to listen on"):
            NotificationListener(wrong)


def test_an_address_that_is_taken_is_told(listener: NotificationListener) -> None:
    with (
        pytest.raises(UnavailableError, match="give another --listen"),
        NotificationListener(f"127.0.0.1:{listener.port}", ""),
    ):
        pass


def test_nobody_there_and_what_is_no_url() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        ((place, reason),) = notify([f"http://127.0.0.1:{taken.getsockname()[1]}"], ["digits:stable"], "")
    assert "does not answer" in str(reason) and place.startswith("127.0.0.1:")
    for wrong in ("https://host", "http://", "http://user:pw@host", "http://host:x", "file:///etc/passwd"):
        with pytest.raises(InputError, match="is no URL to notify") as error:
            notify([wrong], ["digits:stable"], "")
        assert "pw" not in str(error.value)


class Woken:
    """Wakes at once, every time."""

    def wait(self, _seconds: float, _stop: threading.Event) -> bool:
        return True


def test_a_flood_of_notifications_is_one_look_in_ten_seconds() -> None:
    now, looks, stop = [0.0], list[float](), threading.Event()

    def look() -> bool:
        looks.append(now[0])
        if len(looks) == 50:
            stop.set()
        return True

    def wait(seconds: float | None = None) -> bool:
        now[0] += seconds or 0.0
        return stop.is_set()

    stop.wait = wait  # type: ignore[method-assign]
    random.seed(1)
    keep_looking(look, stop, lambda: 120.0, Woken(), clock=lambda: now[0])
    gaps = [after - before for before, after in pairwise(looks)]
    assert min(gaps) >= LEAST_GAP_S and max(gaps) > LEAST_GAP_S + 1
