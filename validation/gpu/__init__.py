"""The GPU kit: builds, proves and times engines on this machine's GPU, and writes the results as one JSON file.

`python -m validation.gpu` runs on a bare machine with Python, torch, numpy and onnx (and whichever compilers are
installed): no registry, Prefect, Ray or pydantic. With `--device cpu` the same code runs on the CPU, as tests do.
"""
