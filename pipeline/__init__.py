"""What happens to a model, in order: export, quantize, plan, build, validate, publish."""
