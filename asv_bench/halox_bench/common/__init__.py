"""Layouts, kernels, clocks, figures with targets, options and plots of all kinds of benchmarks."""
