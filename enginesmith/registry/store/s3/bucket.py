"""A bucket of S3: its requests and uploads."""

import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from functools import partial
from typing import ClassVar

from botocore import exceptions as aws
from botocore.response import StreamingBody

from enginesmith.core.errors import EnginesmithError, UnavailableError
from enginesmith.core.parsing import find, read
from enginesmith.core.requirements import JsonObject
from enginesmith.registry.store.layout import BLOBS, MARKER
from enginesmith.registry.store.objects import api
from enginesmith.registry.store.objects.body import HttpBody
from enginesmith.registry.store.objects.place import S3Location
from enginesmith.registry.store.s3.requests import answers, client, whole

# Multipart uploads to S3, and removal of abandoned ones.
#
# Dead writers leave unfinished uploads, which have no key, and cost money. No server tells whether an upload is still
# being written, so one counts as abandoned a day after it began, on the server's clock; a slower writer finds its
# upload gone, and begins again. A lifecycle rule of the bucket (AbortIncompleteMultipartUpload) does the same.

LEFT_AFTER = timedelta(days=1)


def condition_of(expected: str | None) -> dict[str, str]:
    """The condition that an object has this ETag, or that it is absent (None)."""
    return {"IfNoneMatch": "*"} if expected is None else {"IfMatch": expected}


def parts_etag(source: api.UploadSource) -> str:
    """S3's ETag for these bytes, uploaded by `put` or `put_large`, unless they are encrypted with KMS."""
    part_digests = [hashlib.md5(part, usedforsecurity=False).digest() for part in source.parts()]
    if source.small:
        return f'"{(part_digests or [hashlib.md5(usedforsecurity=False).digest()])[0].hex()}"'
    return f'"{hashlib.md5(b"".join(part_digests), usedforsecurity=False).hexdigest()}-{len(part_digests)}"'


def _ask(
    bucket: "S3Bucket", doing: str, request: str, field: str, params: Mapping[str, object], attempts: int | None = None
) -> JsonObject:
    """Send a request of boto3's client, by its name, until it is answered; the answer must have `field`."""

    def send() -> JsonObject:
        with answers(bucket.place):
            answer: JsonObject = getattr(client(bucket.place), request)(**params)
            return whole(answer, *([field] if field else []))

    return api.ask(bucket, doing, send, attempts)


@dataclass(frozen=True)
class Upload:
    """An unfinished upload: its key in the bucket, and its id."""

    key: str
    upload_id: str

    def __str__(self) -> str:
        return f"unfinished upload of {self.key}"


def _find_abandoned(bucket: "S3Bucket") -> Iterator[Upload]:
    list_arguments = {"Bucket": bucket.place.bucket, "Prefix": bucket.place.key(BLOBS)}
    markers: dict[str, str] = {}
    while True:
        page = _ask(bucket, "listing uploads", "list_multipart_uploads", "IsTruncated", list_arguments | markers)
        # The server's clock, which also dated the uploads: this machine's may be wrong.
        stated_date = find(page, "ResponseMetadata.HTTPHeaders.date", str, None)
        now = parsedate_to_datetime(stated_date) if stated_date else datetime.now(UTC)
        for upload in find(page, "Uploads", list, []):
            if now - read(upload, "Initiated", datetime) > LEFT_AFTER:
                yield Upload(read(upload, "Key", str), read(upload, "UploadId", str))
        if not page.get("IsTruncated"):
            return
        next_markers = {"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"}
        markers = {name: read(page, next_field, str) for name, next_field in next_markers.items()}


_FACTS = ("ContentLength", "ETag")
_PARTIAL = 206
_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/")


