"""Google Cloud Storage's JSON API on loopback, as far as Enginesmith asks for it: `python gcs_server.py` prints its
URL.

It does what Google documents and the emulators of the package index lack: preconditions of every request and of a
resumable upload when it is completed, stated MD5s that are compared, chunks that may come twice, and the answer to a
completed upload that is asked for again. It ends when its standard input does.
"""

import base64
import hashlib
import json
import os
import re
import secrets
import sys
import threading
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.parser import BytesParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

BUCKET = "enginesmith-tests"
_OBJECT = re.compile(r"/(?:download/)?storage/v1/b/([^/]+)/o/([^/]+)")
_REWRITE = re.compile(r"/storage/v1/b/([^/]+)/o/([^/]+)/rewriteTo/b/([^/]+)/o/([^/]+)")
_LIST = re.compile(r"/storage/v1/b/([^/]+)/o")
_UPLOAD = re.compile(r"/upload/storage/v1/b/([^/]+)/o")


class RefusedError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Stored:
    data: bytes
    generation: int
    metadata: dict[str, str]
    updated: str = field(default_factory=lambda: f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%fZ}")

    def resource(self, name: str) -> dict[str, object]:
        return {
            "kind": "storage#object", "name": name, "bucket": BUCKET, "size": str(len(self.data)),
            "generation": str(self.generation), "metageneration": "1", "metadata": self.metadata,
            "updated": self.updated,
            "md5Hash": base64.b64encode(hashlib.md5(self.data).digest()).decode(),
        }  # fmt: skip


@dataclass
class Session:
    """A resumable upload. done: the resource, once it is completed."""

    about: dict[str, object]
    query: dict[str, str]
    data: bytearray = field(default_factory=bytearray)
    done: dict[str, object] | None = None


