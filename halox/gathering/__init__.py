"""Whole arrays on one rank: gather and scatter, of fields or regions of fields.

Begin with `gather_scatter.py`. Checkpoints use the parts below it: a queue of few messages at once, regions, and the
parts of an array on a GPU through page-locked memory.
"""
