"""`ClippedOptimizer` on several replicas: the same updates, the same skips, as many sums as without it."""

import os
import pathlib
import subprocess
import sys
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_monitored as km
from keras_monitored import keras_internals
from tests import replica_updates

CASES = [f"{name}_{kind}" for name in replica_updates.STRATEGIES for kind in replica_updates.OPTIMIZERS]
INF, NAN = float("inf"), float("nan")


@pytest.fixture(scope="module")
def updates(tmp_path_factory: Any) -> Any:
    path = tmp_path_factory.mktemp("updates") / "updates.npz"
    script = pathlib.Path(replica_updates.__file__)
    environment = {**os.environ, "PYTHONPATH": str(script.parents[1])}
    subprocess.run([sys.executable, script, path], env=environment, check=True, timeout=600)
    return np.load(path)


def variables_of(updates: Any, case: str, replicas: int = 1) -> list[np.ndarray]:
    count = sum(key.startswith(f"{case}/1/") for key in updates)
    return [updates[f"{case}/{replicas}/{index}"] for index in range(count)]


def assert_close(ours: list[np.ndarray], theirs: list[np.ndarray]) -> None:
    assert len(ours) == len(theirs) > 0
    for one, other in zip(ours, theirs, strict=True):
        # Sums in another order differ by the last bits of the largest number, also where they come out small.
        largest = max(1.0, float(np.abs(other).max(initial=0.0)))
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6 * largest)


@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize("case", [*CASES, "fit_plain", "fit_execution"])
def test_updates_don_t_depend_on_the_number_of_replicas(updates, case, replicas):
    assert_close(variables_of(updates, case), variables_of(updates, case, replicas))


def test_a_look_for_inf_changes_nothing_on_two_replicas(updates):
    assert_close(variables_of(updates, "fit_plain"), variables_of(updates, "fit_skip", 2))


@pytest.mark.parametrize("case", ["fit_skip", "fit_jit", "fit_jit_skip", "fit_execution"])
def test_xla_several_steps_in_a_call_and_a_look_for_inf_change_nothing(updates, case):
    assert_close(variables_of(updates, "fit_plain"), variables_of(updates, case))


def test_strategies_clip_something(updates):
    for kind in replica_updates.OPTIMIZERS:
        untouched = variables_of(updates, f"none_{kind}")[0]
        for name in replica_updates.STRATEGIES.keys() - {"none"}:
            assert np.abs(variables_of(updates, f"{name}_{kind}")[0] - untouched).max() > 1e-4


