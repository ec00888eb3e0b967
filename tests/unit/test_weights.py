"""What identifies weights: content, wherever it lies; nothing else."""

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from pegaflow import weights
from pegaflow.weights import (
    changed_since_start,
    local_snapshot,
    process_started,
    processors_digest,
    weights_digest,
)


def save(path: Path, **tensors: torch.Tensor) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "model.safetensors")
    return path


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(300, 400) for name in ("embed", "attention", "mlp")}


def test_same_files_elsewhere_have_the_same_digest(tmp_path: Path) -> None:
    first, second = save(tmp_path / "a", **tensors()), save(tmp_path / "b", **tensors())
    (second / "tokenizer.json").write_text("other")
    (second / "README.md").write_text("other")
    assert weights_digest(str(first)) == weights_digest(str(second))


@pytest.mark.parametrize("name", ["embed", "attention", "mlp"])
def test_change_of_any_tensor_shows(tmp_path: Path, name: str) -> None:
    changed = tensors()
    changed[name] = changed[name] + 0.001
    assert weights_digest(str(save(tmp_path / "a", **tensors()))) != weights_digest(
        str(save(tmp_path / "b", **changed))
    )


@pytest.mark.parametrize("place", [0, -1])
def test_first_and_last_element_of_a_tensor_count(tmp_path: Path, place: int) -> None:
    changed = tensors()
    changed["mlp"].view(-1)[place] += 1
    assert weights_digest(str(save(tmp_path / "a", **tensors()))) != weights_digest(
        str(save(tmp_path / "b", **changed))
    )


def test_small_tensors_are_read_whole(tmp_path: Path) -> None:
    first = save(tmp_path / "a", norm=torch.zeros(1000))
    changed = torch.zeros(1000)
    changed[613] = 1
    assert weights_digest(str(first)) != weights_digest(str(save(tmp_path / "b", norm=changed)))


def test_names_of_tensors_count(tmp_path: Path) -> None:
    zeros = torch.zeros(10)
    assert weights_digest(str(save(tmp_path / "a", x=zeros))) != weights_digest(str(save(tmp_path / "b", y=zeros)))


def test_shards_swapped_by_name_differ(tmp_path: Path) -> None:
    for directory, names in (("a", ("1", "2")), ("b", ("2", "1"))):
        (tmp_path / directory).mkdir()
        for content, name in enumerate(names):
            save_file({"x": torch.full((8,), float(content))}, tmp_path / directory / f"{name}.safetensors")
    assert weights_digest(str(tmp_path / "a")) != weights_digest(str(tmp_path / "b"))


def test_single_file_is_known_by_content_not_name(tmp_path: Path) -> None:
    for name in ("one.gguf", "two.gguf"):
        (tmp_path / name).write_bytes(b"GGUF" + bytes(3_000_000))
    assert weights_digest(str(tmp_path / "one.gguf")) == weights_digest(str(tmp_path / "two.gguf"))


