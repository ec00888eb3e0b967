"""The rules: what is measured, what is banned, and what to write instead."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tests.tidy import rust_source

FILE_LINES_MAX = 600
FUNCTION_LINES_MAX = 70
LINE_CHARACTERS_MAX = 120

UNSAFE_FILES = (
    "rust/engine/src/admin/system.rs",
    "rust/engine/src/copy/*.rs",
    "rust/engine/src/cuda/*.rs",
    "rust/engine/src/objects/bytes.rs",
    "rust/engine/src/objects/value.rs",
    "rust/engine/src/shm/*.rs",
    "rust/engine/src/ssd/buffer.rs",
    "rust/engine/src/ssd/uring.rs",
    "rust/engine/src/tier/rows.rs",
    "rust/engine/src/tier/segment.rs",
    "rust/engine/src/tier/slots.rs",
    "rust/engine/src/traffic/file.rs",
    "rust/engine/src/traffic/rows.rs",
    "rust/engine/tests/common/*.rs",
    "rust/peers/src/rdma/*.rs",
    "rust/peers/src/slot.rs",
    "rust/python/src/*.rs",
)
"""Where ``unsafe`` may stand: system calls, mappings, copies, and the buffer protocol of Python."""


@dataclass(frozen=True)
class Source:
    """One file of the project."""

    path: str
    """Relative to the root, with slashes."""
    text: str

    @property
    def is_rust(self) -> bool:
        """Rust, tests included."""
        return self.path.endswith(".rs")

    @property
    def is_python(self) -> bool:
        """Python, stubs included."""
        return self.path.endswith((".py", ".pyi"))

    @property
    def is_test(self) -> bool:
        """Whether the whole file is for tests."""
        path = PurePosixPath(self.path)
        in_folder = not {"tests", "models", "fuzz"}.isdisjoint(path.parts)
        return in_folder or path.match("*_tests.rs") or path.match("fake_*.rs")

    def matches(self, *patterns: str) -> bool:
        """Whether the path matches one of ``patterns`` (a star crosses no slash; matched from the right)."""
        return any(PurePosixPath(self.path).match(pattern) for pattern in patterns)


@dataclass(frozen=True)
class Ban:
    """A pattern that must not appear, and its replacement."""

    pattern: str
    instead: str
    language: str
    """``rust``, ``python`` or ``any``."""
    except_in: tuple[str, ...] = ()
    only_in: tuple[str, ...] = ()
    tests_too: bool = False


BANS = (
    Ban(
        r"\b(?:std|core)::sync::atomic\b",
        "crate::sync",
        "rust",
        except_in=("rust/engine/src/sync.rs", "rust/peers/src/sync.rs"),
    ),
    Ban(r"\.unwrap\(\)", "`?`, or expect() with the reason why it holds", "rust"),
    Ban(r"\bunsafe\b", "a safe function of the files listed in UNSAFE_FILES", "rust", except_in=UNSAFE_FILES),
    # Builds speak to cargo by what they print.
    Ban(r"\be?print(?:ln)?!", "the log crate", "rust", except_in=("rust/*/build.rs",)),
    Ban(r"\bpanic!", "an Error", "rust"),
    Ban(
        r"\btransmute\b",
        "from_le_bytes and to_le_bytes",
        "rust",
        except_in=("rust/*/src/*/library.rs",),  # functions found by name have no other way to get their type
        tests_too=True,
    ),
    Ban(r"#\[ignore", "a test that makes what it needs", "rust", tests_too=True),
    Ban(r"\bpickle\.loads?\(", "json or struct", "python"),
    Ban(r"(?<![\w.])(?:eval|exec)\(", "plain code", "python", tests_too=True),
    Ban(r"\bos\.system\(|\bshell=True", "subprocess with a list of arguments", "python", tests_too=True),
    Ban(
        r"(?<![\w.])print\(",
        "logging, or the rich console of the command line",
        "python",
        except_in=("pegaflow/cli/*.py", "demo/*.py", "tools/*.py", "benchmarks/*.py"),
    ),
    Ban(
        r"\btime\.sleep\(",
        "a deadline that is polled",
        "python",
        only_in=("pegaflow/connector/*.py", "pegaflow/sglang/*.py"),
    ),
    Ban(r"\btorch\.cuda\b", "connector/worker.py", "python", only_in=("pegaflow/connector/scheduler*.py",)),
    Ban(
        r"\bpytest\.(?:skip|xfail|importorskip)\b|\bmark\.(?:skip|skipif|xfail)\b",
        "a test that makes what it needs",
        "python",
        tests_too=True,
    ),
    Ban(r"\b(?:TODO|FIXME|XXX|HACK)\b", "doing it, or an issue", "any", tests_too=True),
    Ban(r"/(?:work|tmp|home/\w+|root)/\w", "a temporary directory or an argument", "any", tests_too=True),
)


def line_of(text: str, position: int) -> int:
    """Number of the line, from 1, that ``position`` is on."""
    return text.count("\n", 0, position) + 1


def size_problems(source: Source) -> Iterator[str]:
    """Files, functions and lines that are too long."""
    lines = source.text.splitlines()
    if len(lines) > FILE_LINES_MAX:
        yield f"{source.path}: {len(lines)} lines, at most {FILE_LINES_MAX}: split it by role"
    for number, line in enumerate(lines, 1):
        if len(line) > LINE_CHARACTERS_MAX:
            yield f"{source.path}:{number}: {len(line)} characters, at most {LINE_CHARACTERS_MAX}"
    for name, number, count in functions_of(source):
        if count > FUNCTION_LINES_MAX:
            yield f"{source.path}:{number}: {name} has {count} lines, at most {FUNCTION_LINES_MAX}: move work to leaves"


def functions_of(source: Source) -> Iterator[tuple[str, int, int]]:
    """``(name, first line, number of lines)`` of every function."""
    if source.is_rust:
        for function in rust_source.functions(rust_source.code_only(source.text)):
            yield function.name, function.line, function.lines
    elif source.is_python:
        for node in ast.walk(ast.parse(source.text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node.name, node.lineno, (node.end_lineno or node.lineno) - node.lineno + 1


def ascii_problems(source: Source) -> Iterator[str]:
    """Characters beyond ASCII, which look alike and are not."""
    for number, line in enumerate(source.text.splitlines(), 1):
        if not line.isascii():
            foreign = "".join(character for character in line if not character.isascii())
            yield f"{source.path}:{number}: {foreign!r} is not ASCII: write an escape"


def docstring_problems(source: Source) -> Iterator[str]:
    """Files that do not say what they are for."""
    if source.is_python and ast.get_docstring(ast.parse(source.text)) is None:
        yield f"{source.path}: no docstring: say in one line what this module is for"
    if source.is_rust and not source.text.startswith("//!"):
        yield f"{source.path}: no //! line at the top: say in one line what this module is for"


def banned_problems(source: Source) -> Iterator[str]:
    """Calls and words that have a replacement."""
    for ban in BANS:
        if ban.language != "any" and not (source.is_rust if ban.language == "rust" else source.is_python):
            continue
        if (source.is_test and not ban.tests_too) or source.matches(*ban.except_in):
            continue
        if ban.only_in and not source.matches(*ban.only_in):
            continue
        searched = searched_text(source, ban)
        for match in re.finditer(ban.pattern, searched):
            yield f"{source.path}:{line_of(searched, match.start())}: {match.group()!r} is banned: use {ban.instead}"


def searched_text(source: Source, ban: Ban) -> str:
    """What a ban applies to: for Rust its code alone, since comments and messages may name what is banned."""
    if ban.language != "rust":
        return source.text
    code = rust_source.code_only(source.text)
    return code if ban.tests_too else rust_source.without_test_modules(code)


def dead_files(sources: list[Source]) -> Iterator[str]:
    """Rust files that no ``mod`` names: cargo never looks at them and nobody would notice."""
    named = {name for source in sources for name in re.findall(r"\bmod\s+(\w+)\s*;", source.text)}
    for source in sources:
        path = Path(source.path)
        name = path.parent.name if path.name == "mod.rs" else path.stem
        inside = "src" in path.parts and path.name not in ("lib.rs", "main.rs")
        if source.is_rust and inside and name not in named:
            yield f"{source.path}: no file says `mod {name};`"
