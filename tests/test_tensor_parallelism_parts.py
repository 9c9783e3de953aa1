"""A part stays a part, whatever a module does with its parameters."""

from __future__ import annotations

import copy
import io

import pytest
import torch

from memlab.ranks import imagined_ranks, one_rank
from memlab.tensor_parallelism import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorParallelGPT,
    VocabularyParallelEmbedding,
    cut_evenly,
    cut_of,
)


@pytest.fixture
def layers():
    with imagined_ranks(2, 1):
        yield torch.nn.ModuleList(
            [ColumnParallelLinear(4, 6), RowParallelLinear(6, 4), VocabularyParallelEmbedding(8, 4)]
        )


def assigned(layers):
    layers.load_state_dict({name: torch.zeros_like(value) for name, value in layers.state_dict().items()}, assign=True)
    return layers


def pickled(layers):
    file = io.BytesIO()
    torch.save(layers, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


def swapped(layers):
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return layers.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


WAYS = {
    "deepcopy of what was pickled": lambda layers: copy.deepcopy(pickled(layers)),
    "double, by swapping": swapped,
    "deepcopy": copy.deepcopy,
    "double": lambda layers: layers.double(),
    "to meta and back": lambda layers: layers.to("meta").to_empty(device="cpu"),
    "load_state_dict(assign=True)": assigned,
    "torch.save": pickled,
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_a_part_knows_its_cut_after(layers, way):
    cuts = {name: cut_of(p) for name, p in layers.named_parameters()}
    after = way(layers)
    assert {name: cut_of(p) for name, p in after.named_parameters()} == cuts
    assert [name for name, cut in cuts.items() if cut is None] == ["1.bias"]
    assert all(p.requires_grad and isinstance(p, torch.nn.Parameter) for p in after.parameters())


def test_a_whole_weight_is_no_part(layers):
    with pytest.raises(ValueError, match=r"expected this rank's part as weight, \(3, 4\), found \(6, 4\)"):
        layers[0].weight = torch.nn.Parameter(torch.zeros(6, 4))


def test_a_call_with_other_tensors_in_place_of_the_parts_is_the_call_with_these_parts():
    x = torch.arange(8).view(2, 4)
    with one_rank("cpu"):
        model, other = (TensorParallelGPT(1, 8, 2, 4, 16) for _ in range(2))
        given = {name: p.detach().clone() for name, p in other.named_parameters()}
        assert torch.equal(torch.func.functional_call(model, given, (x, x)), other(x, x))
        assert all(cut_of(p) == cut_of(q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("norm", [torch.nn.utils.weight_norm, torch.nn.utils.parametrizations.weight_norm])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_a_layer_whose_weight_is_computed_is_converted_and_shown(layers, norm):
    for layer, shown in zip(layers, ("out_features=6, here=3", "out_features=4, here=3", "8, 4, here=4"), strict=True):
        layer = norm(layer).double()
        assert all(p.dtype == torch.float64 for p in layer.parameters()) and shown in repr(layer)


def test_a_layer_without_its_bias_is_converted(layers):
    layers[0].bias = None
    assert layers.double()[0].weight.dtype == torch.float64


def test_a_layer_with_a_group_of_its_own_is_copied_with_it(layers):
    group = torch.distributed.new_group([0, 1])
    layer = ColumnParallelLinear(4, 6, group=group)
    other = copy.deepcopy(layer, {id(group): group})
    assert other.group is group and other.sending.group is group
    assert cut_of(other.weight) == cut_of(layer.weight)


@pytest.mark.parametrize("dim", [-1, -2, -3])
def test_a_dimension_counted_from_the_end_is_cut_as_the_one_that_it_is(dim):
    full = torch.arange(4 * 6 * 8).view(4, 6, 8)
    cuts = [cut_evenly(full.shape, dim, rank, 2) for rank in range(2)]
    assert cuts == [cut_evenly(full.shape, dim + 3, rank, 2) for rank in range(2)]
    for cut, part in zip(cuts, full.chunk(2, dim), strict=True):
        assert cut.part_shape == part.shape and torch.equal(cut.part_of(full), part)


def test_a_dimension_and_a_rank_that_are_not_there_are_refused():
    for dim in (2, -3):
        with pytest.raises(ValueError, match=rf"expected a dimension of \(8, 4\), from -2 to 1, found {dim}"):
            cut_evenly((8, 4), dim, 0, 2)
    for rank in (2, -1):
        with pytest.raises(ValueError, match=f"expected a rank from 0 to 1, found {rank}"):
            cut_evenly((8, 4), 0, rank, 2)
