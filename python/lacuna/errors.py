"""What can go wrong, by what a caller does about it."""

from __future__ import annotations


class LacunaError(Exception):
    """The base of all errors of this package.

    `code` is the server's word for it, and `param` the field that it is about, if it is about one.
    """

    def __init__(
        self,
        message: str,
        code: str = "",
        param: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.param = param
        self.retry_after = retry_after


class InvalidRequest(LacunaError, ValueError):
    """The request can never be answered as it is; `param` names what to change."""


class ContextTooLong(InvalidRequest):
    """The prompt does not fit the context."""


class BudgetExceeded(LacunaError):
    """It does not fit the budget, or the memory that the system can spare, even if nothing else runs."""


class Busy(LacunaError):
    """Others have the places or the memory; try again in `retry_after` seconds."""


class DeadlineExceeded(LacunaError):
    """The request took longer than the engine's `request_timeout`."""


class ModelError(LacunaError):
    """The model cannot be found, read or used for this."""


class Closed(LacunaError):
    """The object was closed, or its engine was."""


class Forked(Closed):
    """The object is of the process that this one was forked from; make another."""


class InUse(LacunaError):
    """Another thread is using the object, or has changed it meanwhile."""


class EngineFailed(LacunaError):
    """The engine could not go on. What is said is for its makers."""


_CLASSES: dict[str, type[LacunaError]] = {
    "context_length_exceeded": ContextTooLong,
    "budget_exceeded": BudgetExceeded,
    "out_of_memory": BudgetExceeded,
    "queue_full": Busy,
    "request_memory_full": Busy,
    "unavailable": Busy,
    "timeout": DeadlineExceeded,
    "model_error": ModelError,
    "wrong_model": ModelError,
    "not_supported": ModelError,
    "model_not_found": ModelError,
    "model_file_lost": ModelError,
    "shutting_down": Closed,
    "closed": Closed,
    "forked": Forked,
    "in_use": InUse,
    "invalid_value": InvalidRequest,
}


def of(
    code: str,
    message: str,
    param: str | None = None,
    status: int = 0,
    retry_after: float | None = None,
) -> LacunaError:
    """The error that a code and a status stand for."""
    by_status = InvalidRequest if 400 <= status < 500 else EngineFailed
    made = _CLASSES.get(code, by_status)
    return made(message, code, param, retry_after)
