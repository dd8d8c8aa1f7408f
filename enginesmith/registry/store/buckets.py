"""The object stores by their URI schemes, each with its library: imported when a URI of it is opened, and named with
the extra that installs it where it is missing.
"""

from typing import TYPE_CHECKING

from enginesmith.core.errors import InputError

if TYPE_CHECKING:
    from enginesmith.registry.store.objects.api import BucketApi, BucketPlace

# Scheme and the extra that brings its library; boto3 comes with Enginesmith.
BUCKETS = {"s3": "", "gs": "gcs", "az": "azure"}
SCHEMES = "file://, s3://, gs:// or az://"
EXAMPLES = "s3://bucket/prefix, gs://bucket/prefix or az://account/container/prefix"


def scheme_of(text: str) -> str:
    """The scheme of a URI, in lower case; '' for a path."""
    scheme, found, _ = text.partition("://")
    return scheme.lower() if found else ""


def is_in_bucket(text: str) -> bool:
    """Whether that is the URI of a place in a bucket."""
    return scheme_of(text) in BUCKETS


def place_in_bucket(uri: str) -> "BucketPlace":
    """The place of a bucket's URI; no library is imported. Raises InputError."""
    match scheme_of(uri):
        case "gs":
            from enginesmith.registry.store.gcs.place import parse_gcs_place

            return parse_gcs_place(uri)
        case "az":
            from enginesmith.registry.store.azure.place import parse_azure_place

            return parse_azure_place(uri)
    from enginesmith.registry.store.s3.place import parse_place

    return parse_place(uri)


def bucket_at(uri: str) -> "BucketApi":
    """The bucket of a URI; nothing is sent yet. Raises InputError, for a library that is not installed too."""
    try:
        return _open(uri)
    except ModuleNotFoundError as error:
        scheme = scheme_of(uri)
        extra = BUCKETS[scheme]
        library = f"'./enginesmith[{extra}]' in a clone" if extra else "boto3"
        raise InputError(
            f"registry {scheme}://...: the library {error.name} is not installed here; run pip install {library}"
        ) from error


def _open(uri: str) -> "BucketApi":
    match scheme_of(uri):
        case "gs":
            from enginesmith.registry.store.gcs.bucket import GcsBucket
            from enginesmith.registry.store.gcs.place import parse_gcs_place

            return GcsBucket(parse_gcs_place(uri))
        case "az":
            from enginesmith.registry.store.azure.bucket import AzureBucket
            from enginesmith.registry.store.azure.place import parse_azure_place

            return AzureBucket(parse_azure_place(uri))
    from enginesmith.registry.store.s3.bucket import S3Bucket
    from enginesmith.registry.store.s3.place import parse_place

    return S3Bucket(parse_place(uri))
