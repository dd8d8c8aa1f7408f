from collections.abc import Callable
from pathlib import Path

import pytest

from enginesmith.client.client import Client
from enginesmith.client.layouts.base import MARK
from enginesmith.client.locate import VersionLocator
from enginesmith.client.resolve import Policy
from enginesmith.client.watching import watch as watching
from enginesmith.client.watching.watch import ChannelWatcher, Swap
from enginesmith.core.errors import EnginesmithError, InputError, UnavailableError, UnknownNameError, UntrustedError
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.layout import manifest_key
from enginesmith.registry.trust.signing import SigningKey, sign
from enginesmith.registry.versions import channels
from tests.enginesmith.client.watching import test_watch
from tests.enginesmith.client.watching.test_watch import Looks
from tests.enginesmith.registries import engine, on_each_store, publish_engines
from tests.enginesmith.registry.trust.keys import written
from tests.enginesmith.registry.trust.test_signing import policy_file

RELEASE, OTHER = (f"  - {{models: '*', signers: [{name}]}}\n" for name in ("release", "other"))


@pytest.fixture
def trust(store: Store, tmp_path: Path) -> Path:
    """A policy that asks for the key `release`, and version 1 in the channel candidate, signed by it."""
    signed(store, tmp_path, b"one")
    return policy_file(tmp_path, RELEASE)


def signed(store: Store, folder: Path, data: bytes, name: str = "release") -> str:
    manifest = publish_engines(store, [engine(store, data=data)], data.decode(), channel=None).manifest
    sign(store, manifest, SigningKey(written(folder, name)[0]))
    channels.promote(store, manifest, "candidate")
    return manifest.version


def following(
    store: Store, dest: Path, trust: Path | None, hook=None, say: Callable[[str], None] = len
) -> ChannelWatcher:
    return test_watch.following(Client(store.uri, policy=Policy(trust=trust)), dest, hook, say)


def served(dest: Path) -> str:
    return (dest / "current").readlink().name.split("-")[0]


@on_each_store
def test_a_revoked_key_is_noticed_at_the_next_poll(store, tmp_path, dest, trust):
    called_versions: list[str] = []
    hook = lambda facts: called_versions.append(facts["version"]) and None  # noqa: E731
    watch = following(store, dest, trust, hook)
    assert watch.once().version == "1" and not (dest / MARK).exists()
    policy_file(tmp_path, OTHER)
    for looking in (watch, following(store, dest, trust, hook)):  # the same process, and one that was just started
        with pytest.raises(UntrustedError, match=r"NO LONGER TRUSTED, but still served: digits@1 has 0 of the 1"):
            looking.once()
        assert served(dest) == "1" and "digits@1 has 0 of the 1" in (dest / MARK).read_text()
    policy_file(tmp_path, RELEASE)
    watch.once()
    assert not (dest / MARK).exists() and called_versions == ["1"]
    # A channel that moves on to what is trusted takes the mark away, too.
    policy_file(tmp_path, OTHER)
    with pytest.raises(UntrustedError):
        watch.once()
    signed(store, tmp_path, b"two", "other")
    assert watch.once().version == "2" and served(dest) == "2" and not (dest / MARK).exists()
    assert called_versions == ["1", "2"]


def test_the_served_version_and_the_channels_version_are_checked_separately(store, tmp_path, dest, trust):
    watch = following(store, dest, trust)
    watch.once()
    signed(store, tmp_path, b"two", "other")
    with pytest.raises(UntrustedError, match=r"^digits@2 has 0"):
        watch.once()
    assert served(dest) == "1" and not (dest / MARK).exists()
    policy_file(tmp_path, "  - {models: '*', signers: [release], min_version: 2}\n")
    with pytest.raises(UntrustedError, match="still served: digits@1 is older than version 2"):
        watch.once()
    # It is gone from the registry: nobody can tell any more, and the mark stays.
    key = manifest_key("digits", "1")
    store.remove(key)
    with pytest.raises(UnknownNameError):
        following(store, dest, trust).once()
    assert (dest / MARK).exists()
    following(store, dest, None).once()  # without a policy everything is trusted
    assert served(dest) == "2" and not (dest / MARK).exists()


def test_lost_trust_is_reported_once_and_ends_no_watcher(store: Store, tmp_path: Path, dest: Path, trust: Path) -> None:
    lines: list[str] = []
    watch = following(store, dest, trust, say=lines.append)
    watch.once()
    trust.write_text("format: 1\nsigners: {")  # an editor that is half through
    watch.run(Looks(3))
    assert len(lines) == 2 and "is not plain YAML" in lines[1] and "keeping 1-" in lines[1] and (dest / MARK).exists()
    policy_file(tmp_path, RELEASE)
    watch.run(Looks(1))
    assert not (dest / MARK).exists() and len(lines) == 2
    signed(store, tmp_path, b"two")
    trust.unlink()
    watch.run(Looks(1))
    assert served(dest) == "1" and "nothing is trusted" in lines[2]
    with pytest.raises(InputError):  # of a process that was just started it is a mistake of who started it
        following(store, dest, trust).run(Looks(1))


def test_no_hook_runs_for_an_untrusted_engine(store: Store, tmp_path: Path, dest: Path, trust: Path) -> None:
    called_versions: list[str] = []

    def hook(facts: dict[str, str]) -> str:
        called_versions.append(facts["version"])
        return "the server is busy"

    watch = following(store, dest, trust, hook)
    with pytest.raises(EnginesmithError, match="server is busy; the hook is called again"):
        watch.once()
    policy_file(tmp_path, OTHER)
    with pytest.raises(UntrustedError):
        watch.once()
    assert called_versions == ["1"]


def test_a_revoked_key_is_noticed_while_the_registry_is_unreachable(store, dest, trust, tmp_path, monkeypatch):
    """The check needs no request: the signatures came with the version."""
    watch = following(store, dest, trust)
    watch.once()

    def down(*_: object) -> None:
        raise UnavailableError("the registry is down")

    for place, name in ((watching, "require"), (VersionLocator, "read_channel")):
        with monkeypatch.context() as patched_context, pytest.raises(UnavailableError):
            patched_context.setattr(place, name, down)
            watch.once()
        assert not (dest / MARK).exists(), "that revokes nothing"
    monkeypatch.setattr(VersionLocator, "read_channel", down)
    policy_file(tmp_path, OTHER)
    with pytest.raises(UntrustedError, match="NO LONGER TRUSTED, but still served"):
        watch.once()
    assert (dest / MARK).exists() and served(dest) == "1"
    policy_file(tmp_path, RELEASE)
    with pytest.raises(UnavailableError):
        watch.once()
    assert not (dest / MARK).exists()
    with pytest.raises(UnavailableError):  # another process has not seen its signatures
        following(store, dest, policy_file(tmp_path, OTHER)).once()
    assert not (dest / MARK).exists()


def test_an_overwritten_description_is_reported(store: Store, dest: Path, trust: Path) -> None:
    def look() -> Swap:
        return following(store, dest, trust).once()

    swap = look()
    swap.description.write_bytes(b"{")
    assert look().swapped is False and swap.description.read_bytes() != b"{"  # mended, since the channel leads there
    (dest / "current").unlink()
    (dest / "other").mkdir()
    (dest / "current").symlink_to("other")
    watch = following(store, dest, trust)
    with pytest.raises(EnginesmithError, match="has no description"):
        watch._trust_recheck.check(store)
