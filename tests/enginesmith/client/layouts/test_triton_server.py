import time
from pathlib import Path

import pytest

from enginesmith.client.client import Client
from enginesmith.client.layouts.triton import Triton
from enginesmith.client.watching.server import Post
from enginesmith.core.errors import EnginesmithError
from enginesmith.registry.store.base import Store
from enginesmith.registry.versions import channels
from tests.enginesmith.client.layouts.engines import cpu_engine, publish_pair, publish_with_golden
from tests.enginesmith.client.layouts.swap_load import SwapLoad, wait_for
from tests.enginesmith.client.layouts.triton_server import VARIABLE, TritonServer, find_triton, triton
from tests.enginesmith.registries import engine, publish_engines
from tests.waiting import until

pytestmark = pytest.mark.skipif(
    find_triton() is None, reason=f"{VARIABLE} names no unpacked wheel of nvidia-pytriton (triton_server.py says how)"
)
POLL = ("--model-control-mode", "poll", "--repository-poll-secs", "1", "--log-verbose", "1")
EXPLICIT = ("--model-control-mode", "explicit", "--load-model")
SWAPS = 3


def look(store: Store, dest: Path, hook=None) -> None:
    Client(store.uri).watch(
        "digits:candidate", dest, target="cpu", once=True, layout=Triton(), hook=hook, say=lambda _: None
    )


def loads(server: TritonServer) -> int:
    """How often Triton has opened a version so far; it looks at one more often than that."""
    return server.log.read_text().count("TRITONBACKEND_ModelInitialize: digits")


def test_triton_polls_the_repository_and_is_swapped_under_load(store: Store, tmp_path: Path) -> None:
    dest = tmp_path / "models"
    publish_with_golden(store, [cpu_engine(store, 0)], tmp_path, 0)
    look(store, dest)
    with triton(find_triton(), dest, tmp_path, *POLL) as server, SwapLoad(server.port) as load:
        for number in range(1, SWAPS + 1):
            publish_with_golden(store, [cpu_engine(store, number)], tmp_path, number)
            look(store, dest)
            wait_for(server.port, "digits", number)
            load.least = number
        channels.rollback(store, "digits", "candidate")
        load.least = 0
        look(store, dest)
        wait_for(server.port, "digits", SWAPS - 1)
        document_before = loads(server)
        time.sleep(2.5)
        assert loads(server) == document_before, "it loads what nobody changed"
    assert load.failed == [] and load.given == set(range(SWAPS + 1))


@pytest.mark.parametrize(("least", "options"), [(1, POLL), (2, (*EXPLICIT, "pair"))])
def test_an_ensemble_is_served_and_swapped_under_load(store: Store, tmp_path: Path, least: int, options) -> None:
    def pull(first: int, second: int, hook=None) -> None:
        publish_pair(store, first, second, least)
        Client(store.uri).watch(
            "pair:candidate",
            tmp_path / "models",
            target="cpu",
            once=True,
            layout=Triton(),
            hook=hook,
            say=lambda _: None,
        )

    pull(0, 0)
    with triton(find_triton(), tmp_path / "models", tmp_path, *options) as server:
        hook = None if options is POLL else Post(f"http://127.0.0.1:{server.port}/v2/repository/models/pair/load")
        with SwapLoad(server.port, "pair") as load:
            for first_number, second_number in ((1, 100), (2, 100), (2, 300)):
                pull(first_number, second_number, hook)
                wait_for(server.port, "pair", first_number + second_number)
                load.least = first_number + second_number
        assert load.failed == [] and load.given == {0, 101, 102, 302}, "an answer of graphs of two versions"
        until(
            lambda: not server.is_ready("/v2/models/pair@encoder/versions/1/ready"), "graphs of the last but one stay"
        )
        assert server.is_ready("/v2/models/pair@decoder/versions/2/ready")


def test_incomplete_downloads_load_nothing(store: Store, tmp_path: Path) -> None:
    dest = tmp_path / "models"
    publish_with_golden(store, [cpu_engine(store, 0)], tmp_path, 0)
    look(store, dest)
    with triton(find_triton(), dest, tmp_path, *POLL) as server:
        document_before = loads(server)
        staged = dest / "digits" / "00" / "2"
        staged.mkdir(parents=True)
        for part in range(3):
            (staged / "model.onnx").write_bytes(b"part" * part)
            time.sleep(1.2)
        assert loads(server) == document_before and server.is_ready()


def test_the_hook_loads_into_triton_and_fails_if_triton_cannot(store: Store, tmp_path: Path) -> None:
    dest = tmp_path / "models"
    publish_with_golden(store, [cpu_engine(store, 0)], tmp_path, 0)
    look(store, dest)
    with triton(find_triton(), dest, tmp_path, *EXPLICIT, "digits") as server, SwapLoad(server.port) as load:
        hook = Post(f"http://127.0.0.1:{server.port}/v2/repository/models/digits/load")
        for number in range(1, SWAPS + 1):
            publish_with_golden(store, [cpu_engine(store, number)], tmp_path, number)
            look(store, dest, hook)
            load.least = number  # the hook answers when the new one serves
        publish_engines(store, [engine(store, data=b"no ONNX at all")], "broken")
        with pytest.raises(EnginesmithError, match="answers 400"):
            look(store, dest, hook)
        wait_for(server.port, "digits", SWAPS, limit_s=0)
    assert load.failed == [] and load.given == set(range(SWAPS + 1))
