"""Where tensors lay at one time: whether they are still there, and what shares memory with them."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterable

from torch import Tensor, UntypedStorage

from cute_kernels import checks


class Addresses:
    """The addresses of some tensors at one time: a storage that is resized moves."""

    def __init__(self, tensors: Iterable[Tensor]):
        self._tensors = [*tensors]
        self._storages = [*{s._cdata: s for s in (t.untyped_storage() for t in self._tensors)}.values()]
        self._addresses = [*map(UntypedStorage.data_ptr, self._storages)]

    def hold(self) -> bool:
        """Whether they are the same now."""
        return [*map(UntypedStorage.data_ptr, self._storages)] == self._addresses

    @functools.cached_property
    def _bounds(self) -> list[int]:
        """First address, and address past the end, of the memory that the tensors cover: ascending, in pieces."""
        bounds = []
        sizes = map(checks.extent, self._tensors)
        starts = map(Tensor.data_ptr, self._tensors)
        for start, end in sorted((start, start + size) for start, size in zip(starts, sizes, strict=True)):
            if bounds and start <= bounds[-1]:
                bounds[-1] = max(bounds[-1], end)
            else:
                bounds += [start, end]
        return bounds

    def apart(self, start: int, end: int) -> bool:
        """Whether none of them shares memory with the addresses from start to end."""
        place = bisect.bisect_right(self._bounds, start)
        return place % 2 == 0 and (place == len(self._bounds) or end <= self._bounds[place])
