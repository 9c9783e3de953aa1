"""ZeRO 1 and 2: the same step as one process's, by parts; each rank holds what is promised, to the byte."""

import contextlib
import gc
import pickle
import weakref

import pytest
import torch
from torch import distributed, nn, optim
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from memlab.book.workloads import GPT
from memlab.data_parallelism import FlatLayout, ZeroOptimizer
from memlab.data_parallelism.buckets import bucketed
from memlab.memory_timeline import Meter, imagine
from memlab.mixed_precision import LossScaler, MasterWeights
from memlab.offloading import OffloadedOptimizer
from memlab.ranks import run_ranks
from memlab.units import parse_bytes
from tests.ranks_helpers import FailsInBackward

FP64 = torch.float64
SHAPES = [(30, 4), (5,), (0,), (2, 3, 4), (), (7, 1), (1,)]
SMALL, BUCKET = "256 B", "16 KiB"
OPTIMIZERS = {
    "SGD": (optim.SGD, {"lr": 0.1}),
    "SGD, Nesterov": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "Adam": (optim.Adam, {}),
    "AdamW, for-loop": (optim.AdamW, {"foreach": False}),
    "AdamW, foreach, AMSGrad": (optim.AdamW, {"foreach": True, "amsgrad": True}),
    "Adagrad": (optim.Adagrad, {"initial_accumulator_value": 0.1}),
    "RAdam": (optim.RAdam, {}),
    "NAdam": (optim.NAdam, {}),
    "RMSprop": (optim.RMSprop, {"momentum": 0.5, "centered": True}),
    "Adamax": (optim.Adamax, {}),
    "Adadelta": (optim.Adadelta, {}),
    "Rprop": (optim.Rprop, {}),
    "ASGD": (optim.ASGD, {}),
}


def in_masters(parts, **options):
    return MasterWeights(parts, optim.AdamW, **options)


def on_host(parts, **options):
    return OffloadedOptimizer(parts, optim.AdamW, **options)


def parameters(dtype=torch.float32, shapes=SHAPES, seed=0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def set_gradients(params, seed, but=()) -> None:
    """Whole multiples of 12, of which 2, 3 or 4 ranks' average is exact."""
    generator = torch.Generator().manual_seed(seed)
    for number, p in enumerate(params):
        gradient = 12 * torch.randint(-9, 9, p.shape, generator=generator).to(p.dtype)
        if number not in but:
            p.grad = gradient


def in_groups(params) -> list[dict]:
    """With weight decay for matrices, without for all else."""
    return [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0, "lr": 5e-4},
    ]


def layouts(groups, ranks, bucket_bytes) -> list[tuple[FlatLayout, int]]:
    """The layouts of the buckets and the bytes of an element, from shapes alone."""
    params = [p for group in groups for p in group["params"]]
    keys = [(p.dtype, n, p.requires_grad) for n, group in enumerate(groups) for p in group["params"]]
    buckets = bucketed(params, keys, parse_bytes(bucket_bytes))
    return [(FlatLayout([params[n].shape for n in ns], ranks), params[ns[0]].itemsize) for ns in buckets]


def apart(ours, theirs) -> float:
    """The largest ‖a − b‖ / ‖b‖ over pairs of tensors; nan if one is."""
    pairs = zip(ours, theirs, strict=True)
    return max([((a - b).norm() / b.norm()).item() if b.norm() else a.norm().item() for a, b in pairs])


def same(a, b) -> bool:
    """Whether two state dicts, or anything in them, are equal bit by bit, with the same keys, types and shapes."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


class Sent(TorchDispatchMode):
    """The collectives that a rank takes part in: their names, and the bytes of the whole that each is about."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            tensors = torch.utils._pytree.tree_leaves(args)
            nbytes = max(x.nbytes for x in tensors if isinstance(x, torch.Tensor))
            self.calls.append((func._opname, nbytes))
        return func(*args, **(kwargs or {}))

    def nbytes(self, name: str) -> int:
        return sum(nbytes for called, nbytes in self.calls if called == name)


SCATTER, GATHER = "_reduce_scatter_base_", "_allgather_base_"


@contextlib.contextmanager
def fake_ranks(world: int, rank: int = 0):
    distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        distributed.destroy_process_group()


# ---- the same as one process

GPT_SIZES = {"layers": 2, "width": 32, "heads": 2, "context": 16, "vocabulary": 64}


