"""Reductions of GPU arrays; begin with `device_reductions`.

`device_programs` describes what a kernel reads and computes, `field_plans` and `kernel_plans` cut it for the GPU.
`device_algorithms` combines the values of all ranks by one kernel through mapped memory (`kernel_reductions`), by trees
(`tree_reduction`, after Faraji and Afsahi 2014), by NCCL, or through the host.
"""
