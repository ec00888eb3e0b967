"""Compile the engine's CUDA kernels to PTX: ``python tools/build_ptx.py`` writes ``rust/engine/src/cuda/blocks.ptx``.

Needs NVRTC (PyPI: ``nvidia-cuda-nvrtc``, which PyTorch brings along), but no GPU and no CUDA toolkit. The result is
kept in the tree, so that building PegaFlow needs neither.
"""

import ctypes
import hashlib
import importlib.metadata
import re
import sys
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "rust" / "engine" / "src" / "cuda" / "blocks.cu"
TARGET = SOURCE.with_suffix(".ptx")
OPTIONS = ("--gpu-architecture=compute_75", "--std=c++17")
ISA_VERSION = "7.8"
"""What the PTX claims to need: drivers from CUDA 11.8 on take it. NVRTC would write its own version, and so shut out
every driver older than itself, for kernels that use nothing new."""


class PtxError(Exception):
    """The kernels cannot be compiled."""


def nvrtc_version() -> str | None:
    """Version of the installed NVRTC, or ``None``."""
    distribution = _distribution()
    return distribution.version if distribution else None


def build_ptx(source: str) -> str:
    """PTX of ``source`` with a header that says what it was made of and by what."""
    text = _compile(_library(), source)
    body = text[text.index(".version") :]
    body, versions = re.subn(r"^\.version .*$", f".version {ISA_VERSION}", body, count=1, flags=re.MULTILINE)
    if versions != 1:
        raise PtxError("NVRTC's PTX names no version: look at what it wrote.")
    lines = (line.rstrip() for line in body.replace("\0", "").strip().splitlines())
    return header(source, nvrtc_version() or "") + "\n".join(lines) + "\n"


def header(source: str, version: str) -> str:
    """First lines of the PTX of ``source``."""
    digest = hashlib.sha256(source.encode()).hexdigest()
    return f"// Made by tools/build_ptx.py with NVRTC {version} and {' '.join(OPTIONS)}\n// Source: sha256 {digest}\n"


def _distribution() -> importlib.metadata.Distribution | None:
    try:
        return importlib.metadata.distribution("nvidia-cuda-nvrtc")
    except importlib.metadata.PackageNotFoundError:
        return None


def _library() -> ctypes.CDLL:
    distribution = _distribution()
    if distribution is None:
        raise PtxError("NVRTC is missing: pip install nvidia-cuda-nvrtc")
    files = {Path(file.name).name: distribution.locate_file(file) for file in distribution.files or ()}
    for pattern in (r"libnvrtc-builtins\.so\.[\d.]+", r"libnvrtc\.so\.\d+"):
        paths = [path for name, path in files.items() if re.fullmatch(pattern, name)]
        if len(paths) != 1:
            raise PtxError(f"nvidia-cuda-nvrtc has no library {pattern}: install it anew.")
        library = ctypes.CDLL(str(paths[0]), mode=ctypes.RTLD_GLOBAL)  # the builtins are found because they are loaded
    return library


def _compile(nvrtc: ctypes.CDLL, source: str) -> str:
    program = ctypes.c_void_p()
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), SOURCE.name.encode(), 0, None, None))
    options = (ctypes.c_char_p * len(OPTIONS))(*(option.encode() for option in OPTIONS))
    status = nvrtc.nvrtcCompileProgram(program, len(OPTIONS), options)
    if status != 0:
        raise PtxError(f"{SOURCE.name} does not compile:\n{_text(nvrtc, program, 'ProgramLog')}")
    ptx = _text(nvrtc, program, "PTX")
    _check(nvrtc.nvrtcDestroyProgram(ctypes.byref(program)))
    return ptx


def _text(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> str:
    size = ctypes.c_size_t()
    _check(getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(getattr(nvrtc, f"nvrtcGet{what}")(program, buffer))
    return buffer.value.decode()


def _check(status: int) -> None:
    if status != 0:
        raise PtxError(f"NVRTC answered error {status}.")


def main() -> None:
    """Write the PTX."""
    try:
        ptx = build_ptx(SOURCE.read_text())
    except PtxError as error:
        sys.exit(str(error))
    TARGET.write_text(ptx)
    print(f"written to {TARGET}")


if __name__ == "__main__":
    main()
