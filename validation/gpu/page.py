"""docs/gpu-results.md from the kit's results: `python -m validation.gpu page RESULTS.json ... > docs/gpu-results.md`.

Without results it says that there are none. Nothing is added by hand, so nothing here can have been better than it was.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from enginery.core.text import format_bytes
from validation.gpu.results import Json, Results
from validation.gpu.timing.peers import PEERS

_HEAD = """\
# What was seen on GPUs

Written by `python -m validation.gpu page RESULTS.json ... > docs/gpu-results.md` from what the GPU proof kit
measured; how to run it, what it tries and what its numbers mean: [gpu-check.md](gpu-check.md).
"""
_NONE = """
**Nothing yet: no machine with a GPU was at hand, and the kit was never run on one.** Nothing in this repository that
runs on a GPU has been run there: sessions of TensorRT, CUDA graphs, cubins, PTX, the kit's own numbers. What the tests
run is the same code with the CPU as its device.
"""


def page(found: Sequence[Results]) -> str:
    """The page."""
    return _HEAD + ("".join("\n".join(_section(item)) for item in found) if found else _NONE)


def _section(found: Results) -> Iterator[str]:
    device, software = found.device, found.software
    yield f"\n## {device['name']}, {found.created_at[:10]}\n"
    facts = [
        f"driver {device['driver']} (CUDA {device['cuda']})"
        if device["driver"]
        else "no GPU: the CPU as the kit's device",
        format_bytes(device["memory_bytes"]),
        *(f"{name} {software[name]}" for name in ("torch", "python", "enginery") if name in software),
        f"models at their {found.size} size",
    ]
    yield ", ".join(facts) + ".\n"
    if found.peaks:
        yield from _peaks(found.peaks)
    yield from _table("Engines and PyTorch, at the batch that engines are tuned for", _SPEED, list(_speeds(found)))
    yield from _table("Engines that were built for another generation", _OTHERS, list(_others(found.tries)))
    yield from _table("Published engines", ("engine", "outcome", ""), [_carried(item) for item in found.carried])
    skipped = [(item["name"], "refused" if item["refused"] else "not here", item["reason"]) for item in found.skipped]
    yield from _table("Not tried", ("", "", "why"), skipped)


def _peaks(peaks: Json) -> Iterator[str]:
    rates = [f"{kind} {rate / 1e12:.3g}" for kind, rate in peaks["operations_per_s"].items()]
    yield (
        f"Roofs, measured by torch: {peaks['bytes_per_s'] / 1e9:.0f} GB/s; products of matrices in 10^12 operations "
        f"a second: {', '.join(rates)}; {1e6 * peaks['launch_s']:.1f} us for an operation on one number.\n"
    )
    if peaks["missing"]:
        yield "Not measured: " + "; ".join(f"{kind} ({why})" for kind, why in peaks["missing"].items()) + ".\n"


_SPEED = (
    "model",
    "by",
    "outcome",
    "build s",
    "load s",
    "ms with copies",
    "p99",
    "ms on the device",
    "of the roof",
    "against PyTorch",
)
_OTHERS = ("backend", "built for", "outcome", "why")


def _speeds(found: Results) -> Iterator[tuple[str, ...]]:
    least = {(item["model"], row["batch"]): row["least_s"] for item in found.models for row in item["sizes"]}
    tuned = {item["model"]: _middle(item["sizes"]) for item in found.models}
    for item in sorted((one for one in found.tries if one["kind"] in ("engine", "peer")), key=lambda one: one["model"]):
        batch = tuned.get(item["model"], 0)
        row = next((row for row in item.get("latency", ()) if row["batch"] == batch), None)
        by = PEERS.get(item["backend"], _named(item))
        if row is None:
            yield (item["model"], by, _outcome(item), *_seconds(item), "", "", "", "", item.get("reason", ""))
        else:
            roof = least.get((item["model"], batch))
            yield (item["model"], by, _outcome(item), *_seconds(item), *_times(row, roof), _races(item))


def _middle(sizes: Sequence[Json]) -> int:
    return int(sizes[len(sizes) // 2]["batch"])


def _named(item: Json) -> str:
    options = " ".join(f"{name}={value}" for name, value in item["options"].items())
    return f"{item['backend']} {options}".strip()


def _outcome(item: Json) -> str:
    return str(item["outcome"])


def _seconds(item: Json) -> tuple[str, str]:
    return tuple(f"{item[name]:.2f}" if name in item else "" for name in ("build_s", "load_s"))  # type: ignore[return-value]  # two


def _times(row: Json, least_s: float | None) -> tuple[str, str, str, str]:
    tail = next((item["value"] for item in row["quantiles"] if item["p"] == 0.99), None)
    device = row["device"]["median_s"] if row["device"] else None
    share = f"{least_s / device:.0%}" if least_s and device else ""
    return (_ms(row["median_s"]), _ms(tail), _ms(device), share)


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.3g}"


def _races(item: Json) -> str:
    return "; ".join(_race(race) for race in item.get("races", ()))


def _race(race: Json) -> str:
    name = PEERS.get(race["peer"], race["peer"])
    if "verdict" not in race:
        return f"{name}: not run, {race['reason']}"
    median = race["ratios"][0]
    if median["low"] is None or race["verdict"] == "no difference shown":
        return f"{name}: no difference shown"
    return f"{name}: takes {median['ratio']:.2f} of its time [{median['low']:.2f}, {median['high']:.2f}]"


def _others(tries: Sequence[Json]) -> Iterator[tuple[str, ...]]:
    for item in tries:
        if item["kind"] not in ("engine", "peer"):
            yield (item["backend"], item["built_for"], _outcome(item), item.get("reason", ""))


def _carried(item: Json) -> tuple[str, str, str]:
    return f"{item['model']}@{item['version']} {item['unit']}", item["outcome"], item.get("reason", "")


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    if not rows:
        return
    yield f"### {title}\n"
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(_cell(value) for value in row) + " |"
    yield ""


def _cell(value: Any) -> str:
    """One line, and none of what would end a cell."""
    return " ".join(str(value).split()).replace("|", "\\|")[:400]
