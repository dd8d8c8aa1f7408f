"""The place of a registry in Google Cloud Storage: a `gs://bucket/prefix?option=value` URI as a value.

Credentials are never part of the URI; each machine has its own: Application Default Credentials.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from enginesmith.registry.store.objects.place import BucketPlace, check_bucket, check_endpoint, read_uri

# https://cloud.google.com/storage/docs/buckets#naming
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
OPTIONS = ("endpoint",)


@dataclass(frozen=True)
class GcsLocation(BucketPlace):
    """A bucket and how to reach it. prefix: '' or 'some/folder', without a slash at its ends.

    endpoint: URL of another server than Google's, such as an emulator; over plain http it gets no credentials.
    """

    bucket: str
    prefix: str = ""
    endpoint: str | None = None

    @property
    def root(self) -> str:
        """'gs://bucket'."""
        return f"gs://{self.bucket}"


def parse_gcs_place(text: str, environment: Mapping[str, str] = os.environ) -> GcsLocation:
    """Read a gs:// URI. The endpoint may also come from STORAGE_EMULATOR_HOST, as for Google's own libraries.

    Raises InputError, which never repeats what may be a secret.
    """
    bucket_uri = read_uri(text, OPTIONS)
    check_bucket(bucket_uri, bucket_uri.host, _BUCKET, "3 to 222 of a-z 0-9 . _ -")
    endpoint = bucket_uri.options.get("endpoint") or environment.get("STORAGE_EMULATOR_HOST")
    if endpoint and "://" not in endpoint:
        endpoint = f"http://{endpoint}"  # as Google's libraries read that variable
    return GcsLocation(
        bucket_uri.host, bucket_uri.prefix, check_endpoint(endpoint, "Google Cloud Storage") if endpoint else None
    )