def ten_steps(rank, world, stage, micro_batches):
    """How far a GPT is from one process's with the whole batch, in weights, states and norms."""
    torch.manual_seed(100 + rank)
    model = GPT(**GPT_SIZES).to(FP64)
    torch.manual_seed(100)
    alone = GPT(**GPT_SIZES).to(FP64)
    optimizer = ZeroOptimizer(in_groups(list(model.parameters())), optim.AdamW, stage, bucket_bytes=BUCKET)
    reference = optim.AdamW(in_groups(list(alone.parameters())))
    schedulers = [optim.lr_scheduler.CosineAnnealingLR(each, 10) for each in (optimizer, reference)]
    norms = []
    for step in range(10):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randint(64, (2, 8, 16), generator=generator)
        alone(x, y).backward()
        theirs = nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
        shares = [each.chunk(world)[rank].chunk(micro_batches) for each in (x, y)]
        for number, (share, targets) in enumerate(zip(*shares, strict=True)):
            keep = stage == 2 and step % 2 and number < micro_batches - 1  # every other step keeps gradients whole
            with optimizer.no_sync() if keep else contextlib.nullcontext():
                (model(share, targets) / micro_batches).backward()
        norms.append(abs(optimizer.clip_grad_norm_(1.0) / theirs - 1).item())
        for each, scheduler in zip((optimizer, reference), schedulers, strict=True):
            each.step()
            each.zero_grad()
            scheduler.step()
    ours, theirs = optimizer.state_dict(), reference.state_dict()
    pairs = [(ours["state"][n][name], v) for n, s in theirs["state"].items() for name, v in s.items()]
    return (
        apart(model.parameters(), alone.parameters()),
        apart(*zip(*pairs, strict=True)),
        max(norms),
        ours["param_groups"] == theirs["param_groups"],
    )


# ---- bit by bit


def whole_gradients(optimizer) -> dict[int, torch.Tensor]:
    """The gradients that the collectives returned, put together from all ranks' parts, by number of the parameter."""
    own, shapes = {}, {}
    for bucket in optimizer._buckets:
        for number, p, part in zip(bucket.numbers, bucket.params, bucket.parts, strict=True):
            own[number], shapes[number] = part.grad, p.shape
    ranks = [None] * distributed.get_world_size()
    distributed.all_gather_object(ranks, own)
    return {n: torch.cat([rank[n] for rank in ranks]).view(shapes[n]) for n in own if own[n] is not None}


def bit_by_bit(rank, stage, make, options, dtype=torch.float32, used_by=lambda number, rank, step: True):
    """Whether weights and states equal an optimizer's that is fed the very gradients the collectives returned."""
    params, copies = parameters(dtype, seed=rank), parameters(dtype)
    unused = options.get("find_unused", False)
    options = {name: value for name, value in options.items() if name != "find_unused"}
    optimizer = ZeroOptimizer(
        in_groups(params), make, stage, bucket_bytes=SMALL, find_unused_parameters=unused, **options
    )
    reference = make(in_groups(copies), **options)
    order = [p for group in in_groups(params) for p in group["params"]]
    theirs = [p for group in in_groups(copies) for p in group["params"]]
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + rank)
        loss = torch.zeros((), dtype=dtype)
        for number, p in enumerate(order):
            weights = torch.randn(p.shape, generator=generator).to(dtype)
            if used_by(number, rank, step):
                loss = loss + (p * weights).sum()
        loss.backward()
        optimizer.reduce_gradients()
        for number, gradient in whole_gradients(optimizer).items():
            theirs[number].grad = gradient
        optimizer.step()
        reference.step()
        reference.zero_grad()
    weights = all(map(torch.equal, params, copies))
    return weights and same(optimizer.state_dict(), reference.state_dict())


def fused(rank):
    """How far fused AdamW is from the same on the whole; and whether it equals the same on copies of the parts."""
    params, copies = parameters(seed=rank), parameters()
    optimizer = ZeroOptimizer(params, optim.AdamW, bucket_bytes=SMALL, fused=True)
    reference = optim.AdamW(copies, fused=True)
    parts = optimizer.param_groups[0]["params"]
    twins = [part.detach().clone() for part in parts]
    on_twins = optim.AdamW(twins, fused=True)
    for seed in range(3):
        set_gradients(params, seed)
        set_gradients(copies, seed)
        optimizer.reduce_gradients()
        for part, twin in zip(parts, twins, strict=True):
            twin.grad = part.grad.clone()
        for each in (optimizer, reference, on_twins):
            each.step()
    ours, theirs = optimizer.state_dict()["state"], reference.state_dict()["state"]
    moments = [(ours[n][name], theirs[n][name]) for n in theirs for name in theirs[n]]
    return apart(params, copies), apart(*zip(*moments, strict=True)), all(map(torch.equal, parts, twins))


def odd_uses(rank):
    """Parameters that some ranks use, in some steps; one that none ever uses; and more ranks than elements."""

    def used_by(number, rank, step):
        return number != 1 and (number != 0 or rank == step % 5) and not (number == 3 and step < 2)

    return [
        bit_by_bit(rank, stage, optim.AdamW, {"weight_decay": 0.1, "find_unused": True}, used_by=used_by)
        for stage in (1, 2)
    ]


# ---- saving, loading


