"""Places in buckets: `s3://`, `gs://` and `az://` URIs, such as `s3://bucket/prefix?option=value`, as values.

All machines of a run must have the same options, so that build workers open the same place. Credentials are never part
of the URI; each machine has its own, in the usual ways of its cloud: those of boto3, Application Default Credentials,
and for Azure AZURE_STORAGE_KEY or AZURE_STORAGE_SAS_TOKEN, else those that DefaultAzureCredential finds.
"""

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from urllib.parse import parse_qsl, urlencode, urlsplit

from enginesmith.core.errors import InputError
from enginesmith.registry.store.layout import is_key


class BucketPlace:
    """The place of a registry: a bucket, a prefix ('' or 'some/folder'), and how to reach it. No credentials.

    endpoint: URL of another server than the cloud's.  attempts: requests before giving up; None: `api.ATTEMPTS`.
    """

    prefix: str
    endpoint: str | None = None
    attempts: int | None = None

    @property
    def root(self) -> str:
        """The bucket's address in the notation of other tools: 's3://bucket'."""
        raise NotImplementedError

    @property
    def options(self) -> Mapping[str, str]:
        """The options of the URI."""
        return {"endpoint": self.endpoint} if self.endpoint else {}

    @property
    def uri(self) -> str:
        """The URI that opens this place on every machine."""
        return self.locator("") + (f"?{urlencode(self.options, safe=':/')}" if self.options else "")

    def locator(self, key: str) -> str:
        """The address of a key in the notation of other tools: 's3://bucket/prefix/key'."""
        return "/".join(part for part in (self.root, self.prefix, key) if part)

    def key(self, key: str) -> str:
        """The key's name in the bucket."""
        return f"{self.prefix}/{key}" if self.prefix else key


@dataclass(frozen=True)
class BucketUri:
    """The parts of a URI. prefix: '' or 'some/folder'.  where: the URI without its options, for messages."""

    host: str
    prefix: str
    options: Mapping[str, str]
    where: str


def read_uri(text: str, options: Collection[str]) -> BucketUri:
    """Parse a URI with some of these options. Raises InputError; its message never contains a possible secret."""
    url = urlsplit(text)
    if "@" in url.netloc or url.fragment:
        raise InputError(
            f"registry {url.scheme}://...: a bucket's URI is {url.scheme}://bucket/prefix?option=value, without "
            "user or password; give credentials in the usual ways of its cloud (environment, profile, role)"
        )
    prefix = url.path.strip("/")
    registry_name = f"registry {url.scheme}://{url.netloc}/{prefix}"
    pairs = parse_qsl(url.query, keep_blank_values=True)
    option_values = dict(pairs)
    if unknown_options := sorted(set(option_values) - set(options)):
        raise InputError(
            f"{registry_name}: option {unknown_options[0][:40]!r} is not known; known: {', '.join(options)}"
        )
    if len(option_values) < len(pairs) or not all(option_values.values()):
        raise InputError(f"{registry_name}: an option is given twice or without a value")
    return BucketUri(url.netloc, prefix, option_values, registry_name)


def check_bucket(uri: BucketUri, name: str, pattern: re.Pattern[str], words: str, kind: str = "bucket") -> None:
    """Raise InputError unless `name` can name a bucket and the prefix can be a key. words: describes a valid name."""
    if not pattern.fullmatch(name):
        raise InputError(f"{uri.where}: {name!r} is not the name of a {kind} ({words})")
    if uri.prefix and not is_key(uri.prefix):
        raise InputError(
            f"{uri.where}: each part of the prefix must be 1 to 128 of A-Z a-z 0-9 . _ -, a letter or digit first"
        )


def check_endpoint(text: str, kind: str) -> str:
    """The URL of a server, without a slash at its end. Raises InputError if it is no URL, or has credentials."""
    url = urlsplit(text)
    if "@" in text or url.query or url.fragment:
        raise InputError(f"the {kind} endpoint must be a plain URL, without user, password or query")
    if url.scheme not in ("http", "https") or not url.hostname:
        raise InputError(f"the {kind} endpoint {text!r} is not a URL; write it as https://host:port")
    return text.rstrip("/")


# General purpose buckets: https://docs.aws.amazon.com/AmazonS3/latest/userguide/bucketnamingrules.html
_S3_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_REGION = re.compile(r"[a-z0-9-]{1,64}")
_ENCRYPTIONS = ("AES256", "aws:kms", "aws:kms:dsse")


