"""What a model must be to have its weights streamed, and what of the usual it does and refuses while they are.

A streamed parameter has no bytes between its turns, and whoever reads it then reads nothing, or crashes. So a state
dict is made of the twins, where the weights are at home, and other ways to a model's weights are refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from memlab.memory_timeline import main_memory
from memlab.offloading.twins import StreamedLayer


def parts_of(model: nn.Module, layers: Iterable[nn.Module]) -> list[tuple[nn.Module, list[nn.Parameter]]]:
    """Each layer with the parameters that can be streamed: of plain tensors, whose memory is theirs alone.

    Raises ValueError for a layer that is not in the model or contains another, or was made in inference mode, and if
    there is nothing to stream.
    """
    if isinstance(layers, nn.Module) and not isinstance(layers, Iterable):
        raise TypeError(f"expected layers in a list, found one {type(layers).__name__}; write [layer]")
    layers, modules = list(dict.fromkeys(layers)), set(model.modules())
    for layer in layers:
        if layer not in modules:
            raise ValueError(f"expected layers of the model, found a {type(layer).__name__} that is not in it")
        if any(inner in layers for inner in layer.modules() if inner is not layer):
            raise ValueError(f"expected layers apart from each other, found a {type(layer).__name__} that contains one")
    users: dict[int, set] = {}  # a storage → the tensors that lie there, and whose they are
    elsewhere = modules - {module for layer in layers for module in layer.modules()}
    for who, owners in (*((layer, layer.modules()) for layer in layers), (None, elsewhere)):
        for module in owners:
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None and plain(tensor):
                    users.setdefault(tensor.untyped_storage()._cdata, set()).add((who, tensor))
    parts = []
    for layer in layers:
        alone = [p for p in layer.parameters() if plain(p) and len(users[p.untyped_storage()._cdata]) == 1]
        if alone:
            parts.append((layer, alone))
    if any(p.is_inference() for _, parameters in parts for p in parameters):
        raise ValueError(
            "expected parameters whose writes PyTorch counts, found one that was made in torch.inference_mode; make "
            "the model outside it, and call it there"
        )
    found = {str(p.device) for _, parameters in parts for p in parameters}
    if len(found) != 1 or "meta" in found:
        raise ValueError(
            f"expected layers with weights of their own on one device, found {', '.join(sorted(found)) or 'no weights'}"
        )
    return parts


def plain(tensor: Tensor) -> bool:
    """Whether it is an ordinary strided tensor: no sparse one, and no wrapper such as DTensor."""
    return type(tensor.data) in (Tensor, FakeTensor) and tensor.layout is torch.strided


@contextmanager
def rest_on(device: torch.device, model: nn.Module, layers: Iterable[StreamedLayer]) -> Iterator[None]:
    """For a model on the host: what is not streamed is on the device meanwhile, and comes back with its values."""
    streamed = {p for layer in layers for p in layer.parameters}
    rest = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor not in streamed]
    with ExitStack() as stack:
        for tensor in rest:
            stack.callback(go_back, tensor, tensor.data)
            gradient, tensor.grad = tensor.grad, None
            tensor.data = torch.empty_like(tensor.data, device=device).copy_(tensor.data)
            if gradient is not None:
                tensor.grad = torch.empty_like(gradient, device=device).copy_(gradient)
        yield


def go_back(tensor: Tensor, before: Tensor) -> None:
    """Give a tensor its former memory with its present values, and a gradient beside it."""
    gradient, tensor.grad = tensor.grad, None
    before.copy_(tensor.data)
    tensor.data = before
    if gradient is not None:
        with main_memory():
            tensor.grad = torch.empty_like(gradient, device=before.device)
        tensor.grad.copy_(gradient)


@contextmanager
def replaced_method(module: nn.Module, name: str, instead: Callable) -> Iterator[None]:
    """Call something else for one method of one module."""
    before = vars(module).get(name)
    setattr(module, name, instead)
    try:
        yield
    finally:
        delattr(module, name)
        if before is not None:
            setattr(module, name, before)


@contextmanager
def manners(model: nn.Module, layers: Iterable[StreamedLayer]) -> Iterator[None]:
    """Save the twins in the place of what is empty, and refuse what would read or write there."""
    with ExitStack() as stack:
        inside = {module for layer in layers for module in layer.module.modules()}
        for module in model.modules():
            names = ["_apply", "_load_from_state_dict", "zero_grad"] if not inside.isdisjoint(module.modules()) else []
            for name in [*names, "__deepcopy__"] if module in inside else names:  # around layers, before any is changed
                stack.enter_context(replaced_method(module, name, refuse_change))
        for layer in layers:
            for module in layer.module.modules():  # each may be saved by itself
                hook = module.register_state_dict_post_hook(functools.partial(as_at_home, layer))
                stack.callback(hook.remove)
        yield


def as_at_home(layer: StreamedLayer, module: nn.Module, state_dict: dict, prefix: str, _metadata: dict) -> None:
    """A state dict's weights: the twins, in place of what is empty."""
    twins = dict(zip(layer.parameters, layer.twins, strict=True))
    for name, p in module._parameters.items():
        if p in twins and prefix + name in state_dict:
            state_dict[prefix + name] = twins[p].detach()


def refuse_change(*_, **__) -> None:
    """Raise RuntimeError: in place of `load_state_dict`, `to` and the like, a copy, and `zero_grad`."""
    raise RuntimeError(
        "expected a model that stays as it is while its weights are streamed; load, convert or copy it before the "
        "block, and clear gradients by zero_grad of an optimizer over streamed.parameters()"
    )


def refuse_step(layers: Iterable[StreamedLayer], optimizer: torch.optim.Optimizer, *_) -> None:
    """Before any optimizer's step. Raises RuntimeError where the gradients are not those that it would step on."""
    twins = {p: twin for layer in layers for p, twin in zip(layer.parameters, layer.twins, strict=True)}
    own = {id(twin): p for p, twin in twins.items()}
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        if p in twins:
            raise RuntimeError(
                "expected an optimizer over streamed.parameters(), whose gradients are on the host; found one that has "
                "streamed parameters of the model itself, which have none: make it inside the block"
            )
        if id(p) in own and own[id(p)].grad is not None:
            raise RuntimeError(
                f"expected all gradients at home, found one of shape {tuple(p.shape)} on the device: unfreeze weights "
                "before the block; and call the model without a wrapper such as DistributedDataParallel, and average "
                "the gradients of streamed.parameters() before the step"
            )
