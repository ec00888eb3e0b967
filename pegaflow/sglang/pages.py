"""Where the pages of one of SGLang's host pools lie in memory, whatever their layout.

A host pool says at which addresses the pieces of given pages are (``get_page_buffer_meta``). All layouts that SGLang
stores have them at equal distances from page to page, so a few pages tell where all are. That is not taken on trust:
each transfer compares the addresses of its own pages.
"""

from typing import TYPE_CHECKING, Any

import numpy

from pegaflow import _native
from pegaflow.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Sequence


class HostPages:
    """The pages of one host pool: regions for ``KVLayout``, and numbers of pages."""

    def __init__(self, pool: Any) -> None:
        """Raises ``InvalidArgument``, with the reason, if the pool's pages cannot be moved by address."""
        self._pool = pool
        if getattr(pool, "shared_allocation_domain", None) is not None:
            raise InvalidArgument("its pages move in memory; use host pools of their own.")
        self.tokens = int(getattr(pool, "logical_page_size", None) or pool.page_size)
        """Indices that SGLang gives for one page."""
        self.count = int(getattr(pool, "logical_size", None) or pool.size) // self.tokens
        if self.count < 1:
            raise InvalidArgument("it has no pages.")
        first, self.lengths = self._pieces(0)
        second, _ = self._pieces(min(1, self.count - 1))
        last, lengths = self._pieces(self.count - 1)
        self._first = first
        self._strides = second - first if self.count > 1 else self.lengths
        apart = bool((self._strides >= self.lengths).all()) and bool((self.lengths > 0).all())
        if not apart or (lengths != self.lengths).any() or (first + (self.count - 1) * self._strides != last).any():
            raise InvalidArgument("its pages do not follow each other at equal distances.")
        self.layout = _native.KVLayout(self.regions(), self.count)
        """For copies; the host pool has to stay where it is until they are done."""

    def regions(self) -> list[tuple[int, int, int]]:
        """``(address, stride, length)`` of each piece of a page, in bytes."""
        return list(zip(self._first.tolist(), self._strides.tolist(), self.lengths.tolist(), strict=True))

    def numbers(self, indices: Any, pages: int) -> "Sequence[int]":
        """Numbers of the ``pages`` pages that ``indices`` (a tensor, ``tokens`` per page) stand for.

        Raises ``InvalidArgument`` if these are not so many pages, or lie elsewhere than when the pool was registered.
        """
        if indices is None or len(indices) != pages * self.tokens:
            got = "none" if indices is None else str(len(indices))
            raise InvalidArgument(f"{pages} pages have {pages * self.tokens} indices, and {got} came.")
        addresses, lengths = self._meta(indices, pages)
        numbers = (addresses[:, 0] - self._first[0]) // self._strides[0]
        elsewhere = (addresses != self._first + numbers[:, None] * self._strides).any() or (
            lengths != self.lengths
        ).any()
        if elsewhere or (numbers < 0).any() or (numbers >= self.count).any():
            raise InvalidArgument("the host pool's memory is not where it was when it was registered: attach anew.")
        return [int(number) for number in numbers]

    def _pieces(self, page: int) -> "tuple[Any, Any]":
        import torch

        addresses, lengths = self._meta(torch.arange(page * self.tokens, (page + 1) * self.tokens), 1)
        return addresses[0], lengths[0]

    def _meta(self, indices: Any, pages: int) -> "tuple[Any, Any]":
        """Addresses and lengths of all pieces, a row per page."""
        try:
            addresses, lengths = self._pool.get_page_buffer_meta(indices)
        except (ValueError, NotImplementedError, AttributeError, TypeError) as error:
            raise InvalidArgument(f"it does not say where its pages are ({error}).") from None
        shape = (pages, -1)
        return numpy.array(addresses, numpy.int64).reshape(shape), numpy.array(lengths, numpy.int64).reshape(shape)
