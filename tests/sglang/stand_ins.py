"""What is not SGLang's own when its parts run here.

Packages that it imports at its start for notebooks and images are empty modules. Its hash of pages, which it compiles
from C++ when it is first asked, is the same SHA-256 in Python. Nothing of the interface is replaced: the base class,
the factory, the cache controller with its threads, and the host pools are the real ones.
"""

import array
import hashlib
import importlib.machinery
import sys
import types
from typing import Any

NAMES = {
    "IPython": (),
    "IPython.display": ("HTML", "Image", "clear_output", "display"),
    "torchvision": (),
    "torchvision.transforms": ("InterpolationMode",),
    "torchvision.transforms.functional": ("InterpolationMode",),
}
"""Modules, and the names that are imported from them."""


def stand_in() -> None:
    """Put empty modules where SGLang looks for these. Before it is imported."""
    # Transformers asks once whether there is a torchvision, and would use it.
    from transformers.utils import import_utils

    import_utils.is_torchvision_available()
    for name, contents in NAMES.items():
        if name in sys.modules:
            continue
        module = types.ModuleType(name)
        module.__path__ = []
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        for content in contents:
            setattr(module, content, None)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


def hash_pages(token_ids: Any, prior_digest: bytes | None, page_tokens: int | None = None) -> str | list[str]:
    """Hashes of whole pages in hex, each over the one before it and its tokens as 32-bit words."""
    tokens = list(getattr(token_ids, "token_ids", token_ids))
    step, digest, pages = page_tokens or len(tokens), prior_digest or b"", []
    for start in range(0, len(tokens) - step + 1, step):
        digest = hashlib.sha256(digest + array.array("I", tokens[start : start + step]).tobytes()).digest()
        pages.append(digest.hex())
    return pages if page_tokens else pages[0]


def stand_in_for_hashes() -> None:
    """Have SGLang use ``hash_pages``. After it was imported."""
    from sglang.srt.mem_cache import utils

    utils.get_native_hash = hash_pages
