"""How many requests a node sends: each number here is a promise of docs/scale.md, and one more fails the test."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from enginesmith.client.client import Client
from enginesmith.client.resolve import Policy
from enginesmith.core.errors import UnavailableError
from enginesmith.registry.store.layout import MARKER, blob_key, channel_key
from enginesmith.registry.trust.signing import SigningKey, sign
from enginesmith.registry.versions import channels
from enginesmith.registry.versions.lookup import load
from enginesmith.registry.versions.publish import add_attestation
from tests.enginesmith.client.watching.test_watch import following
from tests.enginesmith.registries import engine, publish_engines, report
from tests.enginesmith.registry.counting import CountingStore
from tests.enginesmith.registry.trust.keys import written
from tests.enginesmith.registry.trust.test_signing import policy_file

CHANNEL = channel_key("digits", "stable")
watcher = partial(following, reference="digits:stable")
RELEASE = "  - {models: '*', signers: [release]}\n"


def version(store: CountingStore, data: bytes, evidence: bool = True) -> None:
    manifest = publish_engines(store, [engine(store, data=data), engine(store, precision="int8", data=data + b"8")],
                               data.decode(), channel=None).manifest  # fmt: skip
    for entry in manifest.engines if evidence else ():
        add_attestation(store, manifest, report(entry))
    channels.promote(store, manifest, "stable")


@pytest.fixture
def store() -> CountingStore:
    actual = CountingStore()
    version(actual, b"one")
    return actual


@pytest.fixture
def client(store: CountingStore, tmp_path: Path) -> Callable[..., Client]:
    """A client as a process that was just started has it."""

    def start(cache: Path | None = tmp_path / "cache", **policy: object) -> Client:
        actual = Client("memory://registry", cache=cache, policy=Policy(**policy))  # type: ignore[arg-type]
        actual.__dict__["store"] = store
        return actual

    return start


def test_a_pull_reads_channel_snapshot_and_engine(store, client, tmp_path):
    with store.counted() as counts:
        client().pull("digits:stable", tmp_path / "engines", target="cpu")
    assert counts.kinds == {"GET": 3} and counts.keys[0] == f"GET {CHANNEL}"


def test_a_pull_without_a_change_is_one_conditional_request(store, client, tmp_path):
    client().pull("digits:stable", tmp_path / "engines", target="cpu")
    with store.counted() as counts:
        assert client().pull("digits:stable", tmp_path / "engines", target="cpu").cached
    assert counts.keys == [f"UNCHANGED {CHANNEL}"] and counts.received == 0


def test_an_idle_watcher_sends_one_conditional_request(store, client, tmp_path):
    watch = watcher(client(), tmp_path / "w")
    watch.once()
    with store.counted() as counts:
        for _ in range(40):
            watch.once()
    assert set(counts.keys) == {f"UNCHANGED {CHANNEL}"} and counts.count == 40


def test_a_move_costs_two_requests_and_the_engine(store, client, tmp_path):
    watch = watcher(client(), tmp_path / "w")
    watch.once()
    version(store, b"two")
    with store.counted() as counts:
        assert watch.once().version == "2"
    assert counts.kinds == {"GET": 3} and counts.keys[0] == f"GET {CHANNEL}"
    channels.rollback(store, "digits", "stable")
    with store.counted() as counts:
        assert watch.once().version == "1"
    # All is here but the channel: the snapshot has not changed since, and the engine's folder stayed.
    assert counts.keys == [f"GET {CHANNEL}"]


def test_a_move_costs_as_much_under_a_trust_policy(store, client, tmp_path):
    key, policy = written(tmp_path, "release")[0], policy_file(tmp_path, RELEASE)
    for data in (b"two", b"three"):
        manifest = publish_engines(store, [engine(store, data=data)], data.decode(), channel=None).manifest
        add_attestation(store, manifest, report(manifest.engines[0]))
        sign(store, manifest, SigningKey(key))
        channels.promote(store, manifest, "stable", accepted_losses=None)
        if data == b"two":
            watch = watcher(client(trust=policy), tmp_path / "w")
            watch.once()
            with store.counted() as idle_count:
                watch.once()
            assert idle_count.keys == [f"UNCHANGED {CHANNEL}"]
    with store.counted() as counts:
        assert watch.once().version == "3"
    assert counts.kinds == {"GET": 3}


def test_a_move_costs_as_much_without_a_cache(store, client, tmp_path):
    watch = watcher(client(cache=None), tmp_path / "w")
    watch.once()
    version(store, b"two")
    with store.counted() as counts:
        watch.once()
    assert counts.kinds == {"GET": 3}


def test_the_number_of_requests_does_not_grow_with_evidence(store, client, tmp_path):
    manifest = load(store, "digits", "1")
    for number in range(20):
        add_attestation(store, manifest, report(manifest.engines[0], host=f"node {number}"))
    with store.counted() as counts:
        client().pull("digits:stable", tmp_path / "engines", target="cpu")
    assert counts.count == 3


def test_a_bare_name_finds_candidate(client: Callable[..., Client], store: CountingStore, tmp_path: Path) -> None:
    publish_engines(store, [engine(store, data=b"x")], "x", model="other")
    with store.counted() as counts:
        client().pull("other", tmp_path / "engines", target="cpu")
    assert counts.count == 4  # channel `stable` is not there


def test_a_missing_registry_is_reported(client: Callable[..., Client], store: CountingStore, tmp_path: Path) -> None:
    store.remove(CHANNEL)
    store.remove(MARKER)
    with pytest.raises(
        UnavailableError, match="there is no registry at memory://registry; `enginesmith build` makes one"
    ):
        client().pull("digits:stable", tmp_path / "engines", target="cpu")


def test_a_download_detects_a_lost_engine_and_takes_the_next_one(client, store, tmp_path):
    best_entry = client().resolve("digits:stable", "cpu").candidates[0].entry
    store.remove(blob_key(str(best_entry.digest)))
    pulled_engine = client().pull("digits:stable", tmp_path / "engines", target="cpu")
    assert pulled_engine.engine.digest != best_entry.digest and pulled_engine.resolution.lost[0][0] == best_entry.unit
    assert client().resolve("digits:stable", "cpu").lost  # which looks for every blob
