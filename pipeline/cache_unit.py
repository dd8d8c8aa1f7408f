"""A compile cache as a unit of a plan."""

from dataclasses import dataclass
from typing import Literal

from enginesmith.compile_caches.recipe import BACKEND, PRECISION, CompileOptions
from enginesmith.core.errors import digest_of
from enginesmith.core.types import Target
from pipeline.values import Json


@dataclass(frozen=True)
class CacheUnit:
    """A compile cache of a plan. action: 'unknown' until the model is exported.  key: of its record, {} until then."""

    target: Target
    options: CompileOptions
    action: Literal["build", "cached", "refused", "unknown"]
    reason: str
    required: bool = False
    key: Json | None = None

    @property
    def name(self) -> str:
        """'cpu fp32 torch-compile'."""
        return f"{self.target.name} {PRECISION} {BACKEND}"

    def to_json(self) -> Json:
        """What `enginesmith plan --json` prints of it."""
        return {
            "target": self.target.name,
            "precision": PRECISION,
            "backend": BACKEND,
            "action": self.action,
            "reason": self.reason,
            "required": self.required,
            "build_key": digest_of(self.key) if self.key else None,
        }
