"""Values that all other packages use: types, digests, names, errors, text and JSON. Standard library and psutil."""
