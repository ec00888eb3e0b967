"""Whether the kernel lets this process say near which NUMA node its memory should be."""

import ctypes
import os
import platform

SYSTEM_CALLS = {"x86_64": 239, "aarch64": 236}
"""Number of ``get_mempolicy`` by machine. Profiles that refuse ``mbind`` refuse it, too, and it changes nothing."""


def probe_memory_policy(machine: str | None = None) -> str:
    """``"ok"``, or the reason why it is refused."""
    number = SYSTEM_CALLS.get(machine or platform.machine())
    if number is None:
        return "not known on this machine"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(number, None, None, 0, None, 0) == 0:
        return "ok"
    return os.strerror(ctypes.get_errno())
