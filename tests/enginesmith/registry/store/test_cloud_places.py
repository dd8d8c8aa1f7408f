import os
import subprocess
import sys

import pytest

from enginesmith.core.errors import InputError, UnavailableError
from enginesmith.registry.store.base import absolute_uri, open_store
from enginesmith.registry.store.objects.place import AzureLocation, GcsLocation, parse_azure_place, parse_gcs_place
from tests.enginesmith.object_stores import azure_server
from tests.enginesmith.object_stores.kinds import KINDS
from tests.enginesmith.object_stores.servers import Servers
from tests.enginesmith.registries import flip


def test_a_google_cloud_storage_uri_is_parsed() -> None:
    place = parse_gcs_place("gs://bkt/a/b/", {})
    assert place == GcsLocation("bkt", "a/b") and place.uri == "gs://bkt/a/b" and place.key("x.json") == "a/b/x.json"
    emulator = parse_gcs_place("gs://bkt", {"STORAGE_EMULATOR_HOST": "localhost:4443"})
    assert emulator.endpoint == "http://localhost:4443" and emulator.uri == "gs://bkt?endpoint=http://localhost:4443"
    assert parse_gcs_place(emulator.uri, {}) == emulator


def test_an_azure_uri_is_parsed() -> None:
    place = parse_azure_place("az://models1/engines/team/a")
    assert place == AzureLocation("models1", "engines", "team/a") and place.uri == "az://models1/engines/team/a"
    assert (
        place.url == "https://models1.blob.core.windows.net" and place.locator("k") == "az://models1/engines/team/a/k"
    )
    location = parse_azure_place("az://models1/engines?endpoint=https://models1.blob.core.chinacloudapi.cn/")
    assert location.url == "https://models1.blob.core.chinacloudapi.cn" and parse_azure_place(location.uri) == location


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("gs://", "not the name of a bucket"),
        ("gs://Bucket", "not the name of a bucket"),
        ("gs://bkt/../x", "each part of the prefix"),
        ("gs://bkt?region=x", "option 'region' is not known; known: endpoint"),
        ("gs://bkt?endpoint=ftp://x", "not a URL"),
        ("gs://KEY:hunter2@bkt/x", "without user"),
        ("az://", "not the name of a storage account.*az://ACCOUNT/CONTAINER/PREFIX"),
        ("az://engines", "not the name of a container"),
        ("az://models-1/engines", "not the name of a storage account"),
        ("az://models1/En/x", "not the name of a container"),
        ("az://models1/engines/.x", "each part of the prefix"),
        ("az://models1/engines?sas=hunter2", "option 'sas' is not known"),
        ("az://engines@models1/x", "without user"),
        ("abfs://x/y", "scheme 'abfs' is not known; use a path, file://, s3://, gs:// or az://"),
    ],
)
def test_an_invalid_location_is_reported(uri: str, words: str) -> None:
    for use in (absolute_uri, open_store):
        with pytest.raises(InputError, match=words) as error_info:
            use(uri)
        assert "hunter2" not in str(error_info.value)


@pytest.mark.parametrize(
    ("uri", "library", "extra"),
    [("gs://bkt/x", "google", r"enginesmith\[gcs\]"), ("az://models1/engines/x", "azure", r"enginesmith\[azure\]")],
)
def test_a_library_that_is_not_installed_is_named_with_its_extra(uri, library, extra, monkeypatch):
    # Not their packages: those that are imported anew would stay in their parent, without what they had.
    modules = tuple(f"enginesmith.registry.store.{name}" for name in ("gcs.bucket", "gcs.requests", "azure.bucket"))
    for name in [name for name in sys.modules if name.startswith((library, *modules))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(InputError, match=rf"pip install '\./{extra}' in a clone"):
        open_store(uri)
    assert absolute_uri(uri) == uri


@pytest.mark.parametrize(
    ("uri", "environment", "words"),
    [
        (
            "gs://bkt/x",
            {"GOOGLE_APPLICATION_CREDENTIALS": "/nowhere.json"},
            "no usable credentials.*application-default",
        ),
        (
            "az://models1/engines/x",
            {"AZURE_TOKEN_CREDENTIALS": "EnvironmentCredential"},
            "no usable credentials.*az login",
        ),
    ],
)
def test_missing_credentials_are_reported_with_a_remedy(uri, environment, words, tmp_path, s3_environment):
    """In a process of its own: what the libraries found is kept."""
    pytest.importorskip("google.cloud.storage" if uri.startswith("gs") else "azure.storage.blob")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("GOOGLE_", "AZURE_"))}
    code = f"from enginesmith.registry.store.base import open_store; open_store({uri!r})"
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**environ, **environment, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    message = result.stderr.strip().splitlines()[-1]
    assert "UnavailableError" in message
    with pytest.raises(UnavailableError, match=words):
        raise UnavailableError(message)


def test_an_account_key_opens_a_container_too(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = KINDS["az"].uri(servers.url("az"), "by-key")
    monkeypatch.delenv("AZURE_STORAGE_SAS_TOKEN", raising=False)
    monkeypatch.setenv("AZURE_STORAGE_KEY", azure_server.KEY)
    store = open_store(uri, create=True)
    flip(store, digest := store.put_bytes(b"x"))
    store.discard(digest)  # a copy within the account needs the key as well
    assert not store.has(digest) and azure_server.KEY not in repr(store)
