import json
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from enginesmith.registry.store.base import Store
from tests.enginesmith.cli.commands import run
from tests.pipeline.site.sites import publish_small
from tests.waiting import PATIENCE_S, until


def test_site_lists_the_written_files(store: Store, out: Path) -> None:
    publish_small(store)
    first_result, second_result = (run("site", "write", out, "--registry", store.uri, "--json") for _ in range(2))
    assert json.loads(first_result.stdout)["written"] > 5 and json.loads(second_result.stdout)["written"] <= 1
    assert run("site", "write", out, "--registry", store.uri).stdout == f"{out}/index.html\n"


def test_serve_shows_changes_and_ends_with_ctrl_c(store: Store) -> None:
    publish_small(store)
    command = [sys.executable, "-m", "enginesmith", "site", "serve", "--registry", store.uri]
    words = ["--listen", "127.0.0.1:0", "--every", "1", "--prefix", "/registry"]
    with subprocess.Popen([*command, *words], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        try:
            search_result = re.search(r"http://\S+/", process.stderr.readline())
            assert search_result and search_result[0].endswith("/registry/")
            assert "model-b" not in wait_for(search_result[0], "digits")
            publish_small(store, "model-b")
            wait_for(search_result[0], "model-b")
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0 and "stopped" in process.stderr.read()


def wait_for(url: str, text: str) -> str:
    pages = [""]

    def look() -> bool:
        with suppress(HTTPError), urlopen(url, timeout=PATIENCE_S) as answer:
            pages.append(answer.read().decode())
        return text in pages[-1]

    until(look, f"{text} in {url}", pause_s=0.05)
    return pages[-1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--listen", "8080x"], "is not an address"),
        (["--listen", "127.0.0.1:70000"], "is not an address"),
        (["--prefix", "//evil.example"], "is not a path"),
        (["--prefix", "registry"], "is not a path"),
        (["--trust", "missing.yaml"], "missing.yaml"),
    ],
)
def test_bad_options_are_reported(store: Store, out: Path, words: list[str], message: str) -> None:
    command = ["site", "write", out] if words[0] == "--trust" else ["site", "serve"]
    result = run(*command, "--registry", store.uri, *words)
    assert result.exit_code and message in f"{result.output} {result.exception}"
