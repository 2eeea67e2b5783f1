"""MILC's staggered operator and conjugate gradient: rates, shares of memory speed, strong and weak scaling."""
