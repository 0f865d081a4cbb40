"""What is compiled for a model under hooks, kept from one fit to the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras

from keras_monitored.counters import Counter
from keras_monitored.hooks.hook import Hook
from keras_monitored.session.wrapper import has_graph_check
from keras_monitored.step_function import StepFunction


class Compiled(NamedTuple):
    """What one fit compiles and the next can use again."""

    function: StepFunction
    global_step: Counter
    global_epoch: Counter
    train_function: Any
    hooks: tuple[Hook, ...]

    def serves(self, model: keras.Model, hooks: Sequence[Hook]) -> bool:
        """Says whether nothing has changed: Keras makes a new train function when a model is compiled again."""
        checking = tuple(hook for hook in hooks if has_graph_check(hook))
        return self.train_function is model.train_function and self.hooks == checking


def compiled_for(model: keras.Model, hooks: Sequence[Hook]) -> Compiled:
    """Prepares the train step of a model and its counters; it is traced when the first batches are known."""
    checking = tuple(hook for hook in hooks if has_graph_check(hook))
    with model.distribute_strategy.scope():
        global_step, global_epoch = Counter("global_step"), Counter("global_epoch")
    function = StepFunction(
        model,
        model.train_step,
        counter=global_step,
        checks=[hook.graph_check for hook in checking],
        gradients=any(hook.watches_gradients for hook in checking),
    )
    return Compiled(function, global_step, global_epoch, model.train_function, checking)
