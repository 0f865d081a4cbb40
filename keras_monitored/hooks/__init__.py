"""Hooks: what accompanies a run, and the triggers that say when."""
