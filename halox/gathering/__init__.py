"""Whole arrays on one rank: gather and scatter, with their messages and page-locked buffers."""
