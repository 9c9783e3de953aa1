"""The optimizer's step on the host: what only the step reads lies in main memory or in a file, and not on the GPU.

Of the 16 bytes a parameter in mixed precision, forward and backward need 2, the weight, and make 2 more, the gradient.
The other 12, master and Adam's moments, are read once a step and by nothing else. So gradients go down, the CPU steps,
weights go up: 4 bytes over the link, and 4 on the device; or 2, if each gradient leaves as soon as it is complete.

The price is the CPU's step, which reads and writes some 28 bytes a parameter at main memory's bandwidth, a tenth or
less of a GPU's own. Many tokens a step make it small beside forward and backward.   Source: Ren et al. 2021
(ZeRO-Offload), section 4.
"""

from __future__ import annotations

import itertools
import os
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import ExitStack

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from memlab.memory_timeline import in_main_memory, main_memory
from memlab.mixed_precision.edges import HALVES
from memlab.mixed_precision.master_weights import Chunk, MasterWeights
from memlab.offloading.host_gradients import HostGradients
from memlab.offloading.host_link import HostLinks
from memlab.offloading.slab import rounded
from memlab.offloading.state_file import Passage, StateFile, StateRegion
from memlab.units import MiB, parse_bytes

HOST_CHUNK_BYTES, FILE_CHUNK_BYTES = 8 * MiB, 4 * MiB
"""Bytes of FP32 gradients that are stepped at once, unless told otherwise, with states in memory and in a file."""


