"""Options, arguments and value types that several commands share."""

import re
from collections.abc import Callable
from typing import Any, TypeVar

import click

from pegaflow.shm.pool import SHM_DIR_DEFAULT

F = TypeVar("F", bound=Callable[..., Any])

SECONDS_OF_UNIT = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def time_span(_ctx: click.Context, _parameter: click.Parameter, value: str) -> int:
    """Callback of an option: seconds of ``90s``, ``30m``, ``12h``, ``7d`` or ``2w``; ``0`` stays 0."""
    match = re.fullmatch(r"(\d{1,9})([smhdw])|0", value.strip().lower())
    if match is None:
        raise click.BadParameter(f"{value!r} is not a time span; write for example 90s, 30m, 12h, 7d or 0")
    return int(match[1]) * SECONDS_OF_UNIT[match[2]] if match[1] else 0


def shm_dir_option(function: F) -> F:
    """``--shm-dir``: where the pools are."""
    return click.option(
        "--shm-dir",
        default=SHM_DIR_DEFAULT,
        show_default=True,
        type=click.Path(),
        metavar="DIR",
        help="Directory that holds the pools (vLLM's option pegaflow.shm_dir).",
    )(function)


def json_option(function: F) -> F:
    """``--json``: output for programs."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON (schema: docs/cli.md).")(function)


def pool_argument(function: F) -> F:
    """``POOL``: a name or a path."""
    return click.argument("pool", metavar="POOL")(function)
