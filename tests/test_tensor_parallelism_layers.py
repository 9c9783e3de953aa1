"""Split layers against whole ones: values, gradients, bytes held and bytes sent."""

import functools
import itertools

import pytest
import torch
from torch import distributed, nn

from memlab import tensor_parallelism as tp
from memlab.memory_timeline import Meter
from memlab.ranks import Traffic, imagined_ranks, one_rank, ring_bytes, run_ranks
from tests.tensor_parallelism_helpers import part_of

IN, OUT = 16, 24
SHAPES = ((IN,), (8, IN), (4, 3, IN), (0, IN))
MODES = {
    "whole rows": {},
    "own rows": {"sequence_parallel": True},
    "gathered rows kept": {"sequence_parallel": True, "keep_gathered": True},
}


def distance(found: torch.Tensor, truth: torch.Tensor) -> float:
    """By norm, relative to the truth's."""
    assert found.shape == truth.shape and found.dtype == truth.dtype, (found.shape, truth.shape, found.dtype)
    return float((found - truth).detach().norm() / max(float(truth.detach().norm()), 1e-300)) if truth.numel() else 0.0


def seeded(seed: int, *shape: int, dtype=torch.float64) -> torch.Tensor:
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=wide).to(dtype)


def whole_layer(bias: bool = True, dtype=torch.float64) -> nn.Linear:
    linear = nn.Linear(IN, OUT, bias, dtype=dtype)
    with torch.no_grad():
        for number, p in enumerate(linear.parameters()):
            p.copy_(seeded(number, *p.shape, dtype=dtype))
    return linear


def part_of_last(t: torch.Tensor, cut) -> torch.Tensor:
    return torch.cat([t[..., start:stop] for start, stop in cut.ranges()], -1)


