"""The spec: one YAML file per model, and the only place where a person says what is built.

`model.load_spec` reads it into a frozen `ModelSpec`. Unknown keys are refused, and every file it names lies inside the
spec's own folder.
"""
