"""The errors that a run can end with.

Wrong arguments are a `ValueError` or `TypeError` where they are given. What goes wrong later is one of these, each with
the global step at which it did, as far as that is known:

    RuntimeError
      NaNLossError       an observed value, most often the loss, is NaN or infinite
      CheckpointError    a checkpoint can't be written, read, or does not fit the model
      RecoveryError      a lost session could not be made again
"""


class _StepError(RuntimeError):
    def __init__(self, message: str, *, step: int | None = None) -> None:
        super().__init__(message)
        self.step = step


class NaNLossError(_StepError):
    """Raised when a watched value has become NaN or infinite.

    Args:
        message: What happened and what to do.
        step: Global step of the bad value.
        names: Names of the values that were bad.

    Example:
        >>> error = NaNLossError("The loss is NaN.", step=7, names=("loss",))
        >>> error.step, error.names
        (7, ('loss',))
    """

    def __init__(self, message: str, *, step: int | None = None, names: tuple[str, ...] = ()) -> None:
        super().__init__(message, step=step)
        self.names = tuple(names)


class CheckpointError(_StepError):
    """Raised when a checkpoint can't be written or read, or does not fit the model.

    Args:
        message: What happened and what to do.
        step: Global step of the checkpoint, or of the save that failed.

    Example:
        >>> CheckpointError("The file is truncated.", step=1500).step
        1500
    """


class RecoveryError(_StepError):
    """Raised when a session that was lost could not be made again.

    Args:
        message: What happened and what to do.
        step: Global step at which the session was lost.

    Example:
        >>> RecoveryError("Gave up after 10 attempts.", step=42).step
        42
    """
