"""What happens in a run, told as it happens: to a terminal, a log, the run's state, metrics and traces.

Whoever wants to know is a `Progress`; `together` tells several.
"""

from pipeline.progress.by_model import by_model
from pipeline.progress.display import progress_display
from pipeline.progress.events import Progress
from pipeline.progress.json_lines import JsonLines
from pipeline.progress.lines import Lines
from pipeline.progress.table import LiveTable
from pipeline.progress.together import together

__all__ = [
    "JsonLines",
    "Lines",
    "LiveTable",
    "Progress",
    "by_model",
    "progress_display",
    "together",
]
