"""The report of a version for people: one page, from its manifest and reports."""
