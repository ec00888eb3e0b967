"""The one exception tree of PegaFlow.

Misses are values (``None``, a shorter prefix); only failures are exceptions. The native engine raises these same
classes. Every message is one sentence that says what is wrong and what to do.
"""


class PegaFlowError(Exception):
    """Base of every error that PegaFlow raises."""


class InvalidArgument(PegaFlowError, ValueError):
    """An option or argument has the wrong type, value or name."""


class PoolNotFound(PegaFlowError):
    """No pool of this name exists and the caller asked not to create one."""


class PoolRefused(PegaFlowError):
    """The files are not ours to map: other layout version, other owner, a symlink, truncated, or foreign bytes."""


class PoolCorrupt(PegaFlowError):
    """A pool that passed the checks of attaching holds values that its format forbids."""


class PoolFull(PegaFlowError):
    """The value does not fit: the pool is at its capacity and may not evict. Nothing that was stored is lost."""


class ShmFull(PoolFull):
    """The file system below the pool has no room left for another segment. Nothing that was stored is lost."""


class PoolBusy(PegaFlowError, TimeoutError):
    """A bounded wait ran out, for instance because a sibling process is stopped. Nothing was changed."""


class PoolInUse(PegaFlowError):
    """The pool may not be removed while living processes use it."""


class PoolClosed(PegaFlowError):
    """The object was closed before this call."""


class ForkedProcess(PegaFlowError, RuntimeError):
    """The pool was opened before ``fork()``; the child has to open it again. The parent is unharmed."""


class DeviceError(PegaFlowError, RuntimeError):
    """A device or its driver is absent, refuses or has failed. Everything that needs no device goes on."""
