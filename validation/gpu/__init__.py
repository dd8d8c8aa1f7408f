"""The GPU proof kit: what this machine's GPU does with the engines, proven and measured, in one JSON.

`python -m validation.gpu` runs on a bare machine with Python, torch, numpy and onnx (and whichever compilers are
there): no registry, Prefect, Ray or pydantic. With `--device cpu` the very same code runs on the CPU, which is how it
is tested.

models.py   small deterministic ONNX graphs at realistic sizes     cases.py   golden sets as files, without safetensors
devices.py  what there is here                                     clocks.py  seconds on a device
peaks.py    bandwidth and matrix rates, the roofline's roofs       peers.py   eager torch and torch.compile as sessions
tasks.py    what is tried     trials.py  one of them, in a process of its own      probes.py  engines for any generation
offline_bundle.py  published engines that were carried here        recorded.py  outputs as text
kit.py      the whole         results.py  its JSON                 page.py    docs/reference/gpu-results.md
"""
