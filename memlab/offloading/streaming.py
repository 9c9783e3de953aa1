"""Weights streamed layer by layer: at home on the host or in a file, on the device only while they are needed.

A layer's weights are needed in its forward, and again when backward unpacks one of them. Both moments can be caught:
the first where the layer is called, the second in a saved-tensor hook. Each time, the layers that are not needed now or
next give up their storage (`resize_(0)`), and the next ones get theirs back and are filled ahead of need. A Parameter
stays the same object with the same storage, empty or full, so all that autograd saved of it (itself, a transpose) is
right again when backward comes.

    bytes on the device = (1 + prefetch) · w, instead of L · w, for the weights of L layers of w bytes each,
                          and as much again, instead of L · w, for gradients while backward runs

Sources: Rajbhandari et al. 2021 (ZeRO-Infinity), section 5; Zhao et al. 2023 (FSDP), section 4, for emptied storages.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves, tree_map_only

from memlab.backward import at_end_of_backward, backward_number
from memlab.memory_timeline import main_memory
from memlab.mixed_precision.writes import written_to
from memlab.offloading.courier import Courier
from memlab.offloading.homes import Home, HomesInFiles, HomesInMemory
from memlab.offloading.residency import Residency
from memlab.offloading.streamed_model import manners, parts_of, refuse_step, replaced_method, rest_on
from memlab.offloading.twins import StreamedLayer

_outer_hooks = functools.partial(torch._C._autograd._top_saved_tensors_default_hooks, True)


def stream_weights(
    model: nn.Module,
    layers: Iterable[nn.Module],
    to: str | os.PathLike = "cpu",
    *,
    device: torch.device | str | None = None,
    prefetch: int = 1,
) -> StreamedWeights:
    """Keep the weights of `layers` on the host, and on the device only one layer and the next: a context manager.

        with stream_weights(model, model.blocks, to=folder) as streamed:
            optimizer = torch.optim.AdamW(streamed.parameters())
            for x, y in batches:
                model(x, y).backward()
                optimizer.step()
                optimizer.zero_grad()

    layers: modules of the model, in the order in which they run (another order is right, too, and waits for each
      layer). What is streamed are their parameters, but for those that share memory with others, such as a tied
      head: these, buffers and all other modules stay on the device.
    to: "cpu" for the host's memory, pinned where the device is a GPU; or a folder, for an unnamed file of weights in it
      and one of gradients. For a model on the CPU, "cpu" moves bytes within the same memory: it saves nothing, and
      costs (1 + prefetch) layers.
    device: None for a model that is on its device, and comes back there in the end. A device for a model on the host
      that need not fit there: what is not streamed is brought there for the block's time.
    prefetch: how many layers are brought ahead of need, by a thread (and a stream) of its own; 0: each is waited for.

    The outputs and gradients are the same, bit for bit. Each gradient leaves as soon as it is complete: it is added to
    the `.grad` of the parameter's twin on the host, and `.grad` on the device is None. So an optimizer is given
    `streamed.parameters()`, as are clipping and all else that reads weights between steps. A streamed layer's own
    parameters may be read only inside its call: elsewhere their storage is empty, and to read it may crash. A twin's
    gradient is put there, not computed, so a hook on a twin never runs, such as one that steps in backward.

    Inference, frozen layers, several backwards before a step, retain_graph, double backward, dropout, autocast, and
    chapter 08's `checkpoint` around layers or within them work; and so does `state_dict`. Under autocast the 16-bit
    copies of the weights are saved for backward like activations, so a model that is to be trained this way is better
    kept in 16 bits, or checkpointed.

    Not here: the model's `load_state_dict`, `zero_grad`, `to(...)` and copies, `.data` of a twin, a forward that writes
    to its weights, sparse gradients, wrappers that average gradients over ranks (all these are refused); torch.func's
    transforms, torch.compile, and several threads at once; `zero_grad` of a module around the model, which does not
    reach the twins.

    Raises ValueError for layers that are not the model's, contain one another or have nothing to stream; OSError, which
    names the folder, if it has no room; RuntimeError in backward if a weight was written to after the forward, and in a
    step by an optimizer over other parameters, or after the block.
    """
    return StreamedWeights(model, layers, to, device=device, prefetch=prefetch)


class _Forward(functools.partial):
    """A layer's own forward, while its weights are there. A checkpoint around still sees whose it is."""

    around: Callable

    def __call__(self, *args, **kwargs):
        return self.around(super().__call__, *args, **kwargs)


