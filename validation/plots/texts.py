"""Numbers as text for pages and pictures: three digits, a real minus sign, few units."""

import math

from enginesmith.core.text import format_plain


def number_text(value: float) -> str:
    """A number with three significant digits: '0.0123', '1.25e6'."""
    return digits_text(value or 0.0, 3)  # no minus sign for -0.0


def digits_text(value: float, digits: int) -> str:
    """A finite number with so many significant digits and a real minus sign; its exponent without zeros in front."""
    mantissa, _, exponent = f"{value:.{digits}g}".partition("e")
    return (mantissa + (f"e{int(exponent)}" if exponent else "")).replace("-", "−")  # noqa: RUF001


def nonfinite_text(value: float) -> str:
    """'NaN', '∞', or that with a minus sign; '' for a finite number."""
    return "" if math.isfinite(value) else "NaN" if math.isnan(value) else "∞" if value > 0 else "−∞"  # noqa: RUF001


def share_text(share: float) -> str:
    """A share in percent: '0', '0.012 %', 'under 0.001 %'."""
    if share == 0:
        return "0"
    return f"{100 * share:.2g} %" if share >= 1e-5 else "under 0.001 %"


def seconds_text(value: float) -> str:
    """A time, given in seconds, with its unit: '12.3 ms'; '' for NaN and infinities."""
    if not math.isfinite(value):
        return ""
    value = float(f"{value:.3g}")  # 999.9 ns are 1 µs, and not 1e+03 ns
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(value) >= size:
            return f"{format_plain(value / size)} {unit}"
    return f"{format_plain(value / 1e-9)} ns" if value else "0 s"


def percent_text(value: float) -> str:
    """A share or a slowdown in percent, with its sign: '+3.1 %'."""
    sign = "−" if value < 0 else "+"  # noqa: RUF001 - a real minus sign
    return f"{sign}{format_plain(100 * abs(value))} %" if value else "0 %"


def decibels_text(value: float) -> str:
    """A whole number of decibels, for an axis."""
    return f"{number_text(value)} dB"
