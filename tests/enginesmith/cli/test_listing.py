import json

from click import UsageError

from enginesmith.core.errors import UnknownNameError
from enginesmith.registry.store.base import Store
from tests.enginesmith.cli.commands import run, told
from tests.enginesmith.registries import engine, publish_engines


def test_pages_of_list(three: Store) -> None:
    publish_engines(three, [engine(three)], "z", model="other")
    result = run("list", "--limit", "1", "--json")
    assert [row["model"] for row in json.loads(result.stdout)] == ["digits"] and "--after digits" in result.stderr
    assert [row["model"] for row in told("list", "--after", "digits")] == ["other"]
    assert [row["version"] for row in told("list", "digits", "--after", "1")] == ["2", "3"]
    assert "--after 2" in run("list", "digits", "--after", "1", "--limit", "1").stderr
    assert "--before 2" in run("list", "digits", "--limit", "2").stderr
    # All that there is, is no page.
    for arguments in ((), ("digits", "--before", "3"), ("digits", "--after", "1")):
        result = run("list", *arguments, "--limit", "2", "--json")
        assert result.stderr == "" and len(json.loads(result.stdout)) == 2
    assert run("list", "digits", "--limit", "3").stderr == ""
    assert isinstance(run("list", "--before", "1").exception, UsageError | SystemExit)


def test_list(mixed: Store) -> None:
    assert told("list") == [{"model": "digits", "versions": ["1", "2"], "channels": {"candidate": "2"}}]
    rows = told("list", "digits")
    assert [row["engines"] for row in rows] == [{"proven": 1}, {"proven": 1, "refused": 1, "unproven": 1}]
    assert rows[1]["channels"] == {"candidate": "2"}
    assert "digits" in run("list").stdout and "proven 1, refused 1, unproven 1" in run("list", "digits").stdout
    assert isinstance(run("list", "digit").exception, UnknownNameError)
    result = run("list", "digits", "--limit", "1", "--json")
    assert [row["version"] for row in json.loads(result.stdout)] == ["2"] and "--before 2" in result.stderr
    assert [row["version"] for row in told("list", "digits", "--before", "2")] == ["1"]
