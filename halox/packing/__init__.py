"""Packers: strategies that pack and unpack the bytes that a datatype describes."""
