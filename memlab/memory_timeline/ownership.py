"""What a storage *is*: found by asking the model, the optimizer and the inputs, who own tensors by name."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, UntypedStorage
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_PLAIN = {Tensor, torch.nn.Parameter}
_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def storages_of(tensor: Tensor) -> Iterator[UntypedStorage]:
    """The storages that hold a tensor's bytes: one when strided, several when sparse or a wrapper (such as DTensor).

    Raises NotImplementedError for what hides its bytes: a layout (mkldnn), or a wrapper that does not tell its parts.
    """
    plain = type(tensor) in _PLAIN
    if not plain and is_traceable_wrapper_subclass(tensor):
        for attribute in tensor.__tensor_flatten__()[0]:
            part = getattr(tensor, attribute)
            if isinstance(part, Tensor):  # a DTensor also names its mesh here
                yield from storages_of(part)
    elif tensor.layout is torch.strided:
        storage = tensor.untyped_storage()
        if not plain and _is_hollow(tensor, storage):
            raise NotImplementedError(
                f"expected a tensor, or a wrapper that tells its parts (__tensor_flatten__), found "
                f"{type(tensor).__name__}, which hides its bytes from Python; meter what is inside"
            )
        yield storage
    elif tensor.layout in _PARTS:
        for part in _PARTS[tensor.layout]:
            yield getattr(tensor, part)().untyped_storage()
    else:
        raise NotImplementedError(
            f"expected a strided or sparse tensor, found layout {tensor.layout}, which hides its bytes from Python; "
            "convert it with .to_dense() before metering"
        )


def _is_hollow(tensor: Tensor, storage: UntypedStorage) -> bool:
    """Whether a wrapper's storage has a size and no memory: its bytes lie elsewhere. Fake tensors are no such."""
    if type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__ or storage.device.type == "meta":
        return False
    try:
        return storage.nbytes() > 0 and storage.data_ptr() == 0
    except RuntimeError:
        return True


class Owned(NamedTuple):
    """A tensor that somebody owns: what it is (a category), and the owner's name for it."""

    tensor: Tensor
    category: str
    name: str


def modules_of(model: object) -> list[torch.nn.Module]:
    """A model is one module or several (a generator and a discriminator); None is none. Raises TypeError otherwise."""
    modules = [] if model is None else list(model) if isinstance(model, (list, tuple)) else [model]
    for module in modules:
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"expected a model (nn.Module), a list of them or None, found {type(module).__name__}")
    return modules


def named_roots(modules: Iterable[torch.nn.Module]) -> list[tuple[str, torch.nn.Module]]:
    """Each model with a prefix for the names in it: its place in the list, "" when it is the only one."""
    roots = list(modules)
    return [(str(place) if len(roots) > 1 else "", root) for place, root in enumerate(roots)]


class Members(NamedTuple):
    """The tensors in one or several models, by name: parameters first, so that what is both is a parameter.

    Tied ones come once a model, by the first of its names.
    """

    parameters: list[tuple[str, torch.nn.Parameter]]
    buffers: list[tuple[str, Tensor]]

    @classmethod
    def of(cls, roots: Iterable[tuple[str, torch.nn.Module]]) -> Members:
        """All of `named_roots`, found in one walk each: a walk over a model takes as long as dozens of ops."""
        roots = list(roots)
        return cls(
            [named for prefix, root in roots for named in root.named_parameters(prefix)],
            [named for prefix, root in roots for named in root.named_buffers(prefix)],
        )

    def check_memory(self) -> None:
        """Raises ValueError for a model on meta."""
        for name, tensor in (*self.parameters, *self.buffers):
            if tensor.is_meta:
                raise ValueError(
                    f"expected a model with memory, found {name} on the meta device, which has shapes and no bytes; "
                    "build it on the cpu or a GPU, or give it bytes with model.to_empty(device=...)"
                )

    def owned(self) -> Iterator[Owned]:
        """Parameters, their gradients, and buffers.

        A Parameter that is registered as a buffer is a parameter: weights that are gathered from elsewhere for a time.
        """
        for name, parameter in self.parameters:
            if not torch.nn.parameter.is_lazy(parameter):
                yield Owned(parameter, "parameter", name)
                if parameter.grad is not None:
                    yield Owned(parameter.grad, "gradient", name)
        for name, buffer in self.buffers:
            if not torch.nn.parameter.is_lazy(buffer):
                gathered = isinstance(buffer, torch.nn.Parameter)  # kept as a buffer, so that no optimizer finds it
                yield Owned(buffer, "parameter" if gathered else "buffer", name)


