"""Just enough of Rust's syntax to measure functions and to tell code from comments, strings and tests."""

import re
from dataclasses import dataclass

# One alternative per kind of text that is not code. A lifetime ('a) is no character: no quote closes it.
NOT_CODE = re.compile(
    r"""
      //[^\n]*
    | b?r(?P<hashes>\#*)".*?"(?P=hashes)
    | b?"(?:\\.|[^"\\])*"
    | b?'(?:\\(?:x[0-9a-fA-F]{2}|u\{[0-9a-fA-F]+\}|.)|[^'\\\n])'
    """,
    re.VERBOSE | re.DOTALL,
)
BLOCK_COMMENT_EDGE = re.compile(r"/\*|\*/")
TEST_MODULE = re.compile(r"#\[cfg\(test\)\]\s*(?:pub(?:\([^)]*\))?\s+)?mod\s+\w+\s*\{")
FUNCTION = re.compile(r"\bfn\s+(?P<name>\w+)")


@dataclass(frozen=True)
class Function:
    """A function with a body: its name, first line (from 1) and number of lines."""

    name: str
    line: int
    lines: int


def blank(text: str) -> str:
    """Spaces instead of everything but line ends."""
    return re.sub(r"[^\n]", " ", text)


def code_only(source: str) -> str:
    """``source`` with comments, strings and characters blanked out; every line keeps its number and length."""
    pieces = []
    position = 0
    while position < len(source):
        if source.startswith("/*", position):
            end = end_of_block_comment(source, position)
            pieces.append(blank(source[position:end]))
        elif (match := NOT_CODE.match(source, position)) and not inside_word(source, position):
            end = match.end()
            pieces.append(blank(match.group()))
        else:
            end = position + 1
            pieces.append(source[position])
        position = end
    return "".join(pieces)


def inside_word(source: str, position: int) -> bool:
    """Whether ``position`` continues an identifier, so that an ``r`` or ``b`` there starts no string."""
    return (
        source[position].isalpha() and position > 0 and (source[position - 1].isalnum() or source[position - 1] == "_")
    )


def end_of_block_comment(source: str, start: int) -> int:
    """Block comments nest."""
    depth = 0
    for edge in BLOCK_COMMENT_EDGE.finditer(source, start):
        depth += 1 if edge.group() == "/*" else -1
        if depth == 0:
            return edge.end()
    return len(source)


def end_of_braces(code: str, opening: int) -> int:
    """Index behind the brace that closes the one at ``opening``."""
    depth = 0
    for index in range(opening, len(code)):
        if code[index] == "{":
            depth += 1
        elif code[index] == "}":
            depth -= 1
            if depth == 0:
                return index + 1
    return len(code)


def without_test_modules(code: str) -> str:
    """``code`` (of ``code_only``) with its ``#[cfg(test)]`` modules blanked out."""
    while match := TEST_MODULE.search(code):
        end = end_of_braces(code, match.end() - 1)
        code = code[: match.start()] + blank(code[match.start() : end]) + code[end:]
    return code


def functions(code: str) -> list[Function]:
    """All functions of ``code`` (of ``code_only``) that have a body."""
    found = []
    for match in FUNCTION.finditer(code):
        opening = body_of(code, match.end())
        if opening is not None:
            first = code.count("\n", 0, match.start()) + 1
            last = code.count("\n", 0, end_of_braces(code, opening)) + 1
            found.append(Function(match["name"], first, last - first + 1))
    return found


def body_of(code: str, position: int) -> int | None:
    """Index of the brace that opens the body of the function whose name ends at ``position``, if it has one. A ``;``
    inside brackets, as in ``[u8; 4]``, ends nothing."""
    depth = 0
    for index in range(position, len(code)):
        character = code[index]
        if character in "([":
            depth += 1
        elif character in ")]":
            depth -= 1
        elif depth == 0 and character == ";":
            return None
        elif depth == 0 and character == "{":
            return index
    return None
