"""The events of a run, sent as they happen to listeners: a terminal, a log, the run's state, metrics and traces.

A listener is a `Progress`; `together` makes one of several.
"""

from pipeline.progress.display import JsonLines, Lines, LiveTable, by_model, progress_display, together
from pipeline.progress.events import Progress

__all__ = ["JsonLines", "Lines", "LiveTable", "Progress", "by_model", "progress_display", "together"]