class ParameterNames:
    """What parameters are called in some models, by id, as long as each has its place in a module.

    An id is used again when its object is gone. So a name counts while what is in its place still has that id; if not,
    the models have changed, and are walked over again.
    """

    def __init__(self):
        self._roots: list[tuple[str, torch.nn.Module]] = []
        self._places: dict[int, tuple[str, tuple[weakref.ref, str] | None]] = {}

    def learn(self, roots: Iterable[tuple[str, torch.nn.Module]], members: Members) -> None:
        """Names in more models, whose members are these."""
        self._roots += roots
        homes: dict[int, tuple[weakref.ref, str]] = {}
        for _, root in self._roots:
            for module in root.modules():
                for key, parameter in module._parameters.items():
                    homes.setdefault(id(parameter), (weakref.ref(module), key))
        for name, parameter in members.parameters:
            self._places.setdefault(id(parameter), (name, homes.get(id(parameter))))

    def learn_again(self) -> None:
        """Names in the models as they are now."""
        roots, self._roots, self._places = self._roots, [], {}
        self.learn(roots, Members.of(roots))

    def forget(self) -> None:
        """Let the models go, and their names."""
        self._roots, self._places = [], {}

    def get(self, number: int, default: str | None = None) -> str | None:
        """The name of the parameter with this id, or `default`."""
        if self._moved(number):
            self.learn_again()
        return self._places[number][0] if number in self._places else default

    def _moved(self, number: int) -> bool:
        _, home = self._places.get(number, ("", None))
        if home is None:  # not known, or of a model that shows other parameters than its modules have
            return False
        module = home[0]()
        return module is None or id(module._parameters.get(home[1])) != number


def owned_by_optimizer(optimizer: torch.optim.Optimizer, names: ParameterNames | Mapping[int, str]) -> Iterator[Owned]:
    """The optimizer's states, also in lists (LBFGS has such), named after the parameter they belong to.

    Where one memory has those of several, as in a flat buffer, after the first of these. names: id(parameter) → its
    name.
    """
    found = [
        (leaf, name, names.get(id(parameter), "a parameter"), _memory(leaf))
        for parameter, states in optimizer.state.items()
        if isinstance(states, Mapping)
        for state, value in states.items()
        for leaf, name in _leaves(value, str(state))
        if isinstance(leaf, Tensor)
    ]
    sharing = Counter(memory for *_, memory in found)
    for leaf, name, owner, memory in found:
        others = f" and {sharing[memory] - 1} more" if sharing[memory] > 1 else ""
        yield Owned(leaf, "optimizer_state", f"{name} of {owner}{others}")


def _memory(tensor: Tensor) -> int:
    """Equal for tensors that lie in one storage; a sparse tensor, or a wrapper, is by itself."""
    plain = type(tensor) in (*_PLAIN, FakeTensor) and tensor.layout is torch.strided
    return tensor.untyped_storage()._cdata if plain else id(tensor)


def _leaves(value: object, name: str) -> Iterator[tuple[object, str]]:
    """What lies in lists, tuples and dicts of any depth, each with its place in them behind the name."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{name} {key}")
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _leaves(item, f"{name} {number}")
    else:
        yield value, name


def gradients_of(parameters: Iterable[Tensor], names: ParameterNames | Mapping[int, str]) -> Iterator[Owned]:
    """The gradients that parameters have at present. `names`: id(parameter) → its name."""
    for parameter in parameters:
        if parameter.grad is not None:
            yield Owned(parameter.grad, "gradient", names.get(id(parameter), "a parameter"))


def owned_inputs(inputs: object, name: str = "input") -> Iterator[Owned]:
    """The tensors in `inputs`: a tensor, or tuples, lists and dicts of them.

    Raises TypeError for anything else, ValueError for a tensor on meta, unless it is imagined.
    """
    for leaf, place in _leaves(inputs, name):
        if isinstance(leaf, Tensor):
            if leaf.is_meta and not isinstance(leaf, FakeTensor):
                raise ValueError(
                    f"expected inputs with memory, found {place} on the meta device, which has shapes and no bytes; "
                    "make it on the cpu or a GPU"
                )
            yield Owned(leaf, "input", place)
        elif leaf is not None and not isinstance(leaf, (str, int, float, bool)):
            raise TypeError(
                f"expected inputs as a tensor or tuples, lists, dicts of tensors, found {type(leaf).__name__}"
            )