def saved(rank, state, values, seeds, to):
    """Some steps, from a state; then the weights, and the whole states."""
    params = parameters(seed=rank)
    with torch.no_grad():
        for p, value in zip(params, values or params, strict=True):
            p.copy_(value)
    optimizer = ZeroOptimizer(in_groups(params), optim.AdamW, bucket_bytes=SMALL, lr=0.1)
    if state is not None:
        optimizer.load_state_dict(state)
        held = {s.untyped_storage().nbytes() - s.nbytes for states in optimizer.state.values() for s in states.values()}
        assert held == {0}
    for seed in seeds:
        set_gradients(params, seed)
        optimizer.step()
    return [p.detach() for p in params], optimizer.state_dict(to)


def alone(state, values, seeds):
    params = parameters()
    with torch.no_grad():
        for p, value in zip(params, values or params, strict=True):
            p.copy_(value)
    optimizer = optim.AdamW(in_groups(params), lr=0.1)
    if state is not None:
        optimizer.load_state_dict(state)
    for seed in seeds:
        set_gradients(params, seed)
        optimizer.step()
    return [p.detach() for p in params], optimizer.state_dict()


# ---- bytes


def metered(rank, world, stage, make, dtype):
    """Bytes by category after construction, backward, reduction and step, and the largest beside the parameters.

    Of several constructions the least peak: gloo's thread may still hold what ranks told each other in one.
    """
    torch.manual_seed(rank)
    x = torch.randint(64, (2, 16))
    peaks = []
    for _ in range(4):
        model = GPT(**GPT_SIZES).to(dtype)
        with Meter(model) as building:
            optimizer = ZeroOptimizer(in_groups(list(model.parameters())), make, stage, bucket_bytes=BUCKET)
        peaks.append(building.timeline.peak_bytes)
    with Meter(model, optimizer, inputs=x) as meter:
        model(x, x).backward()
        marks = [len(meter.timeline)]
        optimizer.reduce_gradients()
        marks.append(len(meter.timeline))
        optimizer.step()
        marks.append(len(meter.timeline))
    timeline = meter.timeline
    held = [timeline.bytes_by_category(mark) for mark in marks]
    reducing = max(timeline.totals[marks[0] : marks[1] + 1]) - timeline.totals[marks[0]]
    return building.timeline.totals[-1], min(peaks), held, reducing


KINDS = {"AdamW": (optim.AdamW, torch.float32, 8), "MasterWeights": (in_masters, torch.bfloat16, 12)}


# ---- what hooks, losses and ranks may do


def odd_backwards(rank):
    """Facts of stage 2, by name, of two ranks."""
    facts = {}
    params = parameters(FP64, [(8, 4), (8, 4), (3,)], seed=rank)
    optimizer = ZeroOptimizer(params, optim.SGD, 2, bucket_bytes=SMALL, lr=0.1)
    x = torch.full((4,), 1.0 + rank, dtype=FP64)

    def loss(order):
        total = 0.0
        for number in order if rank else reversed(order):
            total = total + (params[number] * (1 + number)).sum() * x[0]
        return total

    def parts():
        return [None if p.grad is None else p.grad.clone() for p in optimizer.param_groups[0]["params"]]

    with Sent() as sent:
        loss([0, 1, 2]).backward()
        loss([0, 1, 2]).backward()
    facts["calls"] = sent.calls
    facts["added up"] = all((grad == 2 * 1.5 * (1 + n)).all() for n, grad in enumerate(parts()))
    facts["freed"] = all(p.grad is None for p in params)
    optimizer.zero_grad(set_to_none=False)
    facts["zeroed"] = all((grad == 0).all() for grad in parts())
    optimizer.zero_grad()
    facts["dropped"] = parts()

    try:
        (FailsInBackward.apply(params[0]).sum() + params[2].sum()).backward()
    except ArithmeticError:
        facts["step after"] = raised(optimizer.step) + raised(optimizer.reduce_gradients)
    optimizer.zero_grad()
    loss([0, 1, 2]).backward()
    facts["right again"] = all((grad == 1.5 * (1 + n)).all() for n, grad in enumerate(parts()))
    optimizer.zero_grad()

    with optimizer.no_sync(), Sent() as kept:
        loss([0, 2]).backward()
    facts["kept"] = kept.calls, params[0].grad is not None
    loss([1]).backward()  # takes what was kept, too
    facts["with the kept"] = all((grad == 1.5 * (1 + n)).all() for n, grad in enumerate(parts()))
    with optimizer.no_sync():
        loss([0]).backward()
    facts["left over"] = raised(optimizer.step)
    optimizer.reduce_gradients()
    facts["reduced"] = bool((parts()[0] == 3.0).all())
    optimizer.zero_grad()

    if rank == 0:
        loss([0, 1, 2]).backward()
    optimizer.reduce_gradients()  # rank 1 has no data, and did not run backward
    facts["without data"] = all((grad == 0.5 * (1 + n)).all() for n, grad in enumerate(parts()))
    optimizer.zero_grad()
    empty = torch.ones(0 if rank else 4, dtype=FP64)
    (empty[:, None, None] * params[0]).sum().backward()
    facts["empty batch"] = bool((parts()[0] == 2.0).all()), [bool((grad == 0).all()) for grad in parts()[1:]]
    optimizer.zero_grad()

    params[1].requires_grad_(False)
    loss([0, 2]).backward()
    facts["frozen"] = parts()[1], bool((parts()[2] == 4.5).all())
    optimizer.step()
    params[1].requires_grad_(True)
    before = params[1].clone()
    loss([1]).backward()
    optimizer.step()
    facts["thawed"] = bool((before - params[1] - 0.3).abs().max() < 1e-12)

    for each in (0, 1):  # reentrant: a backward inside backward, whose hooks are of another graph task
        inner = checkpoint(lambda y, p=params[each]: (p * y).sum(), x[:1].clone().requires_grad_(), use_reentrant=True)
        (inner + params[2].sum()).backward()
    facts["reentrant"] = all((grad == value).all() for grad, value in zip(parts(), (1.5, 1.5, 2.0), strict=True))
    optimizer.zero_grad()

    facts["tied"] = tied(rank)
    return facts