@pytest.mark.parametrize(
    "content", [b"", b"1234567", b"\xff" * 100, (50).to_bytes(8, "little") + b"{not json" + bytes(60)], ids=len
)
def test_malformed_safetensors_have_a_digest_all_the_same(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert weights_digest(str(tmp_path))


def test_directory_without_weights_has_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert weights_digest(str(tmp_path)) is None
    assert weights_digest(str(tmp_path / "absent")) is None


def test_local_directory_is_its_own_snapshot(tmp_path: Path) -> None:
    assert local_snapshot(str(tmp_path), None, None) == str(tmp_path)


def test_repository_is_found_in_the_cache_without_asking_anybody(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (tmp_path / "models--org--model" / "refs").mkdir()
    (tmp_path / "models--org--model" / "refs" / "main").write_text("abc")
    assert local_snapshot("org/model", None, str(tmp_path)) == str(snapshot)
    assert local_snapshot("org/absent", None, str(tmp_path)) is None
    assert local_snapshot("s3://bucket/a/b", None, str(tmp_path)) is None


def test_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(bytes(8 << 20))

    def shrink(begin: int, end: int, pieces: int) -> list[tuple[int, int]]:
        os.truncate(path, 100)
        return [(begin, end)]

    monkeypatch.setattr(weights, "_spread", shrink)
    with pytest.raises(OSError, match="became shorter"):
        weights_digest(str(path))


def in_hub_cache(root: Path, blob: str) -> Path:
    """A snapshot whose only file links to a blob of this name."""
    (root / "blobs").mkdir(parents=True)
    (root / "snapshots" / "abc").mkdir(parents=True)
    save_file(tensors(), root / "blobs" / blob)
    (root / "snapshots" / "abc" / "model.safetensors").symlink_to(root / "blobs" / blob)
    return root / "snapshots" / "abc"


def test_name_that_a_hub_cache_gave_the_content_counts(tmp_path: Path) -> None:
    prints = [weights_digest(str(in_hub_cache(tmp_path / name, blob))) for name, blob in ("ax", "by", "cx")]
    assert prints[0] == prints[2] != prints[1]


def test_weights_that_are_newer_than_the_process_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "a", **tensors()) / "model.safetensors"
    assert changed_since_start(str(tmp_path / "a"))
    os.utime(path, (0, 0))
    assert changed_since_start(str(tmp_path / "a")), "a copy that keeps times is new all the same"
    start = path.stat().st_ctime - 0.02  # written just before: starts are known to a tick
    monkeypatch.setattr(weights, "process_started", lambda: start)
    assert not changed_since_start(str(tmp_path / "a"))
    os.utime(path, (0, start + 10))
    assert changed_since_start(str(tmp_path / "a"))
    os.utime(path, (0, 0))
    monkeypatch.setattr(weights, "process_started", lambda: path.stat().st_ctime)
    (tmp_path / "a" / "README.md").write_text("new")
    assert not changed_since_start(str(tmp_path / "a"))
    monkeypatch.setattr(weights, "process_started", lambda: 0.0)
    assert not changed_since_start(str(in_hub_cache(tmp_path / "hub", "0123")))


def test_process_started_before_now_and_after_the_machine() -> None:
    age = time.time() - process_started()
    assert 0.0 <= age < time.clock_gettime(time.CLOCK_BOOTTIME)


@pytest.mark.parametrize("every", [1, 2, 3, 5, 7])
def test_process_that_waits_for_a_processor_is_not_taken_for_younger_than_it_is(
    monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    """Behind ``every`` so many looks at a clock it takes another minute to the next one."""
    started, now, looks = process_started(), time.clock_gettime(time.CLOCK_BOOTTIME), 0
    booted = time.time() - now

    def uptime(_: int = time.CLOCK_BOOTTIME) -> float:
        nonlocal now, looks
        looks += 1
        seen, now = now, now + 60.0 * (looks % every == 0)
        return seen

    clocks = SimpleNamespace(CLOCK_BOOTTIME=time.CLOCK_BOOTTIME, clock_gettime=uptime, time=lambda: booted + uptime())
    monkeypatch.setattr(weights, "time", clocks)
    found = process_started()
    assert found <= started + 1.0
    assert found >= started - (1.0 if every >= 3 else 121.0), "one look that is not interrupted is enough"


@pytest.mark.parametrize(
    "name", ["preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"]
)
def test_preparation_of_images_counts_and_tokenizers_do_not(tmp_path: Path, name: str) -> None:
    before = processors_digest(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert processors_digest(str(tmp_path)) == before
    (tmp_path / name).write_text('{"size": 224}')
    small = processors_digest(str(tmp_path))
    (tmp_path / name).write_text('{"size": 448}')
    assert len({before, small, processors_digest(str(tmp_path))}) == 3
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert processors_digest(str(tmp_path / "model.gguf")) == processors_digest(str(tmp_path))
