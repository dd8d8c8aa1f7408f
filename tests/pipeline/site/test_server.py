import gzip
import http.client
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from enginesmith.core.errors import HttpAddress, UnavailableError
from enginesmith.listening import HttpServer
from enginesmith.registry.store.base import Store
from pipeline.site.server import Refresher, SiteFiles
from tests.pipeline.site.sites import publish_small, write
from tests.waiting import PATIENCE_S


@contextmanager
def serving(root: Path, prefix: str = "") -> Iterator[HttpServer]:
    with HttpServer(SiteFiles(root, prefix, only_loopback=True), HttpAddress("127.0.0.1", 0)) as server:
        yield server


def ask(server: HttpServer, path: str, method: str = "GET", **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.address.port, timeout=PATIENCE_S)
    connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    data = answer.read()
    connection.close()
    return answer, data


@pytest.fixture
def site(store: Store, out: Path) -> Path:
    publish_small(store)
    write(store, out)
    return out


def test_the_server_sends_the_static_sites_bytes(site: Path) -> None:
    with serving(site) as server:
        for path in ("index.html", "site.css", "site.js", "models.js", "models/digits/versions/1/index.html"):
            answer, data = ask(server, f"/{path}")
            assert (answer.status, data) == (200, (site / path).read_bytes())
        assert ask(server, "/")[1] == (site / "index.html").read_bytes()
        assert ask(server, "/models/digits/")[1] == (site / "models/digits/index.html").read_bytes()
        moved_answer, _ = ask(server, "/models/digits")
        assert (moved_answer.status, moved_answer.headers["Location"]) == (308, "/models/digits/")


def test_answers_are_protected_compressed_and_conditional(site: Path) -> None:
    with serving(site) as server:
        answer, data = ask(server, "/", Accept_Encoding="gzip")
        assert gzip.decompress(data) == (site / "index.html").read_bytes()
        assert "script-src 'self'" in answer.headers["Content-Security-Policy"]
        assert answer.headers["X-Content-Type-Options"] == "nosniff" and "Set-Cookie" not in answer.headers
        second_answer, empty_answer = ask(server, "/", If_None_Match=answer.headers["ETag"])
        assert (second_answer.status, empty_answer) == (304, b"")
        head, empty_answer = ask(server, "/", "HEAD")
        assert (head.status, empty_answer) == (200, b"") and int(head.headers["Content-Length"]) > 1000


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT"])
def test_only_get_and_head_are_allowed(site: Path, method: str) -> None:
    with serving(site) as server:
        answer, data = ask(server, "/", method)
        assert answer.status == 405 and (site / "index.html").read_bytes() not in data


@pytest.mark.parametrize(
    "path",
    [
        "/../secret", "/%2e%2e/secret", "/..%2fsecret", "/models/../../secret", "/%2e%2e%5csecret", "//../secret",
        "/.enginesmith-site/registry.json", "/%00", "/%ff", "/nothing.html", "/models/digits/index.html/x",
        "//evil.example",        "/" + "a" * 3000,
    ],
)  # fmt: skip
def test_no_path_leads_out_or_to_hidden_files(site: Path, path: str) -> None:
    (site.parent / "secret").write_text("secret")
    with serving(site) as server:
        answer, data = ask(server, path)
        assert answer.status in (404, 414) and b"secret" not in data and "Location" not in answer.headers


def test_foreign_pages_cannot_read_it_through_dns_rebinding(site: Path) -> None:
    with serving(site) as server:
        port = server.address.port
        assert ask(server, "/", Host=f"evil.example:{port}")[0].status == 421
        assert ask(server, "/", Host=f"localhost:{port}")[0].status == 200


def test_the_server_works_below_an_ingress_path(site: Path) -> None:
    with serving(site, "/registry/") as server:
        assert ask(server, "/registry/")[0].status == 200
        assert ask(server, "/registry")[0].headers["Location"] == "/registry/"
        assert ask(server, "/registry/models/digits")[0].headers["Location"] == "/registry/models/digits/"
        assert ask(server, "/")[0].status == ask(server, "/registryx/")[0].status == 404


def test_requests_before_the_first_site_are_answered(tmp_path: Path) -> None:
    with serving(tmp_path / "empty") as server:
        answer, data = ask(server, "/")
        assert answer.status == 503 and b"is being written" in data


def test_an_unreachable_registry_is_reported_once_and_the_site_stays() -> None:
    output: list[str] = []
    failing_flags = [True, True, False, True]

    def refresh() -> None:
        if failing_flags.pop(0):
            raise UnavailableError("gone")

    refresher = Refresher(refresh, output.append)
    assert [refresher.once() for _ in range(4)] == [False, False, True, False]
    assert output == [
        "the site is not up to date: gone", "the site is up to date again", "the site is not up to date: gone",
    ]  # fmt: skip
