"""The tests' object stores, each a real server on loopback: its start, its requests, and writes past the store."""

import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from enginesmith.registry.store.base import bucket_at
from enginesmith.registry.store.objects.store import ObjectStore
from tests.enginesmith import s3_server
from tests.enginesmith.object_stores import azure_server

BUCKET = s3_server.BUCKET
FOREIGN = (
    *s3_server.FOREIGN, "STORAGE_EMULATOR_HOST", "GOOGLE_APPLICATION_CREDENTIALS", "AZURE_STORAGE_KEY",
)  # fmt: skip
ENVIRONMENT = {**s3_server.ENVIRONMENT, "AZURE_STORAGE_SAS_TOKEN": azure_server.signature()}


class ServerKind:
    """A kind of server.

    name: its URIs' scheme.  write: the method of a write.  conditions: pattern of what is cut from a request so that it
    has no conditions.  part: bytes of a blob's parts in tests.  missing: an answer that there is no bucket.
    """

    name: str
    write = "PUT"
    look = "HEAD"
    part = 1000
    missing: tuple[int, str]

    def serving(self) -> AbstractContextManager[str]:
        raise NotImplementedError

    def uri(self, url: str, prefix: str) -> str:
        return f"{self.name}://{BUCKET}/{prefix}?endpoint={url}"

    def overwrite(self, store: ObjectStore, key: str, data: bytes) -> None:
        """Write what no writer of ours would."""
        raise NotImplementedError


class S3(ServerKind):
    """moto."""

    name, missing = "s3", (404, "NoSuchBucket")

    def serving(self) -> AbstractContextManager[str]:
        return s3_server.serving()

    def overwrite(self, store: ObjectStore, key: str, data: bytes) -> None:
        from enginesmith.registry.store.s3.requests import client

        place = store.place
        client(place).put_object(Bucket=place.bucket, Key=place.key(key), Body=data)


# Google's library sends up to 8 MiB in one request, whatever the size of chunks is: tests have no time for so many.
GOOGLES_LIMIT = "google.cloud.storage.blob._MAX_MULTIPART_SIZE"


class Gcs(ServerKind):
    """Our server of Google's JSON API."""

    name, missing = "gs", (404, "The specified bucket does not exist.")
    write, look, part = "POST", "GET", 256 << 10

    def serving(self) -> AbstractContextManager[str]:
        return s3_server.started(str(Path(__file__).with_name("gcs_server.py")))

    def overwrite(self, store: ObjectStore, key: str, data: bytes) -> None:
        from enginesmith.registry.store.gcs.requests import connect

        connect(store.place).bucket.blob(store.place.key(key)).upload_from_string(data)


class Azure(ServerKind):
    """Azurite, where it is installed (`make azurite`)."""

    name, missing = "az", (404, "ContainerNotFound")

    def serving(self) -> AbstractContextManager[str]:
        return azure_server.serving(BUCKET)

    def uri(self, url: str, prefix: str) -> str:
        return f"az://{azure_server.ACCOUNT}/{BUCKET}/{prefix}?endpoint={url}/{azure_server.ACCOUNT}"

    def overwrite(self, store: ObjectStore, key: str, data: bytes) -> None:
        from enginesmith.registry.store.azure.bucket import connect

        connect(store.place).upload_blob(store.place.key(key), data, overwrite=True)


KINDS: Mapping[str, ServerKind] = {"s3": S3(), "gs": Gcs(), "az": Azure()}


def kind_of(store: ObjectStore) -> ServerKind:
    return KINDS[store.uri.partition("://")[0]]


def past(store: ObjectStore, server: tuple[str, int]) -> ObjectStore:
    """The same store, asked for at this address: past the proxy."""
    endpoint = re.sub(r"//[^/]+", f"//{server[0]}:{server[1]}", store.place.endpoint)  # type: ignore[attr-defined]
    return ObjectStore(bucket_at(replace(store.place, endpoint=endpoint).uri))  # type: ignore[type-var]
