import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from enginesmith.client.client import Client
from enginesmith.client.watching.server import INTERVAL_S, JITTER, MOST_INTERVALS, keep_looking, pause_s
from enginesmith.client.watching.watch import ChannelWatcher, GroupWatcher, Swap
from enginesmith.core.errors import EnginesmithError, InputError, UnavailableError
from enginesmith.core.names import Reference, parse_reference
from tests.enginesmith.client.watching.test_watch import Looks, following
from tests.enginesmith.registries import engine, publish_engines
from tests.enginesmith.registry.counting import CountingStore

MODELS = [f"model{number}" for number in range(12)]
ALL = [f"{model}:candidate" for model in MODELS]


def publish(store: CountingStore, model: str, data: str) -> None:
    publish_engines(store, [engine(store, data=f"{model} {data}".encode())], data, model=model)


@pytest.fixture
def store() -> CountingStore:
    actual = CountingStore()
    for model in MODELS:
        publish(actual, model, "one")
    return actual


@pytest.fixture
def group(store: CountingStore, tmp_path: Path) -> Callable[..., GroupWatcher]:
    def make_group(*references: str, say: Callable[[str], object] = len) -> GroupWatcher:
        client = Client("memory://registry", cache=tmp_path / "cache")
        client.__dict__["store"] = store

        def make(reference: Reference) -> ChannelWatcher:
            return following(client, tmp_path / reference.model, say=say, reference=str(reference))

        return GroupWatcher([parse_reference(item) for item in references], make)

    return make_group


def served(swaps: tuple[Swap, ...]) -> dict[str, str]:
    return {swap.model: swap.version for swap in swaps}


def test_each_channel_costs_a_request_and_lengthens_the_interval(store, group):
    watch = group(*ALL)
    assert served(watch.once()) == dict.fromkeys(MODELS, "1")
    with store.counted() as counts:
        watch.once()
    assert counts.kinds == {"UNCHANGED": len(MODELS)} and watch._interval_s == INTERVAL_S * len(MODELS)
    assert counts.count / watch._interval_s <= 0.01


def test_nothing_to_follow_is_an_error(group: Callable[..., GroupWatcher]) -> None:
    with pytest.raises(InputError, match="nothing to follow"):
        group()


def test_an_unreachable_registry_keeps_all_and_is_reported_once_for_each(store, group, tmp_path):
    output: list[str] = []
    watch = group(*ALL, say=output.append)
    watch.run(Looks(1))
    store.down = True
    watch.run(Looks(3))
    assert len([line for line in output if "does not answer" in line]) == len(MODELS)
    assert all((tmp_path / model / "current").is_symlink() for model in MODELS)
    with pytest.raises(UnavailableError):
        watch.once()


def test_a_failure_does_not_stop_the_others(store: CountingStore, group: Callable[..., GroupWatcher]) -> None:
    watch = group("model3:candidate", "model5:candidate")
    watch.once()
    publish_engines(store, [engine(store, "sm_89", data=b"gpu")], "gpu", model="model3")
    publish(store, "model5", "two")
    with pytest.raises(EnginesmithError, match="has no engine for cpu"):
        watch.once()
    assert watch._watchers[1].served.version == "2"  # type: ignore[union-attr]


def test_errors_lengthen_the_pauses_up_to_a_limit() -> None:
    for failures, times in ((0, 1), (1, 2), (2, 4), (9, MOST_INTERVALS), (10_000, MOST_INTERVALS)):
        pauses = [pause_s(120, failures) / 120 / times for _ in range(200)]
        assert 1 - JITTER <= min(pauses) < 1 - JITTER / 2 and 1 + JITTER / 2 < max(pauses) <= 1 + JITTER


def test_a_successful_poll_ends_the_backoff() -> None:
    answers, stop = iter([False, False, True, True]), Looks(4)
    keep_looking(lambda: next(answers), stop, 10.0)
    assert [round(wait / 10) for wait in stop.waits] in ([2, 4, 1, 1], [2, 3, 1, 1], [2, 5, 1, 1])


def test_stop_ends_the_watch() -> None:
    stop = threading.Event()
    stop.set()
    keep_looking(lambda: pytest.fail("looked"), stop, 1.0)
