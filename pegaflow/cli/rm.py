"""``pegaflow rm``: remove one pool."""

import click

from pegaflow.cli.options import json_option, pool_argument, shm_dir_option
from pegaflow.cli.output import echo_json, format_bytes, printable
from pegaflow.shm.pool import find_pool, pool_files_bytes, unlink_pool


@click.command(short_help="Remove a pool that nobody uses.")
@pool_argument
@shm_dir_option
@click.option("--force", is_flag=True, help="Remove it even while processes use it, or if it is damaged.")
@json_option
def rm(pool: str, shm_dir: str, force: bool, as_json: bool) -> None:
    """Remove a pool and give its memory back. What is cached in it is lost.

    Refuses while a living process uses the pool. With --force those processes keep the memory that they have mapped
    until they end, and new ones start with an empty pool. Where several pools have the name, of other layout versions
    or users, it removes none: say which one by its path.

    \b
    Examples:
      pegaflow rm default
      pegaflow rm --force /dev/shm/pegaflow-v1-1000-default
    """
    listing = find_pool(pool, shm_dir, to_remove=True)
    freed = pool_files_bytes(listing)
    unlink_pool(listing.path, force=force)
    if as_json:
        echo_json({"name": listing.name, "path": listing.path, "bytes_freed": freed})
    else:
        click.echo(f"Removed {printable(listing.name)}: {format_bytes(freed)} given back.")
