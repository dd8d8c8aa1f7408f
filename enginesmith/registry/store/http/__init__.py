"""A registry behind HTTP, read-only: its keys are paths, as a web server of a registry's folder has them."""