@dataclass(frozen=True)
class S3Location(BucketPlace):
    """A bucket and how to reach it. prefix: '' or 'some/folder', without a slash at its ends.

    endpoint: URL of a server other than AWS.  region: None leaves it to boto3.  path_style: whether the bucket's name
    goes into the path instead of the host; None leaves it to boto3.  sse: 'AES256', 'aws:kms' or 'aws:kms:dsse',
    requested with every write; None leaves it to the bucket.  kms_key: id or ARN of its key.
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
        """The options of the URI that `parse_s3_place` reads."""
        values = ((name, getattr(self, name)) for name in _S3_OPTIONS)
        return {
            name: str(int(value)) if isinstance(value, bool) else value for name, value in values if value is not None
        }

    def encryption(self) -> dict[str, str]:
        """The encryption parameters of a write request."""
        sse_options = {"ServerSideEncryption": self.sse, "SSEKMSKeyId": self.kms_key}
        return {name: value for name, value in sse_options.items() if value}


_S3_OPTIONS = tuple(field.name for field in fields(S3Location) if field.name not in ("bucket", "prefix"))


def parse_s3_place(text: str, environment: Mapping[str, str] = os.environ) -> S3Location:
    """Parse an s3:// URI. The endpoint and the region may also come from AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL,
    AWS_REGION and AWS_DEFAULT_REGION. Raises InputError; its message never contains a possible secret."""
    bucket_uri = read_uri(text, _S3_OPTIONS)
    registry_name, options = bucket_uri.where, bucket_uri.options
    check_bucket(bucket_uri, bucket_uri.host, _S3_BUCKET, "3 to 63 of a-z 0-9 . -")
    endpoint = options.get("endpoint") or environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")
    region = options.get("region") or environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION") or None
    path_style, encryption, kms_key = (options.get(name) for name in ("path_style", "sse", "kms_key"))
    if region is not None and not _REGION.fullmatch(region):
        raise InputError(f"{registry_name}: region {region[:40]!r} is not a region's name; write it as in eu-central-1")
    if path_style is not None and path_style not in ("0", "1", "false", "true"):
        raise InputError(f"{registry_name}: path_style is {path_style[:40]!r}; it must be 1 or 0")
    if encryption is not None and encryption not in _ENCRYPTIONS:
        raise InputError(f"{registry_name}: sse is {encryption[:40]!r}; it must be one of {', '.join(_ENCRYPTIONS)}")
    if kms_key is not None and (encryption is None or not encryption.startswith("aws:kms")):
        raise InputError(f"{registry_name}: kms_key needs sse=aws:kms")
    is_path_style = None if path_style is None else path_style in ("1", "true")
    endpoint = check_endpoint(endpoint, "S3") if endpoint else None
    return S3Location(bucket_uri.host, bucket_uri.prefix, endpoint, region, is_path_style, encryption, kms_key)


# https://cloud.google.com/storage/docs/buckets#naming
_GCS_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")


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
    """Parse a gs:// URI. The endpoint may also come from STORAGE_EMULATOR_HOST, as for Google's own libraries.

    Raises InputError; its message never contains a possible secret.
    """
    bucket_uri = read_uri(text, ("endpoint",))
    check_bucket(bucket_uri, bucket_uri.host, _GCS_BUCKET, "3 to 222 of a-z 0-9 . _ -")
    endpoint = bucket_uri.options.get("endpoint") or environment.get("STORAGE_EMULATOR_HOST")
    if endpoint and "://" not in endpoint:
        endpoint = f"http://{endpoint}"  # as Google's libraries interpret that variable
    return GcsLocation(
        bucket_uri.host, bucket_uri.prefix, check_endpoint(endpoint, "Google Cloud Storage") if endpoint else None
    )


# https://learn.microsoft.com/azure/azure-resource-manager/management/resource-name-rules#microsoftstorage
_ACCOUNT = re.compile(r"[a-z0-9]{3,24}")
_CONTAINER = re.compile(r"[a-z0-9](-?[a-z0-9]){2,62}|\$(root|web)")


@dataclass(frozen=True)
class AzureLocation(BucketPlace):
    """A container and how to reach it. prefix: '' or 'some/folder', without a slash at its ends.

    endpoint: URL of the account, for other clouds than the public one and for emulators.
    """

    account: str
    container: str
    prefix: str = ""
    endpoint: str | None = None

    @property
    def root(self) -> str:
        """'az://account/container'."""
        return f"az://{self.account}/{self.container}"

    @property
    def url(self) -> str:
        """The account's URL."""
        return self.endpoint or f"https://{self.account}.blob.core.windows.net"


def parse_azure_place(text: str) -> AzureLocation:
    """Parse an az:// URI. Raises InputError; its message never contains a possible secret."""
    bucket_uri = read_uri(text, ("endpoint",))
    if not _ACCOUNT.fullmatch(bucket_uri.host):
        raise InputError(
            f"{bucket_uri.where}: {bucket_uri.host!r} is not the name of a storage account (3 to 24 of a-z 0-9); "
            "write az://ACCOUNT/CONTAINER/PREFIX"
        )
    container, _, prefix = bucket_uri.prefix.partition("/")
    container_uri = BucketUri(bucket_uri.host, prefix, bucket_uri.options, bucket_uri.where)
    check_bucket(
        container_uri, container, _CONTAINER, "3 to 63 of a-z 0-9 -; az://ACCOUNT/CONTAINER/PREFIX", "container"
    )
    endpoint = bucket_uri.options.get("endpoint")
    return AzureLocation(bucket_uri.host, container, prefix, check_endpoint(endpoint, "Azure") if endpoint else None)
