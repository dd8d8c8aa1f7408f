"""The place of a registry in a bucket: an `s3://bucket/prefix?option=value` URI as a value.

The options are those that all machines of a run must agree on, so that build workers open the same place. Credentials
are never part of the URI; each machine has its own, in the usual AWS ways.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields

from enginesmith.core.errors import InputError
from enginesmith.registry.store.objects.place import BucketPlace, check_bucket, check_endpoint, read_uri

# General purpose buckets: https://docs.aws.amazon.com/AmazonS3/latest/userguide/bucketnamingrules.html
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_REGION = re.compile(r"[a-z0-9-]{1,64}")
_ENCRYPTIONS = ("AES256", "aws:kms", "aws:kms:dsse")


@dataclass(frozen=True)
class S3Location(BucketPlace):
    """A bucket and how to reach it. prefix: '' or 'some/folder', without a slash at its ends.

    endpoint: URL of a server other than AWS.  region: None leaves it to boto3.  path_style: whether the bucket's name
    goes into the path instead of the host; None leaves it to boto3.  sse: 'AES256', 'aws:kms' or 'aws:kms:dsse', asked
    for with every write; None leaves it to the bucket.  kms_key: id or ARN of the key for it.
    """

    bucket: str
    prefix: str = ""
    endpoint: str | None = None
    region: str | None = None
    path_style: bool | None = None
    sse: str | None = None
    kms_key: str | None = None

    @property
    def root(self) -> str:
        """'s3://bucket'."""
        return f"s3://{self.bucket}"

    @property
    def options(self) -> Mapping[str, str]:
        """The options of the URI that `parse_place` reads."""
        values = ((name, getattr(self, name)) for name in OPTIONS)
        return {
            name: str(int(value)) if isinstance(value, bool) else value for name, value in values if value is not None
        }

    def encryption(self) -> dict[str, str]:
        """The encryption parameters of a write request."""
        sse_options = {"ServerSideEncryption": self.sse, "SSEKMSKeyId": self.kms_key}
        return {name: value for name, value in sse_options.items() if value}


OPTIONS = tuple(field.name for field in fields(S3Location) if field.name not in ("bucket", "prefix"))


def parse_place(text: str, environment: Mapping[str, str] = os.environ) -> S3Location:
    """Read an s3:// URI. The endpoint and the region may also come from AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL,
    AWS_REGION and AWS_DEFAULT_REGION. Raises InputError, which never repeats what may be a secret."""
    bucket_uri = read_uri(text, OPTIONS)
    registry_name, options = bucket_uri.where, bucket_uri.options
    check_bucket(bucket_uri, bucket_uri.host, _BUCKET, "3 to 63 of a-z 0-9 . -")
    endpoint = options.get("endpoint") or environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")
    region = options.get("region") or environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION") or None
    path_style, encryption, kms_key = (options.get(name) for name in ("path_style", "sse", "kms_key"))
    if region is not None and not _REGION.fullmatch(region):
        raise InputError(f"{registry_name}: region {region[:40]!r} is not one; write it as in eu-central-1")
    if path_style is not None and path_style not in ("0", "1", "false", "true"):
        raise InputError(f"{registry_name}: path_style is {path_style[:40]!r}; it must be 1 or 0")
    if encryption is not None and encryption not in _ENCRYPTIONS:
        raise InputError(f"{registry_name}: sse is {encryption[:40]!r}; it must be one of {', '.join(_ENCRYPTIONS)}")
    if kms_key is not None and (encryption is None or not encryption.startswith("aws:kms")):
        raise InputError(f"{registry_name}: kms_key needs sse=aws:kms")
    is_path_style = None if path_style is None else path_style in ("1", "true")
    endpoint = check_endpoint(endpoint, "S3") if endpoint else None
    return S3Location(bucket_uri.host, bucket_uri.prefix, endpoint, region, is_path_style, encryption, kms_key)
