"""Split a model that is there already: a plan says by name which layers become parallel ones.

    plan = {
        "layers.*.self_attn.[qkv]_proj": ColumnParallelLinear,
        "layers.*.self_attn.[qk]_norm": copy_to_ranks,
        "layers.*.self_attn.o_proj": RowParallelLinear,
        "layers.*.mlp.gate_proj": ColumnParallelLinear,
        "layers.*.mlp.up_proj": ColumnParallelLinear,
        "layers.*.mlp.down_proj": RowParallelLinear,
        "embed_tokens": VocabularyParallelEmbedding,
    }
    split_layers(model, plan)

The model's own code runs on: between a column parallel layer and the row parallel one after it, it meets a part of the
features. Attention there must take as many heads as it finds, and dropout there must stand within `different_on_ranks`,
or every rank drops the same places of its part. What is whole there, such as a norm of queries, has on each rank the
gradient of that rank's part only: name it with `copy_to_ranks`, which sums. An activation that is whole, and that parts
read without a column parallel layer, needs `copy_to_ranks` in the model's code. A step within `check_replicas` finds
what was forgotten. Make the optimizer afterwards: it is to step the parts. PyTorch's parallelize_module takes plans of
the same kind.
"""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from memlab.ranks import place_in
from memlab.tensor_parallelism.cuts import Cut, share
from memlab.tensor_parallelism.embedding import VocabularyParallelEmbedding
from memlab.tensor_parallelism.linear import ColumnParallelLinear, RowParallelLinear
from memlab.tensor_parallelism.parameters import SplitLayer
from memlab.tensor_parallelism.regions import copy_to_ranks

_PLAIN = {ColumnParallelLinear: nn.Linear, RowParallelLinear: nn.Linear, VocabularyParallelEmbedding: nn.Embedding}
_SIZE = {
    ColumnParallelLinear: ("out_features", "outputs"),
    RowParallelLinear: ("in_features", "inputs"),
    VocabularyParallelEmbedding: ("num_embeddings", "entries of the vocabulary"),
}
_OF_LAYER = {"in_features", "out_features", "bias", "num_embeddings", "embedding_dim"}


def split_layers(
    model: nn.Module,
    plan: Mapping[str, Any],
    *,
    divide: Mapping[str, Sequence[str]] | None = None,
    group=None,
    device=None,
) -> nn.Module:
    """Replace the layers that a plan names by parallel ones, of which this rank holds a part; return the model.

    plan: name pattern → ColumnParallelLinear, RowParallelLinear (of an nn.Linear) or VocabularyParallelEmbedding (of an
      nn.Embedding), or a pair of one and its options, such as (ColumnParallelLinear, {"gather_output": True}); or
      copy_to_ranks, of a module that reads parts and does not call itself: its own parameters stay whole, and go
      through that in each forward, so that their gradients are of all parts. Patterns are a shell's (fnmatch), of the
      whole name; "*" also matches dots. Where several fit, the first counts.
    divide: name pattern → attributes that count heads or features, to become this rank's: {"*.attention": ["heads"]}.
    device: where layers on "meta" get their parts (None: the default device), with the values that such layers begin
      with; there never is a full weight then. Other modules on "meta" that have reset_parameters, as PyTorch's have,
      are made there too; what else is on "meta" stays there, and is yours to fill.

    All ranks of the group must hold the same model. Tied weights stay tied. Layers are replaced one after the other,
    and give up their whole weights as they go.

    Raises ValueError for a pattern that fits nothing, sizes that the ranks do not divide, copy_to_ranks of what reads
    no parameters, weights that are tied to one that is cut in another way, or not, and layers with hooks; TypeError for
    a layer of another kind than the plan's, one with parametrized weights, or with buffers or modules of its own, and
    for options that the kind has not, or that the layer itself decides; PyTorch's own error for a device that is not
    there. The model is then as it was.
    """
    names = _names(model)
    torch.empty(0, device=device)  # raises for one that is not there, as it would later
    fitting = _fitting(names, plan)
    copied = [model.get_submodule(name) for name, entry in fitting.items() if _is_copied(model, name, entry)]
    fitting = {name: entry for name, entry in fitting.items() if entry is not copy_to_ranks}
    chosen = {name: entry if isinstance(entry, tuple) else (entry, {}) for name, entry in fitting.items()}
    cuts = {
        name: _tried(name, model.get_submodule(name), kind, {"group": group, **options}).cuts
        for name, (kind, options) in chosen.items()
    }
    shares = [
        (module, attribute, share(_number(module, attribute, name), attribute, place_in(group)[1]))
        for name, attributes in _fitting(names, divide or {}).items()
        for module in [model.get_submodule(name)]
        for attribute in attributes
    ]
    ties = _ties(model, names, cuts)

    for module, attribute, number in shares:
        setattr(module, attribute, number)
    for name, all_names in names.items():
        module = model.get_submodule(name)
        if name in chosen:
            kind, options = chosen[name]
            part = _parallel(module, kind, {"group": group, **options}, device)
            for each in all_names:
                parent, _, last = each.rpartition(".")
                setattr(model.get_submodule(parent), last, part)
        elif hasattr(module, "reset_parameters") and any(p.is_meta for p in module.parameters(recurse=False)):
            _begin(module, device)
    for module in copied:
        module.register_forward_pre_hook(functools.partial(_show_copies, group))
        module.register_forward_hook(_hide_copies, always_call=True)
    for (first, attribute), *others in ties:
        for name, other in others:
            setattr(model.get_submodule(name), other, getattr(model.get_submodule(first), attribute))
    return model


