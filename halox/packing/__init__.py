"""Packers: strategies that move what a datatype describes."""
