"""Compile caches of torch: one is made and proven in a job (make_cache), for each target of a spec (step)."""
