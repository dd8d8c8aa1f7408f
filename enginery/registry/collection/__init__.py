"""What garbage collection does with a registry; `enginery.registry.gc` puts it together."""
