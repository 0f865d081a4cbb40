"""A step of `ClippedOptimizer` against the same optimizer with Keras's own clipping, and against no clipping.

Adam on 200 variables of 50,000 elements, in a compiled function that does nothing but the update: what clipping costs
shows most where the gradients cost nothing. Every strategy is measured where it clips, and once below its bound.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import keras_monitored as km
from benchmarks.measuring import alternate, check, show

SHAPE = (250, 200)
STEPS = 5
HIGH = 1e6


def update(optimizer: keras.optimizers.Optimizer, count: int = 200) -> Callable[[], float]:
    """Returns a function that runs steps of the optimizer and returns what one took, in milliseconds."""
    random = np.random.default_rng(0)
    variables = [keras.Variable(random.normal(size=SHAPE).astype("float32")) for _ in range(count)]
    optimizer.build(variables)

    @tf.function(autograph=False)
    def step() -> None:
        optimizer.apply([variable.value * 0.1 for variable in variables], variables)

    def measure() -> float:
        start = time.perf_counter()
        for _ in range(STEPS):
            step()
        optimizer.iterations.numpy()
        return (time.perf_counter() - start) / STEPS * 1e3

    return measure


def adam(**options: Any) -> keras.optimizers.Optimizer:
    """Returns Adam with or without Keras's clipping; its steps are too small to change the norms."""
    return keras.optimizers.Adam(1e-9, **options)


def clipped(clip: km.ClipGradients, **options: Any) -> keras.optimizers.Optimizer:
    """Returns Adam in a `ClippedOptimizer`."""
    return km.ClippedOptimizer(adam(), clip, **options)


def main() -> bool:
    """Measures and prints; returns whether all bounds are kept."""
    variants = {
        "Adam": adam(),
        "Adam, clipnorm": adam(clipnorm=0.1),
        "Adam, clipvalue": adam(clipvalue=0.01),
        "Adam, global_clipnorm": adam(global_clipnorm=0.1),
        "none": clipped(km.NoClipGradients()),
        "value": clipped(km.ClipGradientsByValue(-0.01, 0.01)),
        "norm": clipped(km.ClipGradientsByNorm(0.1)),
        "average norm": clipped(km.ClipGradientsByAverageNorm(1e-6)),
        "global norm": clipped(km.ClipGradientsByGlobalNorm(0.1)),
        "global norm, below the bound": clipped(km.ClipGradientsByGlobalNorm(HIGH)),
        "global norm, skip": clipped(km.ClipGradientsByGlobalNorm(0.1), on_nonfinite="skip"),
        "adaptive": clipped(km.AdaptiveClipGradients()),
        "auto": clipped(km.AutoClipGradients()),
    }
    measured = alternate({name: update(optimizer) for name, optimizer in variants.items()}, rounds=9, warm_up=2)
    show("A step of Adam on 200 variables of 50,000 elements", "milliseconds", measured)
    nearest = {
        "none": ("Adam, global_clipnorm", 1.05),
        "value": ("Adam, clipvalue", 1.05),
        "norm": ("Adam, clipnorm", 1.05),
        "average norm": ("Adam, clipnorm", 1.05),
        "global norm": ("Adam, global_clipnorm", 1.00),
        "global norm, below the bound": ("Adam, global_clipnorm", 1.00),
        "adaptive": ("Adam, clipnorm", 1.05),
        "auto": ("Adam, global_clipnorm", 1.05),
    }
    kept = [check(f"{ours} / {keras}", ratio(measured, ours, keras), bound) for ours, (keras, bound) in nearest.items()]
    print("\nAgainst Adam without clipping:")
    for name in variants:
        print(f"  {name:<30} {ratio(measured, name, 'Adam'):6.2f}")
    growth()
    return all(kept)


def ratio(measured: dict[str, list[float]], ours: str, theirs: str) -> float:
    """Returns the median over the rounds of a round's ratio: what else the machine does in a round, both see."""
    return statistics.median(a / b for a, b in zip(measured[ours], measured[theirs], strict=True))


def growth() -> None:
    """Prints what clipping adds to a step, from 10 variables to 1,000."""
    for count in (10, 100, 1000):
        optimizers = {
            "Adam": adam(),
            "Adam, global_clipnorm": adam(global_clipnorm=0.1),
            "global norm": clipped(km.ClipGradientsByGlobalNorm(0.1)),
        }
        measured = alternate({name: update(optimizer, count) for name, optimizer in optimizers.items()})
        show(f"A step of Adam on {count} variables of 50,000 elements", "milliseconds", measured)
        for name in list(optimizers)[1:]:
            print(f"  {name} / Adam: {ratio(measured, name, 'Adam'):.2f}")


if __name__ == "__main__":
    main()
