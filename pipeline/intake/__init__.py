"""The ways of a spec to the worker that builds it: bundles, registrations, places of specs."""
