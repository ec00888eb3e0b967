"""docs/hooks.md is complete and true to names: every hook of vLLM, and tests that exist."""

import ast
import re
from pathlib import Path

from vllm.distributed.kv_transfer.kv_connector.v1 import base as kv_base

from pegaflow.connector import PegaKVConnector

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| (?P<first>[^|]+) \| (?P<what>[^|]+) \| (?P<tests>[^|]+) \|$", re.MULTILINE)
HOOK = re.compile(r"^`(\w+)`")
NAME = re.compile(r"`(test_\w+)`")


def rows() -> list[re.Match[str]]:
    """Rows of all tables, without heads."""
    found = list(ROW.finditer((ROOT / "docs" / "hooks.md").read_text()))
    return [row for row in found if row["tests"].strip() not in ("shown by", "---")]


def names_of_tests() -> set[str]:
    """Names of all test functions in Python."""
    trees = [ast.parse(path.read_text()) for path in (ROOT / "tests").rglob("test_*.py")]
    return {
        node.name
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def hooks_of(kind: type) -> set[str]:
    """Public methods and properties that a class defines itself."""
    return {name for name in vars(kind) if not name.startswith("_")}


def hooks_in_table() -> list[str]:
    found = (HOOK.match(row["first"]) for row in rows())
    return [match[1] for match in found if match]


def test_every_hook_of_vllm_and_every_hook_of_ours_is_in_the_table_once() -> None:
    listed = hooks_in_table()
    assert len(listed) == len(set(listed))
    theirs = hooks_of(kv_base.KVConnectorBase_V1) | hooks_of(kv_base.SupportsHMA)
    assert theirs - set(listed) == set(), "vLLM has hooks that docs/hooks.md does not name"
    assert hooks_of(PegaKVConnector) - set(listed) == set()
    assert set(listed) - theirs - hooks_of(PegaKVConnector) == set(), "docs/hooks.md names what nobody has"


def test_every_row_names_tests_that_exist() -> None:
    known = names_of_tests()
    for row in rows():
        named = NAME.findall(row["tests"])
        assert named, row[0]
        assert set(named) <= known, row[0]
        assert NAME.sub("", row["tests"]).strip() == "", row[0]


def test_hooks_that_say_default_are_not_ours_and_all_others_are() -> None:
    for row in rows():
        hook = HOOK.match(row["first"])
        if hook is None:
            continue
        ours = hook[1] in hooks_of(PegaKVConnector)
        left_as_it_is = "test_defaults_that_suit_a_store_are_left_as_they_are" in row["tests"]
        if left_as_it_is:
            assert not ours, hook[1]
        elif not ours:
            assert "default" in row["what"] or hook[1] == "requires_piecewise_for_cudagraph", hook[1]


def test_the_table_itself_is_read() -> None:
    assert len(hooks_in_table()) >= 50
    assert len(rows()) >= len(hooks_in_table()) + 25
