"""Recording requests and answers of a server, for a canary. Needs numpy.

>>> import numpy as np
>>> from enginesmith.recording import ObservationLog
>>> with ObservationLog("candidate.jsonl") as log:
...     log.append(0.004, request=1, outputs={"logits": np.ones((1, 10), np.float32)})
True
"""

from typing import TYPE_CHECKING

from enginesmith.core.names import on_first_use

if TYPE_CHECKING:
    from enginesmith.recording.recorder import ObservationLog

__all__ = ["ObservationLog"]

__getattr__ = on_first_use(__name__, {"ObservationLog": "enginesmith.recording.recorder"})
