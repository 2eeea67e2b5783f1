"""The ``scatter_gather`` path: engines that walk both ends' block lists by themselves, without packing."""
