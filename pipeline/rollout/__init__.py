"""Brings a version to a channel in waves: start, gates, the controller's poll, pause, resume, abort."""