@dataclass
class Objects:
    """What is stored, and one lock: a request is done in one step."""

    page_size: int = 1000
    objects: dict[str, Stored] = field(default_factory=dict)
    sessions: dict[str, Session] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    clock: int = 1_700_000_000_000_000

    def check(self, name: str, query: dict[str, str], match: str = "ifGenerationMatch") -> None:
        result = self.objects.get(name)
        generation = result.generation if result else 0
        if match in query and int(query[match]) != generation:
            raise RefusedError(412, "At least one of the pre-conditions you specified did not hold.")

    def find(self, name: str) -> Stored:
        if name not in self.objects:
            raise RefusedError(404, f"No such object: {BUCKET}/{name}")
        return self.objects[name]

    def store(self, about: dict[str, object], query: dict[str, str], data: bytes) -> dict[str, object]:
        name = str(about.get("name") or query.get("name"))
        stated_digest = about.get("md5Hash")
        if stated_digest and stated_digest != base64.b64encode(hashlib.md5(data).digest()).decode():
            raise RefusedError(400, f'Provided MD5 hash "{stated_digest}" doesn\'t match calculated MD5 hash.')
        self.check(name, query)
        self.clock += 1
        self.objects[name] = Stored(data, self.clock, dict(about.get("metadata") or {}))  # type: ignore[call-overload]
        return self.objects[name].resource(name)

    def listing(self, query: dict[str, str]) -> dict[str, object]:
        prefix, delimiter, after = (query.get(name, "") for name in ("prefix", "delimiter", "pageToken"))
        items, folders, last_entry = [], [], ""
        for name in sorted(self.objects):
            if not name.startswith(prefix):
                continue
            inner_name = name[len(prefix) :]
            entry = prefix + inner_name.partition("/")[0] + "/" if delimiter and "/" in inner_name else name
            if entry <= after:
                continue
            if len(items) + len(folders) == min(self.page_size, int(query.get("maxResults", self.page_size))):
                return {"kind": "storage#objects", "items": items, "prefixes": folders, "nextPageToken": last_entry}
            last_entry = after = entry
            folders.append(entry) if entry != name else items.append(self.objects[name].resource(name))
        return {"kind": "storage#objects", "items": items, "prefixes": folders}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a body would wait 40 ms for its head to be acknowledged
    store: Objects

    def log_message(self, *_: object) -> None:
        """Says nothing."""

    def handle_all(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(size)
        if len(body) < size:  # the client went away: nothing is done
            self.close_connection = True
            return
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        try:
            with self.store.lock:
                self.answer(*self.do(self.command, parts.path, query, body))
        except RefusedError as error:
            entries = {"error": {"code": error.status, "message": str(error), "errors": [{"message": str(error)}]}}
            self.answer(error.status, {}, b"" if error.status == 304 else json.dumps(entries).encode())

    do_GET = do_POST = do_PUT = do_DELETE = handle_all

    def answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do(self, method: str, path: str, query: dict[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        if result := _REWRITE.fullmatch(path):
            return self.rewrite(unquote(result[2]), unquote(result[4]), query)
        if result := _OBJECT.fullmatch(path):
            _check_bucket(result[1])
            name = unquote(result[2])
            stored = self.store.find(name)
            self.store.check(name, query)
            if method == "DELETE":
                del self.store.objects[name]
                return 204, {}, b""
            return self.media(stored, query) if query.get("alt") == "media" else _json(stored.resource(name))
        if result := _LIST.fullmatch(path):
            _check_bucket(result[1])
            return _json(self.store.listing(query))
        if (result := _UPLOAD.fullmatch(path)) and method == "POST":
            _check_bucket(result[1])
            return self.begin(query, body)
        if result and "upload_id" in query:
            return self.chunk(query["upload_id"], body)
        raise RefusedError(501, "not here")

    def rewrite(self, source: str, dest: str, query: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        stored_object = self.store.find(source)
        self.store.check(source, query, "ifSourceGenerationMatch")
        object_facts = self.store.store({"name": dest, "metadata": stored_object.metadata}, {}, stored_object.data)
        size = str(len(stored_object.data))
        return _json({"done": True, "resource": object_facts, "objectSize": size, "totalBytesRewritten": size})

    def media(self, stored: Stored, query: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        headers = {"X-Goog-Generation": str(stored.generation), "Content-Type": "application/octet-stream"}
        if query.get("ifGenerationNotMatch") == str(stored.generation):
            raise RefusedError(304, "unchanged")
        expected = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if expected is None:
            return 200, headers, stored.data
        start, size = int(expected[1]), len(stored.data)
        if start >= size:
            raise RefusedError(416, "The requested range cannot be satisfied.")
        data = stored.data[start : int(expected[2] or size) + 1]
        return 206, {**headers, "Content-Range": f"bytes {start}-{start + len(data) - 1}/{size}"}, data

    def begin(self, query: dict[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        if query["uploadType"] == "multipart":
            head = f"Content-Type: {self.headers['Content-Type']}\r\n\r\n".encode()
            first_part, _ = BytesParser().parsebytes(head + body).get_payload()  # type: ignore[misc]
            document = json.loads(first_part.get_payload(decode=True))  # type: ignore[union-attr]
            # The parser takes line ends apart: the bytes are cut out by hand.
            boundary = self.headers["Content-Type"].partition("boundary=")[2].strip('"').encode()
            data = body.split(b"--" + boundary)[2].partition(b"\r\n\r\n")[2][:-2]
            return _json(self.store.store(document, query, data))
        self.store.check(json.loads(body)["name"], query)
        session = secrets.token_hex(8)
        self.store.sessions[session] = Session(json.loads(body), query)
        host = self.headers["Host"]
        place = f"http://{host}/upload/storage/v1/b/{BUCKET}/o?uploadType=resumable&upload_id={session}"
        return 200, {"Location": place}, b""

    def chunk(self, upload: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        if upload not in self.store.sessions:
            raise RefusedError(404, "no such upload")
        session = self.store.sessions[upload]
        if session.done is not None:
            return _json(session.done)
        result = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", self.headers["Content-Range"])
        assert result is not None, self.headers["Content-Range"]
        actual_count = len(session.data)
        if int(result[1]) > actual_count:
            raise RefusedError(400, "bytes are missing before these")
        session.data += body[actual_count - int(result[1]) :]
        if len(session.data) < int(result[3]):
            return 308, {"Range": f"bytes=0-{len(session.data) - 1}"}, b""
        session.done = self.store.store(session.about, session.query, bytes(session.data))
        return _json(session.done)


def _check_bucket(name: str) -> None:
    if name != BUCKET:
        raise RefusedError(404, "The specified bucket does not exist.")


def _json(value: dict[str, object]) -> tuple[int, dict[str, str], bytes]:
    return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()


def main() -> None:
    class Bound(Handler):
        store = Objects(page_size=int(os.environ.get("PAGE_SIZE", "1000")))

    class Server(ThreadingHTTPServer):
        request_queue_size = 128

    server = Server(("127.0.0.1", 0), Bound)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
