"""The command group: how commands are found, and what people see when one fails."""

import difflib
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from pegaflow import _native
from pegaflow.cli.doctor import doctor
from pegaflow.cli.exporter import exporter
from pegaflow.cli.gc import gc
from pegaflow.cli.inspect import inspect
from pegaflow.cli.output import printable
from pegaflow.cli.peers import peers
from pegaflow.cli.pools import pools
from pegaflow.cli.replay import replay
from pegaflow.cli.rm import rm
from pegaflow.cli.ssd import ssd
from pegaflow.cli.top import top
from pegaflow.cli.verify import verify
from pegaflow.errors import PegaFlowError

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


class SentenceGroup(click.Group):
    """A command group that answers every failure with one sentence on standard error and no traceback."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command, or name the nearest one."""
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            near = difflib.get_close_matches(name, self.list_commands(ctx), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise click.UsageError(f"There is no command {name!r}{hint}", ctx)
        return super().resolve_command(ctx, args)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run, and leave the process with the documented exit code unless ``standalone_mode`` is false."""
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        sys.exit(self._run(args, prog_name, complete_var, extra))

    def _run(
        self, args: Sequence[str] | None, prog_name: str | None, complete_var: str | None, extra: dict[str, Any]
    ) -> int:
        try:
            result = super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        except click.UsageError as error:
            return _complain(_usage_sentence(error), EXIT_USAGE)
        except click.ClickException as error:
            return _complain(error.format_message(), error.exit_code)
        except (click.Abort, KeyboardInterrupt):
            return _complain("Interrupted.", EXIT_INTERRUPTED)
        except BrokenPipeError:
            # The reader has seen enough; Python would complain about the rest while it shuts down.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            return EXIT_FAILURE
        except PegaFlowError as error:
            return _complain(str(error), EXIT_FAILURE)
        except OSError as error:
            return _complain(f"The system refused: {error}.", EXIT_FAILURE)
        return result if isinstance(result, int) else 0


def _usage_sentence(error: click.UsageError) -> str:
    sentence = " ".join(error.format_message().split()).rstrip(".")
    if error.ctx is None or sentence.endswith("?"):
        return sentence
    return f"{sentence}; see '{error.ctx.command_path} --help'."


def _complain(sentence: str, exit_code: int) -> int:
    click.echo(f"pegaflow: {printable(sentence)}", err=True)
    return exit_code


def _show_version(ctx: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        click.echo(f"pegaflow {_native.__version__} ({_native.build_profile}, pool layout {_native.LAYOUT_VERSION})")
        ctx.exit()


@click.group(
    cls=SentenceGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version, help="Show the version."
)
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Look after PegaFlow's pools: the KV caches that the vLLM instances of this host share.

    All commands work while no engine runs, since all state is in the pools themselves. POOL is a pool's name, or the
    path of its directory (anything with a '/').

    \b
    Examples:
      pegaflow doctor                 is this host ready, and if not, what to do
      pegaflow pools                  which pools exist, and how full they are
      pegaflow top                    the same, again and again, with what moves
      pegaflow inspect default        what is in one of them
      pegaflow verify default         is every byte of it as it was written
      pegaflow gc --dry-run           what a clean-up would remove
      pegaflow rm default             remove a pool that nobody uses
      pegaflow ssd inspect DIR        cache files on SSD; also: ssd verify, ssd rm
      pegaflow exporter               metrics of all pools for Prometheus
      pegaflow replay trace.jsonl     how much a cache of some size would find
      pegaflow peers list HOST:PORT   do other hosts answer; also: peers bench

    Every command but exporter has --json for programs. Exit codes: 0 fine, 1 failure or problems found, 2 wrong usage.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


for command in (doctor, pools, top, inspect, verify, gc, rm, ssd, exporter, replay, peers):
    cli.add_command(command)
