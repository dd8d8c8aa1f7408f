"""Where a model comes from, and the one form it takes from then on.

::

    source_files.py   the files an entry point is made of, found without running it
    entry_point.py    calling the user's function, with its own modules and no one else's
    torch_source.py   a torch module or .pt2 program: loading weights, capturing, running eagerly, to ONNX
    onnx_model.py     reading and writing ONNX files that may be wrong or hostile
    canonical.py      equal models get equal bytes
"""
