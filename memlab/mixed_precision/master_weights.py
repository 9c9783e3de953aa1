"""Master weights: the model computes in 16 bits, the optimizer steps on an FP32 copy of every weight.

A weight of 1.0 in BF16 has no neighbour nearer than 1/256 below and 1/128 above. An update below half of that rounds to
nothing, and at a learning rate of 1e-3 nearly all of Adam's are. So the update is added to an FP32 copy, the *master*,
where small steps add up, and the 16-bit weight is the master, rounded. Micikevicius et al. 2018, section 3.1.

A parameter then takes 2 bytes as weight, 2 as gradient, 4 as master and, with Adam, 8 as moments: 16, as many as in
FP32. What is saved is activations and time, and never a byte of this sum. A second FP32 copy, of the gradients, would
make it 20: so the step goes chunk by chunk, and the FP32 gradients of one chunk at a time exist. What casts cost in
time is saved elsewhere: an elementwise optimizer steps a chunk's parameters as one vector, see flat_group.py, and a
larger parameter in slices, see slices.py. Fused Adam needs neither: its casts are part of the step's kernel, see
fused_adam.py.
"""

from __future__ import annotations

import functools
import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import closing
from itertools import compress

import torch
from torch import Tensor
from torch.optim import Optimizer

from memlab.memory_arithmetic.optimizers import chunk_limit, slice_elements
from memlab.memory_timeline import in_main_memory
from memlab.mixed_precision import fused_adam
from memlab.mixed_precision.fitting import HALVES, Counters, keep_options, refuse_class, refuse_shared
from memlab.mixed_precision.flat_group import ELEMENTWISE, Chunk, FlatGroup, FlatGroups, is_dense
from memlab.mixed_precision.gradient_block import GradientBlock
from memlab.mixed_precision.loading import states_in_fp32, with_states
from memlab.mixed_precision.slices import can_be_sliced, in_slices
from memlab.mixed_precision.versions import Versions


