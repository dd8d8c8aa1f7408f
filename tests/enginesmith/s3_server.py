"""moto's S3 on loopback, in its own process as the tests fork: prints its URL, ends when its standard input does."""

import base64
import hashlib
import io
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

BUCKET = "enginesmith-tests"
# Nothing of the machine's own AWS configuration is used; moto takes any key.
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing-secret",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "AWS_EC2_METADATA_DISABLED": "true",
}
FOREIGN = (
    "AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION",
    "AWS_DEFAULT_REGION",
)  # fmt: skip


def serving(page_size: int = 1000) -> AbstractContextManager[str]:
    """The URL of a server with the bucket BUCKET, with listings in pages of this size, which takes small parts."""
    settings = {"S3_UPLOAD_PART_MIN_SIZE": "1", "MOTO_S3_DEFAULT_MAX_KEYS": str(page_size)}
    return started(__file__, **ENVIRONMENT, **settings)


@contextmanager
def started(script: str, **settings: str) -> Iterator[str]:
    """The URL that a server prints in a process of its own. settings: environment variables beside the tests' own."""
    command, environment = [sys.executable, script], {**os.environ, **settings}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stdin is not None and server.stdout is not None
        try:
            yield server.stdout.readline().strip()
        finally:
            server.stdin.close()
            server.wait(120)


class LikeS3:
    """moto with what S3 does and moto does not: a request is done in one step, and only when all of it came as sent."""

    def __init__(self, application: Any) -> None:
        self._application = application
        self._lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], start: Any) -> Any:
        # The body first, so that a client that dies while sending holds up nobody.
        size = int(environ.get("CONTENT_LENGTH") or 0)
        body = environ["wsgi.input"].read(size)
        environ["wsgi.input"] = io.BytesIO(body)
        stated_digest = environ.get("HTTP_CONTENT_MD5")
        if len(body) < size:
            return _refuse(start, "IncompleteBody")
        if stated_digest and base64.b64decode(stated_digest) != hashlib.md5(body).digest():
            return _refuse(start, "BadDigest")
        try:
            with self._lock:
                return list(self._application(environ, start))
        except KeyError:  # moto does not know an upload that was aborted
            return _refuse(start, "NoSuchUpload", "404 Not Found")


def _refuse(start: Any, code: str, status: str = "400 Bad Request") -> list[bytes]:
    start(status, [("Content-Type", "application/xml")])
    return [f"<Error><Code>{code}</Code><Message>refused</Message></Error>".encode()]


def main() -> None:
    import boto3
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").disabled = True
    application = LikeS3(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, application, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    boto3.client("s3", endpoint_url=url, region_name="us-east-1").create_bucket(Bucket=BUCKET)
    print(url, flush=True)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
