"""The code that a step's worker can reach, so that a step's key changes exactly when that code does.

`definitions.py` reads the source of modules without importing them, parses each into its top-level definitions, and
follows the names that a function reads, without carriers. The steps call `code.py`, which caches the results.
The reasons are in docs/decisions/0011-computed-code-keys.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from enginesmith.core.errors import digest_of


@dataclass(frozen=True)
class Closure:
    """Code that functions can reach. modules: by name, a digest of the reached code.

    packages: what is imported of others, as `import` names it, the standard library left out.
    read: the modules that this was computed from, with the digest of their source; None for one that was looked for and
    is not there.
    """

    modules: Mapping[str, str]
    packages: tuple[str, ...]
    read: Mapping[str, str | None]

    @cached_property
    def digest(self) -> str:
        """One digest of all the code."""
        return digest_of(self.modules)
