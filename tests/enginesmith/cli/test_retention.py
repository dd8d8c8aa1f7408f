from enginesmith.core.errors import UnknownNameError
from enginesmith.registry.leases import take_lease
from enginesmith.registry.store.base import Store
from tests.enginesmith.cli.commands import run, said, told


def test_gc_lists_garbage_and_deletes_it_with_the_option(three: Store) -> None:
    assert "digits@1 is pinned" in said("registry", "pin", "digits@1") and "already" in said(
        "registry", "pin", "digits@1"
    )
    result = run("registry", "gc", "--keep-versions", 1)
    assert "--delete marks new garbage" in result.stderr
    assert "digits@2" in result.stdout and "2 versions kept; 0 B deleted" in result.stdout
    sweep = told("registry", "gc", "--keep-versions", 1, "--grace", "0s", "--delete")
    assert "nothing was changed" not in run("registry", "gc", "--grace", "0s", "--delete").stderr
    assert {item["state"] for item in sweep["items"]} == {"deleted"} and sweep["acted"] and sweep["deleted_bytes"] > 0
    assert sweep["kept"] == {"digits@1": ["pinned"], "digits@3": ["among the newest"]} and sweep["leases"] == []
    assert told("registry", "pin", "digits@1") == {"model": "digits", "version": "1", "pinned": True, "changed": False}
    assert "digits@1 is unpinned" in said("registry", "pin", "--remove", "digits@1") and "digits@1 is pinned" in said(
        "registry", "pin", "digits@1"
    )
    assert told("registry", "pin", "--remove", "digits@1") == {"model": "digits", "version": "1", "pinned": False}
    assert isinstance(run("registry", "pin", "--remove", "digits").exception, UnknownNameError)
    assert run("registry", "pin", "--remove", "digits@1", "--why", "old").exit_code == 2
    result = run("registry", "gc")
    assert result.stdout == "2 versions kept; 0 B deleted, 0 B of garbage not deleted\n" and not result.stderr
    for grace in ("soon", "999999d"):
        assert run("registry", "gc", "--delete", "--grace", grace).exit_code == 2
    take_lease(three, "publishing digits")
    assert "running, or left by a killed process: publishing digits (" in said("registry", "gc")
    assert told("registry", "fsck")["problems"] == []
