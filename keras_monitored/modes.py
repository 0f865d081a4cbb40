"""What a model is being used for."""

import enum


class Mode(enum.Enum):
    """What a session does with its model; hooks choose the modes they act in.

    Example:
        >>> Mode.TRAINING.value
        'training'
    """

    TRAINING = "training"
    EVALUATION = "evaluation"
    INFERENCE = "inference"
