"""`enginesmith feed` groups channels that nodes follow by one request; `enginesmith notify` tells nodes to look now."""

import click

from enginesmith.cli.options import emit_json, json_option, registry_option, say
from enginesmith.cli.tables import echo, print_table
from enginesmith.core.text import pluralize


@click.group()
def feed() -> None:
    """Group channels, so that a node follows any number of them by one request: `enginesmith pull --follow --feed
    NAME`."""


@feed.command("set")
@click.argument("name")
@click.argument("patterns", nargs=-1, required=True, metavar="MODEL:CHANNEL...")
@registry_option
@json_option
def set_one(name: str, patterns: tuple[str, ...], registry: str, as_json: bool) -> None:
    """Make the feed NAME of the channels that match a pattern, as in 'digits*:stable', or write it anew."""
    from enginesmith.registry.store.base import open_store
    from enginesmith.registry.versions.feeds import set_feed

    found, channels = set_feed(open_store(registry), name, patterns)
    if as_json:
        emit_json({"feed": name, "patterns": list(found.channels), "channels": channels, "shards": len(found.shards)})
        return
    of, shards = ", ".join(found.channels), pluralize(len(found.shards), "shard")
    echo(f"feed {name}: {pluralize(channels, 'channel')} of {of}, in {shards}")


@feed.command("list")
@registry_option
@json_option
def list_all(registry: str, as_json: bool) -> None:
    """List the feeds and their patterns."""
    from enginesmith.registry.store.base import open_store
    from enginesmith.registry.versions.feeds import feed_names, read_feed

    store = open_store(registry)
    found = [read_feed(store, name) for name in feed_names(store)]
    if as_json:
        emit_json([{"feed": item.name, "patterns": list(item.channels), "shards": len(item.shards)} for item in found])
        return
    print_table(("feed", "channels"), [[item.name, ", ".join(item.channels)] for item in found])


@feed.command("show")
@click.argument("name")
@registry_option
@json_option
def show_one(name: str, registry: str, as_json: bool) -> None:
    """List the channels of the feed NAME and the versions that they lead to."""
    from enginesmith.registry.store.base import open_store
    from enginesmith.registry.versions.feeds import read_feed, read_shard

    store = open_store(registry)
    shards = [read_shard(store, digest) for digest in read_feed(store, name).shards]
    rows = {key: item.version for part in shards for key, item in part.items()}
    if as_json:
        emit_json({"feed": name, "channels": rows})
        return
    print_table(("channel", "version"), [[key, version] for key, version in sorted(rows.items())])


@feed.command("remove")
@click.argument("name")
@registry_option
@json_option
def remove_one(name: str, registry: str, as_json: bool) -> None:
    """Delete the feed NAME; its channels stay."""
    from enginesmith.registry.store.base import open_store
    from enginesmith.registry.versions.feeds import remove_feed

    remove_feed(open_store(registry), name)
    if as_json:
        emit_json({"feed": name, "deleted": True})
    else:
        echo(f"feed {name} is deleted")


@click.command()
@click.argument("channels", nargs=-1, required=True, metavar="MODEL:CHANNEL...")
@click.option("--to", "urls", multiple=True, required=True, help="http://HOST:PORT of watchers that listen; repeat it.")
@json_option
def notify(channels: tuple[str, ...], urls: tuple[str, ...], as_json: bool) -> None:
    """Tell watchers that these channels moved, so that they look now: every address that the hosts have.

    Exit code 3 if none of them answered. The others look when it is time.
    """
    from enginesmith.client.watching.notifications import notify as send

    answers = send(urls, channels)
    failed = {place: reason for place, reason in answers if reason is not None}
    for reason in failed.values():
        say(f"{reason}; it looks when it is time")
    if as_json:
        emit_json({"notified": [place for place, reason in answers if reason is None], "failed": failed})
    else:
        echo(f"notified {len(answers) - len(failed)} of {len(answers)} watchers")
    if answers and len(failed) == len(answers):
        raise SystemExit(3)