def frozen_late(rank, stage):
    """How far from torch: frozen between backward and step, by one bucket or all; thawed for a backward in between."""
    made = [parameters(FP64, [(8, 4), (8, 4), (3,)]) for _ in range(2)]
    ours, whole = made
    options = {"lr": 0.1, "weight_decay": 0.1}
    optimizer = ZeroOptimizer(ours, optim.AdamW, stage, bucket_bytes=SMALL, **options)
    reference, found = optim.AdamW(whole, **options), []
    for before, frozen in (([0, 1, 2], [1]), ([0, 2], [0, 2]), ([0, 1, 2], [0, 1, 2]), ([1], [])):
        for params in made:
            for number, p in enumerate(params):
                p.requires_grad_(number in before)
        sum((1 + rank) * ours[n].square().sum() for n in before if rank == 0 or n != 1 or len(before) == 1).backward()
        for each in range(2):
            used = [n for n in before if each == 0 or n != 1 or len(before) == 1]
            (sum((1 + each) * whole[n].square().sum() for n in used) / 2).backward()
        for params in made:
            for number in frozen:
                params[number].requires_grad_(False)
        optimizer.step()
        reference.step()
        reference.zero_grad()
        found.append(apart(ours, whole))
    never = [nn.Parameter(torch.ones(3), requires_grad=False), nn.Parameter(torch.ones(3))]
    optimizer = ZeroOptimizer(never, optim.SGD, stage, lr=0.1)
    never[0].grad = torch.ones(3)
    return found, raised(optimizer.step)


def taken_by_a_hook(rank):
    """What stage 2 makes of a gradient that the reader's own hook has set to None, on one rank and on both."""
    params = parameters(FP64, [(4,), (3,), (5,)])
    for number, p in enumerate(params[:2]):
        if number <= rank:
            p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    optimizer = ZeroOptimizer(params, optim.SGD, 2, bucket_bytes=8, find_unused_parameters=True, lr=0.1)
    sum(p.sum() for p in params).backward()
    return [None if part.grad is None else set(part.grad.tolist()) for part in optimizer.param_groups[0]["params"]]


def tied(rank):
    torch.manual_seed(rank)
    first, last, other = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
    last.weight = first.weight
    model = nn.Sequential(first, other, last).double()
    optimizer = ZeroOptimizer(model.parameters(), optim.SGD, 2, lr=0.1)
    whole = [p.detach().clone().requires_grad_() for p in model.parameters()]
    x = torch.randn(2, 3, 4, dtype=FP64, generator=torch.Generator().manual_seed(0))
    model(x[rank]).square().mean().backward()
    optimizer.step()
    a, b, c, d, e = whole
    y = x @ a.T + b
    y = y @ c.T + d
    (y @ a.T + e).square().mean().backward()
    return apart(model.parameters(), [p - 0.1 * p.grad for p in whole]) < 1e-14 and last.weight is first.weight