class MasterWeights(Optimizer):
    """Any optimizer of torch.optim around 16-bit weights: it steps on FP32 masters, and its states are FP32.

        optimizer = MasterWeights(model.parameters(), torch.optim.AdamW, lr=3e-4, fused=True)

    params: parameters of any shape, or groups of them. FP16 and BF16 parameters get a master, all others are their own.
    optimizer_class, **defaults: whose `step` it is, and what it is made with. It must update each parameter from its
      own gradient and keep what it counts in a parameter's state or a group's option, as nearly all do; one that looks
      at all of them together, or at their places in the groups, needs chunk_bytes=None.
    chunk_bytes: how many bytes of FP32 gradients may exist at once, as an int or such as "16 MiB"; None: no limit.
      "auto": 64 MiB on a GPU, where each chunk costs launches; 2 MiB on a CPU, whose caches keep them until they are
      used. An elementwise optimizer of torch.optim steps what fits of a chunk as one vector, and a larger parameter in
      slices (of 64 bytes or more): its for-loop's temporaries are two of a chunk, not of a parameter. Others step on a
      whole parameter at least; with None all do, and where gradients are FP32 already or strides are not the master's.
      Adam and AdamW with fused=True make none on a GPU where Triton works, or on a CPU where a C compiler makes a
      kernel with PyTorch's bits (on Linux): it reads the 16-bit gradients.

    `param_groups` hold the model's own parameters, so schedulers, `zero_grad`, clipping and loss scalers find what they
    expect. `state[p]` holds the master, under "master", with the optimizer's states: both are made at a parameter's
    first step, and a parameter that never has a gradient costs nothing. They may be views of what a chunk has: to save
    one parameter's alone, clone them.

    A weight that somebody writes to between steps, such as `model.load_state_dict`, is taken over, if torch counts it
    (`torch.distributed.broadcast` it does not: see `refresh`).
    A scale that a scaler leaves to the optimizer (torch.amp.GradScaler does) is divided out here, in FP32: 16-bit
    gradients stay scaled, those in FP32 may be divided in place. Before the scaler's `unscale_`, call
    `widen_gradients`.
    For plain tensors: FSDP2's DTensor is refused by torch ("mixed torch.Tensor and DTensor").

    Raises TypeError or ValueError for an optimizer instead of its class, one whose step needs a closure (LBFGS) or is
    to be differentiable, a chunk_bytes below 1, and parameters of which none has 16 bits, or two lie in one memory.
    """

    _step_supports_amp_scaling = True  # to GradScaler: hand over `grad_scale` and `found_inf`, and do not unscale

    def __init__(
        self,
        params,
        optimizer_class: type[Optimizer],
        *,
        chunk_bytes: int | str | None = "auto",
        **defaults,
    ):
        refuse_class(optimizer_class)
        chunk_limit(chunk_bytes, "cpu")  # refuses what is none
        self.chunk_bytes = chunk_bytes
        self._make = functools.partial(optimizer_class, **defaults)
        self._inner = self._make(params)
        self._inner.state.clear()
        self._versions = Versions()  # of the weights, when their step ended
        self._blocks: dict[torch.device, GradientBlock] = {}
        self._counters = Counters()
        self._flats = FlatGroups()
        self._kernels: dict[int, fused_adam.FusedAdam] = {}  # by a group's id
        self._divided: list[Tensor] = []  # gradients, in this step and in place
        super().__init__(self._inner.param_groups, self._inner.defaults)
        params = [p for group in self.param_groups for p in group["params"]]
        if self._refuses_wide and not any(map(self._needs_master, params)):
            dtypes = sorted({str(p.dtype) for p in params})
            raise ValueError(
                f"expected parameters in FP16 or BF16, found only {', '.join(dtypes)}, which are "
                f"their own masters (autocast leaves weights in FP32 too); use {optimizer_class.__name__} itself"
            )

    def add_param_group(self, param_group: dict) -> None:
        """Add parameters, as to any optimizer. Raises ValueError as the class does."""
        super().add_param_group(param_group)
        try:
            if self.param_groups[-1].get("differentiable"):
                raise ValueError(
                    "expected an optimizer without differentiable=True, since no gradient comes back through the "
                    "rounding of a master to its weight; use it on FP32 weights"
                )
            refuse_shared([p for group in self.param_groups for p in group["params"]])
        except ValueError:
            del self.param_groups[-1]
            raise

    # ---- the step

    @torch._disable_dynamo  # as in torch.optim; traced, every parameter would get the last one's gradient
    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None):
        """One step of every parameter that has a gradient; of none, if a scaler found inf or nan. Returns the loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not getattr(self, "found_inf", False) and self._step_by_kernel():
            try:
                self._counters.begin()
                self._flats.begin_step(self.state, self.chunk_bytes)
                with closing(self._brought()) as chunks:
                    keep_options(self._inner, [pair for chunk in chunks for pair in self._step_chunk(chunk)])
                self._counters.refuse(self._inner)
            except BaseException:  # gradients that were divided in place are as before, to try again
                for gradient in self._divided:
                    multiply([gradient], self.grad_scale.float())
                raise
            finally:
                self._divided.clear()
        return loss

    def _step_by_kernel(self) -> bool:
        """Step what `fused_adam` can step: its gradients are never widened. Returns whether others are left."""
        self._done, kernels, left = frozenset(), {}, not self._rearranges
        for group in self.param_groups if self._rearranges else ():
            gradients = [p.grad for p in group["params"]]
            has_one = [gradient is not None for gradient in gradients]
            asked, gradients = list(compress(group["params"], has_one)), list(compress(gradients, has_one))
            if not (asked and fused_adam.has_kernel(self._inner, group)):
                left = left or bool(asked)
                continue
            kernel = kernels[id(group)] = self._kernels.get(id(group)) or fused_adam.FusedAdam(group)
            if not kernel.holds(asked, gradients, self.state):
                self._versions.wrote(kernel.unwritten())
                kernel.begin(asked, lambda able, group=group: self._masters([(group, p) for p in able], flat=False)[1])
            left = left or len(kernel.params) < len(asked)
        self._kernels = kernels  # what others held goes
        for kernel in kernels.values():
            kernel.step(getattr(self, "grad_scale", None))
        for kernel in kernels.values():
            kernel.end()
        if left:
            self._done = {id(p) for kernel in kernels.values() for p in kernel.params}
        return left

    def _brought(self) -> Iterator[Chunk]:
        """The chunks of `_chunks`, each when all that its step needs is where the masters are. Ends with the step."""
        chunks = self._chunks()
        for chunk in chunks if len(chunks) > 1 else ():
            dense = [p for _, p in chunk if p.grad.dtype in HALVES and not p.grad.is_sparse or self._flats.of(p)]
            self._block(chunk[0][1].device).expect(self._slice(chunk) or sum(map(Tensor.numel, dense)))
        try:
            yield from chunks
        finally:
            self._end_blocks()

    def _block(self, device: torch.device) -> GradientBlock:
        """Where the FP32 gradients of masters on this device are."""
        if device not in self._blocks:
            self._blocks[device] = GradientBlock(device)
        return self._blocks[device]

    def _end_blocks(self, *, keep: bool = False) -> None:
        for block in self._blocks.values():
            block.end(keep=keep)

    def _chunks(self) -> list[Chunk]:
        """Parameters with gradients and their groups, in order, as many as chunk_bytes allow, of one device.

        Those of a flat group stay together.
        """
        chunks, nbytes, most, device, place = [], 0, 0, None, {}
        flat_group_of, has_gradient, done = self._flats.of, self._has_gradient, self._done
        for group in self.param_groups:
            for p in group["params"]:
                if id(p) in done or not has_gradient(p):
                    continue
                flat = flat_group_of(p)
                if flat in place:
                    place[flat].append((group, p))
                    continue
                nbytes += (size := 4 * (p if flat is None else flat.master).numel())
                if nbytes > most or p.device != device:
                    chunks.append([])
                    nbytes, device, most = size, p.device, self._most_bytes(p)
                chunks[-1].append((group, p))
                if flat is not None:
                    place[flat] = chunks[-1]
        return chunks

    def _most_bytes(self, p: Tensor) -> float:
        """Of a chunk where this parameter is; the imagined card's are on a GPU."""
        return chunk_limit(self.chunk_bytes, "cpu" if in_main_memory(p) else "gpu")

    def _slice(self, chunk: Chunk) -> int:
        """If this is one parameter, and larger than a chunk, how many of its elements are stepped at once. 0: all."""
        p = chunk[0][1]
        if len(chunk) > 1 or not (self._can_be_flat and self._needs_master(p) and is_dense(p)):
            return 0
        master = self.state.get(p, {}).get("master", p)  # of other strides if the weight's were changed since
        is_alike = p.grad.layout is p.layout and p.grad.dtype in HALVES
        is_alike = is_alike and p.grad.stride() == p.stride() == master.stride()
        elements = slice_elements(p.numel(), self._most_bytes(p))
        return elements if is_alike and elements < p.numel() else 0

    def _step_slices(self, group: dict, p: Tensor, state: dict) -> list[tuple[dict, dict]]:
        """As `_step_chunk`, of one parameter that is larger than a chunk."""
        inner, groups, place = self._inner, [], None
        try:
            for its, (m, weight, gradient) in in_slices(state, [p, p.grad], self._most_bytes(p)):
                groups.append((group, group | {"params": [m]}))
                try:
                    inner.state[m], inner.param_groups = its, [groups[-1][1]]
                    if place is None:
                        [place] = self._block(m.device).views([m])
                    m.grad = place[: m.numel()].copy_(gradient)
                    self._divide([m])
                    self._step_inner()
                finally:  # if it raises halfway, the weight goes along with its master
                    groups[-1][1]["params"], inner.state, m.grad = group["params"], defaultdict(dict), None
                    weight.copy_(m)
        finally:
            inner.param_groups = self.param_groups
            self._versions.wrote([p])
        return groups

    def _step_chunk(self, chunk: Chunk) -> list[tuple[dict, dict]]:
        """One step of these parameters. Returns their groups, each with what the optimizer made of its options."""
        inner, groups = self._inner, {id(group): (group, group | {"params": []}) for group, _ in chunk}
        masters, states = self._masters(chunk)
        if self._slice(chunk) and can_be_sliced(states[0]):
            return self._step_slices(*chunk[0], states[0])
        if self._can_be_flat:
            self._flats.begin(chunk, states)
        flats, order = self._flats.whole(chunk, states, self.state)
        in_flats = sum(flat.count for flat in flats)  # they come first
        chunk, states = [chunk[i] for i in order], [states[i] for i in order]
        alone = [state.get("master", masters[i]) for i, state in zip(order[in_flats:], states[in_flats:], strict=True)]
        weights, masters = [p for _, p in chunk], [*(m for flat in flats for m in flat.masters), *alone]
        seen = [(flat.group, flat.master, flat.state) for flat in flats]  # by the optimizer
        seen += [
            (group, m, state) for (group, _), m, state in zip(chunk[in_flats:], alone, states[in_flats:], strict=True)
        ]
        for group, m, state in seen:
            groups[id(group)][1]["params"].append(m)
            inner.state[m] = {} if len(state) == 1 and "master" in state else state
        narrow, wide = weights, masters  # of those that have a master
        if any(map(operator.is_, weights[in_flats:], alone)):
            halves = [(p, m) for p, m in zip(weights, masters, strict=True) if m is not p]
            narrow, wide = [p for p, _ in halves], [m for _, m in halves]
        try:
            inner.param_groups = [options for _, options in groups.values()]
            self._widen(narrow, wide, flats)
            self._divide([m for _, m, _ in seen], weights, masters)
            self._step_inner()
        finally:  # if it raises halfway, some masters have moved: their states and weights go along
            strange, before = [], [state for _, _, state in seen]
            if len(inner.state) > len(seen):
                strange = [key for key in inner.state if not isinstance(key, Tensor)]
            if len(inner.state) != len(seen) or not all(map(operator.is_, inner.state.values(), before)):
                its = zip(weights[in_flats:], alone, strict=True)
                self.state.update((p, self._kept(p, m) | inner.state[m]) for p, m in its)
            inner.state, inner.param_groups = defaultdict(dict), self.param_groups
            for flat in flats:
                flat.master.grad = None
                flat.hand_out()
            for m in wide[in_flats:]:
                m.grad = None
            if wide:
                self._round(narrow, wide)
        if strange:
            raise ValueError(
                f"expected {type(inner).__name__} to keep its states by parameter, found one under {strange[0]!r}, "
                "which would be lost; let it keep that in its groups"
            )
        for group, options in groups.values():
            options["params"] = group["params"]
        return list(groups.values())

    def _step_inner(self) -> None:
        """The optimizer's own step, without its hooks: they are for the whole step, and run there."""
        with self._counters.watch(self._inner):
            type(self._inner).step.__wrapped__(self._inner)

    def _widen(self, weights: list[Tensor], masters: list[Tensor], flats: list[FlatGroup]) -> None:
        """Give each of these masters its weight's gradient, in the master's dtype. Those of flat groups come first."""
        in_flats = sum(flat.count for flat in flats)
        copied, wide = [*map(self._gradient, weights[:in_flats])], masters[:in_flats]
        for p, m in zip(weights[in_flats:], masters[in_flats:], strict=True):
            gradient = self._gradient(p)
            dense = m.dtype is torch.float32 and not gradient.is_sparse
            if dense and (gradient.dtype in HALVES or gradient.stride() != m.stride()):
                copied.append(gradient)  # or of another layout: fused kernels read a gradient in its master's order
                wide.append(m)
            else:
                m.grad = gradient.to(m.device, m.dtype)
        if wide:  # places in the memory that the chunk before had
            places = self._block(wide[0].device).views(wide, flats)
            for m, place in zip([*wide[in_flats:], *(flat.master for flat in flats)], places[in_flats:], strict=True):
                m.grad = place
            torch._foreach_copy_(places[: len(wide)], copied)

    def _divide(self, seen: list[Tensor], weights: Sequence[Tensor] = (), masters: Sequence[Tensor] = ()) -> None:
        """Divide the gradients of what the optimizer sees by the loss scale, if a scaler left that to us.

        weights, masters: those among them whose gradients may be one and the same; it is divided in place.
        """
        scale = getattr(self, "grad_scale", None)
        if scale is not None:
            precise = torch.float32 if scale.device.type == "mps" else torch.float64
            multiply([m.grad for m in seen], scale.to(precise).reciprocal().float())
            both = zip(weights, masters, strict=True)
            self._divided += [m.grad for p, m in both if m.grad is not None and m.grad is p.grad]

    # ---- masters

    _keeps_masters = _refuses_wide = _rearranges = True
    _done: Set[int] = frozenset()  # ids of parameters that the kernel has stepped

    @property
    def _can_be_flat(self) -> bool:
        """Whether parameters that begin may be stepped as one; not where what is made could not be written to later."""
        wanted = self._rearranges and self.chunk_bytes is not None
        return wanted and type(self._inner) in ELEMENTWISE and not torch.is_inference_mode_enabled()

    def _needs_master(self, p: Tensor) -> bool:
        """Whether the optimizer steps on a copy of this parameter."""
        return p.dtype in HALVES

    def _wide(self, p: Tensor) -> Tensor:
        """A parameter's weights in FP32, where its master is to be."""
        return p.detach().float()

    def _has_gradient(self, p: Tensor) -> bool:
        """Whether there is a gradient to step with."""
        return p.grad is not None

    def _gradient(self, p: Tensor) -> Tensor:
        """The gradient of a parameter that has one, in its own dtype, once its chunk is brought."""
        return p.grad

    def _masters(self, chunk: Chunk, *, flat: bool = True) -> tuple[list[Tensor], list[dict]]:
        """Their FP32 weights, up to date with what others wrote to them, and their states; made, where missing."""
        weights = [p for _, p in chunk]
        states, all_unchanged = list(map(self.state.get, weights)), self._versions.unchanged(weights)
        if all(all_unchanged) and all(state is not None and "master" in state for state in states):
            return [state["master"] for state in states], states
        begin = [its for its in chunk if self._needs_master(its[1]) and not self.state.get(its[1])]
        masters, states, places = [], [], self._flats.places(begin if flat and self._can_be_flat else [])
        for (group, p), unchanged in zip(chunk, all_unchanged, strict=True):
            state = self.state.get(p)  # now: a parameter may be given twice
            m = state.get("master") if state else None
            if m is None:
                m = places[id(p)].copy_(p) if id(p) in places else self._wide(p) if self._needs_master(p) else p
                kept = self._kept(p, m)
                if state is None or (kept and not state):  # {}: somebody has looked for it
                    # most optimizers begin with none; torch 2.11's Adagrad needs what its __init__ makes
                    self.state[p] = state = kept | self._make([group | {"params": [m]}]).state[m]
                else:
                    state.update(kept)  # its weight was its own master until it came to have 16 bits
                if kept:
                    self._versions.note(p)
            elif not unchanged:
                take_over(p, m)
                self._versions.note(p)
            masters.append(m)
            states.append(state)
        return masters, states

    def _kept(self, p: Tensor, m: Tensor) -> dict[str, Tensor]:
        """What a parameter's state holds beside the optimizer's own."""
        return {"master": m} if self._keeps_masters and m is not p else {}

    def _round(self, weights: list[Tensor], masters: list[Tensor]) -> None:
        """Masters → weights, to the nearest."""
        torch._foreach_copy_(weights, masters)
        self._versions.wrote(weights)

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over what was written to the weights: where a weight is not its master rounded, the master becomes it.

        All other elements keep their low bits. `step` does this by itself for a write that torch counts in
        `p._version`, and for other `data`. Unseen, and in need of this call, are writes into `p.data`
        (`p.data.clamp_(...)`) and its NumPy array, and those of torch.distributed's broadcast, all_reduce and recv.
        """
        for p, state in self.state.items():
            if "master" in state:
                take_over(p, state["master"])

    # ---- gradients

    @torch.no_grad()
    def widen_gradients(self) -> None:
        """Turn 16-bit gradients into FP32 ones of the same parameters, one after the other: 2 bytes more a parameter.

        Then a scaler's `unscale_` and `clip_grad_norm_(model.parameters(), ...)` lose nothing. Divided by the scale in
        FP16, a small gradient would underflow again. Once the gradients are cleared (`set_to_none=True`, the default),
        backward makes 16-bit ones.
        """
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.grad.dtype in HALVES:
                    wide = p.grad.float()
                    p.grad, p.grad_dtype = None, None  # None: of any type
                    p.grad = wide

    # ---- saving and loading

    def load_state_dict(self, state_dict: dict) -> None:
        """Resume from what `state_dict()` gave, masters and states in FP32. The weights themselves are the model's.

        A weight that is not its master rounded is taken over: from BF16 to FP16, first copy the masters to the weights.
        Raises ValueError for the dict of another class, which has no masters, and for one of other parameter groups or
        shapes; all is then as it was.
        """
        hook = self.register_load_state_dict_pre_hook(MasterWeights._in_fp32)  # the last: it gets what others return
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()
        # It fills in the options that it has now, and had not when they were saved.
        self._inner.__setstate__({"state": self._inner.state, "param_groups": self.param_groups})

    def _in_fp32(self, state_dict: dict) -> dict:
        """A state dict with states by parameter, which torch takes as they are; those by number it casts to 16 bits."""
        saved = with_states(state_dict, self.param_groups, type(self).__name__, has_masters=self._keeps_masters)
        wide = {p: self._wide(p) for p in saved if self._needs_master(p)}
        states = states_in_fp32(self._inner, self.param_groups, state_dict, wide)
        for p, m in wide.items() if self._keeps_masters else ():
            states[p]["master"] = m.copy_(states[p].get("master", m))  # its own, whoever else has the dict's
        return state_dict | {"state": states}

    def __getstate__(self) -> dict:
        return super().__getstate__() | {name: getattr(self, name) for name in ("chunk_bytes", "_make", "_inner")}

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._versions, self._blocks, self._counters, self._flats = Versions(), {}, Counters(), FlatGroups()
        self._kernels, self._divided = {}, []


def multiply(gradients: list[Tensor], factor: Tensor) -> None:
    """Multiply gradients on one device, dense or sparse, in place."""
    if gradients:
        values = [gradient._values() if gradient.is_sparse else gradient for gradient in gradients]
        torch._foreach_mul_(values, factor.to(values[0].device))


def take_over(p: Tensor, m: Tensor) -> None:
    """Where a weight is not its master rounded, somebody wrote to it: the master becomes that weight, in place."""
    p = p.detach().to(m.device)
    m.copy_(torch.where(p == m.to(p.dtype), m, p))
