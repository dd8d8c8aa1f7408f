"""What holds for all tests."""

import gc
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests import scheduling
from tests.one_server import OneServer, without_current_test

# Fixtures import what they make: a file of tests starts with what it needs, and not with numpy, onnx and every cloud.
if TYPE_CHECKING:
    from xdist.remote import Producer

    from builders.execution.process import Start
    from enginesmith.registry.store.base import Store
    from enginesmith.registry.store.objects.store import ObjectStore
    from tests.enginesmith.faulty_proxy import FaultyProxy
    from tests.enginesmith.object_stores.kinds import ServerKind
    from tests.enginesmith.object_stores.servers import Servers
    from tests.pipeline.projects import Project

# A shell that starts the tests in the background has them ignore Ctrl-C, and with them everything that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A real control plane; `make cluster-test` names the folder.
collect_ignore = ["cluster"]

# How long an example takes says how busy the machine is.
CALM = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
# The default run tries the same examples every time, so that it fails for a change and not by chance; `make hunt` looks
# for new ones.
settings.register_profile("enginesmith", CALM, derandomize=True)
settings.register_profile("hunt", CALM, print_blob=True)
settings.load_profile("enginesmith")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    scheduling.put_slow_files_first(items)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """What is imported here stays: garbage collection would go through it again and again, a third of the time."""
    gc.disable()
    try:
        if os.environ.get("PYTEST_XDIST_WORKER") == "gw1" and session.config.args == ["tests"]:
            scheduling.import_from_the_end()
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    return scheduling.count_workers()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: "Producer") -> scheduling.WholeFiles | None:
    if config.option.dist != "load":  # another was asked for
        return None
    config.option.loadscopereorder = False
    return scheduling.WholeFiles(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup() -> Generator[None, object, object]:
    with without_current_test():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, object, object]:
    with without_current_test():
        return (yield)


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_the_disk() -> Iterator[None]:
    """What tests write need not outlive a crash of the machine: that takes 3 to 11 ms a file, and a build writes 85."""
    with pytest.MonkeyPatch.context() as patched_context:
        patched_context.setattr("os.fsync", os.fstat)  # it fails for what is no open file, as the other does
        yield


@pytest.fixture(scope="session")
def one_server() -> Iterator[OneServer]:
    """From its first use all builds in this process fork jobs from one server, and exports in it their float64 runs."""
    from pipeline.compile.preflight import PRELOADED

    server = OneServer()
    with pytest.MonkeyPatch.context() as patched_context:
        patched_context.setattr("pipeline.orchestration.run.fork_server", server)
        patched_context.setattr("pipeline.sources.export.fork_here", lambda: server(PRELOADED))
        yield server
    server.stop()


@pytest.fixture
def start(one_server: OneServer) -> Iterator["Start"]:
    """For executors of a test's own: starts jobs as builds do."""
    from pipeline.compile.preflight import PRELOADED

    with one_server(PRELOADED) as server:
        yield server


@pytest.fixture
def project(tmp_path: Path, capsys: pytest.CaptureFixture[str], one_server: OneServer) -> "Project":
    """A fresh project; nothing is built."""
    from tests.pipeline.projects import Project, write_project

    write_project(tmp_path / "project")
    return Project(tmp_path / "project", capsys)


@pytest.fixture(scope="session")
def built_once() -> Path:
    """Project and registry after one build, to be copied."""
    packages = ("ml_dtypes", "numpy", "onnx", "onnxruntime", "tensorrt-rtx")
    code = ("enginesmith", "builders", "validation", "pipeline", "tests/pipeline/projects.py", "pyproject.toml")
    return scheduling.made_once("built", scheduling.key_of(packages, code), _build)


def _build(place: Path) -> None:
    from tests.pipeline.projects import write_project

    write_project(place / "project")
    command = [sys.executable, "-m", "enginesmith", "build", str(place / "project" / "tiny.yaml")]
    subprocess.run([*command, "--registry", str(place / "registry")], check=True, capture_output=True)


@pytest.fixture
def built(built_once: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], one_server: OneServer) -> "Project":
    """A project of which version 1 is published; a copy, free to be changed."""
    from tests.pipeline.projects import Project

    shutil.copytree(built_once, tmp_path / "place")
    return Project(tmp_path / "place" / "project", capsys)


