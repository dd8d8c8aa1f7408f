"""What happens in a run, told as it happens: to a terminal, a log, the run's state, metrics and traces.

Whoever wants to know is a `Progress`; `together` tells several.
"""

from pipeline.progress.display import by_model, progress_display, together
from pipeline.progress.events import Progress
from pipeline.progress.json_lines import JsonLines
from pipeline.progress.terminal import Lines, LiveTable

__all__ = [
    "JsonLines",
    "Lines",
    "LiveTable",
    "Progress",
    "by_model",
    "progress_display",
    "together",
]
