"""The one error tree of posttrain.

    PosttrainError
    ├── UsageError (ValueError)            a person's mistake; exit 2
    │   └── ConfigError                    unknown, misplaced or ill-typed setting
    ├── PreflightError (RuntimeError)      this machine cannot do what was asked; exit 3
    │   └── IsolationError                 no sandbox such as a task requires
    ├── RunError (RuntimeError)            the run cannot go on; exit 1
    │   ├── LedgerError (OSError)          the durable account cannot be written or read
    │   ├── CheckpointError (OSError)      a checkpoint is incomplete, damaged or foreign
    │   ├── NonFiniteError (ArithmeticError)  NaN or infinity in a loss or gradient
    │   └── IllegalTransitionError         a state machine was driven against its table
    ├── InfraError (RuntimeError)          infrastructure failed; an attempt becomes `infra_failed`
    │   ├── EngineError                    the engine could not serve a request
    │   ├── SandboxError                   a sandbox could not be made or was lost
    │   └── WorkerError                    a killable worker died or ran out of time
    ├── DomainError (RuntimeError)         code of a domain raised, hung or broke its contract
    └── VerifierError (RuntimeError)       a verifier raised, hung or returned nonsense

What it is not: a place for control flow. A limit that a policy reaches is a *stop reason*, not an
error. The one thing that must stay true: no error here ever becomes a reward.

To add one: subclass the branch whose exit code and outcome fit, name a standard exception beside
it, take one message string (so that it survives pickling), and draw it above.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PosttrainError(Exception):
    """Root of everything posttrain raises on purpose.

    `next_step` is a sentence or command a person can act on; it is part of `str(error)`.
    """

    exit_code = 1

    def __init__(self, message: str, next_step: str = "") -> None:
        super().__init__(message, next_step)
        self.message = message
        self.next_step = next_step

    def __str__(self) -> str:
        return f"{self.message} Next: {self.next_step}" if self.next_step else self.message


class UsageError(PosttrainError, ValueError):
    """A person asked for something that does not exist or does not fit."""

    exit_code = 2


class ConfigError(UsageError):
    """A configuration key is unknown, misplaced, duplicated or has a value of the wrong kind."""


class PreflightError(PosttrainError, RuntimeError):
    """The machine lacks something the command needs; found before any work is done."""

    exit_code = 3


class IsolationError(PreflightError):
    """No sandbox of the level, or with the network, that a task requires can be made here."""


class RunError(PosttrainError, RuntimeError):
    """The run cannot go on; what was finished stays on disk."""


class LedgerError(RunError, OSError):
    """The ledger cannot be written or does not parse; the run must stop."""


class CheckpointError(RunError, OSError):
    """A checkpoint is incomplete, damaged, or belongs to another model."""


class NonFiniteError(RunError, ArithmeticError):
    """A loss or gradient is NaN or infinite; weights were not touched."""


class IllegalTransitionError(RunError):
    """A state machine was asked for a transition its table does not hold; tells the story."""


class InfraError(PosttrainError, RuntimeError):
    """Infrastructure failed beneath an attempt. The attempt becomes `infra_failed`: no reward."""


class EngineError(InfraError):
    """The engine could not serve a request."""


class SandboxError(InfraError):
    """A sandbox could not be made, was lost, or could not carry out a call."""


class WorkerError(InfraError):
    """A killable worker died, ran out of time, or sent back something unreadable."""


class DomainError(PosttrainError, RuntimeError):
    """Code of a domain (generator, oracle) raised, hung or broke its contract."""


class VerifierError(PosttrainError, RuntimeError):
    """A verifier raised, hung or returned nonsense. The attempt becomes `verifier_failed`."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint such as ` (did you mean 'learning_rate'?)`, or an empty string.

    >>> nearest("learning_rat", ["learning_rate", "steps"])
    " (did you mean 'learning_rate'?)"
    >>> nearest("zzz", ["learning_rate"])
    ''
    """
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean '{matches[0]}'?)" if matches else ""
