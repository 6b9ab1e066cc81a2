"""CUDA C++ for what Triton cannot say, compiled for sm_90a when a model is loaded.

`delta_net.cu`: the gated delta net. `program.py`: how it gets onto a GPU.
"""