@pytest.fixture(scope="session")
def migrated() -> Path:
    """A home of Prefect with its database, to be copied: making it is half of a server's first start."""
    return scheduling.made_once("prefect", scheduling.key_of(("prefect", "sqlalchemy"), ()), _migrate)


def _migrate(place: Path) -> None:
    command = [sys.executable, "-m", "prefect", "server", "database", "upgrade", "-y"]
    subprocess.run(command, env={**os.environ, "PREFECT_HOME": str(place)}, check=True, capture_output=True)


@pytest.fixture(scope="module")
def home(migrated: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home of Prefect, in which no server has run yet."""
    return shutil.copytree(migrated, tmp_path_factory.mktemp("home") / "prefect")


@pytest.fixture(scope="session")
def servers() -> Iterator["Servers"]:
    """Servers of every kind with the bucket `BUCKET`, and proxies in front of them, started when they are asked for."""
    from tests.enginesmith.object_stores.servers import Servers

    with Servers() as fork_servers:
        yield fork_servers


@pytest.fixture(scope="session")
def s3_server(servers: "Servers") -> str:
    """URL of an S3 server with the bucket `BUCKET`."""
    return servers.url("s3")


@pytest.fixture
def server_kind(request: pytest.FixtureRequest) -> "ServerKind":
    """S3; with `registries.on_each_bucket`, each kind of object store."""
    from tests.enginesmith.object_stores.kinds import KINDS

    return KINDS[getattr(request, "param", "s3")]


@pytest.fixture
def s3_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Credentials that the servers take, and a cache of this test's own."""
    from tests.enginesmith.object_stores.kinds import ENVIRONMENT, FOREIGN

    for name in FOREIGN:
        monkeypatch.delenv(name, raising=False)
    for name, value in {**ENVIRONMENT, "ENGINESMITH_CACHE": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def s3_uri(s3_server: str, s3_environment: None) -> str:
    """The URI of a place in the S3 bucket where nothing is yet."""
    from tests.enginesmith.object_stores.kinds import KINDS

    return KINDS["s3"].uri(s3_server, secrets.token_hex(8))


@pytest.fixture
def bucket_uri(servers: "Servers", server_kind: "ServerKind", s3_environment: None) -> str:
    """The URI of a place in a bucket of this kind where nothing is yet."""
    return server_kind.uri(servers.url(server_kind.name), secrets.token_hex(8))


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> "Store":
    """An empty registry in a folder; with `registries.on_each_kind`, one of every kind."""
    from enginesmith.registry.store.base import open_store
    from tests.enginesmith.object_stores.kinds import KINDS

    kind = getattr(request, "param", "file")
    if kind == "file":
        return open_store(tmp_path / "registry", create=True)
    request.getfixturevalue("s3_environment")
    servers: Servers = request.getfixturevalue("servers")
    return open_store(KINDS[kind].uri(servers.url(kind), secrets.token_hex(8)), create=True)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """The registry starts no pools: of a store in memory each request is over at once, and an actor is one thread."""
    from tests.one_thread import registry_in_one_thread

    with registry_in_one_thread():
        yield


@pytest.fixture
def proxy(servers: "Servers", server_kind: "ServerKind", monkeypatch: pytest.MonkeyPatch) -> "FaultyProxy":
    """A proxy without faults yet, in front of the server; pauses are short, and parts small."""
    from enginesmith.registry.store.objects import api
    from tests.enginesmith.object_stores.kinds import GOOGLES_LIMIT

    running_proxy = servers.proxy(server_kind.name)
    monkeypatch.setattr(api, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(api, "PART_BYTES", server_kind.part)
    if server_kind.name == "gs":
        monkeypatch.setattr(GOOGLES_LIMIT, server_kind.part)
    running_proxy.fine()
    return running_proxy


@pytest.fixture
def store_behind_proxy(proxy: "FaultyProxy", server_kind: "ServerKind", s3_environment: None) -> "ObjectStore":
    """An empty registry that is reached through the proxy."""
    from enginesmith.registry.store.base import open_store
    from enginesmith.registry.store.objects.store import ObjectStore

    store = open_store(server_kind.uri(proxy.url, secrets.token_hex(8)), create=True)
    assert isinstance(store, ObjectStore)
    proxy.fine()
    return store
