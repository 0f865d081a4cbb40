"""Hooks, exact resume and sessions for training loops in Keras 3 on TensorFlow.

import keras_monitored as km

callback = km.HookCallback([km.NaNChecker(), km.StepRateLogger()], working_dir="run1")
model.fit(dataset, epochs=10, callbacks=[callback])    # kill it, start it again: it ends bit-identical
"""

import keras as _keras

if _keras.config.backend() != "tensorflow":
    raise ImportError(
        f"keras_monitored needs the TensorFlow backend of Keras. Received: backend {_keras.config.backend()!r}. "
        "Set the environment variable KERAS_BACKEND=tensorflow before Keras is imported."
    )

from keras_monitored.callback import HookCallback
from keras_monitored.checkpoints import CheckpointInfo, latest_checkpoint, list_checkpoints, load_weights
from keras_monitored.clipping.adaptive import AdaptiveClipGradients
from keras_monitored.clipping.auto import AutoClipGradients
from keras_monitored.clipping.norms import (
    ClipGradientsByAverageNorm,
    ClipGradientsByGlobalNorm,
    ClipGradientsByNorm,
)
from keras_monitored.clipping.strategy import ClipGradients
from keras_monitored.clipping.value import ClipGradientsByValue, NoClipGradients
from keras_monitored.configuration import (
    Configuration,
    NoCheckpoints,
    StepBasedCheckpoints,
    TimeBasedCheckpoints,
)
from keras_monitored.counters import Counter
from keras_monitored.criteria import StopCriteria
from keras_monitored.errors import CheckpointError, NaNLossError, RecoveryError
from keras_monitored.hooks.checkpoint_saver import CheckpointSaver
from keras_monitored.hooks.hook import (
    Hook,
    ModelDependentHook,
    SessionRunContext,
    SessionRunValues,
    TriggeredHook,
)
from keras_monitored.hooks.loss_logger import LossLogger
from keras_monitored.hooks.nan_checker import NaNChecker
from keras_monitored.hooks.step_rate_logger import StepRateLogger
from keras_monitored.hooks.stop_at_step import StopAtStep
from keras_monitored.hooks.stopper import Stopper
from keras_monitored.hooks.triggers import (
    EpochHookTrigger,
    HookTrigger,
    NoHookTrigger,
    StepHookTrigger,
    TimeHookTrigger,
)
from keras_monitored.model_instance import ModelInstance
from keras_monitored.modes import Mode
from keras_monitored.observe import feed, observe
from keras_monitored.optimizers import ClippedOptimizer
from keras_monitored.session.arguments import RunOptions, SessionRunArgs
from keras_monitored.session.recoverable import RecoverableSession
from keras_monitored.session.session import Session
from keras_monitored.session.wrapper import SessionWrapper

__version__ = "0.1.0"

__all__ = [
    "AdaptiveClipGradients",
    "AutoClipGradients",
    "CheckpointError",
    "CheckpointInfo",
    "CheckpointSaver",
    "ClipGradients",
    "ClipGradientsByAverageNorm",
    "ClipGradientsByGlobalNorm",
    "ClipGradientsByNorm",
    "ClipGradientsByValue",
    "ClippedOptimizer",
    "Configuration",
    "Counter",
    "EpochHookTrigger",
    "Hook",
    "HookCallback",
    "HookTrigger",
    "LossLogger",
    "Mode",
    "ModelDependentHook",
    "ModelInstance",
    "NaNChecker",
    "NaNLossError",
    "NoCheckpoints",
    "NoClipGradients",
    "NoHookTrigger",
    "RecoverableSession",
    "RecoveryError",
    "RunOptions",
    "Session",
    "SessionRunArgs",
    "SessionRunContext",
    "SessionRunValues",
    "SessionWrapper",
    "StepBasedCheckpoints",
    "StepHookTrigger",
    "StepRateLogger",
    "StopAtStep",
    "StopCriteria",
    "Stopper",
    "TimeBasedCheckpoints",
    "TimeHookTrigger",
    "TriggeredHook",
    "feed",
    "latest_checkpoint",
    "list_checkpoints",
    "load_weights",
    "observe",
]
