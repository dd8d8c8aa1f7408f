from dataclasses import replace
from pathlib import Path

from enginesmith.registry.leases import hold_lease
from enginesmith.registry.rollouts.rollout_state import Rollout
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.layout import channel_key
from enginesmith.registry.versions import channels, lookup
from enginesmith.registry.versions.channel_writes import change_rollout, read_rollout
from tests.enginesmith.registries import engine, overwrite, publish_engines
from tests.pipeline.rollout.fleet import BEGIN, begin, plan
from tests.pipeline.site.crawl import Seen, broken_links, pages
from tests.pipeline.site.sites import move, write

PAGE = "models/digits/index.html"


def roll_out(store: Store) -> Rollout:
    for content in "ab":
        publish_engines(store, [engine(store, data=content.encode())], content)
    move(store, "digits", "1")
    return begin(store, lookup.load(store, "digits", "2"), plan("5%", "100%", health_ppm=950_000))


def words(out: Path, path: str = PAGE) -> str:
    return Seen(out / path).words


def test_a_rollout_shows_its_nodes_and_its_author(store: Store, out: Path) -> None:
    roll_out(store)
    write(store, out)
    model = words(out)
    assert "stable: 1 to 2 running 5% of the nodes get 2, all others 1. Started by ada: a better one" in model
    assert "Gates of each wave: health 95%" in model and "1: 5% 600 s open" in model
    assert "stable 1 → 2 on 5%" in words(out, "index.html")
    assert '{"stable":["2","5%"]}' in (out / "models.js").read_text()
    assert not broken_links(out) and not [seen_page.wrong for seen_page in pages(out) if seen_page.wrong]


def test_a_rollouts_step_is_noticed_at_equal_size(store: Store, out: Path) -> None:
    result = roll_out(store)
    write(store, out)
    size = len(store.read(channel_key("digits", "stable")) or b"")
    change_rollout(store, result, replace(result, reach=(replace(result.reach[0], share_ppm=60_000),)))
    assert len(store.read(channel_key("digits", "stable")) or b"") == size
    write(store, out)
    assert "6% of the nodes get 2" in words(out)


def test_a_rollout_ended_by_a_move_reaches_nobody(store: Store, out: Path) -> None:
    roll_out(store)
    with hold_lease(store, "a promotion by force") as guard:
        channels.point(guard, lookup.load(store, "digits", "2"), "stable", "eve")
    write(store, out)
    assert "aborted" in words(out) and "of the nodes get" not in words(out)
    assert "→" not in words(out, "index.html")


def test_finished_and_damaged_rollouts_are_shown(store: Store, out: Path) -> None:
    result = roll_out(store)
    change_rollout(store, result, result.decide(BEGIN, "halted", "rule", "1 of 1 nodes fail", state="halted"))
    assert read_rollout(store, "digits", "stable")
    write(store, out)
    assert "halted" in words(out) and "1 of 1 nodes fail" in words(out) and "never" in words(out)
    overwrite(store, channel_key("digits", "stable"), b"{")
    write(store, out)
    assert "unreadable channel digits:stable" in words(out)
