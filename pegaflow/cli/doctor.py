"""``pegaflow doctor``: is this host ready, and if not, what to do."""

from collections.abc import Sequence

import click
from rich.table import Table

from pegaflow.cli import (
    checks_container,
    checks_memory,
    checks_peers,
    checks_pools,
    checks_software,
    checks_ssd,
    checks_system,
)
from pegaflow.cli.finding import ERROR, WARNING, Finding
from pegaflow.cli.host import Host, bind_problem
from pegaflow.cli.memory_policy import probe_memory_policy
from pegaflow.cli.options import json_option, shm_dir_option
from pegaflow.cli.output import cell, echo_json, format_count, show, state_cell, table
from pegaflow.errors import PegaFlowError
from pegaflow.p2p.probe import ask_directory
from pegaflow.shm.pool import list_pools, system_report
from pegaflow.shm.report import PoolListing


@click.command(short_help="Check this host and say what to do.")
@shm_dir_option
@click.option(
    "--ssd", "ssd_directories", multiple=True, type=click.Path(), metavar="DIR",
    help="A directory for blocks on SSD (vLLM's option pegaflow.ssd_cache_path); may be repeated.",
)  # fmt: skip
@json_option
@click.pass_context
def doctor(ctx: click.Context, shm_dir: str, ssd_directories: tuple[str, ...], as_json: bool) -> None:
    """Check whether this host is ready for PegaFlow. Run it as the user, and in the container, that vLLM runs in.

    Levels: 'ok'; 'info' is optional or absent; 'warning' works, but badly or not for everybody; 'error' cannot work.
    Exits with 1 only if there is an error. With PEGAFLOW_DIRECTORY set it makes a small pool for the look at that,
    and removes it.

    \b
    Examples:
      pegaflow doctor
      pegaflow doctor --shm-dir /mnt/shm --ssd /mnt/nvme0
      pegaflow doctor --json | jq '.findings[] | select(.level != "ok")'
    """
    findings = examine(Host(), shm_dir, ssd_directories)
    failed = any(one.level == ERROR for one in findings)
    if as_json:
        echo_json({"ok": not failed, "findings": findings})
    else:
        show(_table(findings))
        click.echo("\n" + _summary(findings))
    ctx.exit(1 if failed else 0)


def examine(host: Host, shm_dir: str, ssd_directories: Sequence[str] = ()) -> list[Finding]:
    """All findings, in the order in which they are shown."""
    system = system_report()
    version = checks_software.vllm_version()
    pools = _pools(shm_dir)
    return [
        checks_software.python(),
        checks_software.package(),
        checks_software.vllm(version),
        checks_software.hash_seed(host, version),
        checks_memory.shared_memory(host, shm_dir),
        checks_memory.memory_limit(host, shm_dir, pools),
        checks_container.room_to_grow(host, shm_dir, pools),
        checks_pools.pool_tables(pools),
        checks_container.namespaces(host),
        checks_container.system_calls(host, system.io_uring, probe_memory_policy()),
        checks_memory.removal_at_logout(host, shm_dir),
        checks_memory.locked_memory(host, system.memlock_bytes),
        checks_memory.huge_pages(host),
        checks_system.io_uring(system.io_uring),
        *checks_ssd.ssd_caches(host, ssd_directories),
        checks_system.numa(host, system.cpus),
        checks_system.open_files(host),
        checks_system.cuda(host),
        checks_peers.rdma(host),
        checks_peers.peers(host, bind_problem, lambda url: ask_directory(url, shm_dir)),
    ]


def _pools(shm_dir: str) -> list[PoolListing]:
    try:
        return list_pools(shm_dir)
    except PegaFlowError:  # what is wrong with the directory is a finding of its own
        return []


def _table(findings: list[Finding]) -> Table:
    made = table("check", "level", "found, and what to do")
    made.columns[0].no_wrap = True
    made.columns[1].no_wrap = True
    for one in findings:
        found = cell(one.value)
        if one.advice:
            found.append("\n").append_text(cell(one.advice, "dim"))
        made.add_row(cell(one.name), state_cell(one.level), found)
    return made


def _summary(findings: list[Finding]) -> str:
    errors = sum(one.level == ERROR for one in findings)
    warnings = sum(one.level == WARNING for one in findings)
    if errors:
        return f"Not ready: {format_count(errors, 'error')}, {format_count(warnings, 'warning')}."
    return f"Ready, with {format_count(warnings, 'warning')}." if warnings else "Ready."
