"""Trains the same on 1, 2 and 4 replicas, and writes the variables that come of it, for `test_optimizers_replicas.py`.

In a process of its own, since it takes four logical devices, which have to be there before TensorFlow starts.

    python replica_updates.py updates.npz

Keys of the file are `<case>/<replicas>/<number of the variable>`.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import keras_monitored as km

REPLICAS = (1, 2, 4)
BATCH = 8

STRATEGIES: dict[str, Callable[[], km.ClipGradients]] = {
    "none": km.NoClipGradients,
    "value": lambda: km.ClipGradientsByValue(-0.05, 0.1),
    "norm": lambda: km.ClipGradientsByNorm(0.3),
    "average_norm": lambda: km.ClipGradientsByAverageNorm(0.02),
    "global_norm": lambda: km.ClipGradientsByGlobalNorm(0.5),
    "adaptive": lambda: km.AdaptiveClipGradients(0.05),
    "auto": lambda: km.AutoClipGradients(percentile=25, window=3),
}
OPTIMIZERS: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "sgd": lambda: keras.optimizers.SGD(0.5),
    # The update of Adam is as large for tiny gradients, and so is what rounding makes of them: hence the epsilon.
    "adam": lambda: keras.optimizers.Adam(0.05, weight_decay=0.1, epsilon=1e-2),
}
FITS: dict[str, dict[str, Any]] = {
    "plain": {},
    "skip": {"on_nonfinite": "skip"},
    "jit": {"jit_compile": True},
    "jit_skip": {"jit_compile": True, "on_nonfinite": "skip"},
    "execution": {"steps_per_execution": 3},
}


def strategy_of(replicas: int) -> tf.distribute.Strategy:
    """The default strategy, or one over logical devices. Its sum is made on one: others trip over sparse gradients."""
    if replicas == 1:
        return tf.distribute.get_strategy()
    devices = [f"CPU:{index}" for index in range(replicas)]
    return tf.distribute.MirroredStrategy(devices, tf.distribute.ReductionToOneDevice())


def arrays() -> tuple[np.ndarray, np.ndarray]:
    """Ids that repeat, within a replica and between them, and targets."""
    random = np.random.default_rng(0)
    return random.integers(0, 5, (BATCH * 3, 3)), random.normal(size=(BATCH * 3, 1)).astype("float32") * 5


def model_of() -> keras.Model:
    """An embedding, whose gradients are sparse, and a dense layer."""
    keras.utils.set_random_seed(0)
    layers = [keras.Input((3,)), keras.layers.Embedding(6, 4), keras.layers.Flatten(), keras.layers.Dense(1)]
    return keras.Sequential(layers)


def custom_step(optimizer: keras.optimizers.Optimizer, replicas: int) -> list[np.ndarray]:
    """Trains an embedding and a dense layer, of bare variables, in `strategy.run`; returns all variables."""
    strategy, random = strategy_of(replicas), np.random.default_rng(1)
    with strategy.scope():
        shapes = {"table": (6, 4), "kernel": (12, 1), "bias": (1,)}
        variables = [keras.Variable(random.normal(size=s).astype("float32"), name=n) for n, s in shapes.items()]
        optimizer = km.ClippedOptimizer.from_config(optimizer.get_config())  # its variables are to be mirrored too
        optimizer.build(variables)
    table, kernel, bias = (variable.value for variable in variables)

    @tf.function(autograph=False)
    def train(ids: Any, targets: Any) -> None:
        def step(ids: Any, targets: Any) -> None:
            with tf.GradientTape() as tape:
                outputs = tf.reshape(tf.gather(table, ids), (-1, 12)) @ kernel + bias
                loss = tf.reduce_sum(tf.square(outputs - targets)) / BATCH
            optimizer.apply(tape.gradient(loss, [table, kernel, bias]), variables)

        strategy.run(step, args=(ids, targets))

    data = tf.data.Dataset.from_tensor_slices(arrays()).batch(BATCH)
    for batch in strategy.experimental_distribute_dataset(data):
        train(*batch)
    return [variable.numpy() for variable in [*variables, *optimizer.variables]]


def fit(options: dict[str, Any], replicas: int) -> list[np.ndarray]:
    """Trains with `fit`; returns all variables."""
    options = dict(options)
    clipping: dict[str, Any] = {"clip": km.ClipGradientsByGlobalNorm(0.5), "on_nonfinite": "propagate"}
    clipping.update({name: options.pop(name) for name in clipping.keys() & options.keys()})
    with strategy_of(replicas).scope():
        model = model_of()
        model.compile(km.ClippedOptimizer(OPTIMIZERS["adam"](), **clipping), "mse", **options)
    model.fit(tf.data.Dataset.from_tensor_slices(arrays()).batch(BATCH), verbose=0, shuffle=False)
    return [variable.numpy() for variable in [*model.variables, *model.optimizer.variables]]


def updates() -> Iterator[tuple[str, list[np.ndarray]]]:
    """Runs all cases."""
    for replicas in REPLICAS:
        for kind, make in OPTIMIZERS.items():
            for name, clip in STRATEGIES.items():
                yield f"{name}_{kind}/{replicas}", custom_step(km.ClippedOptimizer(make(), clip()), replicas)
        for name, options in FITS.items():
            if replicas > 1 and ("jit" in name or (name == "skip" and replicas > 2)):
                continue  # XLA can't update variables of several logical CPUs at once, whatever the optimizer
            yield f"fit_{name}/{replicas}", fit(options, replicas)


def main(path: str) -> None:
    """Runs all cases and writes their variables."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * max(REPLICAS))
    found = {f"{case}/{index}": value for case, values in updates() for index, value in enumerate(values)}
    np.savez(path, **found)


if __name__ == "__main__":
    main(sys.argv[1])
