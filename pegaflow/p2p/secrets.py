"""What peers show each other: a token, or files for TLS. No message, log line or ``repr`` holds any of it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pegaflow.errors import InvalidArgument

TOKEN_VARIABLE = "PEGAFLOW_PEER_TOKEN"  # noqa: S105, its name
TOKEN_CHARACTERS_MIN, TOKEN_CHARACTERS_MAX = 16, 512


def read_token(path: str | None, written: str, environ: Mapping[str, str]) -> str | None:
    """The token in the file at ``path``, or else in the environment; ``None`` if there is neither. ``written``: how the
    option was given. Raises ``InvalidArgument``, without the token in its message."""
    if path is None:
        return _checked(environ[TOKEN_VARIABLE], TOKEN_VARIABLE) if environ.get(TOKEN_VARIABLE) else None
    try:
        with open(path, "rb") as opened:
            content = opened.read(2 * TOKEN_CHARACTERS_MAX)
    except OSError as error:
        raise InvalidArgument(f"{written} names {path!r}, which cannot be read: {error.strerror}.") from None
    return _checked(content.decode("latin-1").strip(), f"The file {path!r} of {written}")


def parse_file(value: Any, name: str) -> str:
    """Absolute path of a file that this user can read. Raises ``InvalidArgument``."""
    if not isinstance(value, str) or not value.startswith("/"):
        raise InvalidArgument(f"{name} must be the absolute path of a file, not {value!r}.")
    try:
        with open(value, "rb"):
            pass
    except OSError as error:
        raise InvalidArgument(f"{name} names {value!r}, which cannot be read: {error.strerror}.") from None
    return value


def open_to_others(path: str) -> bool:
    """Whether other users of this host may read the file at ``path``."""
    try:
        return bool(Path(path).stat().st_mode & 0o044)
    except OSError:
        return False


def _checked(token: str, where: str) -> str:
    long_enough = TOKEN_CHARACTERS_MIN <= len(token) <= TOKEN_CHARACTERS_MAX
    if not long_enough or not all("!" <= character <= "~" for character in token):
        raise InvalidArgument(
            f"{where} must hold a token of {TOKEN_CHARACTERS_MIN} to {TOKEN_CHARACTERS_MAX} visible ASCII characters "
            "without blanks, such as 'openssl rand -hex 32' prints."
        )
    return token
