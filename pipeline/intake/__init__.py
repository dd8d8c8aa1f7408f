"""How a spec gets to the worker that builds it: bundles, registrations, places of specs."""
