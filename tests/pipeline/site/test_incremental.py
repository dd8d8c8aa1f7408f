from pathlib import Path

import pytest

from enginesmith.core.errors import InputError
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.files import PREFIX
from enginesmith.registry.versions import policies
from enginesmith.registry.versions.policies import ChannelPolicy
from pipeline.site import generate
from pipeline.site.folder import STATE, Page, SiteFolder, read_models
from tests.enginesmith.registries import on_each_store
from tests.pipeline.projects import raising
from tests.pipeline.site.crawl import broken_links, linked
from tests.pipeline.site.sites import move, publish_small, write


def times(out: Path) -> dict[str, int]:
    result = (path for path in out.rglob("*.*") if path.is_file() and ".enginesmith-site" not in path.parts)
    return {str(path.relative_to(out)): path.stat().st_mtime_ns for path in result}


def changed(before: dict[str, int], out: Path) -> set[str]:
    after = times(out)
    return {path for path in after if before.get(path) != after[path]} | (before.keys() - after.keys())


def write_two_of_each(store: Store, out: Path) -> None:
    for model in ("digits", "other"):
        for content in "ab":
            publish_small(store, model, content)
    write(store, out)


def remove_half(store: Store) -> None:
    for key in list(store.list("models/digits/versions/2/")) + list(store.list("models/other/")):
        store.remove(key)


# It says when the registry was read.
ALWAYS = {"index.html"}
# The pages over all models, the style and the script.
ALWAYS_DRAWN = 4 + 2


@on_each_store
def test_only_changes_are_read_and_written(store: Store, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_two_of_each(store, out)
    times_before = times(out)
    read: list[str] = []
    write_pages = generate.model_pages
    monkeypatch.setattr("pipeline.site.generate.model_pages", lambda site: read.append(site.model) or write_pages(site))
    write(store, out)
    assert changed(times_before, out) <= ALWAYS and read == []
    move(store, "digits", "1")
    result = write(store, out)
    # The model's page and that of the version; those about all models; the style and the script.
    assert read == ["digits"] and result.drawn == 1 + 1 + ALWAYS_DRAWN
    place = "models/digits/"
    assert changed(times_before, out) - ALWAYS == {"models.js", f"{place}index.html", f"{place}versions/1/index.html"}


@pytest.mark.parametrize("model", [None, "digits"])
def test_a_policy_change_is_noticed_at_equal_size(store: Store, out: Path, model: str | None) -> None:
    publish_small(store)
    for target in ("sm_75", "sm_80"):
        policies.write(store, model, "candidate", ChannelPolicy(proven=(target,)))
        write(store, out)
        assert f"proven on {target}" in (out / "models/digits/index.html").read_text()


def test_the_next_run_finishes_a_killed_one(store: Store, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish_small(store)
    write(store, out)
    times_before = times(out)
    publish_small(store, content="b")
    publish_small(store, "other")
    write_model = generate._model

    def die(site: generate.ModelSite, path: str) -> bytes:
        if site.model == "other":
            raise KeyboardInterrupt
        return write_model(site, path)

    with monkeypatch.context() as patched_context:
        patched_context.setattr(generate, "_model", die)
        with pytest.raises(KeyboardInterrupt):
            write(store, out)
    # What was half done cannot be reached yet.
    assert "index.html" not in changed(times_before, out) and not broken_links(out, linked(out))
    write(store, out)
    assert (out / "models" / "other" / "index.html").exists() and not broken_links(out)


def test_the_next_run_deletes_pages_that_a_killed_one_left(store, out, monkeypatch):
    write_two_of_each(store, out)
    remove_half(store)
    with monkeypatch.context() as patched_context:
        patched_context.setattr(SiteFolder, "delete", raising(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            write(store, out)
    assert (out / "models/other").exists() and (out / "models/digits/versions/2").exists()
    write(store, out)
    assert not (out / "models/other").exists() and not (out / "models/digits/versions/2").exists()
    assert not broken_links(out) and not (out / ".enginesmith-site/models/other.json").exists()
    assert write(store, out).drawn == ALWAYS_DRAWN


def test_pages_are_synced_together_before_they_are_recorded(store, out, monkeypatch):
    texts: list[str] = []
    folder = SiteFolder(out)
    monkeypatch.setattr("os.fsync", lambda _: texts.append("one"))
    monkeypatch.setattr("os.sync", lambda: texts.append("all" if not (out / STATE / "g.json").exists() else "late"))
    folder.update("g", [Page(f"{number}.html", "1", lambda: b"a") for number in range(100)])
    assert texts == []
    folder.keep({})
    assert texts == ["all"] and (out / STATE / "g.json").exists()
    folder.update("g", [Page("0.html", "2", lambda: b"b")])
    folder.keep({})
    # The page, and its folder; a sync of everything would wait for all other programs.
    assert texts == ["all", "one", "one"]


def test_partial_files_of_a_killed_run_are_deleted(store: Store, out: Path) -> None:
    publish_small(store)
    partial_path = out / STATE / "new" / f"{PREFIX}00"
    partial_path.parent.mkdir(parents=True)
    partial_path.write_text("<html")
    write(store, out)
    assert not partial_path.exists() and not list(out.rglob(f"{PREFIX}*"))


def test_a_version_published_during_a_run_waits_for_the_next_one(store, out, monkeypatch):
    publish_small(store)
    publish_small(store, "gone")
    models = read_models(store, "")
    publish_small(store, content="b")
    move(store, "digits", "2")
    for key in list(store.list("models/gone/")):
        store.remove(key)
    with monkeypatch.context() as patched_context:
        patched_context.setattr("pipeline.site.generate.read_models", lambda *_: models)
        write(store, out)
    assert "versions/2/index.html" not in (out / "models/digits/index.html").read_text() and not broken_links(out)
    write(store, out)
    assert "versions/2/index.html" in (out / "models/digits/index.html").read_text() and not broken_links(out)
    assert not (out / "models/gone").exists()


def test_a_folder_with_other_files_is_not_changed(store: Store, out: Path) -> None:
    out.mkdir()
    (out / "thesis.txt").write_text("all of it")
    with pytest.raises(InputError, match="holds other files, not a site of Enginesmith"):
        write(store, out)
    with pytest.raises(InputError, match="is not a folder"):
        write(store, out / "thesis.txt")


@pytest.mark.parametrize(
    "state",
    [
        b"", b"{", b'{"format": 2}', b'{"format": 1, "models": [], "pages": []}',
        b'{"format": 1, "models": {"digits": 1}}',
        b'{"format": 1, "models": {"digits": {"key": "of another release"}, "gone": {"key": ""}}}',
    ],
)  # fmt: skip
def test_a_damaged_state_costs_only_time(store: Store, out: Path, state: bytes) -> None:
    publish_small(store)
    write(store, out)
    for path in (out / ".enginesmith-site").rglob("*.json"):
        path.write_bytes(state)
    write(store, out)
    assert not broken_links(out) and "digits" in (out / "index.html").read_text()


def test_an_edited_state_deletes_nothing_outside(out: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    folder = SiteFolder(out)
    folder.update("g", [Page("a.html", "1", lambda: b"a")])
    folder.keep({})
    state = out / ".enginesmith-site" / "g.json"
    state.write_text(state.read_text().replace("a.html", "../precious"))
    folder.delete("g", folder.update("g", []))
    assert (tmp_path / "precious").exists()
