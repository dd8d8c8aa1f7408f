"""Machines, and the requirements of engines: GPU generations, kinds of CPU, the CUDA driver."""
