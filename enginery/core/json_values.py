"""The one type of JSON values, for what has no fixed fields: a document is a typed dataclass (`enginery.core.codec`).

Standard library only. At run time `Json` is what the codec takes unread.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    Json: TypeAlias = bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"] | None
else:
    Json = Any
# An object whose keys are data, or are written and not read.
JsonObject: TypeAlias = Mapping[str, Json]
