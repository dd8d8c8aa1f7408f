"""Rollouts and series of latencies on the pages, and that a change of either is seen."""

from dataclasses import replace
from pathlib import Path

from enginesmith.registry.latency_series import LatencySeries, append_point
from enginesmith.registry.leases import hold_lease
from enginesmith.registry.manifest import Manifest
from enginesmith.registry.rollouts.state import Rollout
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.layout import SERIES, channel_key
from enginesmith.registry.versions import channels, lookup
from enginesmith.registry.versions.channel_writes import change_rollout, read_rollout
from pipeline.site.rollouts import line_of, read_all_series
from tests.enginesmith.registries import engine, overwrite, publish_engines
from tests.enginesmith.registry.test_latency_series import SERIES as KNOWN
from tests.enginesmith.registry.test_latency_series import point
from tests.pipeline.rollout.fleet import BEGIN, begin, plan
from tests.pipeline.site.crawl import Seen, broken_links, pages
from tests.pipeline.site.sites import move, publish_small, write

PAGE = "models/digits/index.html"


def roll_out(registry: Store) -> Rollout:
    for content in "ab":
        publish_engines(registry, [engine(registry, data=content.encode())], content)
    move(registry, "digits", "1")
    return begin(registry, lookup.load(registry, "digits", "2"), plan("5%", "100%", health_ppm=950_000))


def words(out: Path, path: str = PAGE) -> str:
    return Seen(out / path).words


def test_a_rollout_says_who_gets_what_and_who_started_it(registry: Store, out: Path) -> None:
    roll_out(registry)
    write(registry, out)
    model = words(out)
    assert "stable: 1 to 2 running 5% of the nodes get 2, all others 1. Started by ada: a better one" in model
    assert "at least 95 % of the nodes that report are well" in model and "1: 5% 600 s open" in model
    assert (
        "stable 1 → 2 on 5%" in words(out, "index.html") and '{"stable":["2","5%"]}' in (out / "models.js").read_text()
    )
    assert not broken_links(out) and not [seen.wrong for seen in pages(out) if seen.wrong]


def test_a_step_of_a_rollout_is_seen_though_its_document_has_the_same_size(registry: Store, out: Path) -> None:
    found = roll_out(registry)
    write(registry, out)
    size = len(registry.read(channel_key("digits", "stable")) or b"")
    change_rollout(registry, found, replace(found, reach=(replace(found.reach[0], share_ppm=60_000),)))
    assert len(registry.read(channel_key("digits", "stable")) or b"") == size
    write(registry, out)
    assert "6% of the nodes get 2" in words(out)


def test_a_rollout_that_a_move_has_ended_reaches_nobody(registry: Store, out: Path) -> None:
    roll_out(registry)
    with hold_lease(registry, "a promotion by force") as guard:
        channels.point(guard, lookup.load(registry, "digits", "2"), "stable", "eve")
    write(registry, out)
    assert "aborted" in words(out) and "of the nodes get" not in words(out)
    assert "→" not in words(out, "index.html")


def test_a_finished_and_a_damaged_rollout(registry: Store, out: Path) -> None:
    found = roll_out(registry)
    change_rollout(registry, found, found.decide(BEGIN, "halted", "rule", "1 of 1 nodes fail", state="halted"))
    assert read_rollout(registry, "digits", "stable")
    write(registry, out)
    assert "halted" in words(out) and "1 of 1 nodes fail" in words(out) and "never" in words(out)
    overwrite(registry, channel_key("digits", "stable"), b"{")
    write(registry, out)
    assert "unreadable channel digits:stable" in words(out)


def record(registry: Store, manifest: Manifest, days: int, level: float = 1.0) -> LatencySeries:
    found = KNOWN
    assert found.model == manifest.model
    for day in range(days):
        found = append_point(registry, found, point(day, relative=level if day < days / 2 else level * 1.1))
    return found


def test_a_series_has_a_picture_its_points_and_what_changed_its_level(registry: Store, out: Path) -> None:
    manifest = publish_small(registry)
    write(registry, out)
    assert not (out / "models/digits/latency.html").exists()
    record(registry, manifest, 16)
    write(registry, out)
    page = words(out, "models/digits/latency.html")
    assert "relative 10.0 % slower" in page and "16 points since" in page and "100 µs" in page
    assert (out / "models/digits/latency.html").read_text().count("<circle") == 16
    assert "relative 10.0 % slower" in words(out) and "1.100 ×" in words(out)  # noqa: RUF001 - times
    assert not broken_links(out) and not [seen.wrong for seen in pages(out) if seen.wrong]


def test_a_series_of_one_point_and_one_that_is_damaged(registry: Store, out: Path) -> None:
    found = record(registry, publish_small(registry), 1)
    (shown,) = read_all_series(registry, "digits")
    assert line_of(shown.points) == "6,60"
    registry.create(f"{SERIES}digits/{'0' * 64}.json", b"{")
    write(registry, out)
    page = words(out, "models/digits/latency.html")
    assert "is no series of latencies" in page and found.unit in page and "fewer than twelve points" in page
    assert "unreadable" in words(out) and not broken_links(out)
