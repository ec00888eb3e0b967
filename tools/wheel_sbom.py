"""Write down what the Python side of the wheel asks for: ``python tools/wheel_sbom.py FILE.json`` (CycloneDX 1.6).

maturin lists the crates that are compiled in, and knows nothing of ``pyproject.toml``. What is written here is not in
the wheel but is installed with it, so there are ranges of versions and no versions.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import tomllib

ROOT = Path(__file__).parent.parent
REQUIREMENT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)\s*(.*)")


def component(requirement: str, *, extra: str | None) -> dict[str, Any]:
    """What one requirement of ``pyproject.toml`` asks for; ``extra``: only with this extra."""
    found = REQUIREMENT.fullmatch(requirement)
    if found is None:
        raise ValueError(f"pyproject.toml asks for {requirement!r}, which is no name with a range of versions.")
    name, versions = found.groups()
    properties = [{"name": "pegaflow:versions", "value": versions}]
    if extra is not None:
        properties.append({"name": "pegaflow:extra", "value": extra})
    return {
        "type": "library",
        "bom-ref": f"pkg:pypi/{name}",
        "name": name,
        "purl": f"pkg:pypi/{name}",
        "scope": "required" if extra is None else "optional",
        "properties": properties,
    }


def sbom(project: dict[str, Any], version: str) -> dict[str, Any]:
    """The whole document; ``project`` is the table of that name in ``pyproject.toml``."""
    components = [component(requirement, extra=None) for requirement in project["dependencies"]]
    for extra, requirements in project["optional-dependencies"].items():
        components += [component(requirement, extra=extra) for requirement in requirements]
    ours = f"pkg:pypi/{project['name']}@{version}"
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "bom-ref": ours,
                "name": project["name"],
                "version": version,
                "description": project["description"],
                "licenses": [{"license": {"id": project["license"]}}],
                "purl": ours,
            }
        },
        "components": components,
        "dependencies": [{"ref": ours, "dependsOn": [one["bom-ref"] for one in components]}],
    }


def main() -> None:
    """Write it for the project as it is."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    version = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
    target = Path(sys.argv[1])
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(sbom(project, version), indent=1) + "\n")


if __name__ == "__main__":
    main()
