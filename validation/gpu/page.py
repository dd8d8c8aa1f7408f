"""The page docs/reference/gpu-check.md from the kit's results: `python -m validation.gpu page RESULTS.json ...`.

Without results the page says that there are none. Nothing is added by hand.
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


def page(all_results: Sequence[Results]) -> str:
    """The page in Markdown."""
    return _HEAD + ("".join("\n".join(_section(results)) for results in all_results) if all_results else _NONE)


def _section(results: Results) -> Iterator[str]:
    device, software = results.device, results.software
    yield f"\n## {device.name}, {results.created_at[:10]}\n"
    descriptions = [
        f"driver {device.driver} (CUDA {device.cuda})" if device.driver else "no GPU: the CPU as the kit's device",
        format_bytes(device.memory_bytes),
        *(f"{name} {software[name]}" for name in ("torch", "python", "enginesmith") if name in software),
        f"models at their {results.size} size",
    ]
    yield ", ".join(descriptions) + ".\n"
    if peaks := results.peaks:
        rates_text = ", ".join(f"{kind} {format_plain(rate / 1e12)}" for kind, rate in peaks.operations_per_s.items())
        yield (
            f"Roofs, measured by torch: {peaks.bytes_per_s / 1e9:.0f} GB/s; products of matrices in 10^12 operations "
            f"a second: {rates_text}; {1e6 * peaks.launch_s:.1f} us for an operation on one number.\n"
        )
        if peaks.missing:
            yield "Not measured: " + "; ".join(f"{kind} ({absence})" for kind, absence in peaks.missing.items()) + ".\n"
    yield from _table("Engines and PyTorch at the `opt` batch", _SPEED, list(_speeds(results)))
    other_trials = [trial for trial in results.tries if trial.kind not in ("engine", "peer")]
    rows = [(trial.backend, trial.built_for, trial.outcome, trial.reason or "") for trial in other_trials]
    yield from _table("Engines for other GPU generations", _OTHERS, rows)
    carried_rows = [(f"{row.model}@{row.version} {row.unit}", row.outcome, row.reason or "") for row in results.carried]
    yield from _table("Published engines", ("engine", "outcome", ""), carried_rows)
    skipped_rows = [(task.name, "refused" if task.refused else "not here", task.reason) for task in results.skipped]
    yield from _table("Not tried", ("", "", "why"), skipped_rows)


_TIMES = ("ms with copies", "p99", "ms on the device", "of the roof")
_SPEED = ("model", "by", "outcome", "build s", "load s", *_TIMES, "against PyTorch")
_OTHERS = ("backend", "built for", "outcome", "why")


def _speeds(results: Results) -> Iterator[tuple[str, ...]]:
    least_times = {(model.model, row.batch): row.least_s for model in results.models for row in model.sizes}
    tuned_batches = {model.model: model.sizes[len(model.sizes) // 2].batch for model in results.models}
    for trial in sorted((run for run in results.tries if run.kind in ("engine", "peer")), key=lambda run: run.model):
        batch = tuned_batches.get(trial.model, 0)
        row = next((row for row in trial.latency or () if row.batch == batch), None)
        name = " ".join([trial.backend, *(f"{option}={value}" for option, value in trial.options.items())])
        lead_cells = (trial.model, PEERS.get(trial.backend, name), trial.outcome, _s(trial.build_s), _s(trial.load_s))
        if row is None:
            yield (*lead_cells, "", "", "", "", trial.reason or "")
        else:
            p99_s = next((quantile.value for quantile in row.quantiles if quantile.p == 0.99), None)
            device, least_s = row.device.median_s if row.device else None, least_times.get((trial.model, batch))
            share_text = f"{least_s / device:.0%}" if least_s and device else ""
            cells = (_ms(row.median_s), _ms(p99_s), _ms(device), share_text)
            yield (*lead_cells, *cells, "; ".join(map(_compare, trial.races or ())))


def _s(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.2f}"


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else format_plain(1e3 * seconds)


def _compare(comparison: PeerComparison) -> str:
    name = PEERS.get(comparison.peer, comparison.peer)
    if not comparison.ratios:
        return f"{name}: not run, {comparison.reason}"
    median_ratio = comparison.ratios[0]
    if median_ratio.ratio is None or median_ratio.low is None or comparison.verdict == "no difference shown":
        return f"{name}: no difference shown"
    return f"{name}: {median_ratio.ratio:.2f} times its latency [{median_ratio.low:.2f}, {median_ratio.high:.2f}]"


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    if not rows:
        return
    yield f"### {title}\n"
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(" ".join(value.split()).replace("|", "\\|")[:400] for value in row) + " |"
    yield ""