class CountingReduction(tf.distribute.ReductionToOneDevice):
    """Notes the shape of all that is summed."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[Any] = []

    def reduce_implementation(self, reduce_op: Any, per_replica_value: Any, *args: Any, **kwargs: Any) -> Any:
        self.shapes.append(tuple(per_replica_value.values[0].shape))
        return super().reduce_implementation(reduce_op, per_replica_value, *args, **kwargs)


def two_replicas(reduction: Any = None) -> tf.distribute.Strategy:
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], reduction or tf.distribute.ReductionToOneDevice())


class Trained:
    """A variable of two elements on two replicas, each with a gradient of its own."""

    def __init__(self, make_optimizer: Any, reduction: Any = None) -> None:
        self.strategy = two_replicas(reduction)
        with self.strategy.scope():
            self.variable = keras.Variable(np.ones(2, np.float32))
            self.optimizer = make_optimizer()
            self.optimizer.build([self.variable])

    def step(self, *gradients: Any) -> list[float]:
        """Takes a step with a gradient for each replica; returns what the variable is on each."""

        @tf.function(autograph=False)
        def run() -> None:
            def apply() -> None:
                replica = tf.distribute.get_replica_context().replica_id_in_sync_group
                gradient = tf.gather(tf.constant(gradients, tf.float32), replica)
                self.optimizer.apply([gradient], [self.variable])

            self.strategy.run(apply)

        run()
        return [v.numpy().tolist() for v in self.strategy.experimental_local_results(self.variable.value)]

    @property
    def state(self) -> list[np.ndarray]:
        return [copy.numpy() for v in self.optimizer.variables for copy in self._copies(v)]

    def _copies(self, variable: Any) -> Any:
        return self.strategy.experimental_local_results(variable.value)


def sgd_by_global_norm(**options: Any) -> km.ClippedOptimizer:
    return km.ClippedOptimizer(keras.optimizers.SGD(1.0), km.ClipGradientsByGlobalNorm(1.0), **options)


def test_the_bound_is_that_of_the_sum_where_keras_breaks_it():
    gradients = [[3.0, 0.0], [0.0, 4.0]]
    np.testing.assert_allclose(Trained(sgd_by_global_norm).step(*gradients), [[0.4, 0.2]] * 2, rtol=1e-6)
    theirs = Trained(lambda: keras.optimizers.SGD(1.0, global_clipnorm=1.0)).step(*gradients)
    np.testing.assert_allclose(theirs, [[0.0, 0.0]] * 2, atol=1e-6)  # an update of norm 1.41
    # 3 - 2.5 is 0.5, within the bounds; Keras clips to 1 and -1 first.
    ours = Trained(lambda: km.ClippedOptimizer(keras.optimizers.SGD(1.0), km.ClipGradientsByValue(-1, 1)))
    np.testing.assert_allclose(ours.step([3.0, 0.0], [-2.5, 0.0]), [[0.5, 1.0]] * 2)
    theirs = Trained(lambda: keras.optimizers.SGD(1.0, clipvalue=1.0)).step([3.0, 0.0], [-2.5, 0.0])
    np.testing.assert_allclose(theirs, [[1.0, 1.0]] * 2)


@pytest.mark.parametrize("on_nonfinite", ["propagate", "skip", "raise"])
def test_a_gradient_is_summed_once_and_nothing_else_is(on_nonfinite):
    reduction = CountingReduction()
    trained = Trained(lambda: sgd_by_global_norm(on_nonfinite=on_nonfinite), reduction)
    reduction.shapes.clear()
    trained.step([3.0, 0.0], [0.0, 4.0])
    assert reduction.shapes == [(2,)]


@pytest.mark.parametrize("gradients", [([INF, 1.0], [1.0, 1.0]), ([1.0, 1.0], [1.0, NAN]), ([INF, 0.0], [-INF, 0.0])])
def test_skip_leaves_every_replica_as_it_was(gradients):
    trained = Trained(
        lambda: km.ClippedOptimizer(
            keras.optimizers.Adam(0.1, weight_decay=0.1, use_ema=True), km.AutoClipGradients(), on_nonfinite="skip"
        )
    )
    before_variable, before = trained.step([1.0, 2.0], [3.0, 4.0]), trained.state
    assert trained.step(*gradients) == before_variable
    changed = [i for i, (a, b) in enumerate(zip(before, trained.state, strict=True)) if not np.array_equal(a, b)]
    assert [trained.state[i].item() for i in changed] == [1, 1]  # skipped_steps, on both
    assert int(trained.optimizer.observed_values()["skipped_steps"]) == 1
    assert trained.step([1.0, 2.0], [3.0, 4.0]) != before_variable
    assert trained.optimizer.iterations.numpy() == 2


def test_raise_leaves_every_replica_as_it_was():
    def decaying() -> km.ClippedOptimizer:
        inner = keras.optimizers.Adam(0.1, weight_decay=0.1)
        return km.ClippedOptimizer(inner, km.ClipGradientsByNorm(1.0), on_nonfinite="raise")

    trained = Trained(decaying)
    before = trained.state
    with pytest.raises(tf.errors.InvalidArgumentError, match="Gradients are not finite"):
        trained.step([1.0, 1.0], [INF, 1.0])
    np.testing.assert_array_equal(trained.variable.numpy(), [1.0, 1.0])
    for ours, old in zip(trained.state, before, strict=True):
        np.testing.assert_array_equal(ours, old)


@pytest.mark.parametrize("on_nonfinite", ["propagate", "skip"])
@pytest.mark.parametrize("bad", [0, 1])
def test_a_loss_scale_skips_and_shrinks_whichever_replica_overflows(bad, on_nonfinite):
    def scaled() -> keras.optimizers.Optimizer:
        return keras.optimizers.LossScaleOptimizer(sgd_by_global_norm(on_nonfinite=on_nonfinite), initial_scale=8.0)

    trained = Trained(scaled)
    gradients = [[8.0, 0.0], [8.0, 0.0]]
    gradients[bad] = [8.0, INF]
    assert trained.step(*gradients) == [[1.0, 1.0]] * 2
    scales = [float(v) for v in trained.strategy.experimental_local_results(trained.optimizer.dynamic_scale.value)]
    assert scales == [4.0, 4.0]
    assert trained.optimizer.iterations.numpy() == 0
    np.testing.assert_allclose(trained.step([4.0, 0.0], [4.0, 0.0]), [[0.0, 1.0]] * 2)  # 2 after unscaling
    assert trained.optimizer.iterations.numpy() == 1


def test_keras_alone_asks_the_first_replica_only():
    trained = Trained(lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=8.0))
    assert trained.step([8.0, 0.0], [8.0, INF]) == [[-1.0, -INF]] * 2
    assert trained.optimizer.dynamic_scale.numpy() == 8.0


def test_a_loss_scale_on_one_replica_is_left_as_it_is():
    optimizer = keras.optimizers.LossScaleOptimizer(sgd_by_global_norm())
    optimizer.build([keras.Variable(np.ones(2, np.float32))])
    assert "check_finite" not in vars(optimizer)
    assert keras_internals.enclosing_loss_scale(optimizer.inner_optimizer) is None


def test_hooks_see_the_same_norms_on_every_number_of_replicas():
    class Norms(km.Hook):
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def before_run(self, run_context: km.SessionRunContext) -> km.SessionRunArgs:
            return km.SessionRunArgs(["gradient_norm", "clipped_gradient_norm", "clip_ratio"])

        def after_run(self, run_context: km.SessionRunContext, run_values: km.SessionRunValues) -> None:
            self.seen.append([float(value) for value in run_values.results])

    seen = []
    for strategy in (tf.distribute.get_strategy(), two_replicas()):
        with strategy.scope():
            model = replica_updates.model_of()
            model.compile(sgd_by_global_norm(), "mse")
        hook = Norms()
        data = tf.data.Dataset.from_tensor_slices(replica_updates.arrays()).batch(replica_updates.BATCH)
        model.fit(data, verbose=0, shuffle=False, callbacks=[km.HookCallback([hook])])
        seen.append(hook.seen)
    assert len(seen[0]) == 3
    np.testing.assert_allclose(seen[0], seen[1], rtol=1e-5)
    for norm, clipped, ratio in seen[0]:
        np.testing.assert_allclose([clipped, ratio], [1.0, 1.0 / norm], rtol=1e-5)
