"""boto3's client for a place: one per process, because neither sockets nor locks survive a fork."""

import os
from functools import lru_cache
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError

from enginery.registry.store.s3.place import S3Location
from enginery.registry.store.s3.retries import translate_error

CONNECT_TIMEOUT_S = 5.0
# Longer than any server thinks about one request; a slow body is read in pieces, and this counts for each.
READ_TIMEOUT_S = 60.0
CONNECTIONS = 32


def client(place: S3Location) -> Any:
    """The client, made at first use. Credentials, profile, proxies and CA bundle are found as boto3 finds them.

    Raises UnavailableError when the AWS configuration cannot be used.
    """
    return _client(place, os.getpid())


@lru_cache(maxsize=1)
def _session() -> Any:
    """What boto3 reads once: service descriptions, profile, credentials. Without sockets, so a fork may share it."""
    return boto3.session.Session()


@lru_cache(maxsize=16)
def _client(place: S3Location, _process: int) -> Any:
    style = {} if place.path_style is None else {"addressing_style": "path" if place.path_style else "virtual"}
    config = Config(
        connect_timeout=CONNECT_TIMEOUT_S,
        read_timeout=READ_TIMEOUT_S,
        max_pool_connections=CONNECTIONS,
        tcp_keepalive=True,
        # `retries` asks again; see there why.
        retries={"total_max_attempts": 1},
        # Checksums of newer SDKs are refused by older servers; parts carry Content-MD5, and readers check SHA-256.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3=style,
        user_agent_extra="enginery",
    )
    try:
        session = _session()
        region = place.region or session.region_name or "us-east-1"
        return session.client("s3", endpoint_url=place.endpoint, region_name=region, config=config)
    except (BotoCoreError, ValueError) as error:
        raise translate_error(place, "configuring S3", error) from error
