"""Machines and what engines need of them: GPU generations, kinds of CPU, the CUDA driver."""
