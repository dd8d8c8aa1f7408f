"""Reconciling a fleet: the builds that nodes without an engine ask for."""
