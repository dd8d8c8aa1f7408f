"""The page docs/reference/gpu-check.md from the kit's results: `python -m validation.gpu page RESULTS.json ...`.

Without results it says that there are none. Nothing is added by hand.
"""

from collections.abc import Iterator, Sequence

from enginesmith.core.text import format_bytes, format_plain
from validation.gpu.peers import PEERS
from validation.gpu.results import PeerComparison, Results

_HEAD = """\
# GPU results

Results of the [GPU kit](gpu-check.md), written by
`python -m validation.gpu page RESULTS.json ... > docs/reference/gpu-results.md`.
"""
_NONE = """
**Nothing yet: no GPU was available, and the kit was never run on one.** Nothing in this repository that
runs on a GPU has been run there: sessions of TensorRT, CUDA graphs, cubins, PTX, the kit's own numbers. What the tests
run is the same code with the CPU as its device.
"""


def page(found: Sequence[Results]) -> str:
    """The page in Markdown."""
    return _HEAD + ("".join("\n".join(_section(item)) for item in found) if found else _NONE)


def _section(found: Results) -> Iterator[str]:
    device, software = found.device, found.software
    yield f"\n## {device.name}, {found.created_at[:10]}\n"
    facts = [
        f"driver {device.driver} (CUDA {device.cuda})" if device.driver else "no GPU: the CPU as the kit's device",
        format_bytes(device.memory_bytes),
        *(f"{name} {software[name]}" for name in ("torch", "python", "enginesmith") if name in software),
        f"models at their {found.size} size",
    ]
    yield ", ".join(facts) + ".\n"
    if peaks := found.peaks:
        rates = ", ".join(f"{kind} {format_plain(rate / 1e12)}" for kind, rate in peaks.operations_per_s.items())
        yield (
            f"Roofs, measured by torch: {peaks.bytes_per_s / 1e9:.0f} GB/s; products of matrices in 10^12 operations "
            f"a second: {rates}; {1e6 * peaks.launch_s:.1f} us for an operation on one number.\n"
        )
        if peaks.missing:
            yield "Not measured: " + "; ".join(f"{kind} ({why})" for kind, why in peaks.missing.items()) + ".\n"
    yield from _table("Engines and PyTorch at the `opt` batch", _SPEED, list(_speeds(found)))
    others = [item for item in found.tries if item.kind not in ("engine", "peer")]
    rows = [(item.backend, item.built_for, item.outcome, item.reason or "") for item in others]
    yield from _table("Engines for other GPU generations", _OTHERS, rows)
    carried = [(f"{item.model}@{item.version} {item.unit}", item.outcome, item.reason or "") for item in found.carried]
    yield from _table("Published engines", ("engine", "outcome", ""), carried)
    skipped = [(item.name, "refused" if item.refused else "not here", item.reason) for item in found.skipped]
    yield from _table("Not tried", ("", "", "why"), skipped)


_TIMES = ("ms with copies", "p99", "ms on the device", "of the roof")
_SPEED = ("model", "by", "outcome", "build s", "load s", *_TIMES, "against PyTorch")
_OTHERS = ("backend", "built for", "outcome", "why")


def _speeds(found: Results) -> Iterator[tuple[str, ...]]:
    least = {(item.model, row.batch): row.least_s for item in found.models for row in item.sizes}
    tuned = {item.model: item.sizes[len(item.sizes) // 2].batch for item in found.models}
    for item in sorted((one for one in found.tries if one.kind in ("engine", "peer")), key=lambda one: one.model):
        batch = tuned.get(item.model, 0)
        row = next((row for row in item.latency or () if row.batch == batch), None)
        name = " ".join([item.backend, *(f"{option}={value}" for option, value in item.options.items())])
        head = (item.model, PEERS.get(item.backend, name), item.outcome, _s(item.build_s), _s(item.load_s))
        if row is None:
            yield (*head, "", "", "", "", item.reason or "")
        else:
            tail = next((quantile.value for quantile in row.quantiles if quantile.p == 0.99), None)
            device, least_s = row.device.median_s if row.device else None, least.get((item.model, batch))
            share = f"{least_s / device:.0%}" if least_s and device else ""
            times = (_ms(row.median_s), _ms(tail), _ms(device), share)
            yield (*head, *times, "; ".join(map(_compare, item.races or ())))


def _s(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.2f}"


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else format_plain(1e3 * seconds)


def _compare(item: PeerComparison) -> str:
    name = PEERS.get(item.peer, item.peer)
    if not item.ratios:
        return f"{name}: not run, {item.reason}"
    median = item.ratios[0]
    if median.ratio is None or median.low is None or item.verdict == "no difference shown":
        return f"{name}: no difference shown"
    return f"{name}: {median.ratio:.2f} times its latency [{median.low:.2f}, {median.high:.2f}]"


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    if not rows:
        return
    yield f"### {title}\n"
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(" ".join(value.split()).replace("|", "\\|")[:400] for value in row) + " |"
    yield ""
