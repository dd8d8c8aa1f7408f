"""Does a server fail a request while its engine is swapped? `python -m benchmarks.bench_swaps [SERVER] [--swaps N]`

SERVER: `onnxruntime` is examples/swapping_server.py behind the plain layout; `triton-poll` and `triton-load` are Triton
behind its repository, which it looks at every second or is told of by the hook. They need `ENGINESMITH_TRITON`
(tests/enginesmith/client/layouts/triton_server.py). 200 swaps each, with four clients that ask without a pause; a
version is published, then followed by a watch that looks once. Exit 1 if a request failed, if one that began after a
swap was answered by an engine of before it, or if some engine answered none.
"""

import argparse
import importlib.util
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import numpy as np

from enginesmith.client.client import Client
from enginesmith.client.layouts.base import Layout, Plain
from enginesmith.client.layouts.triton import Triton
from enginesmith.client.watching.server import Hook, Post
from enginesmith.registry.store.base import Store, open_store
from tests.enginesmith.client.layouts.engines import cpu_engine
from tests.enginesmith.client.layouts.swap_load import SwapLoad, wait_for
from tests.enginesmith.client.layouts.triton_server import find_triton, triton
from tests.enginesmith.registries import publish_engines

CLIENTS = 4
EXAMPLE = Path(__file__).parents[1] / "examples" / "swapping_server.py"
# A port, and the hook that a swap calls.
Started = tuple[int, Hook | None]


def look(store: Store, dest: Path, layout: Layout, hook: Hook | None) -> None:
    """Follow the channel once."""
    Client(store.uri).watch(
        "digits:candidate", dest, target="cpu", once=True, layout=layout, hook=hook, say=lambda _: None
    )


@contextmanager
def example_server(dest: Path, _folder: Path) -> Iterator[Started]:
    """The example, in this process."""
    spec = importlib.util.spec_from_file_location("swapping_server", EXAMPLE)
    if spec is None or spec.loader is None:
        sys.exit(f"{EXAMPLE} cannot be loaded")
    module = sys.modules["swapping_server"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with module.EngineServer(dest, 0) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port, Post(f"http://127.0.0.1:{server.server_port}/reload")
        server.shutdown()


@contextmanager
def triton_server(dest: Path, folder: Path, *, poll: bool) -> Iterator[Started]:
    """Triton, which looks by itself or is told."""
    wheel = find_triton()
    if wheel is None:
        sys.exit("ENGINESMITH_TRITON names no unpacked wheel of nvidia-pytriton")
    names = ["poll", "--repository-poll-secs", "1"] if poll else ["explicit", "--load-model", "digits"]
    with triton(wheel, dest, folder, "--model-control-mode", *names) as server:
        url = f"http://127.0.0.1:{server.port}/v2/repository/models/digits/load"
        yield server.port, None if poll else Post(url, 60.0)


SERVERS: dict[str, tuple[Layout, Callable[..., Iterator[Started]]]] = {
    "onnxruntime": (Plain(), example_server),
    "triton-poll": (Triton(), lambda dest, folder: triton_server(dest, folder, poll=True)),
    "triton-load": (Triton(), lambda dest, folder: triton_server(dest, folder, poll=False)),
}


def swap(name: str, swaps: int) -> bool:
    """Swap a server so often under load, and print a row; whether nothing was wrong."""
    layout, start = SERVERS[name]
    times: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        dest, store = Path(folder) / "served", open_store(Path(folder) / "registry", create=True)
        publish_engines(store, [cpu_engine(store, 0)], 0)
        look(store, dest, layout, None)
        with start(dest, Path(folder)) as (port, hook), SwapLoad(port, clients=CLIENTS) as load:
            for number in range(1, swaps + 1):
                publish_engines(store, [cpu_engine(store, number)], number)
                start_s = time.perf_counter()
                look(store, dest, layout, hook)
                wait_for(port, "digits", number)
                times.append(time.perf_counter() - start_s)
                load.least = number
                load_count = load.asked
                while load.asked < load_count + 3 * CLIENTS and not load.failed:
                    time.sleep(0.001)
    missing_count = len(set(range(swaps + 1)) - load.given)
    millis = 1e3 * np.array(load.seconds)
    figures = (name, swaps, load.asked, len(load.failed), missing_count, f"{np.median(times):.2f}", f"{max(times):.2f}")
    figures += (f"{np.median(millis):.1f}", f"{np.quantile(millis, 0.99):.1f}", f"{millis.max():.0f}")
    print(f"| {' | '.join(map(str, figures))} |", flush=True)
    for text in load.failed[:10]:
        print(text, file=sys.stderr)
    return not load.failed and not missing_count


def main() -> None:
    """Swap each server, with a table on stdout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("server", nargs="?", default="onnxruntime", choices=SERVERS)
    parser.add_argument("--swaps", type=int, default=200)
    options = parser.parse_args()
    columns = ("server", "swaps", "requests", "failed", "engines without an answer", "swap, s", "longest, s")
    columns += ("request, ms", "99 %, ms", "longest, ms")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
    if not swap(options.server, options.swaps):
        sys.exit(1)


if __name__ == "__main__":
    main()
