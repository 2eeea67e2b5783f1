"""Benchmarks for asv; ``tests/unit/test_asv.py`` runs each of them once, small.

A class may have a method ``small()`` that returns an instance with little to do.
"""
