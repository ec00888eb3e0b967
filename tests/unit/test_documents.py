"""What the documents point to is there: files, sections, targets of make, modules to run, and no package of others."""

import re
from pathlib import Path

import pytest

from pegaflow import exporter
from pegaflow.metrics import COUNTERS, GAUGES, HISTOGRAMS, prometheus_name

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    [
        *ROOT.glob("*.md"),
        *(path for folder in ("docs", "benchmarks", "examples") for path in ROOT.glob(f"{folder}/**/*.md")),
    ]
)
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
MAKE = re.compile(r"(?:`|^    )make ([a-z-]+)", re.MULTILINE)
MODULE = re.compile(r"python -m ((?:benchmarks|demo|tools|tests)[.\w]*)")
METRIC = re.compile(r"`((?:vllm:pega|pegaflow)_[a-z0-9_]+)`")
OTHERS_PACKAGE = re.compile(r"pip install ['\"]?pegaflow(?![\w*/.-])")
"""On PyPI that name is another project's: ours is installed by its file."""
NAMED_SOURCES = ("pegaflow", "examples", "docs", "tools", "benchmarks")


def anchors(document: Path) -> set[str]:
    """Names of a document's sections, as GitHub makes them."""
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in HEADING.findall(document.read_text())]
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_and_sections(document: Path) -> None:
    for link in LINK.findall(document.read_text()):
        if link.startswith("https://"):
            continue
        file, _, section = link.partition("#")
        target = (document.parent / file).resolve() if file else document
        assert target.exists(), f"{link} leads nowhere"
        if section and target.suffix == ".md":
            assert section in anchors(target), f"{link}: there is no such section"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_name_targets_and_modules_that_exist(document: Path) -> None:
    text = document.read_text()
    assert set(MAKE.findall(text)) <= TARGETS
    for module in MODULE.findall(text):
        path = ROOT / module.rstrip(".").replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), f"there is no {module}"


def test_metrics_that_are_named_are_exported() -> None:
    names = {f"{prometheus_name(key)}_total" for key in COUNTERS}
    names |= {prometheus_name(key) for key in (*GAUGES, *HISTOGRAMS)}
    names |= {f"pegaflow_{name}" for name in exporter._GAUGES}
    names |= {f"pegaflow_{name}_total" for name in exporter._COUNTERS}
    seen = set()
    # Those of others are in the tables of the migration, which have a test of their own.
    for document in set(DOCUMENTS) - {ROOT / "docs/migration.md", ROOT / "CHANGELOG.md"}:
        found = set(METRIC.findall(document.read_text()))
        assert found <= names, f"{document.name} names metrics that nobody has: {found - names}"
        seen |= found
    assert len(seen) > 20


def test_nobody_is_told_to_install_the_package_of_others() -> None:
    files = [
        path
        for folder in NAMED_SOURCES
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".md", ".yaml", ".sh")
    ]
    for path in [*files, *ROOT.glob("*.md")]:
        assert not OTHERS_PACKAGE.search(path.read_text()), f"{path.relative_to(ROOT)} names PyPI's pegaflow"
    assert OTHERS_PACKAGE.search("pip install pegaflow")
    assert OTHERS_PACKAGE.search("pip install 'pegaflow[otlp]'")
    assert not OTHERS_PACKAGE.search("pip install build/wheels/pegaflow-*.whl")