def own_part(p: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    return full if tp.cut_of(p) is None else tp.cut_of(p).part_of(full)


def equal_to_linear(rank):
    """How far outputs and gradients are from nn.Linear's, over shapes, modes and biases."""
    ranks, far = distributed.get_world_size(), {}
    layers = (True, torch.float64), (False, torch.float64), (True, torch.complex128)
    for shape, (name, mode), (bias, dtype) in itertools.product(SHAPES, MODES.items(), layers):
        if mode and len(shape) == 1:
            continue
        linear = whole_layer(bias=bias, dtype=dtype)
        x, g = seeded(7, *shape, dtype=dtype).requires_grad_(), seeded(8, *shape[:-1], OUT, dtype=dtype)
        y = linear(x)
        y.backward(g)
        rows = shape[0] // ranks
        own = (lambda t, n=rows: t[rank * n : (rank + 1) * n]) if mode else (lambda t: t)
        whole = dict(linear.named_parameters())

        def compare(layer, mine, dy, expected, dx, whole=whole):
            found = layer(mine.requires_grad_())
            found.backward(dy)
            gradients = [(p.grad, own_part(p, whole[name].grad)) for name, p in layer.named_parameters()]
            return max(distance(*pair) for pair in [(found, expected), (mine.grad, dx), *gradients])

        column = part_of(linear, tp.ColumnParallelLinear, IN, OUT, bias, sections=(16, 8), **mode)
        cut, mine = tp.cut_of(column.weight), own(x.detach()).clone()
        case = shape, name, bias, dtype
        far[("column", *case)] = compare(column, mine, part_of_last(g, cut), part_of_last(y, cut), own(x.grad))
        if name != "gathered rows kept":
            row = part_of(linear, tp.RowParallelLinear, IN, OUT, bias, **mode)
            mine = x.detach().chunk(ranks, -1)[rank]  # not contiguous
            far[("row", *case)] = compare(row, mine, own(g), own(y), x.grad.chunk(ranks, -1)[rank])
    return far


def regions(rank):
    """Forward and backward of each region in several dtypes, of tensors that are not contiguous."""
    ranks, wrong = distributed.get_world_size(), []
    for dtype in (torch.float64, torch.bfloat16, torch.complex128):
        whole = torch.arange(4 * 8, dtype=torch.float64).view(8, 4).to(dtype)  # exact in each of them
        whole = whole * (2 + 1j) if dtype.is_complex else whole
        of_rank = [whole + r for r in range(ranks)]
        total = sum(of_rank)
        rows, width = 8 // ranks, 4 // ranks
        own_rows, own_width = slice(rank * rows, (rank + 1) * rows), slice(rank * width, (rank + 1) * width)
        rows_each = torch.cat([t[:rows] for t in of_rank])
        width_each = torch.cat([t[:, :width] for t in of_rank], 1)
        cases = {  # region: input, output, gradient of the output, gradient of the input
            tp.copy_to_ranks: (whole, whole, of_rank[rank], total),
            tp.reduce_from_ranks: (of_rank[rank], total, whole, whole),
            functools.partial(tp.reduce_from_ranks, inplace=True): (of_rank[rank], total, whole, whole),
            tp.gather_from_ranks: (of_rank[rank][:, :width], width_each, whole, whole[:, own_width]),
            tp.scatter_to_ranks: (whole, whole[:, own_width], of_rank[rank][:, :width], width_each),
            tp.gather_sequence: (of_rank[rank][:rows], rows_each, of_rank[rank], total[own_rows]),
            tp.reduce_scatter_sequence: (of_rank[rank], total[own_rows], of_rank[rank][:rows], rows_each),
        }
        for region, (given, expected, dy, dx) in cases.items():
            for lay in (
                torch.Tensor.contiguous,
                lambda t: t.mT.contiguous().mT,
                lambda t: t.repeat_interleave(2, 1)[:, ::2],
                lambda t: t.conj().resolve_conj().conj(),  # of complex numbers: with signs that are in no memory
                lambda t: torch._neg_view(-t),
            ):
                x = lay(given.clone()).requires_grad_()
                y = region(lay(x * 1))
                y.backward(lay(dy.clone()))
                if not (torch.equal(y, expected) and torch.equal(x.grad, dx) and x.grad.dtype == dtype):
                    wrong.append((str(region), dtype))
    return wrong


def sums_of_views(rank):
    """A sum that may take its argument's place leaves alone what others can see."""
    base = torch.ones(4, 6, requires_grad=True)
    twice = base * 2
    tp.reduce_from_ranks(twice.flatten(), inplace=True).sum().backward()
    temporary = base.detach() * 3
    same = tp.reduce_from_ranks(temporary, inplace=True) is temporary
    return float(twice.detach().max()), float(base.grad.max()), same


def through_autocast(rank):
    """Under autocast: dtypes, and how far values are from nn.Linear's."""
    ranks, dtypes, far = distributed.get_world_size(), [], []
    linear, x = whole_layer(dtype=torch.float32), seeded(4, 8, IN, dtype=torch.float32).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        truth = linear(x)
    truth.float().square().sum().backward()
    for mode in MODES.values():
        column = part_of(linear, tp.ColumnParallelLinear, IN, OUT, **mode)
        row = part_of(linear, tp.RowParallelLinear, IN, OUT, sequence_parallel=bool(mode))
        rows = slice(rank * 8 // ranks, (rank + 1) * 8 // ranks) if mode else slice(None)
        mine, part = (t.clone().requires_grad_() for t in (x.detach()[rows], x.detach().chunk(ranks, 1)[rank]))
        with torch.autocast("cpu", torch.bfloat16):
            y, z = column(mine), row(part)
        (y.float().square().sum() + z.float().square().sum()).backward()
        dtypes += [y.dtype, z.dtype, *(p.grad.dtype for p in (*column.parameters(), *row.parameters(), mine, part))]
        far += [
            distance(y, part_of_last(truth, tp.cut_of(column.weight))),
            distance(z, truth[rows]),
            distance(mine.grad, x.grad[rows]),
            *(distance(p.grad, own_part(p, linear.weight.grad)) for p in (column.weight, row.weight)),
            distance(row.bias.grad, linear.bias.grad),
        ]
    double = tp.ColumnParallelLinear(IN, OUT, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        dtypes.append(double(x.detach().double()).dtype)
    return dtypes, max(far)


FACTS = (equal_to_linear, regions, sums_of_views, through_autocast)


def everything(rank):
    torch.manual_seed(0)
    return {fact.__name__: fact(rank) for fact in FACTS}


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.thorough), 4])
def found(request):
    """What each rank found."""
    return run_ranks(everything, request.param)


def test_split_layers_are_the_whole_layer_in_fp64(found):
    for here in found:
        assert len(here["equal_to_linear"]) == 3 * (4 * 2 + 3 * 2 + 3)
        assert max(here["equal_to_linear"].values()) <= 1e-12, max(
            here["equal_to_linear"].items(), key=lambda one: one[1]
        )


