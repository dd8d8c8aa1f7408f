"""The store that counts agrees with what is sent to a real server for the same work."""

from collections import Counter
from pathlib import Path

from enginesmith.client.client import Client
from enginesmith.registry.store.base import Store, open_store
from enginesmith.registry.store.s3.requests import client
from tests.enginesmith.registries import engine, publish_engines
from tests.enginesmith.registry.counting import CountingStore


def test_the_counter_counts_requests_to_a_bucket(s3_uri: str, tmp_path: Path) -> None:
    bucket, memory = open_store(s3_uri, create=True), CountingStore()
    sent_counts: Counter[str] = Counter()

    def note(request, **_: object) -> None:  # type: ignore[no-untyped-def]
        listing = request.method == "GET" and "list-type" in request.url
        sent_counts["LIST" if listing else request.method] += 1

    def work(store: Store) -> None:
        publish_engines(store, [engine(store, data=b"one")], channel="stable")
        client = Client(s3_uri, cache=tmp_path / store.uri.partition(":")[0])
        client.__dict__["store"] = store
        for _ in range(2):
            client.pull("digits:stable", tmp_path / f"{store.uri.partition(':')[0]}-engines", target="cpu")

    for store in (bucket, memory):  # the server is asked once what it can
        publish_engines(store, [engine(store, data=b"zero")], "zero", model="other")
    events = client(bucket.place).meta.events  # type: ignore[attr-defined]
    events.register("before-send.s3", note)
    work(bucket)
    events.unregister("before-send.s3", note)
    with memory.counted() as counts:
        work(memory)
    counted = Counter({"GET": counts.kinds.pop("UNCHANGED")}) + counts.kinds
    assert counted == sent_counts
