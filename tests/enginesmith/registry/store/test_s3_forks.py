"""A fork while another thread makes a client: the child can make one too."""

import os
from threading import Event, Lock, Thread
from types import SimpleNamespace

import pytest

from enginesmith.registry.store.s3 import requests
from enginesmith.registry.store.s3.place import S3Location
from tests.enginesmith.registries import in_child
from tests.waiting import PATIENCE_S


def test_no_child_begins_with_a_lock_that_a_thread_held(monkeypatch: pytest.MonkeyPatch) -> None:
    held, made, wanted = Lock(), Event(), Event()

    def make(*_: object, **__: object) -> str:
        with held:  # as botocore's session does
            made.set()
            wanted.wait(0.5)
        return "a client"

    monkeypatch.setattr(requests, "_session", lambda: SimpleNamespace(client=make, region_name=None))
    thread = Thread(target=requests.client, args=(S3Location("bucket", ""),))
    thread.start()
    made.wait()

    def take() -> None:
        assert held.acquire(timeout=PATIENCE_S), "the lock came over as it was held"

    child = in_child(take)
    wanted.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
    requests._client.cache_clear()
