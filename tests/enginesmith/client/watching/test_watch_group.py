"""Several channels followed at once, by a feed and without one: requests, folders, feeds that are late."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from enginesmith.client.client import Client
from enginesmith.client.watching.looking import INTERVAL_S, JITTER, MOST_INTERVALS, keep_looking, pause_s
from enginesmith.client.watching.watch import ChannelWatcher, Swap
from enginesmith.client.watching.watch_group import LOOKS_A_CHANNEL, GroupWatcher
from enginesmith.core.errors import EnginesmithError, InputError, UnavailableError, UnknownNameError
from enginesmith.core.hardware.machine import Machine
from enginesmith.core.names import Reference, parse_reference
from enginesmith.registry.store.layout import feed_key
from enginesmith.registry.versions.channels import rollback
from enginesmith.registry.versions.feeds import set_feed
from tests.enginesmith.client.watching.test_watch import Looks
from tests.enginesmith.registries import engine, publish_engines
from tests.enginesmith.registry.counting import CountingStore

ROOT = feed_key("edge")
MODELS = [f"model{number}" for number in range(12)]


def publish(store: CountingStore, model: str, data: str) -> None:
    publish_engines(store, [engine(store, data=f"{model} {data}".encode())], data, model=model)


@pytest.fixture
def store() -> CountingStore:
    found = CountingStore()
    for model in MODELS:
        publish(found, model, "one")
    set_feed(found, "edge", ["model?:candidate", "model1?:candidate"])
    return found


@pytest.fixture
def group(store: CountingStore, tmp_path: Path) -> Callable[..., GroupWatcher]:
    def make_group(*references: str, feed: str | None = "edge", say: Callable[[str], object] = len) -> GroupWatcher:
        client = Client("memory://registry", cache=tmp_path / "cache")
        client.__dict__["store"] = store

        def make(reference: Reference) -> ChannelWatcher:
            return ChannelWatcher(
                lambda: client._locator, reference, [Machine.from_name("cpu")], tmp_path / reference.model,
                policy=client.policy, fetcher=lambda: client._fetcher(lambda *_: None), say=say,
            )  # fmt: skip

        parsed = [parse_reference(item) for item in references]
        return GroupWatcher(lambda: client._locator, parsed, make, feed=feed, say=say)

    return make_group


def served(swaps: tuple[Swap, ...]) -> dict[str, str]:
    return {swap.model: swap.version for swap in swaps}


def test_one_conditional_request_follows_all_channels_of_a_feed(
    store: CountingStore, group: Callable[..., GroupWatcher]
) -> None:
    watch = group()
    assert served(watch.once()) == dict.fromkeys(MODELS, "1")
    with store.counted() as found:
        for _ in range(LOOKS_A_CHANNEL - 2):
            watch.once()
    assert set(found.keys) == {f"UNCHANGED {ROOT}"} and found.count == LOOKS_A_CHANNEL - 2
    with store.counted() as found:
        watch.once()  # one channel in turn is asked for by itself
    assert len(found.keys) == 2 and found.keys[0] == f"UNCHANGED {ROOT}"


def test_a_move_costs_root_shard_snapshot_and_engine(store: CountingStore, group: Callable[..., GroupWatcher]) -> None:
    watch = group("model3:candidate", "model5:candidate")
    assert served(watch.once()) == {"model3": "1", "model5": "1"}
    publish(store, "model3", "two")
    with store.counted() as found:
        assert served(watch.once()) == {"model3": "2", "model5": "1"}
    assert [key.split(" ")[0] for key in found.keys] == ["GET"] * 4 and found.keys[0] == f"GET {ROOT}"
    publish(store, "model4", "two")  # another channel's move: the root alone, or the shard too, if it is the same
    with store.counted() as found:
        watch.once()
    assert found.count <= 2


def test_without_a_feed_each_channel_is_a_request_and_the_interval_longer(
    store: CountingStore, group: Callable[..., GroupWatcher]
) -> None:
    watch = group(*(f"{model}:candidate" for model in MODELS), feed=None)
    watch.once()
    with store.counted() as found:
        watch.once()
    assert found.kinds == {"UNCHANGED": len(MODELS)}
    assert watch._pause_s() == INTERVAL_S * len(MODELS) and group()._pause_s() == INTERVAL_S


def test_idle_nodes_send_at_most_a_request_in_100_s(store: CountingStore, group: Callable[..., GroupWatcher]) -> None:
    for watch in (group(), group(*(f"{model}:candidate" for model in MODELS[:3]), feed=None)):
        watch.once()
        looks = 6 * LOOKS_A_CHANNEL
        with store.counted() as found:
            for _ in range(looks):
                watch.once()
        assert found.count / (looks * watch._pause_s()) <= 0.01


def test_channels_that_come_later_are_followed(store: CountingStore, group: Callable[..., GroupWatcher]) -> None:
    watch = group()
    watch.once()
    publish(store, "model13", "one")
    assert served(watch.once())["model13"] == "1"


def test_a_late_feed_is_passed_by_and_never_leads_back(
    store: CountingStore, group: Callable[..., GroupWatcher]
) -> None:
    watch = group("model3:candidate")
    watch.once()
    late = store.objects[ROOT]
    publish(store, "model3", "two")
    store._write(ROOT, late)  # as a writer leaves it that was killed before it updated the feed
    looks = [served(watch.once())["model3"] for _ in range(2 * LOOKS_A_CHANNEL)]
    assert looks[0] == "1" and looks[-1] == "2" and looks == sorted(looks)
    assert looks.index("2") < LOOKS_A_CHANNEL


def test_a_late_feed_leads_nobody_back_who_could_not_pull(
    store: CountingStore, group: Callable[..., GroupWatcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    def down(*_: object, **__: object) -> None:
        raise UnavailableError("down")

    watch = group("model3:candidate")
    watch.once()
    publish(store, "model3", "two")
    late = store.objects[ROOT]
    assert served(watch.once())["model3"] == "2"
    rollback(store, "model3", "candidate")
    swap = watch.once()[0]
    store._write(ROOT, late)
    swap.engine.unlink()
    with monkeypatch.context() as patched:
        patched.setattr("enginesmith.client.watching.watch.rank_each", down)
        with pytest.raises(UnavailableError):
            watch.once()
    assert served(watch.once())["model3"] == "1"


def test_what_is_no_feed_is_told(group: Callable[..., GroupWatcher], store: CountingStore) -> None:
    with pytest.raises(UnknownNameError, match=r"there is no feed 'other'.*there are: edge"):
        group(feed="other").once()
    with pytest.raises(InputError, match="nothing to follow"):
        group(feed=None)
    watch = group()
    watch.once()
    store._write(ROOT, store.objects[ROOT].replace(b'"format":1', b'"format":2'))
    with pytest.raises(InputError, match=r"feed 'edge': format is 2; this enginesmith reads 1: upgrade enginesmith"):
        watch.once()


def test_a_registry_that_is_down_keeps_all_and_is_said_once(
    store: CountingStore, group: Callable[..., GroupWatcher], tmp_path: Path
) -> None:
    said: list[str] = []
    watch = group(say=said.append)
    watch.run(Looks(1))
    store.down = True
    watch.run(Looks(3))
    assert len([line for line in said if "does not answer" in line]) == 1
    assert all((tmp_path / model / "current").is_symlink() for model in MODELS)
    with pytest.raises(UnavailableError):
        watch.once()


def test_one_that_fails_hinders_no_other(store: CountingStore, group: Callable[..., GroupWatcher]) -> None:
    watch = group("model3:candidate", "model5:candidate")
    watch.once()
    publish_engines(store, [engine(store, "sm_89", data=b"gpu")], "gpu", model="model3")
    publish(store, "model5", "two")
    with pytest.raises(EnginesmithError, match="has no engine for cpu"):
        watch.once()
    assert watch._watchers["model5:candidate"].served.version == "2"  # type: ignore[union-attr]


def test_errors_make_the_pauses_longer_to_a_bound_and_all_are_random() -> None:
    for failures, times in ((0, 1), (1, 2), (2, 4), (9, MOST_INTERVALS), (10_000, MOST_INTERVALS)):
        pauses = [pause_s(120, failures) / 120 / times for _ in range(200)]
        assert 1 - JITTER <= min(pauses) < 1 - JITTER / 2 and 1 + JITTER / 2 < max(pauses) <= 1 + JITTER


def test_a_good_look_ends_the_backing_off() -> None:
    answers, stop = iter([False, False, True, True]), Looks(4)
    keep_looking(lambda: next(answers), stop, lambda: 10.0)
    assert [round(wait / 10) for wait in stop.waits] in ([2, 4, 1, 1], [2, 3, 1, 1], [2, 5, 1, 1])


def test_stop_ends_it() -> None:
    stop = threading.Event()
    stop.set()
    keep_looking(lambda: pytest.fail("looked"), stop, lambda: 1.0)