class StreamedWeights:
    """What `stream_weights` returns, for one block. Inside it `layers` are those that are streamed."""

    def __init__(self, model: nn.Module, layers: Iterable[nn.Module], to: str | os.PathLike, *, device, prefetch: int):
        if not isinstance(prefetch, int) or prefetch < 0:
            raise ValueError(f"expected prefetch as a number of layers, 0 or more; found {prefetch!r}")
        self.model, self.prefetch = model, prefetch
        self.parts = parts_of(model, layers)
        some = self.parts[0][1][0]
        self.returns = device is None
        self.device = some.device if device is None else torch.device(device)
        self.imagined = isinstance(some, FakeTensor)
        pinned = self.device.type == "cuda" and not self.imagined
        self.homes = HomesInMemory(pinned=pinned) if to == "cpu" or self.imagined else HomesInFiles(to)
        self._undo: ExitStack | None = None
        self._entered = False

    @property
    def layers(self) -> list[StreamedLayer]:
        """The layers in their order. Raises RuntimeError outside the block."""
        if self._undo is None:
            raise RuntimeError("expected to be inside the block, found nothing streamed: `with stream_weights(...)`")
        return self._residency.layers

    def parameters(self) -> list[nn.Parameter]:
        """What an optimizer is to step: the model's parameters in their order, twins in place of those streamed."""
        twins = {p: twin for layer in self.layers for p, twin in zip(layer.parameters, layer.twins, strict=True)}
        return [twins.get(p, p) for p in self.model.parameters()]

    # ---- entering and leaving

    def __enter__(self) -> StreamedWeights:
        if self._entered:
            raise RuntimeError("expected to be entered once, found a second time; call stream_weights again")
        self._entered, self._task, self._running = True, -1, []
        self._ends: weakref.WeakValueDictionary[int, Callable] = weakref.WeakValueDictionary()
        self._owners: dict[int, StreamedLayer] = {}  # a storage on the device → the layer
        training = torch.is_grad_enabled()
        with torch.inference_mode(False), ExitStack() as stack:
            self._courier = stack.enter_context(Courier(self.device, self.imagined))
            self._residency = residency = Residency(self._courier, self.prefetch)
            stack.callback(self.homes.close)
            layers = [StreamedLayer(i, module, parameters) for i, (module, parameters) in enumerate(self.parts)]
            homes = self.homes.make([layer.nbytes for layer in layers])
            if not self.returns:
                stack.enter_context(rest_on(self.device, self.model, layers))
            for layer, home in zip(layers, homes, strict=True):
                residency.layers.append(layer)
                stack.callback(self._bring_back, layer)
                self._send_home(layer, home)
                self._install(layer, stack)
            if training:  # take all the room before it can run out
                self._make_gradient_homes()
            stack.enter_context(manners(self.model, layers))
            refuse = functools.partial(refuse_step, layers)
            stack.callback(register_optimizer_step_pre_hook(refuse).remove)
            stack.enter_context(self._catching())  # outside layers too: what backward saves for its own backward
            stack.callback(residency.empty)
            self._undo = stack.pop_all()
        return self

    def __exit__(self, *error) -> None:
        undo, self._undo = self._undo, None
        with torch.inference_mode(False), undo, suppress(*[Exception] * (error[0] is not None)):
            self._residency.settle(0)

    def _send_home(self, layer: StreamedLayer, home: Home) -> None:
        """The weights, and gradients if there are any, go home."""
        gradients = [p.grad for p in layer.parameters]
        for p in layer.parameters:
            p.grad = None
        layer.move_in(home, self.device, self._courier)
        self._owners[layer.flat.untyped_storage()._cdata] = layer
        for number, gradient in enumerate(gradients):
            if gradient is not None:
                self._send_gradient(layer, number, gradient)
        self._residency.settle(0)

    def _install(self, layer: StreamedLayer, stack: ExitStack) -> None:
        """Catch the moments at which the layer is needed, and those at which a gradient is complete."""
        forward = _Forward(layer.module.forward)
        forward.around = functools.partial(self._forward, layer)
        stack.enter_context(replaced_method(layer.module, "forward", forward))
        for module in layer.module.modules():  # those inside, too: a checkpoint in the layer's forward calls only them
            if module is layer.module or next(module.parameters(recurse=False), None) is not None:
                needed = module.register_forward_pre_hook(lambda *_: self._need(layer), prepend=True)
                stack.callback(needed.remove)  # before the hooks of others, which may look at weights
        for number, p in enumerate(layer.parameters):
            if p.requires_grad:
                complete = p.register_post_accumulate_grad_hook(functools.partial(self._complete, layer, number))
                stack.callback(complete.remove)

    def _bring_back(self, layer: StreamedLayer) -> None:
        """A layer's weights and gradients are its parameters' own again, where they were."""
        if layer.home is None:
            return
        layer.move_out(self._own)
        del self._owners[layer.flat.untyped_storage()._cdata]

    def _own(self, tensor: Tensor) -> Tensor:
        """A copy of what is at home, where the model was before."""
        with nullcontext() if self.returns else main_memory():
            own = torch.empty_like(tensor, device=self.device if self.returns else "cpu")
        self._courier.run(own.copy_, tensor)
        return own

    # ---- a layer is needed

    def _need(self, layer: StreamedLayer) -> None:
        """The layer, or a module inside it, is called; or backward has come to it."""
        in_backward = backward_number() != -1
        if in_backward:
            self._when_backward_ends()
        why = "backward" if in_backward else "forward" if torch.is_grad_enabled() else "inference"
        self._residency.need(layer, why)

    def _forward(self, layer: StreamedLayer, forward: Callable, *args, **kwargs) -> Any:
        """The layer's own forward, while its weights are there."""
        self._need(layer)
        layer.calls += 1
        self._running.append(layer)
        try:
            with self._catching():
                output = forward(*args, **kwargs)
            if any(isinstance(each, Tensor) and self._owner(each) for each in tree_leaves(output)):
                # weights themselves, such as learned queries, whose memory will be given back
                output = tree_map_only(Tensor, lambda each: each.clone() if self._owner(each) else each, output)
            return output
        finally:
            layer.calls -= 1
            self._running.pop()
            if layer.written_here:
                layer.version = -1  # to be brought again
                raise RuntimeError(
                    f"expected a forward that only reads its weights, found a {type(layer.module).__name__} whose "
                    "forward or hook writes to them, as an Embedding with max_norm does; leave it out of the streamed "
                    "layers"
                )

    def _owner(self, tensor: Tensor) -> StreamedLayer | None:
        """The layer whose weight it is, or a view of one."""
        return self._owners.get(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else None

    def _catching(self) -> saved_tensors_hooks:
        """Hooks for what ops save: for weights our own, for all else those that are in force around."""
        return saved_tensors_hooks(functools.partial(self._pack, _outer_hooks()), self._unpack)

    def _pack(self, outer: tuple[Callable, Callable] | None, tensor: Tensor) -> tuple:
        """An op saves a tensor. If it is a weight, note the layer and how often it had been written to at home."""
        layer = self._owner(tensor)
        if layer is not None:
            return tensor, tensor._version, None, layer, layer.version
        inside = self._running[-1] if self._running else None
        # detached: an op's own result, saved by it, would hold the graph that holds it, and neither could ever be freed
        return (tensor.detach() if outer is None else outer[0](tensor)), tensor._version, outer, inside, None

    def _unpack(self, saved: tuple) -> Tensor:
        """Backward wants the tensor: if it is a weight, the layer is needed, and if it was saved inside the layer, too.

        For it may be all that a checkpoint in there has kept, which is about to run a module's forward again.
        """
        tensor, version, outer, layer, written = saved
        weight = written is not None
        if weight and layer.home is None:
            raise RuntimeError("expected backward inside the block that streams the weights, found it after the block")
        if outer is not None:
            tensor = outer[1](tensor)
        elif tensor._version != version or (weight and layer.written != written):
            raise written_to(tensor, f"expected {'a weight' if weight else 'a tensor'} as it was in the forward")
        if layer is not None and layer.home is not None:
            self._need(layer)
        return tensor

    # ---- a gradient is complete

    def _complete(self, layer: StreamedLayer, number: int, p: nn.Parameter) -> None:
        """Autograd has added all there is to `p.grad`: it goes home."""
        hooks = p._post_accumulate_grad_hooks
        if len(hooks) > 1 and any(getattr(hook, "averages_ranks", False) for hook in hooks.values()):
            raise RuntimeError(
                f"expected a gradient that stays this rank's own, found one of shape {tuple(p.shape)} that a "
                "DataParallel is to average after it has left: call the model without the wrapper, and average the "
                "gradients of streamed.parameters() before the step"
            )
        gradient, p.grad = p.grad.detach(), None
        if gradient.layout is not torch.strided:
            raise TypeError(f"expected a dense gradient, found {gradient.layout}; give the layer sparse=False")
        self._when_backward_ends()
        self._send_gradient(layer, number, gradient)

    def _send_gradient(self, layer: StreamedLayer, number: int, gradient: Tensor) -> None:
        if layer.gradient_home is None:
            self._make_gradient_homes()
        self._residency.take(layer, number, gradient)

    def _make_gradient_homes(self) -> None:
        layers = [layer for layer in self._residency.layers if layer.trained and layer.gradient_home is None]
        for layer, home in zip(layers, self.homes.make([each.nbytes for each in layers]), strict=True):
            layer.gradient_home = home

    def _when_backward_ends(self) -> None:
        """See to it that all gradients are home then, and the device's bytes given back."""
        if self._task == (task := backward_number()):
            return
        self._task = task
        if task not in self._ends:
            self._ends[task] = end = functools.partial(self._backward_ended, task)  # which only a live task holds
            at_end_of_backward(end)

    def _backward_ended(self, task: int) -> None:
        del self._ends[task]
        if not self._ends:  # else it was inside another backward, which may hold weights it has unpacked
            self._residency.empty()
        self._residency.settle(0)
