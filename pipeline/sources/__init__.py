"""Where a model comes from, and the one form it takes from then on.

::

    source_files.py   the files an entry point is made of, found without running it
    entry_point.py    calling the user's function, with its own modules and no one else's
    torch_source.py   a torch module or .pt2 program: loading weights, capturing, running eagerly, to ONNX
    onnx_model.py     reading and writing ONNX files that may be wrong or hostile
    walk.py           what a model is made of, wherever in it
    external.py       tensors whose bytes are in other files, which may name any place
    functions.py      local functions put in, and measured before
    bounded.py        a bound on memory for a library that is asked for any amount
    canonical.py      equal models get equal bytes
"""
