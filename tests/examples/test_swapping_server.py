import importlib.util
import sys
from pathlib import Path
from threading import Thread

import pytest

from enginesmith.client.client import Client
from enginesmith.client.resolve import Policy
from enginesmith.client.watching.server import Post
from enginesmith.core.errors import EnginesmithError
from enginesmith.registry.store.base import open_store
from tests.enginesmith.client.layouts.engines import cpu_engine
from tests.enginesmith.client.layouts.swap_load import SwapLoad, wait_for
from tests.enginesmith.registries import engine, publish_engines
from tests.waiting import until

SWAPS = 6


@pytest.fixture
def swapping():
    path = Path(__file__).parents[2] / "examples" / "swapping_server.py"
    spec = importlib.util.spec_from_file_location("swapping_server", path)
    module = sys.modules["swapping_server"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_server_is_swapped_under_load_unless_an_engine_cannot_be_opened(tmp_path: Path, swapping) -> None:
    store = open_store(tmp_path / "registry", create=True)
    client, dest = Client(store.uri, policy=Policy(proven_only=True)), tmp_path / "engines"
    publish_engines(store, [cpu_engine(store, 0)], 0)
    client.watch("digits:candidate", dest, target="cpu", once=True, say=lambda _: None)
    with swapping.EngineServer(dest, 0) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        hook = Post(f"http://127.0.0.1:{server.server_port}/reload")
        with SwapLoad(server.server_port) as load:
            for number in range(1, SWAPS + 1):
                publish_engines(store, [cpu_engine(store, number)], number)
                client.watch("digits:candidate", dest, target="cpu", once=True, hook=hook, keep=1, say=lambda _: None)
                load.least = number
                # A swap is under load only when requests of before and after it were answered.
                load_count = load.asked
                until(lambda asked=load_count: load.asked >= asked + 3 * load.clients or load.failed, pause_s=0.001)
        publish_engines(store, [engine(store, data=b"no ONNX at all")], SWAPS + 1)
        with pytest.raises(EnginesmithError, match="answers 400; the hook is called again"):
            client.watch("digits:candidate", dest, target="cpu", once=True, hook=hook, say=lambda _: None)
        wait_for(server.server_port, "digits", SWAPS, limit_s=0)  # what it had is served on
        server.shutdown()
    assert load.failed == [] and load.given == set(range(SWAPS + 1)) and load.asked > 10 * SWAPS
