"""What garbage collection does with a registry; `enginesmith.registry.gc` puts it together."""