@dataclass(frozen=True)
class S3Bucket:
    """The bucket at `place`. Tags are ETags."""

    kind: ClassVar[str] = "S3 server"
    # The ETag of an MD5 of zeros.
    never: ClassVar[str] = f'"{"0" * 32}"'
    place: S3Location

    def head(self, key: str) -> api.ObjectFacts:
        """See `BucketApi.head`. The checksum is the ETag if that can be an MD5: not with keys of KMS."""
        with answers(self.place):
            response = whole(client(self.place).head_object(**self._at(key)), *_FACTS)
            etag = read(response, "ETag", str)
            is_opaque = find(response, "ServerSideEncryption", str, "").startswith("aws:kms") and "-" not in etag
            return api.ObjectFacts(
                read(response, "ContentLength", int),
                etag,
                "" if is_opaque else etag,
                find(response, "Metadata", dict, {}),
            )

    def get(self, key: str, unless: str, limit: int) -> tuple[bytes, str]:
        """See `BucketApi.get`. The answer for an unchanged object has no body (304)."""
        conditions = {"IfNoneMatch": unless} if unless else {}
        with answers(self.place):
            answer = whole(client(self.place).get_object(**self._at(key), **conditions), *_FACTS)
            with closing(read(answer, "Body", StreamingBody)) as body:
                size = read(answer, "ContentLength", int)
                # A body in chunks may be longer than its stated length.
                content = body.read(limit + 1) if size <= limit else b""
                if max(size, len(content)) > limit:
                    raise api.Declined(api.TOO_LARGE, "large")
                if len(content) != size:
                    raise aws.IncompleteReadError(actual_bytes=len(content), expected_bytes=size)
                return content, read(answer, "ETag", str)

    def open_from(self, key: str, offset: int, tag: str) -> tuple[str, api.Body]:
        """See `BucketApi.open_from`."""
        conditions = {**({"Range": f"bytes={offset}-"} if offset else {}), **({"IfMatch": tag} if tag else {})}
        with answers(self.place):
            answer = whole(client(self.place).get_object(**self._at(key), **conditions), *_FACTS)
            body = read(answer, "Body", StreamingBody)
            if offset and not find(answer, "ContentRange", str, "").startswith(f"bytes {offset}-"):
                body.close()
                raise api.Declined(api.NO_RANGE, "no range")
            return read(answer, "ETag", str), _body(self.place, body, read(answer, "ContentLength", int))

    def open_range(self, key: str, offset: int, size: int) -> api.Body:
        """See `BucketApi.open_range`. Also declines if the server does not support ranges."""
        last_offset = offset + size - 1
        with answers(self.place):
            answer = client(self.place).get_object(**self._at(key), Range=f"bytes={offset}-{last_offset}")
            body = read(answer, "Body", StreamingBody)
            if _is_range(answer, offset, size):
                return _body(self.place, body, size)
            body.close()
            if read(answer, "ResponseMetadata.HTTPStatusCode", int) != _PARTIAL:
                raise api.Declined(api.NO_RANGE, "no ranges")
            match = _RANGE.match(find(answer, "ContentRange", str, ""))
            if match and int(match[1]) == offset and int(match[2]) < last_offset:
                raise api.Declined(api.NO_RANGE, "it ends too early")
            # Truncated headers have another range, or none: try again.
            raise aws.IncompleteReadError(actual_bytes=0, expected_bytes=size)

    def put(self, key: str, data: bytes, expected: str | None, token: str) -> None:
        """See `BucketApi.put`."""
        with answers(self.place):
            client(self.place).put_object(
                **self._at(key),
                Body=data,
                ContentMD5=api.md5_of(data),
                Metadata={api.TOKEN: token} if token else {},
                **self.place.encryption(),
                **condition_of(expected),
            )

    def put_large(self, key: str, source: api.UploadSource, expected: str | None) -> None:
        """See `BucketApi.put_large`: a multipart upload, which is aborted unless it is completed."""
        location = {"Bucket": self.place.bucket, "Key": self.place.key(key)}
        answer = _ask(self, f"writing {key}", "create_multipart_upload", "UploadId", location | self.place.encryption())
        upload = {**location, "UploadId": read(answer, "UploadId", str)}

        def send_part(number: int, data: bytes) -> dict[str, str | int]:
            part_request = {**upload, "PartNumber": number, "Body": data, "ContentMD5": api.md5_of(data)}
            response = _ask(self, f"writing part {number} of {location['Key']}", "upload_part", "ETag", part_request)
            return {"PartNumber": number, "ETag": read(response, "ETag", str)}

        try:
            parts = api.send_parts(source, send_part)
            request = {**upload, "MultipartUpload": {"Parts": parts}, **condition_of(expected)}
            # Sending it twice is harmless: a completed upload is gone, so the server declines (404).
            _ask(self, f"completing {key}", "complete_multipart_upload", "ETag", request)
        except BaseException:
            # After an interrupt too. If the abort fails, `sweep` aborts the upload later.
            with suppress(EnginesmithError, api.Declined):
                _ask(self, f"aborting {key}", "abort_multipart_upload", "", upload, attempts=3)
            raise

    def holds(self, facts: api.ObjectFacts, source: api.UploadSource) -> bool | None:
        """See `BucketApi.holds`: by the ETag, if this module uploaded it."""
        if facts.checksum == parts_etag(source):
            return True
        return False if facts.checksum and "-" not in facts.checksum else None

    def delete(self, key: str, tag: str = "") -> None:
        """See `BucketApi.delete`. A bucket with versioning keeps the bytes until its own rule deletes them."""
        with answers(self.place):
            client(self.place).delete_object(**self._at(key), **({"IfMatch": tag} if tag else {}))

    def copy(self, key: str, dest: str, tag: str) -> None:
        """See `BucketApi.copy`. Managed by boto3, because a single copy request takes at most 5 GiB."""
        copy_arguments = {"CopySourceIfMatch": tag, **self.place.encryption()}
        with answers(self.place):
            client(self.place).copy(self._at(key), self.place.bucket, self.place.key(dest), ExtraArgs=copy_arguments)

    def page(self, prefix: str, token: str, *, deep: bool) -> api.ListedPage:
        """See `BucketApi.page`."""
        list_arguments = {**({} if deep else {"Delimiter": "/"}), **({"ContinuationToken": token} if token else {})}
        base_prefix, prefix_key = self.place.key(""), self.place.key(prefix)
        with answers(self.place):
            response = client(self.place).list_objects_v2(Bucket=self.place.bucket, Prefix=prefix_key, **list_arguments)
            page = whole(response, "IsTruncated")
            return api.ListedPage(
                tuple(
                    api.ListedObject(
                        read(row, "Key", str).removeprefix(base_prefix),
                        read(row, "Size", int),
                        read(row, "ETag", str),
                        read(row, "LastModified", datetime),
                    )
                    for row in find(page, "Contents", list, [])
                ),
                tuple(
                    read(row, "Prefix", str).removeprefix(base_prefix) for row in find(page, "CommonPrefixes", list, [])
                ),
                read(page, "NextContinuationToken", str) if page.get("IsTruncated") else "",
            )

    def now(self) -> datetime:
        """See `BucketApi.now`."""
        with answers(self.place):
            response = client(self.place).head_object(**self._at(MARKER))
            return api.parse_date(find(response, "ResponseMetadata.HTTPHeaders.date", str, ""))

    def strays(self) -> tuple[str, ...]:
        """See `BucketApi.strays`."""
        return tuple(str(upload) for upload in _find_abandoned(self))

    def sweep(self) -> int:
        """See `BucketApi.sweep`."""
        # 0 without permission, or if the server does not support the request
        upload_count = 0
        with suppress(UnavailableError):
            for upload in _find_abandoned(self):
                upload_arguments = {"Bucket": self.place.bucket, "Key": upload.key, "UploadId": upload.upload_id}
                with suppress(api.Declined):
                    _ask(self, f"aborting {upload}", "abort_multipart_upload", "", upload_arguments)
                    upload_count += 1
        return upload_count

    def _at(self, key: str) -> dict[str, str]:
        return {"Bucket": self.place.bucket, "Key": self.place.key(key)}


def _is_range(answer: JsonObject, offset: int, size: int) -> bool:
    """Whether it is exactly that range. A server without ranges may send all of a small object, which may be it."""
    if read(answer, "ResponseMetadata.HTTPStatusCode", int) != _PARTIAL:
        return offset == 0 and answer.get("ContentLength") == size
    match = _RANGE.match(find(answer, "ContentRange", str, ""))
    return match is not None and (int(match[1]), int(match[2])) == (offset, offset + size - 1)


def _body(place: S3Location, body: StreamingBody, size: int) -> HttpBody:
    try:
        return HttpBody(body.__enter__(), size, partial(answers, place))  # urllib3's response beneath botocore's body
    except ValueError:
        body.close()
        raise
