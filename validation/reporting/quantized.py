"""What the page says about quantization, worked out from the quantization records: plain values, and pictures."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from enginery.core.text import join_first
from validation.plots.texts import number_text, share_text
from validation.reporting.pictures import decibels_text, frontier_svg, histogram_svg

# Rows shown at once, and in all; nodes named at once behind a reason; histograms.
SHOWN, MOST, NAMED, DRAWN = 20, 400, 8, 6

# Of a row of the table.
FIELDS = ("name", "kind", "sqnr", "clipped", "seen", "range", "scale", "readers")

Json = Mapping[str, Any]


def quantizations(manifest: Json) -> list[dict[str, Any]]:
    """One section per quantized graph: those with a record, and those that came with Q/DQ of their own.

    manifest: its JSON, with `quantization` (flavour -> record) where there are records.
    """
    records: Json = manifest.get("quantization", {})
    return [_section(name, record) for name, record in records.items()] + list(_untouched(manifest))


def _section(name: str, record: Json) -> dict[str, Any]:
    tensors = record["tensors"]
    rows = [row(tensor) for tensor in tensors[:MOST]]
    return {
        "name": name,
        "untouched": False,
        "facts": list(facts(record)),
        "shown": rows[:SHOWN],
        "rest": rows[SHOWN:],
        "omitted": max(0, len(tensors) - MOST),
        "pictures": [_picture(tensor) for tensor in tensors if "histogram" in tensor][:DRAWN],
        "sampled": any(tensor["measured"] == "rows" for tensor in tensors),
        "frontier": _frontier(record["choice"]),
        "searched": record["choice"] is not None,
        "left": _by_reason(record["left"]),
    }


def facts(record: Json) -> Iterator[tuple[str, str]]:
    """Headline figures: (value, what it is)."""
    if record["macs_share"] is not None:
        yield f"{100 * record['macs_share']:.1f} %", f"of the multiplications with weights in {record['precision']}"
    nodes, left = record["quantized"], len(record["left"])
    verb = "node computes" if nodes == 1 else "nodes compute"
    yield str(nodes), f"{verb} in {record['precision']}, {left} left in float"
    known = [tensor for tensor in record["tensors"] if tensor["sqnr_db"] is not None]
    if known:
        yield f"{known[0]['sqnr_db']:.1f} dB", f"lowest SQNR of {len(record['tensors'])} tensors"
    yield str(record["samples"]), f"calibration samples, ranges by {record['method']}"


def left_lines(record: Json) -> list[str]:
    """What stays in float, a line per node."""
    return [f"left in float: {item['node']} ({item['op_type']}): {item['reason']}" for item in record["left"]]


def row(tensor: Json) -> dict[str, str]:
    """A tensor for people: FIELDS as text."""
    return {
        "name": tensor["name"],
        "kind": f"{tensor['role']}, {tensor['format']}",
        "readers": join_first(tensor["readers"], 2),
        "seen": _span(tensor["seen"]),
        "range": _span(tensor["range"]),
        "clipped": "" if tensor["clipped"] is None else share_text(tensor["clipped"]),
        "scale": number_text(tensor["scale"]),
        "sqnr": sqnr_text(tensor),
    }


def sqnr_text(tensor: Json) -> str:
    """A tensor's SQNR for people; '≈' where it is known from some rows only."""
    if tensor["sqnr_db"] is None:
        return "no loss" if tensor["measured"] else "not measured"
    return f"{'≈ ' if tensor['measured'] == 'rows' else ''}{tensor['sqnr_db']:.1f} dB"


def _span(pair: Sequence[float] | None) -> str:
    return "" if pair is None else f"{number_text(pair[0])} to {number_text(pair[1])}"


def _picture(tensor: Json) -> dict[str, str]:
    return {
        "name": tensor["name"],
        "sqnr": sqnr_text(tensor),
        "clipped": share_text(tensor["clipped"]),
        "svg": histogram_svg(tensor),
    }


def _frontier(choice: Json | None) -> dict[str, str] | None:
    if choice is None:
        return None
    chosen, floor = choice["chosen"], choice["floor_db"]
    quality = decibels_text(chosen["sqnr_db"])
    asked = "" if floor is None else f", where at least {number_text(floor)} dB were asked for"
    return {
        "svg": frontier_svg(choice["frontier"], chosen, floor),
        "text": f"Chosen (ring): {100 * chosen['share']:.1f} % at {quality}{asked}.",
    }


def _by_reason(left: Sequence[Json]) -> list[dict[str, Any]]:
    reasons: dict[str, list[str]] = {}
    for item in left:
        reasons.setdefault(item["reason"], []).append(f"{item['node']} ({item['op_type']})")
    return [{"reason": reason, "nodes": nodes[:NAMED], "more": nodes[NAMED:]} for reason, nodes in reasons.items()]


def _untouched(manifest: Json) -> Iterator[dict[str, Any]]:
    """Quantized engines whose graph is the exported model itself: its author quantized it."""
    original = manifest.get("sources", {}).get("onnx")
    names = [
        entry["precision"]
        for entry in manifest.get("engines", ())
        if entry["precision"] in ("int8", "fp8") and entry.get("graph") == original and entry["status"] != "refused"
    ]
    for name in dict.fromkeys(names) if original else ():
        yield {"name": name, "untouched": True}
