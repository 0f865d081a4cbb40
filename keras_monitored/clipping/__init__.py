"""Clipping strategies: one a file, all on the arithmetic of `rescaling`."""
