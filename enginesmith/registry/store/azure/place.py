"""The place of a registry in Azure Blob Storage: an `az://account/container/prefix?option=value` URI as a value.

Credentials are never part of the URI; each machine has its own: a managed or workload identity, or what
DefaultAzureCredential finds else; AZURE_STORAGE_KEY and AZURE_STORAGE_SAS_TOKEN, as for the az command, come first.
"""

import re
from dataclasses import dataclass

from enginesmith.core.errors import InputError
from enginesmith.registry.store.objects.place import BucketPlace, BucketUri, check_bucket, check_endpoint, read_uri

# https://learn.microsoft.com/azure/azure-resource-manager/management/resource-name-rules#microsoftstorage
_ACCOUNT = re.compile(r"[a-z0-9]{3,24}")
_CONTAINER = re.compile(r"[a-z0-9](-?[a-z0-9]){2,62}|\$(root|web)")
OPTIONS = ("endpoint",)


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
    """Read an az:// URI. Raises InputError, which never repeats what may be a secret."""
    bucket_uri = read_uri(text, OPTIONS)
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
