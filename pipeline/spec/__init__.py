"""The spec: one YAML file per model, the only door for user text.

`load_spec` is the way in (`file`); `model` and the parts that it names say what a spec may hold. Everything is frozen,
unknown keys are refused, and every file it names lies inside the spec's own folder.
"""
