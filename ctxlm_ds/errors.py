"""Errors that a user can fix. Each message says what is wrong, the value, and what to do.

The exit status shows a job whether a restart can help: a user's error (2) and a training error (3) would repeat; a hang
(4) and anything else (1, a signal) may not.
"""

EXIT_UNEXPECTED = 1
EXIT_USER_ERROR = 2
EXIT_TRAINING_ERROR = 3
EXIT_HANG = 4


class CtxlmError(Exception):
    """Base of all errors that a user can fix; entry points print it without a traceback."""


class ConfigError(CtxlmError):
    """A setting is unknown, of the wrong type, or impossible together with another."""


class DataError(CtxlmError):
    """A dataset, corpus or sample index is missing, damaged or made for something else."""


class TokenizerError(CtxlmError):
    """A tokenizer is missing, incomplete or does not fit the dataset or the model."""


class CheckpointError(CtxlmError):
    """A checkpoint is missing, damaged or does not fit the model."""


class RunLockedError(CtxlmError):
    """Another live job holds the run directory."""


class TrainingError(CtxlmError):
    """Training cannot continue (a NaN, an exhausted loss scale)."""


class ClusterError(CtxlmError):
    """Slurm refuses a command, or a job's resources or settings make no sense."""


class ExportError(CtxlmError):
    """A conversion to or from Hugging Face is impossible, or its logits differ."""


class KernelError(CtxlmError):
    """A kernel that was asked for by name cannot run here."""


class VerifyError(CtxlmError):
    """Something of a run cannot be proved here, or is wrong."""


_ELSEWHERE = "_raised_on_another_rank"


def mark_from_another_rank(error: BaseException) -> None:
    """Mark an exception for `is_from_another_rank`."""
    error.__dict__[_ELSEWHERE] = True


def is_from_another_rank(error: BaseException) -> bool:
    """Return whether an exception was raised on another rank."""
    return _ELSEWHERE in error.__dict__
