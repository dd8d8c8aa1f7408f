"""How a spec gets from where a person wrote it to the worker that builds it: bundles, registrations, catalogs."""
