"""Values that all other packages use: types, digests, names, errors, text and JSON.

Beside the standard library they need psutil and annotated-types.
"""