def test_each_region_and_its_conjugate_are_exact_in_every_dtype_and_layout(found):
    assert [here["regions"] for here in found] == [[]] * len(found)


def test_a_sum_in_place_takes_the_place_of_a_tensor_and_never_of_a_view(found):
    assert [here["sums_of_views"] for here in found] == [(2.0, 2.0, True)] * len(found)


def test_under_autocast_layers_compute_in_16_bit_as_linear_does_and_gradients_keep_their_parameters_dtype(found):
    for here in found:
        dtypes, far = here["through_autocast"]
        assert dtypes == ([torch.bfloat16] * 2 + [torch.float32] * 6) * 3 + [torch.float64]
        assert far < 2**-7  # sums of a few numbers with 8 bits each


BACK = {  # what is sent in backward, if a gradient is needed of x and the weight, of x, of the weight
    (tp.ColumnParallelLinear, "whole rows"): (["all_reduce"], ["all_reduce"], []),
    (tp.ColumnParallelLinear, "own rows"): (["all_gather", "reduce_scatter"], ["reduce_scatter"], ["all_gather"]),
    (tp.ColumnParallelLinear, "gathered rows kept"): (["reduce_scatter"], ["reduce_scatter"], []),
    (tp.RowParallelLinear, "whole rows"): ([], [], []),
    (tp.RowParallelLinear, "own rows"): (["all_gather"], ["all_gather"], ["all_gather"]),
}


@pytest.mark.parametrize(("kind", "mode"), BACK)
def test_layers_send_nothing_for_a_gradient_that_nobody_needs(kind, mode):
    column = kind is tp.ColumnParallelLinear
    for trained, expected in zip(("x weight", "x", "weight"), BACK[kind, mode], strict=True):
        with imagined_ranks(4):
            layer = kind(IN, OUT, **MODES[mode], dtype=torch.float64).requires_grad_("weight" in trained)
            rows, width = 2 if column and mode != "whole rows" else 8, IN if column else IN // 4
            y = layer(torch.zeros(rows, width, dtype=torch.float64, requires_grad="x" in trained))
            with Traffic() as backward:
                y.sum().backward()
        assert [record.name for record in backward.records] == expected
        whole = 8 * 8 * (IN if column else OUT)
        assert all(r.sent_bytes == ring_bytes(r.name, whole, 4) for r in backward.records)


def a_step(layer, x) -> dict:
    """Bytes of a layer's step: what is kept for backward, and the peaks of both halves, all beyond what was there."""
    x = x.detach().requires_grad_()
    with Meter(layer, inputs=x) as meter:
        there = meter.timeline.totals[-1]
        y = layer(x)
        after, forward = meter.timeline.totals[-1] - there, meter.timeline.peak_bytes - there
        y.backward(torch.ones_like(y))
    return {"y": y.nbytes, "after": after, "forward": forward, "step": meter.timeline.peak_bytes - there}


@pytest.mark.parametrize(("ranks", "rank"), [(1, 0), (2, 0), (4, 3)])
def test_a_rank_holds_its_part_of_the_weights_and_a_step_takes_what_a_plain_layer_of_that_shape_takes(ranks, rank):
    x, part = torch.ones(8, IN), torch.ones(8, IN // ranks)
    with imagined_ranks(ranks, rank):
        column, row = tp.ColumnParallelLinear(IN, OUT), tp.RowParallelLinear(IN, OUT)
        assert sum(p.nbytes for p in column.parameters()) == 4 * (OUT * IN + OUT) // ranks
        assert sum(p.nbytes for p in row.parameters()) == 4 * (OUT * IN // ranks + OUT)
        assert a_step(column, x) == a_step(nn.Linear(IN, OUT // ranks), x)
        split, plain = a_step(row, part), a_step(nn.Linear(IN // ranks, OUT), part)
    assert split["after"] == plain["after"] == plain["y"]  # one (rows, width) and no second
    assert split["step"] == plain["step"]
    assert split["forward"] == plain["forward"] + 4 * OUT * (rank > 0)  # zeros in place of the bias


def test_in_a_group_of_one_regions_return_what_they_are_given():
    x = seeded(3, 8, IN)
    with one_rank():
        for region in (tp.copy_to_ranks, tp.reduce_from_ranks, tp.gather_from_ranks, tp.scatter_to_ranks):
            assert region(x) is x
        assert tp.gather_sequence(x) is x and tp.reduce_scatter_sequence(x) is x
