"""CUDA by CuPy, and by NVIDIA's bindings where CuPy has no function or a slower one; no ranks, except in `nccl`.

`cuda` imports CuPy and says why no GPU can be used. `compiler` compiles the kernels of all rooms, and `launch` prepares
launches. `streams` orders calls across streams and knows of captures.
"""
