"""Split layers against whole ones: values, gradients, bytes held, bytes sent, and what is refused."""

import functools

import pytest
import torch
from torch import distributed, nn
from torch.nn import functional as F

from memlab.gradient_checkpointing import checkpoint
from memlab.memory_timeline import Meter, imagine
from memlab.ranks import Traffic, imagined_ranks, one_rank, ring_bytes, run_ranks
from memlab.tensor_parallelism import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_ranks,
    cut_evenly,
    cut_of,
    gather_from_ranks,
    gather_sequence,
    reduce_from_ranks,
    reduce_scatter_sequence,
    scatter_to_ranks,
)
from memlab.tensor_parallelism.regions import neighbours

WORLDS = (1, 2, 4)
IN, OUT = 16, 24
SHAPES = ((IN,), (8, IN), (4, 3, IN), (0, IN), (4, 0, IN))
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


def whole_layer(inputs: int = IN, outputs: int = OUT, bias: bool = True, dtype=torch.float64) -> nn.Linear:
    linear = nn.Linear(inputs, outputs, bias, dtype=dtype)
    with torch.no_grad():
        for number, p in enumerate(linear.parameters()):
            p.copy_(seeded(number, *p.shape, dtype=dtype))
    return linear


def part_of_last(t: torch.Tensor, cut) -> torch.Tensor:
    return torch.cat([t[..., start:stop] for start, stop in cut.ranges()], -1)


# ---- what ranks find


def equal_to_linear(rank):
    """How far outputs and gradients are from nn.Linear's, over shapes, modes and biases."""
    ranks, far = distributed.get_world_size(), {}
    for shape in SHAPES:
        for name, mode in MODES.items():
            for bias, dtype in ((True, torch.float64), (False, torch.float64), (True, torch.complex128)):
                if mode and len(shape) == 1:
                    continue
                linear = whole_layer(bias=bias, dtype=dtype)
                x, g = seeded(7, *shape, dtype=dtype), seeded(8, *shape[:-1], OUT, dtype=dtype)
                x.requires_grad_()
                y = linear(x)
                y.backward(g)
                rows = shape[0] // ranks
                own = (lambda t, n=rows: t[rank * n : (rank + 1) * n]) if mode else (lambda t: t)

                column = ColumnParallelLinear.from_linear(linear, sections=(16, 8), **mode)
                cut = cut_of(column.weight)
                mine = own(x.detach()).clone().requires_grad_()
                found = column(mine)
                found.backward(part_of_last(g, cut))
                pairs = [(found, part_of_last(y, cut)), (mine.grad, own(x.grad))]
                pairs += [(p.grad, cut_of(p).part_of(whole.grad)) for p, whole in zip_parameters(column, linear)]
                far["column", shape, name, bias, dtype] = max(distance(*pair) for pair in pairs)

                if name == "gathered rows kept":
                    continue
                row = RowParallelLinear.from_linear(linear, **mode)
                mine = x.detach().chunk(ranks, -1)[rank].requires_grad_()  # not contiguous
                found = row(mine)
                found.backward(own(g))
                pairs = [(found, own(y)), (mine.grad, x.grad.chunk(ranks, -1)[rank])]
                pairs += [
                    (p.grad, whole.grad if cut_of(p) is None else cut_of(p).part_of(whole.grad))
                    for p, whole in zip_parameters(row, linear)
                ]
                far["row", shape, name, bias, dtype] = max(distance(*pair) for pair in pairs)

        linear, x, g = whole_layer(), seeded(7, *shape).requires_grad_(), seeded(8, *shape[:-1], OUT)
        y = linear(x)
        y.backward(g)
        for kind, options in (
            (ColumnParallelLinear, {"gather_output": True}),
            (RowParallelLinear, {"input_is_parallel": False}),
        ):
            mine = x.detach().clone().requires_grad_()
            found = kind.from_linear(linear, **options)(mine)
            found.backward(g)
            far[kind.__name__, shape, "whole to whole"] = max(distance(found, y), distance(mine.grad, x.grad))
    return far


def zip_parameters(layer, linear):
    whole = dict(linear.named_parameters())
    return [(p, whole[name]) for name, p in layer.named_parameters()]


