"""``pegaflow gc``: clean up after the dead, and clear away what nobody uses."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import click

from pegaflow.cli.options import json_option, shm_dir_option, time_span
from pegaflow.cli.output import cell, echo_json, format_bytes, format_count, format_seconds, printable, show, table
from pegaflow.errors import PegaFlowError, PoolInUse, PoolNotFound
from pegaflow.shm.pool import list_pools, pool_files_bytes, reap_pool, unlink_pool
from pegaflow.shm.report import PoolListing

# A creator needs milliseconds. This is generous, so that a pool that another gc would call abandoned is so.
HALF_CREATED_SECONDS_MAX = 60


@dataclass(frozen=True)
class Step:
    """What ``gc`` does, or would do, about one pool."""

    name: str
    path: str
    action: str
    """``"remove"``, ``"reap"`` (clean up after dead processes) or ``"keep"``."""
    reason: str
    done: bool = False
    processes_reaped: int = 0
    bytes_freed: int = 0
    error: str | None = None
    """Why the action failed, as one sentence."""


@click.command(short_help="Clean up after dead processes and remove idle pools.")
@shm_dir_option
@click.option(
    "--idle",
    "idle_seconds_max",
    callback=time_span,
    default="7d",
    show_default=True,
    metavar="SPAN",
    help="Remove pools that no living process uses and that were last used longer ago than this; 0: none for that.",
)
@click.option("--dry-run", is_flag=True, help="Say what would be done and change nothing.")
@json_option
@click.pass_context
def gc(ctx: click.Context, shm_dir: str, idle_seconds_max: int, dry_run: bool, as_json: bool) -> None:
    """Give back what the dead still hold, remove idle pools, and leftovers of pools that were never completed.

    Never touches a pool that a living process uses, except to free what dead processes held in it, and never a pool
    that is refused (another user's, or another layout version's): 'pegaflow rm' does that, one by one. Running
    engines clean up after the dead by themselves; this is for hosts where none runs any more. Safe to run from cron.

    \b
    Examples:
      pegaflow gc --dry-run
      pegaflow gc --idle 12h
      pegaflow gc --idle 0            only what dead processes have left behind
    """
    steps = [_plan(one, idle_seconds_max) for one in list_pools(shm_dir)]
    if not dry_run:
        steps = [_do(step) for step in steps]
    if as_json:
        echo_json({"shm_dir": shm_dir, "dry_run": dry_run, "idle_seconds_max": idle_seconds_max, "pools": steps})
    else:
        _show(steps, shm_dir, dry_run)
    ctx.exit(1 if any(step.error for step in steps) else 0)


def _plan(one: PoolListing, idle_seconds_max: int) -> Step:
    action, reason = _decide(one, idle_seconds_max)
    freed = pool_files_bytes(one) if action == "remove" else 0
    return Step(one.name, one.path, action, reason, bytes_freed=freed)


def _decide(one: PoolListing, idle_seconds_max: int) -> tuple[str, str]:
    idle = one.idle_seconds or 0
    if one.state == "refused":
        return "keep", f"refused: {one.error}"
    if one.processes_alive:
        in_use = f"used by {format_count(one.processes_alive, 'living process')}"
        if one.state == "creating":
            return "keep", "being created"
        return _reap_or_keep(one, in_use)
    if one.state == "creating":
        if idle > HALF_CREATED_SECONDS_MAX:
            return "remove", f"never completed, untouched for {format_seconds(idle)}"
        return "keep", "being created"
    if idle_seconds_max and idle >= idle_seconds_max:
        return "remove", f"idle for {format_seconds(idle)}"
    return _reap_or_keep(one, f"idle for only {format_seconds(idle)}" if idle_seconds_max else "idle pools are kept")


def _reap_or_keep(one: PoolListing, reason_to_keep: str) -> tuple[str, str]:
    if one.processes_dead:
        return "reap", f"{format_count(one.processes_dead, 'dead process')}; {reason_to_keep}"
    return "keep", reason_to_keep


def _do(step: Step) -> Step:
    try:
        if step.action == "remove":
            unlink_pool(step.path)
            return replace(step, done=True)
        if step.action == "reap":
            return replace(step, done=True, processes_reaped=reap_pool(step.path))
    except (PoolInUse, PoolNotFound) as error:
        # Somebody was faster, between our look and our act; neither is a failure.
        return replace(step, action="keep", reason=str(error), bytes_freed=0)
    except (PegaFlowError, OSError) as error:
        # One pool that resists must not protect the others.
        return replace(step, bytes_freed=0, error=str(error))
    return step


def _show(steps: list[Step], shm_dir: str, dry_run: bool) -> None:
    if not steps:
        click.echo(f"No pools in {printable(shm_dir)}; nothing to do.")
        return
    made = table("pool", "action", "reason", "frees", right=("frees",))
    for step in steps:
        action = cell("failed", "bold red") if step.error else cell(step.action)
        made.add_row(
            cell(step.name), action, cell(step.error or step.reason), cell(format_bytes(step.bytes_freed or None))
        )
    show(made)
    click.echo("\n" + _summary(steps, dry_run))


def _summary(steps: Iterable[Step], dry_run: bool) -> str:
    acted = [step for step in steps if step.action != "keep" and not step.error]
    removed = [step for step in acted if step.action == "remove"]
    pools = f"{format_count(len(removed), 'pool')} ({format_bytes(sum(step.bytes_freed for step in removed))})"
    if dry_run:
        return f"Would remove {pools} and clean up {len(acted) - len(removed)} more. Nothing was changed."
    reaped = sum(step.processes_reaped for step in acted)
    return f"Removed {pools}, reaped {format_count(reaped, 'dead process')}."
