"""Transposes: `halox.Transpose` and datatypes of transposed matrices, beside copies and hand-written code."""
