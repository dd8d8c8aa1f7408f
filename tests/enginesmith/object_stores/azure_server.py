"""Azurite on loopback, Microsoft's emulator of Azure Blob Storage: an npm package that `make azurite` installs.

ENGINESMITH_AZURITE names the folder with its `node_modules`; else it is build/azurite of this checkout. Nothing is
downloaded when tests run.
"""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

# Azurite's published development account; it is no secret.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_PROGRAM = "node_modules/azurite/dist/src/blob/main.js"


def signature() -> str:
    """A SAS token of the account for a day; '' without Azurite or without the library, which takes half a second to
    import. Unlike signed requests, those that carry it may lose their conditions on the way."""
    if program() is None:
        return ""
    try:
        from azure.storage.blob import AccountSasPermissions, ResourceTypes, generate_account_sas
    except ImportError:
        return ""
    all_types = ResourceTypes(service=True, container=True, object=True)
    allowed_permissions = AccountSasPermissions(read=True, write=True, delete=True, list=True, add=True, create=True)
    end_time = datetime.now(UTC) + timedelta(days=1)
    return generate_account_sas(ACCOUNT, KEY, all_types, allowed_permissions, end_time, protocol="https,http")


def program() -> list[str] | None:
    """The command that starts Azurite; None where it, or node, is not installed."""
    folder = Path(os.environ.get("ENGINESMITH_AZURITE") or Path(__file__).parents[3] / "build" / "azurite")
    node, script = shutil.which("node"), folder / _PROGRAM
    return [node, str(script)] if node and script.is_file() else None


@contextmanager
def serving(container: str) -> Iterator[str]:
    command = program()
    assert command is not None, "look with program() first"
    with socket.create_server(("127.0.0.1", 0)) as free_server:
        port = free_server.getsockname()[1]
    command += ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--inMemoryPersistence", "--silent"]
    command += ["--skipApiVersionCheck", "--disableTelemetry"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as server:
        try:
            _wait(port)
            _make(f"http://127.0.0.1:{port}", container)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait(30)


def _wait(port: int) -> None:
    for _ in range(300):
        with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.1)
    raise TimeoutError("Azurite does not listen")


def _make(url: str, container: str) -> None:
    from azure.storage.blob import ContainerClient

    with ContainerClient(f"{url}/{ACCOUNT}", container, credential=KEY) as client:
        client.create_container()
