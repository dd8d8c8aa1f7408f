import json
import random
import secrets
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import psutil
import pytest

from enginesmith.client.client import Client
from enginesmith.client.layouts.base import Plain, hold
from enginesmith.client.watching.server import Command, HealthCommand, Post
from enginesmith.client.watching.watch import ChannelWatcher, Swap
from enginesmith.core.errors import EnginesmithError, InputError, UnavailableError, UnknownNameError
from enginesmith.core.hardware.machine import Machine
from enginesmith.core.names import parse_reference
from enginesmith.registry.store.base import Store
from enginesmith.registry.versions import channels
from tests.enginesmith.object_stores.servers import serving
from tests.enginesmith.registries import engine, flip, names_in, on_each_store, publish_engines
from tests.waiting import PATIENCE_S, until


@pytest.fixture
def look(store: Store, dest: Path) -> Callable[..., Swap]:
    """Look once at the channel candidate; each time as a process that was just started."""

    def once(hook=None, **options) -> Swap:
        result = Client(store.uri).watch(
            "digits:candidate", dest, target="cpu", once=True, hook=hook, say=lambda text: None, **options
        )
        assert result is not None
        return result

    return once


def led(dest: Path) -> str:
    return (dest / "current").readlink().name


def version(store: Store, data: bytes, target: str = "cpu") -> str:
    return publish_engines(store, [engine(store, target, data=data)], data.decode()).manifest.version


@on_each_store
def test_current_points_to_the_promoted_version_and_back_without_a_download(store, dest, look):
    version(store, b"one")
    first_look = look()
    assert (first_look.version, first_look.swapped, first_look.previous) == ("1", True, "")
    assert (dest / "current" / first_look.engine.name).read_bytes() == b"one"
    assert json.loads((dest / "current" / first_look.description.name).read_bytes())["channel"] == "candidate"
    version(store, b"two")
    second_look = look()
    assert (second_look.version, second_look.previous) == ("2", first_look.folder.name) and first_look.folder.is_dir()
    assert (dest / "current" / second_look.engine.name).read_bytes() == b"two"
    assert not look().swapped
    channels.rollback(store, "digits", "candidate")
    restored_look = look()
    assert (restored_look.version, restored_look.folder, restored_look.origin) == ("1", first_look.folder, "there")
    assert led(dest) == first_look.folder.name


def test_old_folders_are_deleted_except_the_previous_one(store: Store, dest: Path, look: Callable[..., Swap]) -> None:
    for data in (b"a", b"b", b"c", b"d"):
        version(store, data)
        swap = look(keep=1)
    assert {name.split("-")[0] for name in names_in(dest) if not name.startswith(".")} == {"3", "4", "current"}
    (dest / "mine").mkdir()
    look(keep=1)
    assert (dest / "mine").is_dir() and swap.previous.startswith("3-")


def test_a_damaged_engine_is_repaired_and_a_foreign_current_is_refused(store, dest, look):
    version(store, b"one")
    swap = look()
    swap.engine.unlink()
    swap.engine.write_bytes(b"damaged")
    assert look().origin == "registry" and swap.engine.read_bytes() == b"one"
    (dest / "current").unlink()
    (dest / "current").mkdir()
    with pytest.raises(InputError, match="not a link that enginesmith made"):
        look()


def test_only_channels_are_followed(store: Store, dest: Path) -> None:
    version(store, b"one")
    for reference in ("digits", "digits@1"):
        with pytest.raises(InputError, match="give digits:stable"):
            Client(store.uri).watch(reference, dest, once=True)
    with pytest.raises(UnknownNameError, match="no channel digits:stable; there are: candidate"):
        Client(store.uri).watch("digits:stable", dest, once=True)


def following(
    client: Client,
    dest: Path,
    hook=None,
    say: Callable[[str], object] = len,
    reference: str = "digits:candidate",
    **more,
) -> ChannelWatcher:
    return ChannelWatcher(
        lambda: client._locator, parse_reference(reference), [Machine.from_name("cpu")], dest, policy=client.policy,
        fetcher=lambda: client._fetcher(lambda *_: None), hook=hook, say=say, **more,
    )  # fmt: skip


def test_errors_keep_the_old_engine_and_are_reported_once(store: Store, dest: Path, tmp_path: Path) -> None:
    version(store, b"one")
    output: list[str] = []
    watch, stop = following(Client(store.uri), dest, say=output.append, interval_s=0.05), threading.Event()
    watch.once()
    served_text = led(dest)
    version(store, b"for a GPU", target="sm_89")
    (tmp_path / "registry").rename(tmp_path / "away")
    thread = threading.Thread(target=watch.run, args=(stop,))
    thread.start()
    try:
        until(lambda: len(output) == 2)
        assert "there is no registry" in output[1] and f"keeping {served_text}" in output[1]
        (tmp_path / "away").rename(tmp_path / "registry")
        until(lambda: len(output) == 3)
        assert "has no engine for cpu" in output[2] and led(dest) == served_text
        version(store, b"three")
        until(lambda: led(dest).startswith("3-"))
    finally:
        stop.set()
        thread.join()
    assert output[3].startswith("digits:candidate now serves version 3") and len(output) == 4


