"""What ``doctor`` finds out: one row per question."""

from dataclasses import dataclass

OK = "ok"
INFO = "info"
WARNING = "warning"
ERROR = "error"


@dataclass(frozen=True)
class Finding:
    """One row of ``pegaflow doctor``."""

    name: str
    """Stable, lower case: programs may look for it."""
    level: str
    """``"ok"``, ``"info"`` (optional or absent, nothing is wrong), ``"warning"`` or ``"error"`` (cannot work)."""
    value: str
    """What was found."""
    advice: str = ""
    """What to do about it; empty if nothing."""
