"""Where the FP32 gradients of one chunk of parameters after another are: in the same memory, while a step lasts.

Memory of its own for each chunk might go back to the system each time, and come again page by page; and none of it
would be in a cache. Of two threads one writes and reads the first half of each large gradient, the other the second.
So the largest gradients of a chunk come first: chunks then look alike, and a core finds in its own caches what it had
of the chunk before. Else it fetches from another core's what it is about to overwrite; where caches are far apart, that
is slower than from memory.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from memlab.mixed_precision.flat_group import FlatGroup, views_in

RESIZABLE = ("cpu", "cuda")
"""Types of devices whose storages give their bytes back and take them again; on others each step has a new one."""


class GradientBlock:
    """One storage, and the views of it that each chunk of a step has.

    The views stay from step to step, while the storage has no bytes between: for a small parameter, making a view takes
    longer than filling it. (Who finds them by `gc.get_objects` must not read them then: FSDP's are no different.) An
    optimizer that keeps a gradient past its chunk keeps that storage; from then on each chunk has one of its own size.
    """

    def __init__(self, device: torch.device):
        self._device, self._chunk, self._expected, self._left = device, 0, 0, False
        self._begin()

    def _begin(self) -> None:
        self._flat = torch.empty(0, dtype=torch.float32, device=self._device)
        self._views: dict[int, tuple[tuple, int, list[Tensor]]] = {}  # by chunk: their layout, elements, themselves

    def expect(self, numel: int) -> None:
        """Some chunk of the coming step has so many elements. Growing within a step would leave what caches have."""
        self._expected = 0 if self._left else max(self._expected, numel)

    def views(self, masters: list[Tensor], flats: Sequence[FlatGroup] = ()) -> list[Tensor]:
        """Where the gradients of the step's next chunk go, in the shapes and strides of these. Values are undefined.

        masters: dense, in any order of dimensions. The chunk before is overwritten. flats: the groups whose masters
        come first; of these gradients, too, each group's lie one after another, and behind the views is one of each
        group's whole, (n,).
        """
        self._let_go()
        self._chunk += 1
        alone = masters[sum(flat.count for flat in flats) :]
        layout = list(flats), [m.shape for m in alone], [m.stride() for m in alone]
        its_layout, numel, views = self._views.get(self._chunk, (None, 0, []))
        if its_layout != layout:
            numel, views = sum(map(Tensor.numel, masters)), []
        self._hold(4 * max(self._expected, numel))
        if not views or self._chunk not in self._views:  # or the block began anew
            views = self._made(masters, [flat.count for flat in flats])
            self._views[self._chunk] = layout, numel, views
            self._owners = 1 + sum(len(its) for *_, its in self._views.values())  # the block's own
        return views

    def _made(self, masters: list[Tensor], together: Sequence[int]) -> list[Tensor]:
        first = sum(together)
        order = [*range(first), *sorted(range(first, len(masters)), key=lambda i: -masters[i].numel())]
        made = dict(zip(order, views_in(self._flat, [masters[i] for i in order]), strict=True))
        views = [made[i] for i in range(len(masters))]
        for end, count in zip(accumulate(together), together, strict=True):
            its = views[end - count : end]
            views.append(self._flat.as_strided((sum(map(Tensor.numel, its)),), (1,), its[0].storage_offset()))
        return views

    def _hold(self, nbytes: int) -> None:
        if self._flat.untyped_storage().nbytes() < nbytes:
            self.free()  # else what is in it would be copied
            if self._device.type in RESIZABLE:
                self._flat.untyped_storage().resize_(nbytes)
            else:
                self._flat = torch.empty(nbytes // 4, dtype=torch.float32, device=self._device)
        elif self._chunk == 1:
            self._flat.detach()  # an op, from which a Meter learns of bytes that are here from before

    def _let_go(self) -> None:
        """Leave the storage to whoever holds it, or a view of the last chunk."""
        if self._chunk in self._views:
            owners = torch._C._storage_Use_Count(self._flat.untyped_storage()._cdata) - 1  # this question
            views = self._views[self._chunk][2]
            if owners > self._owners or max(map(sys.getrefcount, views)) > 2:  # the list's, and this question
                self._left, self._expected = True, 0
                self._begin()

    def free(self) -> None:
        """Give the bytes back, until the next chunk."""
        self._let_go()
        storage = self._flat.untyped_storage()
        if storage.nbytes() and self._device.type in RESIZABLE:
            storage.resize_(0)
        elif storage.nbytes():
            self._begin()

    def end(self, *, keep: bool = False) -> None:
        """The step is over. keep: its bytes stay."""
        if keep:
            self._let_go()
        else:
            self.free()
        self._chunk, self._expected = 0, 0
