"""The GPU kit: builds, proves and times engines on this machine's GPU, and writes the results as one JSON file.

`python -m validation.gpu` runs on a bare machine with Python, torch, numpy and onnx (and whichever compilers are
installed): no registry, Prefect, Ray or pydantic. With `--device cpu` the same code runs on the CPU, as tests do.

kit.py      the whole run                                   tasks.py           what is tried
trials.py   one try, in a process of its own                models.py          ONNX models, the same on every machine
cases.py    golden cases, as files                          offline_bundle.py  published engines in a folder
recording.py  answers to the calls of a proof, as text
devices.py  device, driver and software of this machine     peaks.py           bandwidth and matrix rates of the device
peers.py    PyTorch running the same graph                  results.py         the JSON
page.py     docs/reference/gpu-check.md
"""
