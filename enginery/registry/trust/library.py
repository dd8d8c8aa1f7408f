"""The one door to OpenSSF model-signing, an optional dependency that takes seconds to import."""

from dataclasses import dataclass
from types import ModuleType
from typing import Any

from enginery.core.errors import UnavailableError


@dataclass(frozen=True)
class Library:
    """model-signing's public modules."""

    signing: ModuleType
    verifying: ModuleType
    hashing: ModuleType

    def hashing_config(self) -> Any:
        """How documents are hashed: as whole files, with SHA-256, no links followed."""
        config = self.hashing.Config()
        return config.use_file_serialization(hashing_algorithm="sha256", allow_symlinks=False)


def model_signing() -> Library:
    """The library. Raises UnavailableError when the extra is not installed."""
    try:
        from model_signing import hashing, signing, verifying
    except ImportError as error:
        raise UnavailableError(
            f"signatures need the extra `signing` ({error}); run `pip install 'enginery[signing]'`"
        ) from error
    return Library(signing, verifying, hashing)
