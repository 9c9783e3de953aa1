"""What a model whose weights are streamed must still do: save, load, clear gradients; and what it must refuse.

A streamed parameter has no bytes between its turns, and whoever reads it then reads nothing, or crashes. So the ways by
which a model's weights are usually reached are led to the twins, where the weights are at home.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from memlab.memory_timeline import main_memory
from memlab.offloading.courier import Courier
from memlab.offloading.residency import Residency, StreamedLayer


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
def manners(model: nn.Module, residency: Residency, courier: Courier) -> Iterator[None]:
    """Lead what is asked of the model to the twins."""
    with ExitStack() as stack:
        inside = {module for layer in residency.layers for module in layer.module.modules()}
        for module in model.modules():
            if not inside.isdisjoint(module.modules()):  # what is around layers too, before any of it is converted
                stack.enter_context(replaced_method(module, "_apply", refuse_conversion))
                clear = functools.partial(zero_grad, module, module.zero_grad, residency, courier)
                stack.enter_context(replaced_method(module, "zero_grad", clear))
            if module in inside:
                stack.enter_context(replaced_method(module, "__deepcopy__", refuse_conversion))
        for layer in residency.layers:
            for module in layer.module.modules():  # each may be saved and loaded by itself
                if twins_of(module, layer):
                    for hook in (
                        module.register_state_dict_post_hook(functools.partial(as_at_home, layer)),
                        module.register_load_state_dict_pre_hook(functools.partial(before_loading, layer, residency)),
                        module.register_load_state_dict_post_hook(functools.partial(after_loading, layer, courier)),
                    ):
                        stack.callback(hook.remove)
        yield


def twins_of(module: nn.Module, layer: StreamedLayer) -> dict[str, tuple[nn.Parameter, nn.Parameter]]:
    """The module's own parameters that are streamed with the layer, each with its twin, by their names in it."""
    twins = dict(zip(layer.parameters, layer.twins, strict=True))
    return {name: (p, twins[p]) for name, p in module._parameters.items() if p in twins}


def zero_grad(
    module: nn.Module, original: Callable, residency: Residency, courier: Courier, set_to_none: bool = True
) -> None:
    """`module.zero_grad()`, also for the twins of its parameters."""
    original(set_to_none)
    its = set(module.parameters())
    for layer in residency.layers:
        for twin in (twin for p, twin in zip(layer.parameters, layer.twins, strict=True) if p in its):
            if set_to_none:
                twin.grad = None
            elif twin.grad is not None:
                courier.run(twin.grad.detach().zero_)


def as_at_home(layer: StreamedLayer, module: nn.Module, state_dict: dict, prefix: str, _metadata: dict) -> None:
    """A state dict's weights: the twins, in place of what is empty."""
    for name, (_, twin) in twins_of(module, layer).items():
        if (key := prefix + name) in state_dict:
            state_dict[key] = twin if isinstance(state_dict[key], nn.Parameter) else twin.detach()


def before_loading(layer: StreamedLayer, residency: Residency, _module, _state_dict, _prefix, metadata, *_) -> None:
    """Weights are loaded into the layer on the device … Raises RuntimeError for `assign=True`."""
    if metadata.get("assign_to_params_buffers"):
        raise RuntimeError(
            "expected load_state_dict without assign=True, which would end the streaming of these weights; "
            "leave it out, or load before the block"
        )
    residency.need(layer, "loading")


def after_loading(layer: StreamedLayer, courier: Courier, module: nn.Module, *_) -> None:
    """… and go home from there."""
    for p, twin in twins_of(module, layer).values():
        courier.run(twin.detach().copy_, p.detach())
    layer.version = layer.written


def refuse_step(residency: Residency, optimizer: torch.optim.Optimizer, *_) -> None:
    """Before any optimizer's step. Raises RuntimeError where the gradients are not those that it would step on."""
    twins = {p: twin for layer in residency.layers for p, twin in zip(layer.parameters, layer.twins, strict=True)}
    own = {id(twin): p for p, twin in twins.items()}
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        if id(p) not in own:
            former = getattr(p, "own", None)
            if p in twins or (former is not None and former() in twins):
                raise RuntimeError(
                    "expected an optimizer over streamed.parameters(), whose gradients are on the host; found one that "
                    "has streamed parameters of the model itself, or of another block, which have none: make it inside "
                    "the block"
                )
        elif own[id(p)].grad is not None:
            raise RuntimeError(
                f"expected all gradients at home, found one of shape {tuple(p.shape)} on the device that was put there "
                "after this rank's had left, as DistributedDataParallel does with averages: call the model without the "
                "wrapper, and average the gradients of streamed.parameters() before the step"
            )


def refuse_conversion(*_, **__) -> None:
    """Raise RuntimeError: in place of `to`, `half` and the like, and of a copy, whose weights would be empty."""
    raise RuntimeError(
        "expected a model that stays as it is while its weights are streamed; convert or copy it before the block"
    )
