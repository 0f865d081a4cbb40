"""What Keras and its callbacks remember over a restart: counters, best values and weights, `History` and logs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_monitored.hooks.hook import Hook
from keras_monitored.state import decode, encode

_KERAS_OWN = {"_model", "params", "validation_data"}


class CallbackState:
    """The state of callbacks, a part of the run's state.

    What a callback was constructed with is not its state: a script may change `patience` between two starts. Attributes
    that are neither numbers, strings nor arrays, nor made of such, are left alone. A callback that has `state_dict` and
    `load_state_dict` methods of its own is asked through these.

    Args:
        callbacks: The callbacks.
    """

    def __init__(self, callbacks: Sequence[keras.callbacks.Callback]) -> None:
        self.callbacks = tuple(callbacks)

    def save(self) -> tuple[Any, dict[str, Any]]:
        tensors: dict[str, Any] = {}
        record = []
        for index, callback in enumerate(self.callbacks):
            state = {}
            for name, value in _state_of(callback).items():
                try:
                    state[name] = encode(value, tensors, f"{index}/{name}")
                except TypeError:
                    if has_own_state(callback):
                        raise
            record.append({"class": type(callback).__name__, "state": state})
        return record, tensors

    def load(self, record: Any, tensors: dict[str, Any]) -> None:
        for callback, saved in zip(self.callbacks, record, strict=False):
            if saved["class"] != type(callback).__name__:
                continue  # the script now lists other callbacks
            state = {name: decode(value, tensors) for name, value in saved["state"].items()}
            if has_own_state(callback):
                callback.load_state_dict(state)
            else:
                vars(callback).update(state)


class HistoryState:
    """The epochs in a `History`, a part of the run's state.

    Args:
        model: The model, whose `history` is that of the running `fit`.
    """

    def __init__(self, model: keras.Model) -> None:
        self.model = model

    def save(self) -> tuple[Any, dict[str, Any]]:
        tensors: dict[str, Any] = {}
        history = self.model.history
        return {
            "epochs": [int(epoch) for epoch in history.epoch],
            "history": encode(dict(history.history), tensors, "history"),
        }, tensors

    def load(self, record: Any, tensors: dict[str, Any]) -> None:
        history = self.model.history
        history.epoch = list(record["epochs"])
        history.history.clear()
        history.history.update(decode(record["history"], tensors))


class LogsState:
    """The logs of the last step, a part of the run's state: after an epoch's last step they go into the `History`.

    Args:
        read: Returns the logs.
    """

    def __init__(self, read: Callable[[], Any]) -> None:
        self._read = read
        self.restored: dict[str, Any] = {}

    def save(self) -> tuple[Any, dict[str, Any]]:
        logs = self._read()
        tensors = {name: value for name, value in logs.items() if tf.is_tensor(value)} if isinstance(logs, dict) else {}
        return list(tensors), tensors

    def load(self, record: Any, tensors: dict[str, Any]) -> None:
        self.restored = {name: tensors[name] for name in record}


class HookStates:
    """What hooks remember, a part of the run's state.

    Args:
        hooks: The hooks. A script may list others at its next start: each finds its state by its class and order.
    """

    def __init__(self, hooks: Sequence[Hook]) -> None:
        self.hooks = hooks

    def save(self) -> tuple[Any, dict[str, Any]]:
        return [{"class": type(hook).__name__, "state": hook.state_dict()} for hook in self.hooks], {}

    def load(self, record: Any, tensors: dict[str, Any]) -> None:
        waiting = list(record)
        for hook in self.hooks:
            saved = next((entry for entry in waiting if entry["class"] == type(hook).__name__), None)
            if saved is not None:
                waiting.remove(saved)
                if saved["state"]:
                    hook.load_state_dict(saved["state"])


def has_own_state(callback: Any) -> bool:
    """Says whether a callback keeps its state through methods of its own."""
    return callable(getattr(callback, "state_dict", None)) and callable(getattr(callback, "load_state_dict", None))


def _state_of(callback: Any) -> dict[str, Any]:
    if has_own_state(callback):
        return dict(callback.state_dict())
    given = {
        name
        for base in type(callback).__mro__
        if "__init__" in vars(base)
        for name in inspect.signature(base).parameters
    }
    return {n: v for n, v in vars(callback).items() if n not in _KERAS_OWN and n not in given}
