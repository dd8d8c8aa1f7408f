"""An ONNX graph as a function that JAX can trace: what the XLA backend compiles.

graph.py        a model on disk -> Graph: nodes with their attributes, constants as numpy arrays
nodes.py        Node, and the table of operators that the other files fill
evaluate.py     runs a Graph's nodes in order over arrays or tracers; folds what depends on constants alone
arrays.py       what operators ask of values
elementwise.py, reductions.py, shapes.py, indexing.py, linear.py, windows.py, normalization.py, resize.py, quantize.py,
control.py      the operators, a few lines each

Values are numpy arrays wherever they are known while tracing (constants, shapes, what is computed from them), and JAX
arrays where they are data. Operators that shapes are computed with stay in numpy as long as all their inputs do, so
that a Reshape finds numbers. The size of a dynamic dim is a number to them as well: a symbolic one, in an array of
objects.
"""
