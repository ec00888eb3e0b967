"""Read from the sources of several vLLM versions what they ask of a connector, and what they have of what we import.

    python tools/vllm_hooks.py build/vllm/* > tests/versions/vllm_hooks.json

Nothing of vLLM is imported or run.
"""

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BASE = "distributed/kv_transfer/kv_connector/v1/base.py"
CLASSES = ("KVConnectorBase_V1", "SupportsHMA")


def parameters(function: ast.FunctionDef) -> list[str]:
    """Names of a method's parameters without the first; ``name=`` has a default, ``*`` and ``**`` take any."""
    arguments = function.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    required = len(names) - len(arguments.defaults)
    found = [name if index < required else f"{name}=" for index, name in enumerate(names)][1:]
    found += [f"*{arguments.vararg.arg}"] if arguments.vararg else []
    found += [f"*{argument.arg}" for argument in arguments.kwonlyargs]
    return found + ([f"**{arguments.kwarg.arg}"] if arguments.kwarg else [])


def hooks(source: str) -> dict[str, str]:
    """Parameters of each public method of the classes that connectors inherit from, ``abstract`` behind if it is."""
    found: dict[str, str] = {}
    for owner in ast.parse(source).body:
        if isinstance(owner, ast.ClassDef) and owner.name in CLASSES:
            for method in owner.body:
                if isinstance(method, ast.FunctionDef) and not method.name.startswith("_"):
                    marks = {mark.id for mark in method.decorator_list if isinstance(mark, ast.Name)}
                    words = parameters(method) + (["abstract"] if "abstractmethod" in marks else [])
                    found[method.name] = " ".join(words)
    return found


def imports(folder: Path) -> Iterator[tuple[str, str]]:
    """``(module, name)`` of everything that the sources below ``folder`` import from vLLM, at any time."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                for alias in node.names:
                    yield str(node.module), alias.name


def has(sources: Path, module: str, name: str) -> bool:
    """Whether a version has a name in a module, or a module of that name below it."""
    place = sources.parent / Path(*module.split("."))
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    if (place / f"{name}.py").exists() or (place / name).is_dir():
        return True
    return file.exists() and re.search(rf"\b{re.escape(name)}\b", file.read_text(encoding="utf-8")) is not None


def version_of(folder: Path) -> tuple[int, ...]:
    """From the distribution's own folder."""
    [found] = folder.glob("vllm*.dist-info")
    return tuple(int(part) for part in found.name.removesuffix(".dist-info").split("-")[1].split("."))


def describe(folders: list[Path]) -> dict[str, Any]:
    """All versions, oldest first: ``hooks`` by name and parameters, and what each ``lacks`` of what we import."""
    wanted = sorted(set(imports(ROOT / "pegaflow")))
    versions: list[str] = []
    lacks: dict[str, list[str]] = {}
    found: dict[str, dict[str, list[str]]] = {}
    for folder in sorted(folders, key=version_of):
        sources, version = folder / "vllm", ".".join(map(str, version_of(folder)))
        versions.append(version)
        lacks[version] = [f"{module}.{name}" for module, name in wanted if not has(sources, module, name)]
        for hook, words in hooks((sources / BASE).read_text(encoding="utf-8")).items():
            found.setdefault(hook, {}).setdefault(words, []).append(version)
    return {"versions": versions, "lacks": lacks, "hooks": dict(sorted(found.items()))}


def main() -> None:
    """Print it as JSON."""
    print(json.dumps(describe([Path(name) for name in sys.argv[1:]]), indent=1))


if __name__ == "__main__":
    main()
