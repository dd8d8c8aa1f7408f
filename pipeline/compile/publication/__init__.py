"""From a judged plan to a version: manifest, page, provenance."""