def _names(model: nn.Module) -> dict[str, list[str]]:
    """All names of every module, by its first one; without the model's own, which is empty."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    return {each[0]: each for each in names.values()}


def _fitting(names: Mapping[str, Sequence[str]], patterns: Mapping[str, Any]) -> dict[str, Any]:
    """For each module that a pattern fits, what the first of these says. Raises ValueError for one that fits none."""
    found, useful = {}, set()
    for name, all_names in names.items():
        fits = [
            pattern for pattern in patterns if any(fnmatch.fnmatchcase(each, pattern) for each in all_names if each)
        ]
        useful.update(fits)
        if fits:
            found[name] = patterns[fits[0]]
    for pattern in patterns:
        if pattern not in useful:
            known = dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name in names if name)
            raise ValueError(f"expected layers that fit {pattern!r}, found none; names here are {', '.join(known)}")
    return found


def _tried(name: str, layer: nn.Module, kind: type[nn.Module], options: dict) -> SplitLayer:
    """The parallel layer on "meta". Raises for what cannot become one, and what would be lost with the plain layer."""
    plain = _PLAIN.get(kind)
    if plain is None:
        known = ", ".join(each.__name__ for each in _PLAIN)
        raise TypeError(f"expected {known}, a pair of one and its options, or copy_to_ranks for {name}, found {kind!r}")
    if not isinstance(layer, plain) or type(layer).forward is not plain.forward:
        raise TypeError(
            f"expected an nn.{plain.__name__} at {name} to make a {kind.__name__} of, found {type(layer).__name__}; "
            "let the pattern fit such layers only"
        )
    if set(layer._parameters) - {"weight", "bias"} or not isinstance(layer._parameters.get("weight"), nn.Parameter):
        raise TypeError(f"expected plain weights at {name}, found parametrized ones; split before parametrizing them")
    if layer.weight.dim() != 2:
        raise ValueError(
            f"expected a whole weight at {name}, found a piece, {tuple(layer.weight.shape)}; split first, then shard"
        )
    if more := [*layer._buffers, *layer._modules]:
        raise TypeError(f"expected nothing but weights at {name}, found {more[0]}, which would be lost; add it later")
    hooks = [hooks for kind_of, hooks in vars(layer).items() if kind_of.endswith("_hooks")]
    hooks += [hooks for p in layer.parameters() for hooks in (p._backward_hooks, p._post_accumulate_grad_hooks)]
    if any(hooks) or "forward" in vars(layer):
        raise ValueError(f"expected no hooks on {name}, which would go with it, found some; set hooks after splitting")
    if own := sorted(_OF_LAYER & options.keys()):
        raise TypeError(f"expected options for {name} without {own[0]}, which its own layer decides; leave it out")
    torch.empty(0, device=options.get("device"))
    size, what = _SIZE[kind]
    share(getattr(layer, size), f"{what} of {name}", place_in(options["group"])[1])
    sizes = (layer.in_features, layer.out_features) if _PLAIN[kind] is nn.Linear else tuple(layer.weight.shape)
    return kind(*sizes, **{**options, "device": "meta"})  # raises what it would later, when layers are replaced


def _is_copied(model: nn.Module, name: str, entry) -> bool:
    """Whether a module's own parameters are to go through copy_to_ranks. Raises what `split_layers` raises for it."""
    if entry is not copy_to_ranks:
        return False
    module = model.get_submodule(name)
    if not module._parameters or isinstance(module, nn.ParameterList | nn.ParameterDict):
        raise ValueError(
            f"expected a module that reads parameters of its own at {name} for copy_to_ranks, found a "
            f"{type(module).__name__}; name the modules that read them"
        )
    if is_parametrized(module) or module._forward_pre_hooks:
        raise TypeError(
            f"expected plain weights at {name} for copy_to_ranks, found some that may be computed before each forward, "
            "by a parametrization or a hook; split before adding those"
        )
    return True