class Looks(threading.Event):
    """Is set after so many looks, and notes for how long it was to be waited."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count, self.waits = count, []

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.append(timeout or 0)
        if len(self.waits) == self.count:
            self.set()
        return self.is_set()


def test_a_failed_swap_is_retried_without_a_channel_move(store: Store, dest: Path) -> None:
    version(store, b"one")
    watch = following(Client(store.uri), dest)
    watch.once()
    served_text = led(dest)
    version(store, b"two")
    flip(store, str(engine(store, data=b"two").digest))
    for _ in range(2):
        with pytest.raises(EnginesmithError, match="other bytes"):
            watch.once()
        assert led(dest) == served_text
    store.put_bytes(b"two")
    assert watch.once().version == "2"


def test_files_deleted_or_overwritten_during_a_watch_are_downloaded_again(store: Store, dest: Path) -> None:
    version(store, b"one")
    output: list[str] = []
    watch = following(Client(store.uri), dest, say=output.append)
    swap = watch.once()
    assert watch.once() == swap and len(output) == 1
    swap.engine.chmod(0o644)
    for harm in (
        lambda: swap.engine.write_bytes(b"two"),
        swap.description.unlink,
        (dest / "current").unlink,
        lambda: shutil.rmtree(dest),
    ):
        harm()
        output.clear()
        assert watch.once().version == "1" and (dest / "current" / swap.engine.name).read_bytes() == b"one"
        assert watch.once().version == "1" and "deleted or overwritten" in output[0]
        assert not any("deleted or overwritten" in line for line in output[1:])


def test_a_folder_has_one_watcher(store: Store, dest: Path, look: Callable[..., Swap]) -> None:
    version(store, b"one")
    with hold(Plain().at(dest, "digits")), pytest.raises(UnavailableError, match="another process"):
        look()


def test_a_command_runs_once_per_swap_and_again_after_a_failure(store, dest, tmp_path, look):
    version(store, b"one")
    script = tmp_path / "hook.sh"
    script.write_text(
        f'echo "$ENGINESMITH_VERSION $ENGINESMITH_ENGINE $ENGINESMITH_PREVIOUS" >> {tmp_path}/log; test -e '
        f"{tmp_path}/ok"
    )
    hook = Command(f"sh {script}")
    for _ in range(2):
        with pytest.raises(EnginesmithError, match="ended with 1; the hook is called again"):
            look(hook)
    (tmp_path / "ok").touch()
    for _ in range(2):
        swap = look(hook)
    assert (tmp_path / "log").read_text() == f"1 {swap.engine} \n" * 3
    assert led(dest) == swap.folder.name


@pytest.mark.parametrize(("kind", "last"), [(Command, "wait"), (HealthCommand, "wait"), (HealthCommand, "exit 0")])
def test_a_hanging_command_is_killed_with_its_children(tmp_path, kind, last):
    """Also where the first process has ended, and the health command's output is not over."""
    started = f"600.{secrets.randbelow(1 << 40)}"
    failure = kind(f"sh -c 'sleep {started} & {last}'", timeout_s=0.3)({})
    assert "took over 0.3 s and was killed" in str(failure)
    until(lambda: not any(started in (process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])))
    assert "cannot be started" in str(Command("/absent")({}))
    for wrong_text in (" ", "reload 'server", "reload \\"):
        with pytest.raises(InputError):
            kind(wrong_text)


def test_a_url_gets_a_post_request(store: Store, look: Callable[..., Swap]) -> None:
    version(store, b"one")
    documents: list[dict] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            documents.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204 if len(documents) > 1 else 503)
            self.end_headers()

    with serving(HTTPServer(("127.0.0.1", 0), Handler)) as place:
        url = f"{place}/reload?token=secret"
        with pytest.raises(EnginesmithError, match="answers 503") as error:
            look(Post(url))
        assert "secret" not in str(error.value)
        swap = look(Post(url))
    url = url.replace("http://", "http://user:secret@")
    assert [message["version"] for message in documents] == ["1", "1"] and documents[1]["engine"] == str(swap.engine)
    assert "does not answer" in str(Post(url, timeout_s=1)({})) and "secret" not in str(Post(url)({}))
    for wrong_path in ("file:///etc/passwd", "http://", "http://[::1", "http://host:65536/"):
        with pytest.raises(InputError, match="http or https"):
            Post(wrong_path)


def test_sigterm_ends_a_watch_cleanly(store: Store, dest: Path) -> None:
    version(store, b"one")
    arguments = ["pull", "digits:candidate", "--target", "cpu", "--dest", str(dest), "--follow"]
    arguments += ["--registry", store.uri]
    command = [sys.executable, "-m", "enginesmith", *arguments, "--interval", "60"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("digits:candidate now serves version 1")
        process.send_signal(signal.SIGTERM)
        output, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, output, err) == (0, "", "stopped\n")


def test_polls_come_at_random_times(store: Store, dest: Path) -> None:
    version(store, b"one")
    random.seed(1)
    watch, looks = following(Client(store.uri), dest, interval_s=10), Looks(20)
    watch.run(looks)
    assert all(8 <= wait <= 12 for wait in looks.waits) and max(looks.waits) - min(looks.waits) > 1
