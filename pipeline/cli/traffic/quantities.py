"""Times and shares on the command line: '50ms', '20%'."""

import re

import click


class ShortTime(click.ParamType[float]):
    """'50ms', '200us', '1.5s': seconds. least: the smallest that is taken."""

    name = "time"

    def __init__(self, least: float = 0.0, above: bool = False) -> None:
        self._least, self._above = least, above

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Seconds. Raises click's usage error for another text."""
        if isinstance(value, float):
            return value
        found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)(us|µs|ms|s)", str(value))
        if found is None:
            self.fail(f"{value!r} is no time; give a number and us, ms or s, as in 50ms", param, ctx)
        seconds = float(found[1]) * {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}[found[2]]
        if seconds < self._least or (self._above and seconds <= self._least):
            self.fail(f"{value!r}: must be above {self._least:g} s", param, ctx)
        return seconds


class Percent(click.ParamType[float]):
    """'20%': 0.2. From 0 % to below 100 %."""

    name = "percent"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The share. Raises click's usage error for another text."""
        if isinstance(value, float):
            return value
        found = re.fullmatch(r"(\d{1,2}(?:\.\d{1,6})?)%", str(value))
        if found is None:
            self.fail(f"{value!r} is no share from 0% to below 100%; give such as 20%", param, ctx)
        return float(found[1]) / 100.0
