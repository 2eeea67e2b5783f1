"""Measurement on several ranks: clock, methods side by side, command line, NCCL."""
