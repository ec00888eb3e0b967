"""The whole project keeps the rules of ``tests/tidy``, and each rule finds what it is for."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.tidy import rules, rust_source
from tests.tidy.rules import Source

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("benchmarks", "demo", "pegaflow", "rust", "tests", "tools")
SUFFIXES = (".py", ".pyi", ".rs")
SINGLE_FILES = (".ci/run", "Cargo.toml", "Makefile", "clippy.toml", "pyproject.toml", "rustfmt.toml")
RULES_FILE = "tests/tidy/rules.py"
"""Names what is banned, and so would break its own rules."""


def read(path: Path) -> Source:
    return Source(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))


def code() -> list[Source]:
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    return [read(path) for path in sorted(found) if "target" not in path.parts]


def problems_of(rule: Callable[[Source], Iterator[str]], sources: list[Source]) -> str:
    """One problem a line."""
    return "\n".join(problem for source in sources for problem in rule(source))


def test_files_functions_and_lines_are_short() -> None:
    problems = problems_of(rules.size_problems, code())
    assert not problems, problems


def test_sources_are_ascii() -> None:
    problems = problems_of(rules.ascii_problems, code() + [read(ROOT / name) for name in SINGLE_FILES])
    assert not problems, problems


def test_every_module_says_what_it_is_for() -> None:
    problems = problems_of(rules.docstring_problems, code())
    assert not problems, problems


def test_nothing_banned_is_used() -> None:
    sources = [source for source in code() if source.path not in (RULES_FILE, "tests/test_tidy.py")]
    problems = problems_of(rules.banned_problems, sources + [read(ROOT / name) for name in SINGLE_FILES])
    assert not problems, problems


def test_every_rust_file_is_compiled() -> None:
    problems = "\n".join(rules.dead_files(code()))
    assert not problems, problems


def test_all_folders_are_looked_at() -> None:
    assert {source.path.split("/")[0] for source in code()} == set(FOLDERS)


def test_long_things_are_found() -> None:
    body = "    pass\n" * rules.FUNCTION_LINES_MAX
    python = Source("pegaflow/a.py", f"def short():\n    pass\n\n\ndef long():\n{body}")
    assert [problem.split(": ")[1][:12] for problem in rules.size_problems(python)] == ["long has 71 "]
    rust = Source("rust/a.rs", "fn long() {\n" + "    call();\n" * rules.FUNCTION_LINES_MAX + "}\nfn short() {}\n")
    assert [problem.split(": ")[1][:12] for problem in rules.size_problems(rust)] == ["long has 72 "]
    assert list(rules.size_problems(Source("a.py", "#\n" * (rules.FILE_LINES_MAX + 1))))
    assert list(rules.size_problems(Source("a.py", "#" * (rules.LINE_CHARACTERS_MAX + 1))))


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("rust/engine/src/a.rs", "use std::sync::atomic::AtomicU32;"),
        ("rust/engine/src/a.rs", "fn f() { g().unwrap(); }"),
        ("rust/engine/src/a.rs", "fn f() { unsafe { g() } }"),
        ("rust/engine/src/a.rs", '#[cfg(test)]\nmod tests { }\nfn f() { println!("x"); }'),
        ("rust/engine/tests/a.rs", "#[ignore]\nfn f() {}"),
        ("pegaflow/a.py", "import pickle\npickle.loads(b'')"),
        ("pegaflow/a.py", "x = eval('1')"),
        ("pegaflow/a.py", "print('x')"),
        ("pegaflow/connector/a.py", "time.sleep(1)"),
        ("tests/a.py", "pytest.skip('no')"),
        ("tests/a.py", "@pytest.mark.skipif(True)"),
        ("tests/a.py", "# FIXME later"),
        ("pegaflow/a.py", "path = '/home/me/models'"),
    ],
)
def test_banned_text_is_found_once(path: str, text: str) -> None:
    assert len(list(rules.banned_problems(Source(path, text)))) == 1


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("rust/engine/src/a.rs", '// never .unwrap() here\nfn f() { log("unsafe") }'),
        ("rust/engine/src/a.rs", "#[cfg(test)]\nmod tests {\n    fn f() { g().unwrap(); }\n}"),
        ("rust/engine/src/a_tests.rs", "fn f() { g().unwrap(); }"),
        ("rust/engine/src/shm/a.rs", "fn f() { unsafe { g() } }"),
        ("pegaflow/cli/a.py", "print('x')"),
        ("pegaflow/a.py", "self.print('x'), model.eval(), re_eval(1)"),
        ("tests/a.py", "time.sleep(1)"),
    ],
)
def test_allowed_text_is_not_found(path: str, text: str) -> None:
    assert list(rules.banned_problems(Source(path, text))) == []


def test_modules_without_purpose_and_foreign_characters_are_found() -> None:
    assert list(rules.docstring_problems(Source("a.py", "x = 1")))
    assert list(rules.docstring_problems(Source("a.rs", "// a comment\nfn f() {}")))
    assert list(rules.ascii_problems(Source("a.py", "x = '\N{EN DASH}'")))


def test_unnamed_rust_files_are_found() -> None:
    library = Source("rust/engine/src/lib.rs", "//!\npub mod used;\n")
    used, unused = Source("rust/engine/src/used.rs", ""), Source("rust/engine/src/unused/mod.rs", "")
    assert list(rules.dead_files([library, used, unused])) == [
        "rust/engine/src/unused/mod.rs: no file says `mod unused;`"
    ]


def test_rust_code_is_told_from_comments_strings_and_characters() -> None:
    source = """let a = '{'; let b = "\\"}"; let c = r#"}" "#; /* { /* } */ */ fn f<'a>(x: &'a str, y: [u8; 4]) {\n}"""
    code = rust_source.code_only(source)
    assert len(code) == len(source)
    assert code.count("{") == code.count("}") == 1
    assert rust_source.functions(code) == [rust_source.Function("f", 1, 2)]


def test_declarations_without_body_are_no_functions() -> None:
    assert rust_source.functions("trait T { fn a(&self) -> [u8; 4]; fn b(&self) {} }")[0].name == "b"