def _show_copies(group, module: nn.Module, _) -> None:
    """Before forward: an attribute of the module itself stands before the parameter of that name."""
    for name, p in module._parameters.items():
        if p is not None:
            vars(module)[name] = copy_to_ranks(p, group)


def _hide_copies(module: nn.Module, *_) -> None:
    for name in module._parameters:
        vars(module).pop(name, None)


def _number(module: nn.Module, attribute: str, name: str) -> int:
    number = getattr(module, attribute, None)
    if not isinstance(number, int):
        raise ValueError(f"expected a number of heads or features in {name}.{attribute}, found {number!r}")
    return number


def _ties(model: nn.Module, names: Sequence[str], cuts: Mapping[str, dict[str, Cut]]) -> list[list[tuple[str, str]]]:
    """Parameters that several modules share: (module's name, parameter's name) of each. Raises for unlike cuts."""
    owners: dict[nn.Parameter, list[tuple[str, str]]] = {}
    for name in names:
        for attribute, p in model.get_submodule(name).named_parameters(recurse=False):
            owners.setdefault(p, []).append((name, attribute))
    ties = [users for users in owners.values() if len(users) > 1]
    for users in ties:
        cut_at = {f"{name}.{attribute}": cuts.get(name, {}).get(attribute) for name, attribute in users}
        if len(set(cut_at.values())) > 1:
            told = ", ".join(
                f"{user} whole" if cut is None else f"{user} cut by dimension {cut.dim}, sections {cut.sections}"
                for user, cut in cut_at.items()
            )
            raise ValueError(f"expected one cut of tied weights, found {told}; let the plan cut all alike, or none")
    return ties


def _parallel(layer: nn.Module, kind: type[nn.Module], options: dict, device) -> nn.Module:
    """The parallel layer of this one, as trainable and as much in training as it was."""
    if layer.weight.is_meta:
        options = {"device": device, **options}
    part = (kind.from_embedding if kind is VocabularyParallelEmbedding else kind.from_linear)(layer, **options)
    for name, p in part.named_parameters():
        p.requires_grad_(getattr(layer, name).requires_grad)
    return part.train(layer.training)


def _begin(module: nn.Module, device) -> None:
    """Give a module on "meta" the values that it begins with."""
    for name, p in list(module.named_parameters(recurse=False)):
        setattr(
            module,
            name,
            nn.Parameter(torch.empty_like(p, device=device or torch.get_default_device()), p.requires_grad),
        )
    for name, buffer in list(module.named_buffers(recurse=False)):
        setattr(module, name, torch.empty_like(buffer, device=device or torch.get_default_device()))
    module.reset_parameters()
