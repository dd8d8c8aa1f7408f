"""The spec: one YAML file per model, the only place where a person defines the build.

`model.load_spec` reads it into a frozen `ModelSpec`. Unknown keys are refused. Every file that a spec names is inside
the spec's own folder.
"""