def raised(fn, *args, **kwargs) -> str:
    """The message of what a call raises, after the error's name."""
    try:
        fn(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def nonfinite(rank):
    """With a scaler that agrees, all skip; without, all have nan."""
    facts = {}

    def agree(found):
        distributed.all_reduce(found, distributed.ReduceOp.MAX)
        return found

    for dtype, make in ((torch.float32, optim.SGD), (torch.float16, in_masters)):
        for stage in (1, 2):
            params = parameters(dtype, [(4, 4), (7,)])
            optimizer = ZeroOptimizer(params, make, stage, lr=0.5)
            scaler = LossScaler(8.0, agree=agree)
            history = []
            for bad in (False, True, False):
                before = [p.detach().clone() for p in params]
                loss = sum((p * p.new_tensor(float("inf") if bad and rank == 1 else 1.0)).sum() for p in params)
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                norm = optimizer.clip_grad_norm_(100.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                history.append((norm.item(), all(map(torch.equal, before, params)), scaler.get_scale()))
            facts[dtype, stage] = history
    params = parameters(FP64, [(4, 4), (7,)])
    optimizer = ZeroOptimizer(params, optim.SGD, lr=0.5)
    (params[0].sum() * (float("nan") if rank == 1 else 1.0) + params[1].sum()).backward()
    norm = optimizer.clip_grad_norm_(1.0)
    facts["refused"] = raised(optimizer.clip_grad_norm_, 1.0, error_if_nonfinite=True)
    optimizer.step()
    facts["nan"] = norm.isnan().item() and all(p.isnan().all() for p in params)
    return facts


def norms(rank):
    """Of every kind, next to torch's of the average."""
    params = parameters(FP64, seed=rank)
    optimizer = ZeroOptimizer(params, optim.SGD, bucket_bytes=SMALL, lr=0.5)
    found = {}
    for kind in (1.0, 2.0, 3.5, float("inf")):
        copies = parameters(FP64)
        for seed in (2, 3):
            generator = torch.Generator().manual_seed(seed)
            for p, copy in zip(params, copies, strict=True):
                gradient = torch.randn(p.shape, generator=generator, dtype=FP64)
                copy.grad = gradient / 2 if copy.grad is None else copy.grad + gradient / 2
                if rank == seed - 2:
                    p.grad = gradient
        theirs = nn.utils.clip_grad_norm_([p for p in copies if p.numel()], 0.1, kind)  # torch refuses empty ones
        ours = optimizer.clip_grad_norm_(0.1, kind)
        clipped = whole_gradients(optimizer)
        found[kind] = (
            abs(ours / theirs - 1).item(),
            apart([clipped[n] for n in range(len(copies))], [p.grad for p in copies]),
        )
        optimizer.zero_grad()
    return found


def beside_torchs_own(rank):
    """DDP and ZeroRedundancyOptimizer on one model, ours on another, and ours on one that DDP wraps by mistake."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    models = []
    for _ in range(3):
        torch.manual_seed(1)
        models.append(GPT(**GPT_SIZES).double())
    plain, wrapped, theirs = models[0], DistributedDataParallel(models[1]), DistributedDataParallel(models[2])
    optimizers = [
        ZeroOptimizer(plain.parameters(), optim.AdamW, 2, bucket_bytes=BUCKET),
        ZeroOptimizer(wrapped.parameters(), optim.AdamW, 1, bucket_bytes=BUCKET),
        ZeroRedundancyOptimizer(theirs.parameters(), optim.AdamW),
    ]
    for step in range(5):
        x, y = torch.randint(64, (2, 8, 16), generator=torch.Generator().manual_seed(step)).chunk(2, dim=1)[rank]
        for model, optimizer in zip((plain, wrapped, theirs), optimizers, strict=True):
            model(x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [apart(model.parameters(), models[2].parameters()) for model in models[:2]]


def masters_notice(rank):
    """A weight written to between steps reaches its master; the gather after a step counts as no such write."""
    params = parameters(torch.bfloat16)
    optimizer = ZeroOptimizer(params, in_masters, lr=1e-3)
    set_gradients(params, 0)
    optimizer.step()
    parts = optimizer.param_groups[0]["params"]
    counted = [part._version for part in parts]
    set_gradients(params, 1)
    optimizer.reduce_gradients()
    quiet = counted == [part._version for part in parts]
    with torch.no_grad():
        params[0].fill_(3.0)
    optimizer.step()
    graph = (params[0] * params[0]).sum()
    set_gradients(params, 1)
    optimizer.step()
    return quiet, bool(((params[0] - 3.0).abs() < 0.1).all()), raised(graph.backward)


def more_parameters(rank):
    """A group that comes later; its parameters are rank 0's, and are stepped."""
    params, late = parameters(FP64, seed=rank), parameters(FP64, [(5, 3)], seed=5 + rank)
    optimizer = ZeroOptimizer(params, optim.SGD, 2, bucket_bytes=SMALL, lr=0.5)
    optimizer.add_param_group({"params": late, "lr": 0.25})
    expected = parameters(FP64, [(5, 3)], seed=5)[0] - 0.25
    loss = sum(p.sum() for p in (*params, *late))
    optimizer.zero_grad()

    def closure():
        loss.backward()
        return loss

    returned = optimizer.step(closure)
    again = raised(optimizer.add_param_group, {"params": late})
    return torch.equal(late[0], expected), returned is loss, again, len(optimizer.state_dict()["param_groups"])


# ---- launches: as few as can be


def as_two(rank, state, values):
    return {
        "ten steps": {(stage, k): ten_steps(rank, 2, stage, k) for stage in (1, 2) for k in (1, 2)},
        "resumed": saved(rank, state, values, range(3, 6), None),
        "odd": odd_backwards(rank),
        "frozen late": [frozen_late(rank, stage) for stage in (1, 2)],
        "taken": taken_by_a_hook(rank),
        "nonfinite": nonfinite(rank),
        "norms": norms(rank),
        "torch": beside_torchs_own(rank),
        "masters": masters_notice(rank),
        "more": more_parameters(rank),
    }


def as_three(rank, state, values):
    facts = {
        "bits": {
            (name, stage): bit_by_bit(rank, stage, *what) for name, what in OPTIMIZERS.items() for stage in (1, 2)
        },
        "metered": {
            (stage, name): metered(rank, 3, stage, make, dtype)
            for stage in (1, 2)
            for name, (make, dtype, _) in KINDS.items()
        },
        "resumed": saved(rank, state, values, range(3, 6), None),
        "fused": fused(rank),
    }
    for make in (in_masters, on_host):
        for stage in (1, 2):
            facts["bits"][make.__name__, stage] = bit_by_bit(rank, stage, make, {}, torch.bfloat16)
    return facts


def as_four(rank):
    return {
        "ten steps": {(stage, 1): ten_steps(rank, 4, stage, 1) for stage in (1, 2)},
        "saved": saved(rank, None, None, range(3), 1),
    }


@pytest.fixture(scope="module")
def two():
    values, state = alone(None, None, range(3))
    return run_ranks(as_two, 2, state, values)


@pytest.fixture(scope="module")
def four():
    return run_ranks(as_four, 4)


@pytest.fixture(scope="module")
def three(four):
    values, state = four[1]["saved"]
    return run_ranks(as_three, 3, state, values)


@pytest.mark.parametrize("world", ["two", "four"])
def test_ten_steps_in_fp64_equal_the_single_process(world, request):
    for facts in request.getfixturevalue(world):
        for weights, states, norm, same_groups in facts["ten steps"].values():
            assert weights <= 1e-12 and states <= 1e-12 and norm <= 1e-12 and same_groups


def test_every_elementwise_optimizer_steps_bit_by_bit_as_on_the_whole_fed_the_very_gradients_the_collective_returned(
    three,
):
    for facts in three:
        assert len(facts["bits"]) == 2 * len(OPTIMIZERS) + 4
        assert all(facts["bits"].values()), [name for name, right in facts["bits"].items() if not right]


def test_fused_on_a_cpu_rounds_by_an_elements_place_in_its_tensor_so_parts_differ_from_the_whole_by_rounding_only(
    three,
):
    for facts in three:
        weights, moments, same_on_copies_of_the_parts = facts["fused"]
        assert weights <= 1e-6 and moments <= 1e-6 and same_on_copies_of_the_parts


def test_a_parameter_that_no_rank_uses_is_not_stepped_and_one_that_a_single_rank_uses_is():
    assert run_ranks(odd_uses, 5) == [[True, True]] * 5


def test_a_state_dict_is_that_of_the_optimizer_itself_and_goes_on_with_another_number_of_ranks_bit_by_bit(
    two, three, four
):
    half, expected = alone(None, None, range(3)), alone(None, None, range(6))
    assert same(four[1]["saved"], half) and all(four[rank]["saved"][1] == {} for rank in (0, 2, 3))
    for facts in (*two, *three):
        assert same(facts["resumed"], expected)
    weights, state = four[1]["saved"]
    assert same(alone(state, weights, range(3, 6)), expected)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_holds_what_the_formula_says_to_the_byte(three, stage, kind):
    make, dtype, state_bytes = KINDS[kind]
    groups = in_groups(list(GPT(**GPT_SIZES).to(dtype).parameters()))
    params = [p for group in groups for p in group["params"]]
    cut = layouts(groups, 3, BUCKET)
    whole = sum(layout.padded * itemsize for layout, itemsize in cut)
    pieces = sum(layout.piece * itemsize for layout, itemsize in cut)
    largest = max(layout.padded * itemsize for layout, itemsize in cut)
    assert any(layout.padding for layout, _ in cut) and len(cut) > 3
    for rank, facts in enumerate(three):
        built, building, (backward, reduced, stepped), reducing = facts["metered"][stage, kind]
        elements = sum(end - begin for layout, _ in cut for begin, end in layout.parts(rank))
        assert built == whole
        assert building <= sum(p.nbytes for p in params) + largest + 8 * len(cut)
        assert backward["gradient"] == (sum(p.nbytes for p in params) if stage == 1 else pieces)
        assert reduced["gradient"] == pieces and stepped["gradient"] == 0
        assert stepped["optimizer_state"] == state_bytes * elements + 4 * len(params)  # and one step counter each
        for held in (backward, reduced, stepped):
            assert held["parameter"] == whole
        assert reducing <= pieces + 2 * largest if stage == 1 else reducing <= len(params)


def test_at_stage_2_every_backward_is_reduced_in_the_same_order_on_every_rank_and_added_up(two):
    assert two[0]["odd"]["calls"] == two[1]["odd"]["calls"]
    scattered = [nbytes for name, nbytes in two[0]["odd"]["calls"] if name == SCATTER]
    assert len(scattered) == 2 * 3 and sum(scattered) == 2 * (2 * 8 * 4 + 4) * 8
    for facts in two:
        odd = facts["odd"]
        assert odd["added up"] and odd["freed"] and odd["zeroed"] and odd["dropped"] == [None] * 3


def test_after_a_backward_that_raised_zero_grad_makes_a_fresh_start(two):
    for facts in two:
        assert facts["odd"]["step after"].count("one that raised in the middle; call zero_grad()") == 2
        assert facts["odd"]["right again"]


def test_no_sync_keeps_gradients_whole_until_the_backward_after_it(two):
    for facts in two:
        assert facts["odd"]["kept"] == ([], True) and facts["odd"]["with the kept"] and facts["odd"]["reduced"]
        assert "call reduce_gradients() when the last backward is through" in facts["odd"]["left over"]


def test_a_rank_without_data_counts_as_zeros(two):
    for facts in two:
        assert facts["odd"]["without data"] and facts["odd"]["empty batch"] == (True, [True, True])


def test_frozen_thawed_tied_and_checkpointed_parameters_have_the_gradients_they_should(two):
    for facts in two:
        assert facts["odd"]["frozen"] == (None, True)
        assert facts["odd"]["thawed"] and facts["odd"]["reentrant"] and facts["odd"]["tied"]


def test_a_parameter_frozen_between_backward_and_step_is_stepped_on_all_ranks_as_by_torch(two):
    for facts in two:
        for apart_by, refusal in facts["frozen late"]:
            assert max(apart_by) <= 1e-12
            assert "freeze it again after step(), or set its grad to None" in refusal


def test_a_gradient_that_a_hook_took_away_counts_as_one_that_never_came(two):
    assert [facts["taken"] for facts in two] == [[None, {0.5}, {1.0}]] * 2


def test_an_inf_on_one_rank_makes_all_skip_with_a_scaler_that_agrees_and_nan_for_all_without(two):
    for facts in two:
        *histories, refused, nan = facts["nonfinite"].values()
        assert len(histories) == 4 and nan and "found nan; skip the step" in refused
        for history in histories:
            (norm, kept, scale), (_, kept_too, scale_too), (_, kept_last, _) = history
            assert (kept, kept_too, kept_last) == (False, True, False) and (scale, scale_too) == (8.0, 4.0)
            assert norm == pytest.approx(23**0.5, rel=1e-6)
    assert repr(two[0]["nonfinite"]) == repr(two[1]["nonfinite"])


def test_the_norm_and_the_clipped_gradients_are_torchs_of_the_average(two):
    for facts in two:
        assert all(norm <= 1e-12 and clipped <= 1e-12 for norm, clipped in facts["norms"].values())


def test_it_equals_zero_redundancy_optimizer_and_averaging_twice_changes_nothing(two):
    for facts in two:
        assert max(facts["torch"]) <= 1e-12


def test_a_weight_written_to_between_steps_reaches_its_master_and_a_graph_from_before_a_step_is_refused(two):
    for facts in two:
        quiet, reached, message = facts["masters"]
        assert quiet and reached and "modified by an inplace operation" in message


def test_a_group_may_come_later_and_a_closure_is_called(two):
    for facts in two:
        equal, returned, again, groups = facts["more"]
        assert equal and returned and groups == 2 and "found numbers 7 and 8 given twice" in again


# ---- imagined ranks, errors, and what is left behind


def traffic_of_a_step(stage, micro_batches, world=64):
    """What rank 0 of many calls in a step on imagined hardware; its timeline, and the bytes of parameters."""
    with fake_ranks(world), imagine("H100-80GB"):
        model = GPT(**GPT_SIZES)
        optimizer = ZeroOptimizer(model.parameters(), optim.AdamW, stage, bucket_bytes=BUCKET)
        x = torch.randint(64, (2, 16))
        for _ in range(2):  # in the first, ranks agree on turns
            with Sent() as sent, Meter(model, optimizer, inputs=x) as meter:
                for _ in range(micro_batches):
                    model(x, x).backward()
                optimizer.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
        state = optimizer.state_dict()
        assert state["state"][0]["exp_avg"].shape == (64, 32) and state["state"][0]["exp_avg"].device.type == "cpu"
        optimizer.load_state_dict(state)
        groups = [{"params": list(model.parameters())}]
        whole = sum(layout.padded * 4 for layout, _ in layouts(groups, world, BUCKET))
    return sent, meter.timeline, whole


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_of_64_imagined_ranks_one_sends_its_share_of_gradients_and_weights_and_stage_2_gradients_of_each_backward(
    stage, micro_batches
):
    sent, timeline, whole = traffic_of_a_step(stage, micro_batches)
    assert sent.nbytes(GATHER) == whole
    assert sent.nbytes(SCATTER) == whole * (micro_batches if stage == 2 else 1)
    assert [call for call in sent.calls if call[0] not in (GATHER, SCATTER)] == [("allreduce_", 8)]  # the norm's


def with_frozen_bases(rank, stage):
    frozen = [torch.full((3,), rank + 1).to(dtype) for dtype in (torch.int16, torch.uint16, torch.float8_e4m3fn)]
    params = [*(nn.Parameter(base, requires_grad=False) for base in frozen), nn.Parameter(torch.ones(3))]
    optimizer = ZeroOptimizer(params, torch.optim.SGD, stage=stage, lr=0.5)
    (params[-1].sum() * (rank + 1)).backward()
    optimizer.step()
    return [p.float().tolist() for p in params]


@pytest.mark.parametrize("stage", [1, 2])
def test_frozen_weights_may_be_of_dtypes_that_no_collective_knows(stage):
    assert run_ranks(with_frozen_bases, 2, stage) == [[[1.0] * 3] * 3 + [[0.25] * 3]] * 2


def test_stage_2_never_has_the_whole_of_the_gradients():
    _, timeline, whole = traffic_of_a_step(2, 1)
    filling = {number for number, each in timeline.storages.items() if str(each.line).startswith("Filling")}
    alive, most = 0, 0
    for event in timeline.events:
        alive += event.delta if event.storage in filling else 0
        most = max(most, alive)
    largest = parse_bytes(BUCKET)
    assert alive == 0 and whole / 12 < most <= 3 * largest < whole / 2
    assert max(timeline.curves["gradient"]) == whole / 64


def test_errors_say_what_to_do():
    params = parameters(FP64)
    assert "run_ranks(fn, 4)" in raised(ZeroOptimizer, params, optim.SGD)
    with fake_ranks(4):
        assert "use fully_shard(module)" in raised(ZeroOptimizer, params, optim.SGD, 3)
        assert "write [tensor]" in raised(ZeroOptimizer, params[0], optim.SGD)
        assert "found none" in raised(ZeroOptimizer, [], optim.SGD)
        assert "numbers 0 and 7 given twice" in raised(ZeroOptimizer, [*params, params[0]], optim.SGD)
        shared = nn.Parameter(params[0].data)
        assert "numbers 0 and 7 in the same memory" in raised(ZeroOptimizer, [*params, shared], optim.SGD)
        assert "dense leaf tensors, found int" in raised(ZeroOptimizer, [*params, 3], optim.SGD)
        with_meta = [*params, nn.Parameter(torch.empty(2, device="meta"))]
        assert "all parameters on one device, found cpu, meta" in raised(ZeroOptimizer, with_meta, optim.SGD)
        assert "looks at a parameter's rows and columns" in raised(ZeroOptimizer, parameters(), optim.Adafactor)
        assert "at once and would be wrong on parts; use AdamW" in raised(ZeroOptimizer, parameters(), optim.LBFGS)
        assert "expected an optimizer's class" in raised(ZeroOptimizer, parameters(), lambda parts: parts)

        model = nn.Embedding(5, 3, sparse=True)
        optimizer = ZeroOptimizer(model.parameters(), optim.SGD, lr=0.1)
        model(torch.tensor([1])).sum().backward()
        assert "found one of layout torch.sparse_coo" in raised(optimizer.step)
        optimizer.zero_grad()

        model = nn.Linear(3, 3)
        optimizer = ZeroOptimizer(model.parameters(), optim.AdamW, 2)
        assert "norm_type above 0" in raised(optimizer.clip_grad_norm_, 1.0, 0.0)
        assert "save a ZeroOptimizer" in raised(pickle.dumps, optimizer)
        assert "found ['a']" in raised(optimizer.load_state_dict, {"a": 1})
        other = optim.AdamW(parameters())
        assert "2 parameters, found one of 7" in raised(optimizer.load_state_dict, other.state_dict())
        other = optim.AdamW(parameters(shapes=[(3, 4), (3,)]))
        set_gradients(other.param_groups[0]["params"], 0)
        other.step()
        assert "found (3, 4); load the state dict into the model" in raised(
            optimizer.load_state_dict, other.state_dict()
        )
        model.double()
        assert "call model.to(...), .half() and the like before" in raised(optimizer.step)
        optimizer.close()
        assert "found one that was closed" in raised(optimizer.step)


def test_an_optimizer_that_dies_or_is_closed_leaves_no_hook_and_no_part():
    with fake_ranks(4):
        model = nn.Linear(3, 3)
        for end in ("close", "die"):
            optimizer = ZeroOptimizer(model.parameters(), optim.AdamW, 2)
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            assert all(p._post_accumulate_grad_hooks for p in model.parameters())
            part = weakref.ref(optimizer.param_groups[0]["params"][0])
            gc.disable()
            try:
                if end == "close":
                    optimizer.close()
                    assert part() is not None
                else:
                    del optimizer
                    assert part() is None
            finally:
                gc.enable()
            assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
        assert "learning rate" in raised(ZeroOptimizer, model.parameters(), optim.AdamW, 2, lr=-1.0)
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
