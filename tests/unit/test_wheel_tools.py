"""What ``make wheel-test`` looks at finds what would be wrong with a wheel, and the SBOM leaves out nothing."""

import json
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
import tomllib

from tools import wheel_sbom, wheel_test

ROOT = Path(__file__).parents[2]
LIBRARY = Path("/bin/true")
"""Stands for the native module: stripped, and asks for nothing but the C library."""


def sbom_of(purl: str) -> dict[str, Any]:
    return {"bomFormat": "CycloneDX", "metadata": {"component": {"purl": purl}}}


def wheel_of(
    folder: Path,
    name: str = "pegaflow-1.0-cp310-abi3-manylinux_2_99_x86_64.whl",
    library: bytes | None = None,
    purls: tuple[str, ...] = ("pkg:cargo/a@1", "pkg:pypi/b@1"),
) -> Path:
    with zipfile.ZipFile(folder / name, "w") as files:
        files.writestr(wheel_test.LIBRARY, LIBRARY.read_bytes() if library is None else library)
        for number, purl in enumerate(purls):
            files.writestr(f"pegaflow-1.0.dist-info/sboms/{number}.json", json.dumps(sbom_of(purl)))
    return folder / name


def test_a_good_wheel_has_no_problems(tmp_path: Path) -> None:
    assert wheel_test.problems_of(wheel_of(tmp_path)) == []


@pytest.mark.parametrize(
    "name", ["pegaflow-1.0-cp312-cp312-manylinux_2_34_x86_64.whl", "pegaflow-1.0-cp310-abi3-linux_x86_64.whl"]
)
def test_wheels_for_one_version_or_one_machine_are_refused(tmp_path: Path, name: str) -> None:
    assert "no abi3 wheel" in wheel_test.problems_of(wheel_of(tmp_path, name))[0]


def test_a_library_that_needs_a_newer_libc_than_the_name_says_is_refused(tmp_path: Path) -> None:
    wheel = wheel_of(tmp_path, "pegaflow-1.0-cp310-abi3-manylinux_2_1_x86_64.whl")
    assert any("glibc" in problem for problem in wheel_test.problems_of(wheel))


def test_libraries_that_manylinux_does_not_promise_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel_test, "LIBRARIES_ALLOWED", ())
    assert any("libc.so.6" in problem for problem in wheel_test.problems_of(wheel_of(tmp_path)))


def test_symbols_are_refused(tmp_path: Path) -> None:
    program = tmp_path / "program"
    subprocess.run(["cc", "-xc", "-", "-o", program], input=b"int main(void) { return 0; }", check=True)
    wheel = wheel_of(tmp_path, library=program.read_bytes())
    assert any("strip" in problem for problem in wheel_test.problems_of(wheel))


def test_a_large_wheel_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel_test, "WHEEL_BYTES_MAX", 1000)
    assert any("bytes" in problem for problem in wheel_test.problems_of(wheel_of(tmp_path)))


@pytest.mark.parametrize("purls", [(), ("pkg:cargo/a@1",), ("pkg:pypi/b@1",)])
def test_both_sboms_have_to_be_there(tmp_path: Path, purls: tuple[str, ...]) -> None:
    assert any("SBOM" in problem for problem in wheel_test.problems_of(wheel_of(tmp_path, purls=purls)))


def test_the_sbom_names_every_requirement_with_its_range() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    document = wheel_sbom.sbom(project, "1.2.3")
    assert document["metadata"]["component"]["purl"] == "pkg:pypi/pegaflow@1.2.3"
    named = {one["name"] + one["properties"][0]["value"]: one["scope"] for one in document["components"]}
    expected = dict.fromkeys(project["dependencies"], "required")
    expected |= {
        one for extra in project["optional-dependencies"].values() for one in dict.fromkeys(extra, "optional").items()
    }
    assert named == expected
    assert document["dependencies"][0]["dependsOn"] == [one["bom-ref"] for one in document["components"]]


def test_a_requirement_that_is_not_understood_is_an_error() -> None:
    with pytest.raises(ValueError, match="no name"):
        wheel_sbom.component("[nothing]", extra=None)
