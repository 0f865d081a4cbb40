"""Measures variants in turn and prints their medians and ratios."""

from __future__ import annotations

import statistics
from collections.abc import Callable


def alternate(variants: dict[str, Callable[[], float]], *, rounds: int = 7, warm_up: int = 1) -> dict[str, list[float]]:
    """Runs every variant once a round, so that all see the same machine; each returns what it measured.

    Args:
        variants: What to measure, by name.
        rounds: Rounds that count. Defaults to 7.
        warm_up: Rounds before them that don't. Defaults to 1.

    Returns:
        The measured values of each variant, a value a round.
    """
    measured: dict[str, list[float]] = {name: [] for name in variants}
    for index in range(warm_up + rounds):
        for name, measure in variants.items():
            value = measure()
            if index >= warm_up:
                measured[name].append(value)
    return measured


def show(title: str, unit: str, measured: dict[str, list[float]]) -> dict[str, float]:
    """Prints minimum, median and maximum of every variant; returns the medians."""
    print(f"\n{title} [{unit}]")
    width = max(len(name) for name in measured)
    medians = {name: statistics.median(values) for name, values in measured.items()}
    for name, values in measured.items():
        print(f"  {name:<{width}}  min {min(values):9.1f}  median {medians[name]:9.1f}  max {max(values):9.1f}")
    return medians


def check(what: str, value: float, bound: float) -> bool:
    """Prints a value beside the bound that it should keep; returns whether it does."""
    kept = value <= bound
    print(f"  {'ok  ' if kept else 'OVER'} {what}: {value:.3g} (at most {bound:g})")
    return kept
