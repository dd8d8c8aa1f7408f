"""Whether an engine may be trusted: golden sets, drift metrics, limits and the reports that prove it."""
