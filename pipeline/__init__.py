"""The pipeline of a model, in order: export, quantize, plan, build, validate, publish."""