def regions(rank):
    """Forward and backward of each region in several dtypes, of tensors that are not contiguous."""
    ranks, wrong = distributed.get_world_size(), []
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.complex128):
        whole = torch.arange(4 * 8, dtype=torch.float64).view(8, 4).to(dtype)  # exact in each of them
        whole = whole * (2 + 1j) if dtype.is_complex else whole
        of_rank = [whole + r for r in range(ranks)]
        total = sum(of_rank)
        rows, width = 8 // ranks, 4 // ranks
        own_rows, own_width = slice(rank * rows, (rank + 1) * rows), slice(rank * width, (rank + 1) * width)
        rows_each = torch.cat([t[:rows] for t in of_rank])
        width_each = torch.cat([t[:, :width] for t in of_rank], 1)
        cases = {  # region: input, output, gradient of the output, gradient of the input
            copy_to_ranks: (whole, whole, of_rank[rank], total),
            reduce_from_ranks: (of_rank[rank], total, whole, whole),
            functools.partial(reduce_from_ranks, inplace=True): (of_rank[rank], total, whole, whole),
            gather_from_ranks: (of_rank[rank][:, :width], width_each, whole, whole[:, own_width]),
            scatter_to_ranks: (whole, whole[:, own_width], of_rank[rank][:, :width], width_each),
            gather_sequence: (of_rank[rank][:rows], rows_each, of_rank[rank], total[own_rows]),
            reduce_scatter_sequence: (of_rank[rank], total[own_rows], of_rank[rank][:rows], rows_each),
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


def second_derivatives(rank):
    """Gradients of gradients, through each region, against those of the same computation in one process."""
    ranks, far = distributed.get_world_size(), {}
    x, w = seeded(1, 8, 8).requires_grad_(), seeded(2, 8, 8)

    def of(y, *inputs):
        (first,) = torch.autograd.grad(y.pow(3).sum(), inputs, create_graph=True)
        return torch.autograd.grad(first.pow(2).sum(), inputs)[0]

    truth = of(x @ w, x)
    cut = cut_evenly((8, 8), 0, rank, ranks)
    (first,) = torch.autograd.grad((copy_to_ranks(x) @ cut.part_of(w.T).T).pow(3).sum(), x, create_graph=True)
    far["copy"] = distance(torch.autograd.grad(first.pow(2).sum(), x)[0], truth)
    far["row"] = distance(of(reduce_from_ranks(scatter_to_ranks(x) @ cut.part_of(w), inplace=True), x), truth)
    return far


def shared_sections(rank):
    """A column layer of which neighbours share pieces: gradients against the sum over all that hold them."""
    ranks, sections = distributed.get_world_size(), (16, (8, 2), (4, 2), (6, 1))
    linear, x = whole_layer(outputs=34), seeded(5, 8, IN)
    linear.requires_grad_(False)
    found = {}
    for name, mode in MODES.items():
        layer = ColumnParallelLinear.from_linear(linear, sections=sections, **mode).requires_grad_()
        rows = slice(rank * 2, rank * 2 + 2) if mode else slice(None)
        mine = x[rows].clone().requires_grad_()
        with Traffic() as traffic:
            y = layer(mine)
            g = [seeded(100 + r, *y.shape) for r in range(ranks)]
            y.backward(g[rank])
        cuts = [cut_evenly((34, IN), 0, r, ranks, sections) for r in range(ranks)]
        dw, db, dx = torch.zeros(34, IN, dtype=x.dtype), torch.zeros(34, dtype=x.dtype), torch.zeros_like(x)
        for cut, gradient in zip(cuts, g, strict=True):
            places = torch.cat([torch.arange(start, stop) for start, stop in cut.ranges()])
            dw[places] += gradient.T @ x
            db[places] += gradient.sum(0)
            dx += gradient @ linear.weight[places]
        found[name] = {
            "y": distance(y, part_of_last(linear(x), cuts[rank])),
            "dx": distance(mine.grad, dx[rows]),
            "dw": distance(layer.weight.grad, cuts[rank].part_of(dw)),
            "db": distance(layer.bias.grad, cut_of(layer.bias).part_of(db)),
        }
        sent = [(record.tensor_bytes, record.ranks) for record in traffic.records if record.name == "all_reduce"]
        found[name, "sent"] = sent[-4:]
        found[name, "shared gradient"] = layer.weight.grad[4 + 4 + 2 :].clone()
    return found


def sums_of_views(rank):
    """A sum that may take its argument's place leaves alone what others can see."""
    base = torch.ones(4, 6, requires_grad=True)
    twice = base * 2
    reduce_from_ranks(twice.flatten(), inplace=True).sum().backward()
    temporary = base.detach() * 3
    same = reduce_from_ranks(temporary, inplace=True) is temporary
    return {"seen": float(twice.detach().max()), "gradient": float(base.grad.max()), "same": same}


def sent_by(rank):
    """What a layer's forward and backward send, and how often, by what of it needs a gradient."""
    found = {}
    for kind in (ColumnParallelLinear, RowParallelLinear):
        for name, mode in MODES.items():
            if kind is RowParallelLinear and "keep_gathered" in mode:
                continue
            for trained in ("x weight", "x", "weight"):
                layer = kind(IN, OUT, **mode, dtype=torch.float64)
                layer.requires_grad_("weight" in trained)
                width = IN if kind is ColumnParallelLinear else layer.weight.shape[1]
                rows = layer.weight.shape[0] and 8
                if mode and kind is ColumnParallelLinear:
                    rows = 8 // distributed.get_world_size()
                x = seeded(rank, rows, width).requires_grad_("x" in trained)
                with Traffic() as forward:
                    y = layer(x)
                with Traffic() as backward:
                    y.sum().backward()
                found[kind.__name__, name, trained] = [
                    [(record.name, record.sent_bytes) for record in traffic.records] for traffic in (forward, backward)
                ]
    return found


def a_step(layer, x) -> dict:
    """Bytes of a layer's step: what is kept for backward, and the peaks of both halves, all beyond what was there."""
    x = x.detach().requires_grad_()
    with Meter(layer, inputs=x) as meter:
        there = meter.timeline.totals[-1]
        y = layer(x)
        after, forward = meter.timeline.totals[-1] - there, meter.timeline.peak_bytes - there
        y.backward(torch.ones_like(y))
    return {"y": y.nbytes, "after": after, "forward": forward, "step": meter.timeline.peak_bytes - there}


def bytes_of(rank):
    """Parameters' bytes, and a step's beside those of plain layers of the parts' shapes."""
    ranks, found = distributed.get_world_size(), {}
    column, row = ColumnParallelLinear(IN, OUT), RowParallelLinear(IN, OUT)
    found["parameters"] = [sum(p.nbytes for p in layer.parameters()) for layer in (column, row)]
    x, part = torch.ones(8, IN, requires_grad=True), torch.ones(8, IN // ranks, requires_grad=True)
    found["column"] = a_step(column, x), a_step(nn.Linear(IN, OUT // ranks), x)
    found["row"] = a_step(row, part), a_step(nn.Linear(IN // ranks, OUT), part)
    return found


def through_autocast(rank):
    """Under autocast: dtypes and values against nn.Linear's."""
    ranks, found = distributed.get_world_size(), {}
    linear, x = whole_layer(dtype=torch.float32), seeded(4, 8, IN, dtype=torch.float32)
    x.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        truth = linear(x)
    truth.float().square().sum().backward()
    for name, mode in MODES.items():
        column = ColumnParallelLinear.from_linear(linear, **mode)
        row = RowParallelLinear.from_linear(linear, **{k: v for k, v in mode.items() if k != "keep_gathered"})
        rows = slice(rank * 8 // ranks, (rank + 1) * 8 // ranks) if mode else slice(None)
        mine, part = (
            x.detach()[rows].clone().requires_grad_(),
            x.detach().chunk(ranks, 1)[rank].clone().requires_grad_(),
        )
        with torch.autocast("cpu", torch.bfloat16):
            y, z = column(mine), row(part)
        y.float().square().sum().backward()
        z.float().square().sum().backward()
        found[name] = {
            "dtypes": (
                y.dtype,
                z.dtype,
                *(p.grad.dtype for p in (*column.parameters(), *row.parameters(), mine, part)),
            ),
            "far": max(
                distance(y, part_of_last(truth, cut_of(column.weight))),
                distance(z, truth[rows]),
                distance(mine.grad, x.grad[rows]),
                distance(column.weight.grad, cut_of(column.weight).part_of(linear.weight.grad)),
                distance(row.weight.grad, cut_of(row.weight).part_of(linear.weight.grad)),
                distance(row.bias.grad, linear.bias.grad),
            ),
        }
    double = ColumnParallelLinear(IN, OUT, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        found["FP64"] = double(x.detach().double()).dtype
    return found


def checkpointed(rank):
    """A pair of layers behind a checkpoint: gradients bit for bit those without, and what is sent."""
    ranks, found = distributed.get_world_size(), {}
    ways = {
        "none": lambda f, x: f(x),
        "torch": functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False),
        "torch, reentrant": functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=True),
        "memlab": checkpoint,
    }
    for name, mode in MODES.items():
        up = ColumnParallelLinear.from_linear(whole_layer(IN, OUT), **mode)
        down = RowParallelLinear.from_linear(whole_layer(OUT, IN), sequence_parallel=bool(mode))
        pair = nn.Sequential(up, nn.GELU(), down)
        for way, call in ways.items():
            x = seeded(3, 8, IN)[: 8 // ranks if mode else 8].requires_grad_()
            pair.zero_grad()
            with Traffic() as traffic:
                call(pair, call(pair, x)).square().sum().backward()
            found[name, way] = [x.grad, *(p.grad.clone() for p in pair.parameters())]
            found[name, way, "sent"] = [record.name for record in traffic.records]
    return found


def in_subgroups(rank):
    """Two groups of two on four ranks, each with a batch of its own."""
    mine = rank // 2
    groups = [distributed.new_group([0, 1]), distributed.new_group([2, 3])]
    linear, x = whole_layer(), seeded(50 + mine, 8, IN)
    column = ColumnParallelLinear.from_linear(linear, gather_output=True, group=groups[mine])
    far = distance(column(x), linear(x))
    shared = ColumnParallelLinear(IN, 8, sections=(4, (4, 1)), group=groups[mine], dtype=torch.float64)
    shared(x).square().sum().backward()
    again = ColumnParallelLinear(IN, 8, sections=(4, (4, 1)), group=groups[mine])
    same = neighbours(2, groups[mine]) is neighbours(2, again.group)
    try:
        ColumnParallelLinear(IN, OUT, group=groups[1 - mine])
        refused = ""
    except ValueError as error:
        refused = str(error)
    members = distributed.get_process_group_ranks(neighbours(2, groups[mine]))
    return {"far": far, "gradient": shared.weight.grad[2:], "same": same, "members": members, "refused": refused}


def refusals(rank):
    """What each wrong call says."""
    whole, part = torch.zeros(8, IN), torch.zeros(8, IN // distributed.get_world_size())
    column, row = ColumnParallelLinear(IN, OUT), RowParallelLinear(IN, OUT)
    cases = {
        "split for a column": lambda: column(part),
        "odd for a column": lambda: column(torch.zeros(8, 5)),
        "no dimension": lambda: column(torch.zeros(())),
        "whole for a row": lambda: row(whole),
        "odd for a row": lambda: row(torch.zeros(8, 5)),
        "split for a row that splits": lambda: RowParallelLinear(IN, OUT, input_is_parallel=False)(part),
        "outputs": lambda: ColumnParallelLinear(IN, 10),
        "inputs": lambda: RowParallelLinear(6, OUT),
        "rows": lambda: RowParallelLinear(IN, OUT, sequence_parallel=True)(part[:7]),
        "a single row": lambda: ColumnParallelLinear(IN, OUT, sequence_parallel=True)(whole[0]),
        "sections": lambda: ColumnParallelLinear(IN, OUT, sections=(8, 8)),
        "pieces": lambda: ColumnParallelLinear(IN, OUT, sections=(20, (3, 3), 1)),
        "pieces of a section": lambda: ColumnParallelLinear(IN, OUT, sections=(16, (3, 2), 5)),
        "gathered sections": lambda: ColumnParallelLinear(IN, OUT, sections=(16, 8), gather_output=True),
        "scattered": lambda: scatter_to_ranks(torch.zeros(3, 9)),
        "no linear": lambda: ColumnParallelLinear.from_linear(column),
        "create_graph": lambda: torch.autograd.grad(
            column(whole.requires_grad_()).sum(), column.weight, create_graph=True
        ),
        "torch.func": lambda: torch.func.grad(lambda w: torch.func.functional_call(column, {"weight": w}, whole).sum())(
            column.weight.detach()
        ),
    }
    said = {}
    for name, call in cases.items():
        try:
            call()
            said[name] = "nothing"
        except (ValueError, TypeError, RuntimeError) as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


def accumulated(rank):
    """Two backwards against one of both batches, and bits of replicated gradients."""
    layer = nn.Sequential(
        ColumnParallelLinear(IN, OUT, dtype=torch.float64), RowParallelLinear(OUT, IN, dtype=torch.float64)
    )
    x = seeded(9, 8, IN)
    layer(x).square().sum().backward()
    truth = [p.grad for p in layer.parameters()]
    layer.zero_grad()
    for half in x.chunk(2):
        layer(half).square().sum().backward()
    return max(distance(p.grad, t) for p, t in zip(layer.parameters(), truth, strict=True)), layer[1].bias.grad


def from_whole(rank):
    """What from_linear makes."""
    linear = whole_layer().requires_grad_(False)
    before = torch.get_rng_state()
    linear.bias.requires_grad_()
    column = ColumnParallelLinear.from_linear(linear, dtype=torch.float32)
    row = RowParallelLinear.from_linear(linear)
    drew = not torch.equal(before, torch.get_rng_state())
    hollow = nn.Linear(IN, OUT, device="meta")
    torch.manual_seed(0)
    filled = ColumnParallelLinear.from_linear(hollow, device="cpu")
    torch.manual_seed(0)
    truth = nn.Linear(IN, OUT)
    return {
        "drew": drew,
        "trained": [p.requires_grad for p in (*column.parameters(), *row.parameters())],
        "dtypes": [p.dtype for p in (*column.parameters(), *row.parameters())],
        "storages": column.weight.untyped_storage().nbytes() == column.weight.nbytes,
        "on meta": ColumnParallelLinear.from_linear(hollow).weight.is_meta,
        "filled": torch.equal(filled.weight, cut_of(filled.weight).part_of(truth.weight)),
        "cuts": [cut_of(p) is not None for p in (*column.parameters(), *row.parameters())],
    }


FACTS = (
    equal_to_linear,
    regions,
    sums_of_views,
    second_derivatives,
    sent_by,
    bytes_of,
    through_autocast,
    checkpointed,
    accumulated,
    from_whole,
)
AMONG_FOUR = (shared_sections, in_subgroups, refusals)


def everything(rank, names):
    torch.manual_seed(0)
    return {name: globals()[name](rank) for name in names}


@pytest.fixture(scope="module")
def found():
    """For each number of ranks, what each rank found."""
    names = [fact.__name__ for fact in FACTS]
    return {n: run_ranks(everything, n, names + [f.__name__ for f in AMONG_FOUR] * (n == 4)) for n in WORLDS}


# ---- values


@pytest.mark.parametrize("ranks", WORLDS)
def test_split_layers_are_the_whole_layer_in_fp64(found, ranks):
    for here in found[ranks]:
        far = here["equal_to_linear"]
        assert len(far) == 2 * len(SHAPES) + 3 * (len(SHAPES) * 5 - 3)
        assert max(far.values()) <= 1e-12, max(far, key=far.get)


@pytest.mark.parametrize("ranks", WORLDS)
def test_each_region_and_its_conjugate_are_exact_in_every_dtype_and_layout(found, ranks):
    assert [here["regions"] for here in found[ranks]] == [[]] * ranks


@pytest.mark.parametrize("ranks", WORLDS)
def test_a_sum_in_place_takes_the_place_of_a_tensor_and_never_of_a_view(found, ranks):
    for here in found[ranks]:
        assert here["sums_of_views"] == {"seen": 2.0, "gradient": 2.0, "same": True}


@pytest.mark.parametrize("ranks", WORLDS)
def test_regions_can_be_differentiated_twice(found, ranks):
    assert max(max(here["second_derivatives"].values()) for here in found[ranks]) <= 1e-12


@pytest.mark.parametrize("ranks", WORLDS)
def test_two_backwards_add_up_and_replicated_gradients_have_the_same_bits(found, ranks):
    assert max(here["accumulated"][0] for here in found[ranks]) <= 1e-12
    first = found[ranks][0]["accumulated"][1]
    assert all(torch.equal(here["accumulated"][1], first) for here in found[ranks])


@pytest.mark.parametrize("ranks", WORLDS)
def test_a_checkpoint_changes_no_bit_of_the_gradients(found, ranks):
    for here in found[ranks]:
        for (name, way, *sent), gradients in here["checkpointed"].items():
            if not sent:
                plain = here["checkpointed"][name, "none"]
                assert all(torch.equal(a, b) for a, b in zip(gradients, plain, strict=True)), (name, way)


def test_a_checkpoint_that_stops_early_does_not_repeat_the_last_sum(found):
    sent = {
        key[1]: len(names) for key, names in found[2][0]["checkpointed"].items() if key[0] == "whole rows" and key[2:]
    }
    assert sent == {"none": 4, "torch": 4, "torch, reentrant": 6, "memlab": 4}


@pytest.mark.parametrize("ranks", WORLDS)
def test_under_autocast_layers_compute_in_16_bit_as_linear_does_and_gradients_keep_their_parameters_dtype(found, ranks):
    for here in found[ranks]:
        assert here["through_autocast"]["FP64"] == torch.float64
        for name in MODES:
            case = here["through_autocast"][name]
            assert case["dtypes"] == (torch.bfloat16,) * 2 + (torch.float32,) * 6
            assert case["far"] < 2**-7  # sums of a few numbers with 8 bits each


@pytest.mark.parametrize("name", MODES)
def test_neighbours_that_share_a_piece_hold_the_sum_of_its_gradients_bit_for_bit(found, name):
    pieces = [here["shared_sections"][name, "shared gradient"] for here in found[4]]
    for here in found[4]:
        assert max(here["shared_sections"][name].values()) <= 1e-12
        # two pieces of two sections, 4 + 2 rows over two ranks; one piece, 6 rows, over four; weights and biases
        row = 8 * IN
        assert here["shared_sections"][name, "sent"] == [(6 * row, 2), (6 * 8, 2), (6 * row, 4), (6 * 8, 4)]
    assert all(torch.equal(piece, pieces[0]) for piece in pieces)
    assert pieces[0].shape == (6, IN)


def test_layers_work_in_groups_that_are_not_all_ranks(found):
    here = [rank["in_subgroups"] for rank in found[4]]
    assert max(one["far"] for one in here) <= 1e-12
    assert [one["members"] for one in here] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert torch.equal(here[0]["gradient"], here[1]["gradient"]) and torch.equal(
        here[2]["gradient"], here[3]["gradient"]
    )
    assert not torch.equal(here[0]["gradient"], here[2]["gradient"])
    assert all(one["same"] and "group that this rank is of" in one["refused"] for one in here)


# ---- what is sent


def expected_messages(kind: str, mode: str, trained: str, ranks: int) -> list:
    read, written = 8 * IN * 8, 8 * OUT * 8  # bytes of x and of y, whole
    send = lambda name, nbytes: (name, ring_bytes(name, nbytes, ranks))  # noqa: E731
    if kind == "RowParallelLinear":
        if mode == "whole rows":
            return [[send("all_reduce", written)], []]
        return [[send("reduce_scatter", written)], [send("all_gather", written)]]
    if mode == "whole rows":
        return [[], [send("all_reduce", read)] if "x" in trained else []]
    again = mode == "own rows" and "weight" in trained
    back = [send("all_gather", read)] * again + [send("reduce_scatter", read)] * ("x" in trained)
    return [[send("all_gather", read)], back]


@pytest.mark.parametrize("ranks", WORLDS)
def test_layers_send_what_the_formula_says_and_nothing_for_a_gradient_that_nobody_needs(found, ranks):
    for here in found[ranks]:
        for (kind, mode, trained), sent in here["sent_by"].items():
            expected = [[], []] if ranks == 1 else expected_messages(kind, mode, trained, ranks)
            assert sent == expected, (kind, mode, trained)


def test_with_its_gathered_rows_kept_sequence_parallelism_sends_what_a_pair_of_layers_sends_without(found):
    total = lambda kind, mode: sum(b for half in sent[kind, mode, "x weight"] for _, b in half)  # noqa: E731
    for ranks in WORLDS:
        sent = found[ranks][0]["sent_by"]
        without = total("ColumnParallelLinear", "whole rows") + total("RowParallelLinear", "whole rows")
        assert total("ColumnParallelLinear", "gathered rows kept") + total("RowParallelLinear", "own rows") == without


# ---- what is held


@pytest.mark.parametrize("ranks", WORLDS)
def test_a_rank_holds_its_part_of_the_weights_and_a_step_takes_what_a_plain_layer_of_that_shape_takes(found, ranks):
    column, row = 4 * (OUT * IN + OUT) // ranks, 4 * (OUT * IN // ranks + OUT)
    for rank, here in enumerate(found[ranks]):
        held = here["bytes_of"]
        assert held["parameters"] == [column, row]
        split, plain = held["column"]
        assert split == plain
        split, plain = held["row"]
        assert split["after"] == plain["after"] == plain["y"]  # one (rows, width) and no second
        assert split["step"] == plain["step"]
        assert split["forward"] == plain["forward"] + 4 * OUT * (rank > 0)  # zeros in place of the bias


@pytest.mark.parametrize("ranks", (2, 8, 64))
def test_with_sequence_parallelism_a_layer_keeps_its_own_rows_unless_told_otherwise(ranks):
    rows, width, wide = 4 * ranks, 2 * ranks, 8 * ranks
    whole, own, middle = 4 * rows * width, 4 * rows * width // ranks, 4 * rows * wide // ranks
    with imagined_ranks(ranks):
        x = torch.ones(rows // ranks, width, requires_grad=True)
        kept = {
            keep: a_step(ColumnParallelLinear(width, wide, sequence_parallel=True, keep_gathered=keep), x)
            for keep in (False, True)
        }
        down = a_step(
            RowParallelLinear(wide, width, sequence_parallel=True), torch.ones(rows, wide // ranks).requires_grad_()
        )
    assert (kept[False]["after"], kept[True]["after"]) == (middle, middle + whole)
    assert kept[False]["forward"] == kept[True]["forward"] == middle + whole
    assert (down["after"], down["forward"]) == (own, own + whole)


@pytest.mark.parametrize("mode", MODES)
def test_layers_run_on_imagined_hardware_with_imagined_ranks(mode):
    options = MODES[mode]
    with imagine("H100-80GB"), imagined_ranks(64, rank=5):
        up = ColumnParallelLinear(128, 256, sections=(128, (128, 8)), **options)
        down = RowParallelLinear(256, 128, sequence_parallel=bool(options))
        x = torch.ones(2 if options else 128, 128, requires_grad=True)
        with torch.autocast("cuda", torch.bfloat16), Traffic() as traffic:
            down(F.pad(up(x), (0, -14))).sum().backward()
    assert up.weight.shape == (2 + 16, 128) and up.weight.grad.shape == (18, 128) and x.grad.dtype == torch.float32
    assert [r.ranks for r in traffic.records if r.tensor_bytes in (16 * 128 * 2, 16 * 2)] == [8, 8]


# ---- making layers


@pytest.mark.parametrize("ranks", WORLDS)
def test_from_linear_takes_values_dtypes_and_what_is_trained_and_draws_nothing(found, ranks):
    for here in found[ranks]:
        made = here["from_whole"]
        assert not made["drew"] and made["storages"] and made["on meta"] and made["filled"]
        assert made["trained"] == [False, True, False, True]
        assert made["dtypes"] == [torch.float32] * 2 + [torch.float64] * 2
        assert made["cuts"] == [True, True, True, False]


def test_in_a_group_of_one_nothing_is_added_to_linear():
    linear, x = whole_layer(), seeded(3, 8, IN)
    with one_rank(), Traffic() as traffic:
        for region in (copy_to_ranks, reduce_from_ranks, gather_from_ranks, scatter_to_ranks, gather_sequence):
            assert region(x) is x
        assert reduce_scatter_sequence(x) is x
        for kind in (ColumnParallelLinear, RowParallelLinear):
            assert torch.equal(kind.from_linear(linear, sequence_parallel=True)(x), linear(x))
    assert traffic.records == []


def test_without_a_process_group_layers_say_where_one_comes_from():
    for kind in (ColumnParallelLinear, RowParallelLinear):
        with pytest.raises(
            RuntimeError, match="expected a process group, found none; call this in a function that run"
        ):
            kind(IN, OUT)


@pytest.mark.parametrize("region", [gather_from_ranks, scatter_to_ranks, gather_sequence, reduce_scatter_sequence])
def test_a_single_number_has_no_parts(region):
    with imagined_ranks(2), pytest.raises(ValueError, match=r"expected x of at least one dimension.*x.reshape\(1\)"):
        region(torch.tensor(3.0))


SAID = {
    "split for a column": (
        "ValueError: expected a whole x, (..., 16), found (8, 4); it is a part already: RowParallelLinear "
        "reads parts, and gather_from_ranks(x) is whole"
    ),
    "odd for a column": "ValueError: expected a whole x, (..., 16), found (8, 5); the layer reads 16 features",
    "no dimension": "ValueError: expected a whole x, (..., 16), found (); the layer reads 16 features",
    "whole for a row": (
        "ValueError: expected a part of x, (..., 4), found (8, 16); it is whole: pass input_is_parallel=False"
        " to the layer, or give it scatter_to_ranks(x)"
    ),
    "odd for a row": (
        "ValueError: expected a part of x, (..., 4), found (8, 5); the layer reads 16 features, 4 on each of 4 ranks"
    ),
    "split for a row that splits": (
        "ValueError: expected a whole x, (..., 16), found (8, 4); it is a part already: pass "
        "input_is_parallel=True to the layer"
    ),
    "outputs": (
        "ValueError: a number of outputs of 10 cannot be split over 4 ranks; pick a number that divides it "
        "(1, 2, 5, 10), or a number of outputs of 8 or 12"
    ),
    "inputs": (
        "ValueError: a number of inputs of 6 cannot be split over 4 ranks; pick a number that divides it (1, "
        "2, 3, 6), or a number of inputs of 4 or 8"
    ),
    "rows": (
        "ValueError: 7 rows cannot be split over 4 ranks; pick a tensor-parallel size that divides 7 (1, 7), "
        "or for 4 ranks 8 rows"
    ),
    "a single row": "ValueError: expected rows, (rows, ..., features), for sequence_parallel; found x of (16,)",
    "sections": "ValueError: expected sections that make 24 together, found 8 + 8 = 16",
    "pieces": (
        "ValueError: 3 pieces of a number of outputs of 3 cannot be shared evenly by 4 ranks; make as many "
        "pieces as divide them (1, 2, 4)"
    ),
    "pieces of a section": (
        "ValueError: a number of outputs of 3 cannot be split into 2 pieces; pick a number that divides it "
        "(1, 3), or a number of outputs of 2 or 4"
    ),
    "gathered sections": (
        "ValueError: expected outputs that lie in order when gathered, found gather_output with sections "
        "((16, 4), (8, 4)); make a layer for each section"
    ),
    "scattered": (
        "ValueError: 9 features cannot be split over 4 ranks; pick a tensor-parallel size that divides 9 "
        "(1, 3, 9), or for 4 ranks 12 features"
    ),
    "no linear": "TypeError: expected an nn.Linear, whole, found ColumnParallelLinear",
    "create_graph": (
        "RuntimeError: expected backward without create_graph, since ColumnParallelLinear sends while it "
        "computes, which cannot be differentiated again; F.linear(copy_to_ranks(x), layer.weight, layer.bias)"
        " can"
    ),
    "torch.func": "RuntimeError: In order to use an autograd.Function with functorch transforms",
}


@pytest.mark.parametrize("wrong", SAID)
def test_a_wrong_call_says_what_was_expected_found_and_what_to_do(found, wrong):
    for here in found[4]:
        assert here["refusals"][wrong].startswith(SAID[wrong])
        assert set(here["refusals"]) == set(SAID)
