"""The command ``pegaflow``: look after pools and the host they live on, with no engine running."""

import sys


def main() -> None:
    """Entry point of the console script."""
    try:
        from pegaflow.cli.main import cli
    except ImportError as error:
        sys.stderr.write(f"pegaflow: this installation is incomplete ({error}); reinstall pegaflow.\n")
        raise SystemExit(1) from None
    cli.main(prog_name="pegaflow")
