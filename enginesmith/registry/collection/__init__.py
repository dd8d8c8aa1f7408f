"""The parts of garbage collection; `enginesmith.registry.gc` combines them."""
