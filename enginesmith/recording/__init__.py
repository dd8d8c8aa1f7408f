"""Recording requests and answers of a server, for a canary. Needs numpy."""

from typing import TYPE_CHECKING

from enginesmith.core.names import on_first_use

if TYPE_CHECKING:
    from enginesmith.recording.recorder import ObservationLog

__all__ = ["ObservationLog"]

__getattr__ = on_first_use(__name__, {"ObservationLog": "enginesmith.recording.recorder"})
