"""A registry behind HTTP, read-only: its keys are paths. `enginesmith cache` serves it, and so does any plain web
server of a registry's folder, but for listings."""