class OffloadedOptimizer(MasterWeights):
    """Any optimizer of torch.optim, stepped on the host, with its states there or in a file.

        optimizer = OffloadedOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-4, fused=True)

    params: parameters of any shape, or groups of them, on any device. Those in FP16 or BF16 get an FP32 master on the
      host, others on a GPU a copy there; those on the CPU in FP32 are their own, and nothing of theirs moves.
    optimizer_class, **defaults: as in `MasterWeights`. fused=True is the CPU's fastest.
    to: "cpu", main memory; or a folder, in which an unnamed file holds masters and states. Two chunks of it are in
      memory at a time, and only while a step lasts. `close()` gives its room back, else it goes with the optimizer; not
      before the last state dict that maps it. On imagined hardware, main memory stands for the folder.
    gradients: also take each gradient away as soon as backward has completed it. `p.grad` is None then; backward after
      backward is added on the host, in the gradient's own dtype. A step uses them up, or this optimizer's `zero_grad`
      drops them: the model's `zero_grad` does not find them. Clip with `clip_grad_norm_`. Ranks cannot average what is
      taken: DataParallel and DistributedDataParallel are refused in the step, the latter not if it looks for unused
      parameters or has a static graph: ranks then train apart! fully_shard averages first.
    chunk_bytes: how many bytes of FP32 gradients are stepped at once (one parameter's, if they are more; 4 an element
      also in FP64), while the next chunk's come, with states, and the last one's weights go. None: all at once. "auto":
      8 MiB in main memory, which a CPU's caches nearly hold; 4 MiB with a folder, whose step has six such blocks in its
      buffers.

    `param_groups` hold the model's own parameters: schedulers, `zero_grad` and (without gradients=True) clipping and
    loss scalers work as ever. `state[p]` holds what is in main memory. `state_dict()` is that of `MasterWeights`, or
    for FP32 parameters that of the class itself: each loads the other's, whatever the `to`.

    Raises what MasterWeights raises; OSError, naming the folder, if no file can be made in it or its room does not
    suffice. Room is reserved at the first step, before anything is stepped. After an error of the disk itself in the
    middle of a step, load a state dict.
    """

    _refuses_wide = False

    def __init__(
        self,
        params,
        optimizer_class: type[Optimizer],
        *,
        to: str | os.PathLike = "cpu",
        gradients: bool = False,
        chunk_bytes: int | str | None = "auto",
        **defaults,
    ):
        self.gradients = gradients
        if chunk_bytes == "auto":
            chunk_bytes = HOST_CHUNK_BYTES if to == "cpu" else FILE_CHUNK_BYTES
        limit = None if chunk_bytes is None else parse_bytes(chunk_bytes)
        self._file = None if to == "cpu" else StateFile(to)
        self._places = WeakTensorKeyDictionary()  # parameter → the region of its states, kept if a load forgets those
        self._links = HostLinks()
        self._host = HostGradients(self._links, self._file, limit)
        self._passage: Passage | None = None
        self._coming: deque[tuple[list[Tensor], list[Tensor], torch.cuda.Event]] = deque()
        self._stepped: list[Tensor] = []  # whose gradients the last step used up
        self._closed = False
        super().__init__(params, optimizer_class, chunk_bytes=limit, **defaults)

    def close(self) -> None:
        """Take the hooks off and give the file's room back. The model can train, this cannot step: save it before."""
        self._closed, self._stepped = True, []
        self._host.close()
        if self._file is not None:
            self._file.close()

    def add_param_group(self, param_group: dict) -> None:
        """Add parameters, as to any optimizer."""
        self._refuse_closed("add parameters to")
        super().add_param_group(param_group)
        if self.gradients:
            self._host.watch(self.param_groups[-1]["params"])

    def _refuse_closed(self, purpose: str) -> None:
        if self._closed:
            raise RuntimeError(f"expected an optimizer to {purpose}, found one that was closed; make another")

    # ---- where things are

    def _needs_master(self, p: Tensor) -> bool:
        return p.dtype in HALVES or not in_main_memory(p)

    def _wide(self, p: Tensor) -> Tensor:
        with main_memory():
            return p.detach().to("cpu", _master_dtype(p), copy=True)

    def _has_gradient(self, p: Tensor) -> bool:
        return p.grad is not None or p in self._host.held

    def _gradient(self, p: Tensor) -> Tensor:
        gradient = self._host.held.get(p, p.grad) if self._host.held else p.grad
        return gradient if in_main_memory(gradient) else gradient.to("cpu", copy=True)

    def _in_file(self, p: Tensor) -> bool:
        return self._file is not None and not isinstance(p, FakeTensor)

    def _params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    # ---- the step: chunk by chunk, the next one on its way down, the last one on its way back

    def _chunks(self) -> Iterator[Chunk]:
        self._refuse_closed("step")
        if self.gradients:
            self._host.collect(self._params())
        if self._file is not None and self._file.torn:
            raise OSError(f"expected whole states in {self._file.folder!r}, found a failed write; load a state dict")
        return super()._chunks()

    def _step_chunks(self, chunks: list[Chunk]) -> None:
        if self.gradients:
            self._stepped = [p for chunk in chunks for _, p in chunk]
        with ExitStack() as stack:
            stack.callback(self._after_step)
            self._open(stack, chunks)
            for chunk, following in itertools.zip_longest(chunks, chunks[1:], fillvalue=[]):
                if chunk is chunks[0]:
                    self._send_for(chunk)
                self._receive(chunk)
                self._send_for(following)
                try:
                    with main_memory():
                        self._step_chunk(chunk, alone=len(chunks) == 1)
                finally:
                    self._put_away(chunk)

    def _open(self, stack: ExitStack, chunks: list[Chunk]) -> None:
        """What the chunks will come through, until the stack closes."""
        for link in {self._links.to(chunk[0][1]) for chunk in chunks} - {None}:
            link.follow()
            stack.callback(link.finish)
        if any(self._in_file(p) for chunk in chunks for _, p in chunk):
            self._reserve(chunks)
            largest = max(sum(r.nbytes for r in self._regions(chunk) if r is not None) for chunk in chunks)
            self._passage = stack.enter_context(Passage(self._file, largest))

    def _regions(self, chunk: Chunk) -> list[StateRegion | None]:
        """Where in the file the chunk's states are, then where its gradients are."""
        gradients = (self._host.held.get(p) for _, p in chunk)
        return [
            *(self._places.get(p) if p in self.state else None for _, p in chunk),
            *(g if isinstance(g, StateRegion) else None for g in gradients),
        ]

    def _send_for(self, chunk: Chunk) -> None:
        """Begin to bring what a chunk needs."""
        if chunk and (link := self._links.to(chunk[0][1])) is not None:  # a chunk's parameters are of one device
            params = [p for _, p in chunk if p not in self._host.held and not p.grad.is_sparse]
            self._coming.append((params, *link.bring([p.grad for p in params])))
        if self._passage is not None and chunk:
            self._passage.ahead(self._regions(chunk))

    def _receive(self, chunk: Chunk) -> None:
        """Wait for what was sent for."""
        if self._links.to(chunk[0][1]) is not None:
            params, gradients, event = self._coming.popleft()
            event.synchronize()
            self._host.held.update(zip(params, gradients, strict=True))
        if self._passage is not None:
            found = self._passage.arrived()
            for (_, p), states, gradient in zip(chunk, found[: len(chunk)], found[len(chunk) :], strict=True):
                if states:
                    self.state[p] = states | self.state[p]
                self._host.held.update((p, g) for g in gradient.values())

    def _put_away(self, chunk: Chunk) -> None:
        """The gradients are used up, the states go back."""
        for _, p in chunk if self._host.held else ():
            self._host.held.pop(p, None)
        if self._passage is not None:
            self._passage.back(self._filed([p for _, p in chunk if p in self.state]))

    def _after_step(self) -> None:
        if not self.gradients:
            self._host.held.clear()  # copies of p.grad, if the step raised
        if not self._host.held:
            self._host.clipping = None  # else it is owed to gradients that were not stepped
        self._passage = None
        self._coming.clear()

    def _factor(self) -> Tensor | None:
        return super()._factor() if self._host.clipping is None else self._host.clipping

    def _round(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        if not pairs or (link := self._links.to(pairs[0][0])) is None:
            return super()._round(pairs)
        link.send([m for _, m in pairs], [p for p, _ in pairs])

    # ---- states in the file

    def _reserve(self, chunks: list[Chunk]) -> None:
        """Room for the states that this step will make: on a first step nothing is stepped unless all will fit."""
        nbytes, sizes = 0, {}
        for group, p in itertools.chain(*chunks):
            if p not in self._places:
                kind = id(group), _master_dtype(p)
                if kind not in sizes:
                    sizes[kind] = self._state_itemsizes(group, kind[1])
                for itemsize in (*sizes[kind], *([kind[1].itemsize] if self._needs_master(p) else [])):
                    nbytes += rounded(itemsize * p.numel())
        self._file.reserve(nbytes)

    def _state_itemsizes(self, group: dict, dtype: torch.dtype) -> list[int]:
        """Bytes an element of each state of a parameter whose master has this dtype, found by a step of a small one."""
        trial = torch.zeros(2, 3, dtype=dtype, device="cpu")
        trial.grad = torch.zeros_like(trial)
        optimizer = self._make([group | {"params": [trial]}])
        try:
            type(optimizer).step.__wrapped__(optimizer)
        except Exception:  # it wants others, such as sparse gradients or other shapes; then nothing is reserved
            return []
        states = optimizer.state[trial].values()
        return [state.itemsize for state in states if torch.is_tensor(state) and state.shape == trial.shape]

    def _filed(self, params: list[Tensor]) -> list[tuple[StateRegion, dict[str, Tensor]]]:
        """Take parameters' states out of `state`, but for single numbers. Returns them, each after their place.

        If one finds no place, all stay in `state`, which counts more than what the file has.
        """
        filed = []
        for p in params:
            large = {name: s for name, s in self.state[p].items() if torch.is_tensor(s) and s.numel() > 1}
            filed.append((self._file.region(large, self._places.get(p)), large))
        for p, (place, large) in zip(params, filed, strict=True):
            self._places[p] = place
            self.state[p] = {name: s for name, s in self.state[p].items() if name not in large}
        return filed

    # ---- gradients

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """As torch.nn.utils.clip_grad_norm_ for all parameters, wherever their gradients are. Returns their norm: FP32,
        or FP64 if any of them is.

        With gradients=True the step does it: it multiplies the FP32 gradients, so that nothing is rounded on the way.
        Call it when all gradients are there, once a step. Raises RuntimeError for a norm of inf or nan, if told to.
        """
        self._refuse_closed("clip for")
        if not self.gradients:
            return torch.nn.utils.clip_grad_norm_(self._params(), max_norm, norm_type, error_if_nonfinite)
        self._host.collect(self._params())
        return self._host.clip_norm(self._params(), max_norm, norm_type, error_if_nonfinite)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, wherever they are; or with set_to_none=False make them 0, also those a step used up."""
        zeroed = () if set_to_none or not self.gradients else {*self._stepped, *self._host.held}
        self._stepped = []
        super().zero_grad(set_to_none)
        self._host.drop()
        for p in zeroed:
            p.grad = torch.zeros_like(p)
            self._host.take(p)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        if self.gradients:
            raise RuntimeError(
                "expected gradients=False with a loss scaler, which looks for inf among p.grad; found gradients=True: "
                "use it with BF16, which needs no scaler"
            )
        return True

    # ---- saving, loading

    def state_dict(self) -> dict:
        """As of MasterWeights. States from a file are mapped: read when they are used, so save them before you step
        or load; and as long as they live, the file's room is kept.
        """
        if self._file is not None:
            self._refuse_closed("save")
        kept, window = self.state, self._file.mapped() if self._places else None
        self.state = defaultdict(dict)
        try:
            for p, states in kept.items():
                if p in self._places:
                    states = self._places[p].mapped(window) | states
                if p.dtype not in HALVES:
                    states = {name: state for name, state in states.items() if name != "master"}  # only a copy
                if states:
                    self.state[p] = states
            return super().state_dict()
        finally:
            self.state = kept

    def load_state_dict(self, state_dict: dict) -> None:
        """Resume from what `state_dict()` gave, here or in MasterWeights, or, in FP32, in the optimizer's class."""
        self._refuse_closed("load into")
        with main_memory():
            super().load_state_dict(state_dict)
        if self._file is not None:
            self._file.torn = False
            for place, states in self._filed([p for p in self.state if self._in_file(p)]):
                self._file.write(place, states)

    def __getstate__(self) -> dict:
        raise TypeError(
            "expected state_dict() to save an OffloadedOptimizer, found pickle or deepcopy; save that instead"
        )


def _master_dtype(p: Tensor) -> torch.dtype:
    return torch.float32 if p.dtype in HALVES else p.dtype
