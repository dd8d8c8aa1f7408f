"""Numbers for people, the same way everywhere: three digits, a real minus sign, a thin choice of units."""

import math


def number_text(value: float) -> str:
    """Three significant digits, with a real minus sign."""
    text = f"{value:.3g}" if value else "0"
    mantissa, _, exponent = text.partition("e")
    return (mantissa + (f"e{int(exponent)}" if exponent else "")).replace("-", "−")  # noqa: RUF001


def share_text(share: float) -> str:
    """A share for people: '0', '0.012 %', 'under 0.001 %'."""
    if share == 0:
        return "0"
    return f"{100 * share:.2g} %" if share >= 1e-5 else "under 0.001 %"


def seconds_text(value: float) -> str:
    """A latency for people: '12.3 ms'."""
    if not math.isfinite(value):
        return ""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(value) >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns" if value else "0 s"


def percent_text(value: float) -> str:
    """A share or a slowdown for people, with its sign: '+3.1 %'."""
    return f"{100 * value:+.3g} %".replace("-", "−") if value else "0 %"  # noqa: RUF001 - a real minus sign


def decibels_text(value: float) -> str:
    """A whole number of decibels, for an axis."""
    return f"{number_text(value)} dB"
