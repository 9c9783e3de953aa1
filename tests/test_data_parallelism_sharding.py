"""fully_shard: every rank holds a piece of the weights, and trains as the single process does."""

from __future__ import annotations

import copy
import gc
import io
import traceback
import weakref
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import distributed, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from memlab.book.workloads import GPT
from memlab.data_parallelism import (
    clip_grad_norm_,
    full_optimizer_state,
    full_state_dict,
    fully_shard,
    load_full_optimizer_state,
    load_full_state_dict,
    traffic_bytes,
)
from memlab.data_parallelism.arithmetic import padded_elements
from memlab.data_parallelism.shard import divide_factors
from memlab.data_parallelism.sharding import units_of
from memlab.gradient_checkpointing import checkpoint
from memlab.memory_timeline import Meter, imagine
from memlab.mixed_precision import MasterWeights
from memlab.ranks import Traffic, run_ranks
from tests.ranks_helpers import FailsInBackward

SIZES = {"layers": 3, "width": 16, "heads": 2, "context": 8, "vocabulary": 32}


def gpt(seed=0, dtype=torch.float64, **sizes):
    torch.manual_seed(seed)
    return GPT(**SIZES | sizes).to(dtype)


def batch(step, rows=12):
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randint(32, (rows, 8), generator=generator) for _ in "xy")


def share(tensors, rank, world):
    """This rank's rows."""
    return tuple(t.chunk(world)[rank] for t in tensors)


def sharded(model, layers="blocks", **options):
    for layer in getattr(model, layers):
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def gathered_bytes(model) -> int:
    return sum(shard.flat.untyped_storage().nbytes() for unit in units_of(model) for shard in unit.shards)


def apart(found, expected) -> float:
    """The largest distance of two tensors of the same name, by norm."""
    assert list(found) == list(expected)
    return max(float((found[key] - expected[key]).norm() / expected[key].norm().clamp_min(1e-30)) for key in expected)


def full_gradients(model) -> dict:
    """The whole gradients by name, on every rank; None where a part has none."""
    found, names = {}, {}
    for name, p in model.named_parameters():
        names[p] = name
    for unit in units_of(model):
        for shard in unit.shards:
            piece = torch.zeros_like(shard.piece)
            for p, view in zip(shard.parts, shard.layout.part_views(piece, shard.rank), strict=True):
                if p.grad is not None:
                    view.copy_(p.grad)
            whole = piece.new_empty(shard.layout.padded)
            distributed.all_gather(list(whole.view(torch.uint8).chunk(shard.layout.ranks)), piece.view(torch.uint8))
            for p, view in zip(shard.parts, shard.layout.views(whole), strict=True):
                found[names[p]] = None if p.grad is None else view
    return {name: found[name] for name in names.values()}


def same_gradients(model, plain, tolerance=1e-13) -> bool:
    """Whether a sharded model's gradients are the plain one's; then both are cleared."""
    found = full_gradients(model)
    for name, p in plain.named_parameters():
        if p.grad is None or found[name] is None:
            assert p.grad is None and found[name] is None, name
        else:
            distance = float((found[name] - p.grad).norm() / p.grad.norm().clamp_min(1e-9))
            assert distance <= tolerance, (name, distance)
    for each in (model, plain):
        each.zero_grad()
    assert gathered_bytes(model) == 0
    return True


class Stack(nn.Module):
    """Layers one after another. x: (batch, 8) → the same."""

    def __init__(self, layers=4, around=lambda layer, x: layer(x)):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8)) for _ in range(layers))
        self.last = nn.Linear(8, 8)
        self.around = around

    def forward(self, x):
        for layer in self.layers:
            x = self.around(layer, x)
        return self.last(x)


def stack(seed=0, **options):
    torch.manual_seed(seed)
    return Stack(**options).double()


def both(make, layers="layers", **options):
    """The same model plain, and sharded."""
    return make(), sharded(make(), layers, **options)


def rows(rank, world, seed=0, n=6):
    """All ranks' inputs and this rank's. (n, 8) each."""
    x = torch.randn(n, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return x, x.chunk(world)[rank]


def same_twice(plain, model, rank, world) -> bool:
    """Two backwards of both models, after each of which the gradients must be the same. Returns True."""
    everyone, mine = rows(rank, world)
    for _ in range(2):
        plain(everyone).square().mean().backward()
        model(mine).square().mean().backward()
        assert same_gradients(model, plain)
    return True


# ---- what each rank finds out; a launch runs them all


def trained(rank, world, steps=10, lr=1e-3, state=None, optimizer_state=None, first=0):
    model = sharded(gpt(seed=rank))  # other values on every rank
    if state is not None:
        load_full_state_dict(model, state if rank == 0 else {})
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    if optimizer_state is not None:
        load_full_optimizer_state(model, optimizer, optimizer_state if rank == 0 else {})
    norms = []
    for step in range(first, first + steps):
        model(*share(batch(step), rank, world)).backward()
        norms.append(clip_grad_norm_(model, 0.5))
        optimizer.step()
        optimizer.zero_grad()
    return full_state_dict(model), norms, full_optimizer_state(model, optimizer)


def trained_alone(steps=10, lr=1e-3):
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    norms = []
    for step in range(steps):
        model(*batch(step)).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), norms, optimizer.state_dict()


def like_fsdp2(rank, world, **options):
    """Losses and weights of five steps, of ours and of FSDP2's, and the peaks of the last."""
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.fsdp import fully_shard as fsdp2

    found = []
    for ours in (True, False):
        model = gpt(dtype=torch.float32, width=64)
        theirs = {"mesh": distributed.init_device_mesh("cpu", (world,))}  # by default the GPUs', if there are any
        theirs |= {"mp_policy": MixedPrecisionPolicy(**options)} if options else {}
        for layer in (*model.blocks, model):
            fully_shard(layer, **options) if ours else fsdp2(layer, **theirs)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for step in range(5):
            x, y = share(batch(step), rank, world)
            with Meter(model, optimizer, inputs=(x, y)) if step == 4 else nullcontext() as meter:
                loss = model(x, y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
        if ours:
            state = full_state_dict(model)
        else:
            state = {key: value.full_tensor() for key, value in model.state_dict().items()}
        found.append((torch.stack(losses), state if rank == 0 else {}, meter.timeline.peak_bytes))
    return found


def gradients_accumulate_over_micro_batches(rank, world, quiet):
    plain, model = both(gpt, "blocks")
    for step in range(3):
        (plain(*batch(step)) / 3).backward()
        with model.no_sync() if quiet and step < 2 else nullcontext():
            (model(*share(batch(step), rank, world)) / 3).backward()
            if quiet and step < 2:
                assert gathered_bytes(model) == 0 and all(p.grad is None for p in model.parameters())
    return same_gradients(model, plain)


def weights_tied_in_a_unit(rank, world):
    def make():
        model = gpt()
        model.head.weight = model.token_embedding.weight
        model.blocks[1].norm1.weight = model.blocks[1].norm2.weight
        return model

    plain, model = both(make, "blocks")
    assert len(list(model.parameters())) == len(list(plain.parameters()))
    assert sum(s.layout.numel for u in units_of(model) for s in u.shards) == sum(p.numel() for p in plain.parameters())
    for step in range(2):
        plain(*batch(step)).backward()
        model(*share(batch(step), rank, world)).backward()
        assert same_gradients(model, plain)
    state = full_state_dict(model)
    assert rank or state["head.weight"].data_ptr() == state["token_embedding.weight"].data_ptr()
    return True


def weights_tied_across_units(rank, world, order):
    def make():
        model = stack()
        model.layers[2][0].weight = model.layers[0][0].weight
        model.last.weight = model.layers[3][2].weight if model.last.weight.shape == (8, 12) else model.last.weight
        return model

    plain, model = make(), make()
    for i in order:
        fully_shard(model.layers[i])
    fully_shard(model)
    everyone, mine = rows(rank, world)
    for _ in range(3):
        plain(everyone).square().mean().backward()
        model(mine).square().mean().backward()
        assert same_gradients(model, plain)
    with torch.no_grad():
        assert torch.allclose(model(everyone), plain(everyone), atol=1e-14)
    return gathered_bytes(model) == 0


def a_head_of_its_own_tied_to_the_roots_embedding(rank, world):
    def make():
        model = gpt()
        model.head.weight = model.token_embedding.weight
        return model

    plain, model = make(), make()
    for layer in (model.head, *model.blocks, model):
        fully_shard(layer)
    for step in range(2):
        plain(*batch(step)).backward()
        model(*share(batch(step), rank, world)).backward()
        assert same_gradients(model, plain)
    return True


def frozen_parameters(rank, world):
    def make():
        model = gpt()
        for p in (*model.blocks[0].parameters(), model.blocks[1].attention.qkv.weight, model.token_embedding.weight):
            p.requires_grad_(False)
        return model

    plain, model = both(make, "blocks")
    for step, thawed in enumerate((False, True, True, False)):
        for each in (plain, model):
            each.blocks[1].attention.qkv.weight.requires_grad_(thawed)
            each.blocks[2].norm1.weight.requires_grad_(not thawed)
        plain(*batch(step)).backward()
        model(*share(batch(step), rank, world)).backward()
        assert same_gradients(model, plain)
    return True


def unused_parameters(rank, world):
    def make():
        model = stack()
        model.layers[1].extra = nn.Linear(8, 5).double()  # in a Sequential of three, so: not called
        model.layers[1].forward = lambda x, layer=model.layers[1]: layer[2](layer[1](layer[0](x)))
        model.aside = nn.Linear(4, 4).double()
        return model

    plain, model = make(), make()
    for layer in (*model.layers, model.aside, model):
        fully_shard(layer)
    return same_twice(plain, model, rank, world)


def parameters_used_on_one_rank_only(rank, world):
    def make(chosen):
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)]).double()
        model.forward = lambda x: model[chosen](x)
        return model

    plain = make(0)
    everyone, mine = rows(rank, world)
    for i, part in enumerate(everyone.chunk(world)):
        (plain[i](part).square().mean() / world).backward()
    model = fully_shard(make(rank))
    for _ in range(2):
        model(mine.clone().requires_grad_()).square().mean().backward()
    for p in plain.parameters():
        p.grad *= 2
    found = full_gradients(model)
    for name, p in plain.named_parameters():
        part = dict(model.named_parameters())[name]
        assert part.numel() == 0 or torch.allclose(found[name], p.grad)
    return True


def a_unit_called_twice(rank, world):
    def make():
        model = stack()
        model.forward = lambda x: model.last(model.layers[0](model.layers[1](model.layers[0](x))) + model.layers[2](x))
        return model

    plain, model = both(make)
    return same_twice(plain, model, rank, world)


def forwards_without_backward(rank, world):
    plain, model = both(gpt, "blocks")
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for step in range(2):
        model(*share(batch(9), rank, world))  # with gradients, and thrown away
        kept = gathered_bytes(model)
        assert kept == sum(shard.flat_bytes for shard in units_of(model)[0].shards)
        with torch.no_grad():
            assert torch.allclose(model(*batch(step)), plain(*batch(step)), atol=1e-13)
        assert gathered_bytes(model) == 0
        with torch.inference_mode():
            assert torch.allclose(model(*batch(step)), plain(*batch(step)), atol=1e-13)
        plain(*batch(step)).backward()
        model(*share(batch(step), rank, world)).backward()
        for optimizer in optimizers:
            optimizer.step()
        assert same_gradients(model, plain)
        model(*share(batch(9), rank, world))  # the root's weights are kept for a backward; the next step changes them
    model.eval()
    plain.eval()
    assert torch.allclose(model(*batch(5)), plain(*batch(5)), atol=1e-13)
    return True


def exceptions_leave_nothing_behind(rank, world):
    plain, model = both(stack)
    everyone, mine = rows(rank, world)

    def broken(where, layer, x):
        x = layer(x)
        if layer is model.layers[2]:
            if where == "forward":
                raise ArithmeticError("planted in forward")
            x = FailsInBackward.apply(x)
        return x

    for where in ("forward", "backward", "forward", "backward"):
        model.around = partial(broken, where)
        with pytest.raises(ArithmeticError, match=where):
            model(mine).square().mean().backward()
        assert where == "backward" or gathered_bytes(model) == 0
        model.zero_grad()
        model.around = plain.around
        plain(everyone).square().mean().backward()
        model(mine).square().mean().backward()
        assert same_gradients(model, plain)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        model.layers[0](mine[:, :3])
    with torch.no_grad():
        model(mine)
    return gathered_bytes(model) == 0


def checkpointed(rank, world, how, inside):
    run = {
        "ours": checkpoint,
        "torch": partial(torch_checkpoint, use_reentrant=False),
        "reentrant": partial(torch_checkpoint, use_reentrant=True),
    }[how]
    around = (lambda layer, x: layer(x)) if inside else (lambda layer, x: run(layer, x))
    plain, model = stack(), stack(around=around)
    if inside:
        for layer in model.layers:
            layer.forward = lambda x, layer=layer: run(lambda x: layer[2](layer[1](layer[0](x))), x)
    sharded(model, "layers")
    everyone, mine = rows(rank, world)
    for _ in range(2):
        plain(everyone.clone().requires_grad_()).square().mean().backward()
        model(mine.clone().requires_grad_()).square().mean().backward()
        assert same_gradients(model, plain)
    return True


def a_checkpointed_layer_of_the_root_tied_to_a_units(rank, world):
    def make():
        model = stack(around=partial(torch_checkpoint, use_reentrant=False))
        model.layers[0][2].weight = model.layers[3][2].weight
        return model

    plain, model = make(), make()
    fully_shard(model.layers[3])  # whose backward is through before the first layer's begins
    fully_shard(model)
    return same_twice(plain, model, rank, world)


def two_units_in_one_checkpoint(rank, world):
    plain, model = stack(), stack()
    first, second = model.layers[:2], model.layers[2:]

    def forward(x):
        for part in (first, second):
            x = checkpoint(lambda x, part=part: part[1](part[0](x)), x)
        return model.last(x)

    model.forward = forward
    sharded(model, "layers")
    return same_twice(plain, model, rank, world)


def several_forwards_and_backwards(rank, world):
    plain, model = both(stack)
    batches = [rows(rank, world, seed) for seed in range(2)]
    for keep in (True, False):
        losses = [[each(x[i]).square().mean() for x in batches] for i, each in enumerate((plain, model))]
        for one, two in losses:
            (one + two).backward(retain_graph=keep)
        assert same_gradients(model, plain)
    for one, two in [[each(x[i]).square().mean() for x in batches] for i, each in enumerate((plain, model))]:
        one.backward()
        two.backward()
    assert same_gradients(model, plain)
    for i, each in enumerate((plain, model)):
        loss = each(batches[0][i]).square().mean()
        for _ in range(3):
            loss.backward(retain_graph=True)
    return same_gradients(model, plain)


def gradients_of_gradients(rank, world, reshard):
    """A penalty on the gradient of the input, after which nothing is gathered."""
    plain, model = both(stack, reshard_after_forward=reshard)
    for _ in range(2):
        for each, x in zip((plain, model), rows(rank, world), strict=True):
            x = x.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(each(x).square().sum(), x, create_graph=True)
            (each(x).square().mean() + (gradient.norm(dim=1) - 1).square().mean()).backward()
        assert same_gradients(model, plain)
        assert gathered_bytes(model) == 0
    return True


def gradients_of_inputs(rank, world):
    plain, model = both(stack)
    _, mine = rows(rank, world)
    found = []
    for each in (plain, model):
        x = mine.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(each(x).square().mean(), x)
        found.append(gradient)
    assert torch.allclose(*found, atol=1e-14) and all(p.grad is None for p in model.parameters())
    return gathered_bytes(model) == 0


def hidden_outputs(rank, world):
    class Box:
        def __init__(self, value):
            self.value = value

    def boxed(layer):
        return lambda x: Box(layer[2](layer[1](layer[0](x))).view(-1, 8))

    def make():
        model = stack()
        for layer in model.layers:
            layer.forward = boxed(layer)

        def around(layer, x):
            x = layer(x).value
            x += 1  # in place, into a view
            return x

        model.around = around
        return model

    plain, model = both(make)
    return same_twice(plain, model, rank, world)


def in_place_on_inputs_and_views(rank, world):
    def make():
        model = stack()
        for layer in model.layers:

            def forward(x, layer=layer):
                out = layer[2](layer[1](layer[0](x * 1)))
                x += out
                return x[:, :].view(-1, 8)

            layer.forward = forward

        def around(layer, x):
            x = layer(x * 1)
            x *= 0.5
            return x

        model.around = around
        return model

    plain, model = both(make)
    return same_twice(plain, model, rank, world)


def an_lstm(rank, world):
    def make():
        torch.manual_seed(0)
        return nn.LSTM(8, 8, num_layers=2, batch_first=True).double()

    plain, model = make(), fully_shard(make())
    everyone, mine = rows(rank, world)
    for _ in range(2):
        plain(everyone[:, None])[0].square().mean().backward()
        model(mine[:, None])[0].square().mean().backward()
        assert same_gradients(model, plain)
    return True


def blocks_without_their_root(rank, world):
    plain, model = stack(), stack()
    for layer in model.layers:
        fully_shard(layer)
    everyone, mine = rows(rank, world)
    for _ in range(2):
        plain(everyone).square().mean().backward()
        model(mine).square().mean().backward()
        assert model.last.weight.shape == (8, 8)
        assert all(same_gradients(*pair) for pair in zip(model.layers, plain.layers, strict=True))
    return True


def kept_units(rank, world, reshard):
    plain, model = both(stack, reshard_after_forward=reshard)
    everyone, mine = rows(rank, world)
    plain(everyone).square().mean().backward()
    loss = model(mine).square().mean()
    whole = sum(shard.flat_bytes for unit in units_of(model) for shard in unit.shards)
    assert gathered_bytes(model) == (0 if reshard else whole)
    assert all(p.dim() == 1 for p in model.parameters())
    loss.backward()
    return same_gradients(model, plain)


def an_optimizer_of_before_and_one_in_backward(rank, world):
    plain, model = stack(), stack()
    before = torch.optim.AdamW(model.parameters(), lr=0.1)
    sharded(model, "layers")
    alone = torch.optim.AdamW(plain.parameters(), lr=0.1)
    everyone, mine = rows(rank, world)
    for _ in range(2):
        plain(everyone).square().mean().backward()
        alone.step()
        alone.zero_grad()
        model(mine).square().mean().backward()
        before.step()
        before.zero_grad()

    def step(p):
        steps[p].step()
        p.grad = None

    steps = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    hooks = [p.register_post_accumulate_grad_hook(step) for p in steps]
    model(mine).square().mean().backward()
    plain(everyone).square().mean().backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for hook in hooks:
        hook.remove()
    state = full_state_dict(model)
    return rank > 0 or apart(state, plain.state_dict()) < 1e-13


def mixed_precision(rank, world):
    model = sharded(gpt(dtype=torch.float32), param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    seen = []
    model.blocks[0].feed_forward.up.register_forward_pre_hook(
        lambda module, args: seen.append((module.weight.dtype, args[0].dtype))
    )
    model(*share(batch(0), rank, world)).backward()
    assert seen == [(torch.bfloat16, torch.bfloat16)]
    for p in model.parameters():
        assert p.dtype is torch.float32 and p.grad.dtype is torch.float32
    assert all(value.dtype is torch.float32 for value in full_state_dict(model).values())
    layers = fully_shard(nn.Linear(8, 8), param_dtype=torch.bfloat16)
    assert layers(torch.ones(2, 8)).dtype is torch.bfloat16
    return True


def master_weights(rank, world):
    """16-bit weights, FP32 masters of each rank's parts: the same as on the single process."""
    torch.manual_seed(0)
    model, plain = (nn.Linear(8, 8).bfloat16() for _ in range(2))
    plain.load_state_dict(model.state_dict())
    fully_shard(model)
    distributed.broadcast(plain.weight.data, 0)
    distributed.broadcast(plain.bias.data, 0)
    mine, alone = (MasterWeights(each.parameters(), torch.optim.AdamW, lr=0.1) for each in (model, plain))
    x = torch.ones(2, 8, dtype=torch.bfloat16)
    for _ in range(3):
        for each, optimizer in ((model, mine), (plain, alone)):
            each(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    found = full_state_dict(model)
    states = full_optimizer_state(model, mine)
    if rank == 0:
        assert all(torch.equal(found[key], value) for key, value in plain.state_dict().items())
        for i, state in alone.state_dict()["state"].items():
            assert all(torch.equal(states["state"][i][name], value) for name, value in state.items())
    return True


def clipping(rank, world):
    plain, model = both(stack)
    everyone, mine = rows(rank, world)
    for norm in (2.0, 1.0, "inf"):
        plain(everyone).square().mean().backward()
        model(mine).square().mean().backward()
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e-3, norm)
        found = clip_grad_norm_(model.parameters(), 1e-3, norm)
        assert abs(found - expected) / expected < 1e-12, norm
        assert same_gradients(model, plain, 1e-12)
    assert clip_grad_norm_(model, 1.0) == 0
    model(mine * (float("inf") if rank else 1.0)).square().mean().backward()
    with pytest.raises(RuntimeError, match="expected a finite norm"):
        clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
    model.zero_grad()
    with pytest.raises(ValueError, match="in no unit"):
        clip_grad_norm_(plain, 1.0)
    return True


def clipping_of_complex_numbers(rank, world):
    def made(*dtypes):
        return nn.ParameterList(
            [torch.arange(1, 4) * torch.ones((), dtype=dtype) * (1 + 1j if dtype.is_complex else 1) for dtype in dtypes]
        )

    for dtypes in ([torch.complex64], [torch.complex64, torch.float32]):
        for norm in (2.0, 1.0, "inf"):
            plain, model = made(*dtypes), fully_shard(made(*dtypes))
            for each in (plain, model):
                for p in each.parameters():
                    p.grad = p.detach().clone()
            expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0, norm)
            found = clip_grad_norm_(model, 1.0, norm)
            assert found.dtype is expected.dtype is torch.float32
            assert abs(found - expected) <= 1e-6 * expected
            assert same_gradients(model, plain, 1e-6)
    return True


def bytes_are_as_the_formula_says(rank, world):
    """Between steps: padded / ranks elements a dtype and unit of weights and gradients, parts' own of states."""
    model = sharded(gpt(dtype=torch.float32, width=18))
    optimizer = torch.optim.AdamW(model.parameters())
    x, y = share(batch(0), rank, world)
    with Meter(model, optimizer, inputs=(x, y)) as meter:
        model(x, y).backward()
        optimizer.step()
        held = meter.timeline.bytes_by_category(len(meter.timeline.events) - 1)
    numels = [sum(p.numel() for p in unit.parameters()) for unit in gpt(width=18).blocks]
    numels.append(sum(p.numel() for p in gpt(width=18).parameters()) - sum(numels))
    pieces = sum(-(-numel // world) for numel in numels)
    parts = list(model.parameters())
    assert held["parameter"] == 4 * pieces
    assert held["gradient"] == 4 * pieces
    assert held["optimizer_state"] == sum(2 * 4 * p.numel() + 4 for p in parts)
    return held["input"] == sum(t.untyped_storage().nbytes() for t in (x, y))  # of what is gathered, nothing is left


class Collectives(TorchDispatchMode):
    """Elements that each collective brings, by name."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            name = func._schema.name.partition("::")[2]
            sizes = [t.numel() for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, torch.Tensor)]
            self.calls.append((name.strip("_"), max(sizes)))
        return result


def traffic(rank, world, reshard):
    """Elements brought by each kind of collective in the second step, the units' padded sizes, and the order."""
    model = sharded(gpt(), reshard_after_forward=reshard)
    model(*share(batch(0), rank, world)).backward()
    with Collectives() as collectives:
        model(*share(batch(1), rank, world)).backward()
    padded = [sum(shard.layout.padded for shard in unit.shards) for unit in units_of(model)]
    return collectives.calls, padded


def the_graph_is_freed_with_its_last_reference(rank, world):
    model = sharded(stack(), "layers")
    _, mine = rows(rank, world)
    gc.collect()
    gc.disable()
    try:
        dead = []
        hook = model.layers[1][0].register_forward_hook(
            lambda _module, _args, output: dead.append(weakref.ref(output.untyped_storage()))
        )
        model(mine).square().mean().backward()
        model(mine).square().mean()
        hook.remove()
        assert [ref() for ref in dead] == [None, None]
    finally:
        gc.enable()
    return True


def what_is_wrong_is_said(rank, world):
    model = sharded(stack(), "layers")
    with pytest.raises(ValueError, match="once.*called on before"):
        fully_shard(model)
    with pytest.raises(ValueError, match="inner modules first"):
        fully_shard(model.last)
    for change in (model.half, lambda: copy.deepcopy(model), lambda: nn.Sequential(model).double()):
        with pytest.raises(RuntimeError, match="before fully_shard"):
            change()
    for whole in (model, nn.Sequential(model)):
        with pytest.raises(TypeError, match="full_state_dict"):
            torch.save(whole, io.BytesIO())
    _, mine = rows(rank, world)
    assert all(torch.isfinite(p).all() and p.dim() == 1 for p in model.parameters())  # a sharded weight may be read
    loss = model(mine).square().mean()
    torch.optim.SGD(model.parameters(), lr=0.1).zero_grad()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.9)
    with pytest.raises(RuntimeError, match="a weight of shape"):
        loss.backward()
    model.layers[1][0].weight = nn.Parameter(torch.ones(12, 8))
    with pytest.raises(RuntimeError, match="expected weight of Linear as fully_shard left it"):
        model(mine)
    for late in (nn.Linear(8, 8).double(), nn.ParameterList([torch.ones(8)])):
        grown = sharded(stack(), "layers")
        grown.layers[1].append(late)
        with pytest.raises(RuntimeError, match="as fully_shard left it, found a parameter that is in no unit"):
            grown(mine)
        late.requires_grad_(False)
        grown.layers[1].forward = lambda x: x
        grown(mine)
    alike = stack()
    alike.last.bias.data = alike.layers[1][2].weight.data[1]
    with pytest.raises(ValueError, match="memory of their own, found 2.weight|found weight and bias in the same"):
        fully_shard(alike)
    assert all(p.dim() == 2 for p in (alike.last.weight, alike.layers[1][2].weight))  # nothing is cut then
    sparse = fully_shard(nn.Embedding(8, 4, sparse=True))
    with pytest.raises(TypeError, match="sparse=False"):
        sparse(torch.arange(3)).sum().backward()
    used = stack()
    used(mine).sum().backward()
    with pytest.raises(ValueError, match="without gradients"):
        fully_shard(used)
    hooked, came = nn.Linear(8, 4).double(), []
    handle = hooked.weight.register_hook(came.append)
    with pytest.raises(ValueError, match="without register_hook, found one at weight; autograd .* would never call it"):
        fully_shard(hooked)
    handle.remove()
    hooked.weight.register_post_accumulate_grad_hook(lambda p: came.append(p.grad.shape == p.shape))
    fully_shard(hooked)(mine).sum().backward()
    assert came == [True]
    handle = hooked.bias.register_hook(came.append)
    with pytest.raises(RuntimeError, match="expected no register_hook on bias of Linear"):
        hooked(mine)
    handle.remove()
    hooked(mine)
    with pytest.raises(ValueError, match="expected prefetch"):
        fully_shard(stack(), prefetch=-1)
    with pytest.raises(ValueError, match="found a plain Stack"):
        full_state_dict(stack())
    return True


def gradients_that_no_sync_added_up_go_with_zero_grad(rank, world):
    plain, model = both(stack)
    everyone, mine = rows(rank, world)
    for whole in (model, model.layers[1]):
        with model.no_sync():
            model(mine * 1000).square().mean().backward()
        whole.zero_grad()
        model(mine).square().mean().backward()
        plain(everyone).square().mean().backward()
        found, expected = full_gradients(model), dict(plain.named_parameters())
        for name in found if whole is model else [name for name in found if name.startswith("layers.1.")]:
            assert (found[name] - expected[name].grad).norm() <= 1e-12 * expected[name].grad.norm(), name
        for each in (model, plain):
            each.zero_grad()
    with model.no_sync():
        model(mine).square().mean().backward()
    model.zero_grad(set_to_none=False)
    model(mine).square().mean().backward()
    plain(everyone).square().mean().backward()
    return same_gradients(model, plain)


def frozen_weights_of_any_dtype_and_interleaved_ones(rank, world):
    class Quantized(nn.Module):
        def __init__(self):
            super().__init__()
            self.gathered = torch.ones(3)  # a name that fully_shard likes, too
            for dtype in (torch.int16, torch.uint16, torch.int64, torch.bool, torch.float8_e4m3fn):
                base = (torch.arange(15).view(3, 5) % 2 + rank).to(dtype)
                setattr(self, str(dtype).partition(".")[2], nn.Parameter(base, requires_grad=False))
            self.halves = nn.ParameterList(torch.arange(6 * 4.0).view(6, 4).chunk(2, dim=1))

        def forward(self, x):
            frozen = [p.float() for p in self.parameters() if not p.requires_grad]
            return (x @ sum(frozen)).sum() + self.halves[0].sum() * self.halves[1].square().sum()

    plain, model = Quantized(), fully_shard(Quantized())
    model(torch.ones(1, 3)).backward()
    plain(torch.ones(1, 3)).backward()
    state = full_state_dict(model)
    load_full_state_dict(model, {key: value.clone() for key, value in state.items()})
    state = full_state_dict(model)
    for name, p in plain.named_parameters() if rank == 0 else ():
        assert state[name].dtype is p.dtype and torch.equal(state[name].float(), p.float()), name
    assert model.gathered.tolist() == [1.0] * 3 and model.gathered_2.numel() == 0
    return same_gradients(model, plain, 1e-6)


def states_that_do_not_fit_are_refused(rank, world):
    model = sharded(stack(), "layers")
    before = full_state_dict(model)
    state = stack(seed=1).state_dict()
    with pytest.raises(KeyError, match="found no last.bias"):
        load_full_state_dict(model, {key: value for key, value in state.items() if key != "last.bias"})
    with pytest.raises(KeyError, match="found also more"):
        load_full_state_dict(model, state | {"more": torch.ones(1)})
    with pytest.raises(ValueError, match="of shape"):
        load_full_state_dict(model, state | {"last.bias": torch.ones(7)})
    after = full_state_dict(model)
    optimizer = torch.optim.AdamW(model.parameters())
    other = torch.optim.AdamW([{"params": [*stack().parameters()][:3]}, {"params": [*stack().parameters()][3:]}])
    with pytest.raises(ValueError, match="parameter groups"):
        load_full_optimizer_state(model, optimizer, other.state_dict())
    with pytest.raises(ValueError, match="expected state and param_groups"):
        load_full_optimizer_state(model, optimizer, {})
    packed = optimizer.state_dict()
    for number, complaint in {99: "number 99, which is not", 0: r"of shape \(12, 8\), found \(9,\)"}.items():
        with pytest.raises(ValueError, match=complaint):
            load_full_optimizer_state(model, optimizer, packed | {"state": {number: {"exp_avg": torch.ones(9)}}})
    assert all(torch.equal(after[key], value) for key, value in before.items())
    load_full_state_dict(model, state if rank == 0 else {})
    assert all(torch.equal(state[key], value) for key, value in full_state_dict(model).items())
    local = model.state_dict()
    assert all(value.dim() == 1 for value in local.values())
    model.load_state_dict(local)
    return True


class Scaled(nn.Module):
    """A layer, a factor that is one number, and a count that travels as extra state. x: (n, 4) → a loss, ()."""

    def __init__(self):
        super().__init__()
        self.layer, self.factor, self.seen = nn.Linear(4, 4), nn.Parameter(torch.tensor(0.5)), 0

    def forward(self, x):
        return (self.layer(x) * self.factor).square().mean()

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]


def a_unit_of_one_number_goes_on_and_the_saved_state_stays_as_it_was(rank, world):
    def made():
        torch.manual_seed(0)
        model = Scaled()
        fully_shard(model.layer)
        fully_shard(model)  # of the factor alone
        return model, torch.optim.NAdam(model.parameters(), lr=0.1)

    def steps(model, optimizer):
        for _ in range(2):
            model(torch.ones(2, 4)).backward()
            optimizer.step()
            optimizer.zero_grad()

    first, optimizer = made()
    first.seen = 7 * (1 - rank)
    steps(first, optimizer)
    with torch.inference_mode():
        saved, states = full_state_dict(first), full_optimizer_state(first, optimizer)
    before = copy.deepcopy(states)
    steps(first, optimizer)
    for _ in range(2):  # twice from one state: what the first did to it, the second would see
        second, other = made()
        load_full_state_dict(second, saved)
        load_full_optimizer_state(second, other, states)
        steps(second, other)
        assert second.seen == 7
        assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    for number, state in states.get("state", {}).items():
        assert all(torch.equal(before["state"][number][name], value) for name, value in state.items())
    return True


def buffers_are_rank_0s(rank, world):
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[1].running_mean.normal_()
    own = {
        "short": torch.tensor([rank], dtype=torch.int16),
        "strided": (torch.arange(16.0) + 100 * rank)[::2],
        "expanded": torch.tensor([rank]).expand(2, 3),
    }
    for name, value in own.items():
        model.register_buffer(name, value, persistent=name != "expanded")
    fully_shard(model)
    mean = model[1].running_mean.clone()
    distributed.broadcast(mean, 0)
    assert torch.equal(mean, model[1].running_mean)
    assert model.short.item() == 0 and model.expanded.tolist() == [[0] * 3] * 2
    assert model.strided.tolist() == [*range(0, 16, 2)]
    assert model.strided._base[1::2].tolist() == [n + 100 * rank for n in range(1, 16, 2)]
    state = full_state_dict(model)
    if rank == 0:
        state["strided"] += 1
    load_full_state_dict(model, state)
    assert model.strided.tolist() == [*range(1, 17, 2)]
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).state_dict()
    return rank > 0 or sorted(state) == sorted([*plain, "short", "strided"])


def prefetched(rank, world, prefetch):
    """How many units were gathered at once at most, in the second step's forward and backward."""
    model = sharded(stack(layers=6), "layers", prefetch=prefetch)
    _, mine = rows(rank, world)
    units, most = units_of(model), {"forward": 0, "backward": 0}

    def count(where, *_):
        most[where] = max(most[where], sum(unit.gathered for unit in units[1:]))

    model(mine).sum().backward()
    for layer in model.layers:
        layer[0].register_forward_hook(partial(count, "forward"))
        layer[2].register_full_backward_hook(partial(count, "backward"))
    model(mine).sum().backward()
    return most


FACTS = {
    "gradients accumulate over micro-batches": partial(gradients_accumulate_over_micro_batches, quiet=False),
    "gradients accumulate in no_sync": partial(gradients_accumulate_over_micro_batches, quiet=True),
    "weights tied in a unit": weights_tied_in_a_unit,
    "weights tied across units": partial(weights_tied_across_units, order=(0, 1, 2, 3)),
    "weights tied across units, the later first": partial(weights_tied_across_units, order=(3, 2, 1, 0)),
    "a head of its own tied to the root's embedding": a_head_of_its_own_tied_to_the_roots_embedding,
    "frozen parameters": frozen_parameters,
    "unused parameters": unused_parameters,
    "parameters used on one rank only": parameters_used_on_one_rank_only,
    "a unit called twice": a_unit_called_twice,
    "forwards without backward": forwards_without_backward,
    "exceptions leave nothing behind": exceptions_leave_nothing_behind,
    **{
        f"{how} checkpoint {'inside' if inside else 'around'} units": partial(checkpointed, how=how, inside=inside)
        for how in ("ours", "torch", "reentrant")
        for inside in (False, True)
    },
    "two units in one checkpoint": two_units_in_one_checkpoint,
    "several forwards and backwards": several_forwards_and_backwards,
    "gradients of inputs": gradients_of_inputs,
    "gradients of gradients": partial(gradients_of_gradients, reshard=None),
    "gradients of gradients, kept": partial(gradients_of_gradients, reshard=False),
    "hidden outputs": hidden_outputs,
    "in place on inputs and views": in_place_on_inputs_and_views,
    "an LSTM": an_lstm,
    "blocks without their root": blocks_without_their_root,
    "kept units": partial(kept_units, reshard=False),
    "a root that is resharded": partial(kept_units, reshard=True),
    "an optimizer of before and one in backward": an_optimizer_of_before_and_one_in_backward,
    "a checkpointed layer of the root tied to a unit's": a_checkpointed_layer_of_the_root_tied_to_a_units,
    "mixed precision": mixed_precision,
    "master weights": master_weights,
    "clipping": clipping,
    "clipping of complex numbers": clipping_of_complex_numbers,
    "bytes are as the formula says": bytes_are_as_the_formula_says,
    "the graph is freed with its last reference": the_graph_is_freed_with_its_last_reference,
    "what is wrong is said": what_is_wrong_is_said,
    "gradients that no_sync added up go with zero_grad": gradients_that_no_sync_added_up_go_with_zero_grad,
    "frozen weights of any dtype, and interleaved ones": frozen_weights_of_any_dtype_and_interleaved_ones,
    "states that do not fit are refused": states_that_do_not_fit_are_refused,
    "a unit of one number goes on": a_unit_of_one_number_goes_on_and_the_saved_state_stays_as_it_was,
    "buffers are rank 0's": buffers_are_rank_0s,
}


def all_facts(rank, world, facts):
    found = {}
    for name in facts:
        try:
            found[name] = FACTS[name](rank, world)
        except BaseException:
            found[name] = traceback.format_exc()
            break  # the other ranks may be elsewhere
    return found


@pytest.fixture(scope="module")
def facts():
    names = list(FACTS)
    found = run_ranks(all_facts, 2, 2, names, timeout=30)
    return found


@pytest.mark.parametrize("name", FACTS)
def test_on_two_ranks(facts, name):
    for rank, found in enumerate(facts):
        assert found.get(name, "was not reached") is True, f"rank {rank}: {found.get(name, 'was not reached')}"


# ---- against the single process, FSDP2, and other numbers of ranks


@pytest.fixture(scope="module")
def alone():
    return trained_alone()


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_ten_steps_are_those_of_the_single_process(alone, world):
    (state, norms, optimizer_state), *others = run_ranks(trained, world, world)
    assert apart(state, alone[0]) < 1e-12
    assert all(abs(a - b) / b < 1e-12 for a, b in zip(norms, alone[1], strict=True))
    assert all(
        found[0] == found[2] == {} and torch.equal(torch.stack(found[1]), torch.stack(norms)) for found in others
    )
    assert optimizer_state["param_groups"] == alone[2]["param_groups"]
    for i, expected in alone[2]["state"].items():
        found = optimizer_state["state"][i]
        assert list(found) == list(expected) and found["step"] == expected["step"]
        assert found["exp_avg"].shape == expected["exp_avg"].shape
        assert (found["exp_avg"] - expected["exp_avg"]).norm() <= 1e-11 * expected["exp_avg"].norm()


def test_training_goes_on_bit_for_bit_from_a_saved_state_and_on_other_numbers_of_ranks(alone):
    half, _, optimizer_half = run_ranks(trained, 2, 2, 3)[0]
    through = run_ranks(trained, 2, 2, 6)[0]
    resumed = run_ranks(trained, 2, 2, 3, 1e-3, half, optimizer_half, 3)[0]
    assert all(torch.equal(resumed[0][key], value) for key, value in through[0].items())
    for i, state in through[2]["state"].items():
        assert all(torch.equal(resumed[2]["state"][i][name], value) for name, value in state.items())
    other = run_ranks(trained, 3, 3, 3, 1e-3, half, optimizer_half, 3)[0]
    assert apart(other[0], through[0]) < 1e-12
    plain = gpt(seed=5)
    plain.load_state_dict(half)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    optimizer.load_state_dict(optimizer_half)
    for step in range(3, 6):
        plain(*batch(step)).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    assert apart(plain.state_dict(), through[0]) < 1e-12


@pytest.mark.parametrize("options", [{}, {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}])
def test_numbers_are_those_of_fsdp2_and_the_peak_is_no_higher_than_five_percent_above(options):
    for ours, theirs in run_ranks(partial(like_fsdp2, **options), 2, 2):
        assert torch.equal(ours[0], theirs[0])
        assert all(torch.equal(ours[1][key], value) for key, value in theirs[1].items())
        assert ours[2] <= 1.05 * theirs[2]


@pytest.mark.parametrize("reshard", [True, None])
def test_traffic_is_two_gathers_and_a_reduce_scatter_of_each_unit(reshard):
    world = 2
    found = run_ranks(partial(traffic, reshard=reshard), world, world)
    calls, padded = found[0]
    assert calls == found[1][0]  # all ranks call the same in the same order
    gathers = sorted(n for name, n in calls if "allgather" in name)
    scatters = sorted(n for name, n in calls if "reduce_scatter" in name)
    root, *blocks = padded
    assert scatters == sorted(padded)
    assert gathers == sorted([root] * (2 if reshard else 1) + 2 * blocks)
    if reshard:  # 1.5 times what an all-reduce of all gradients takes, 2Ψ(N − 1) / N
        assert sum(gathers) + sum(scatters) == 3 * sum(padded)


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_a_root_that_returns_what_its_last_unit_does_gathers_nothing_a_third_time(rank_0_of_64, prefetch):
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)), nn.Linear(8, 2, bias=False))
    for layer in model:
        fully_shard(layer, prefetch=prefetch)
    fully_shard(model, prefetch=prefetch)
    with Traffic() as traffic:
        model(torch.ones(1, 8)).sum().backward()
    whole = 4 * padded_elements([*[[64, 8]] * 4, [16]], 64)
    assert traffic.sent_bytes == traffic_bytes(whole, whole, 64, stage=3)


@pytest.mark.parametrize("prefetch, most", [(0, 1), (1, 2), (2, 3)])
def test_one_unit_and_those_expected_are_gathered(prefetch, most):
    assert run_ranks(partial(prefetched, prefetch=prefetch), 2, 2)[0] == {"forward": most, "backward": most}


# ---- without ranks


def test_without_a_process_group_it_is_said_what_to_do():
    with pytest.raises(RuntimeError, match="expected a process group"):
        fully_shard(nn.Linear(2, 2))


def test_halves_are_divided_before_and_after_the_sum():
    assert divide_factors(torch.bfloat16, 6) == (1, 6)
    for ranks in range(1, 65):
        before, after = divide_factors(torch.float16, ranks)
        assert before * after == ranks and before <= 8


@pytest.fixture
def rank_0_of_64():
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=64)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
def test_rank_0_of_64_is_imagined_to_the_byte(rank_0_of_64, param_dtype):
    world = 64
    with imagine("H100-80GB"):
        model = GPT(layers=4, width=256, heads=4, context=64, vocabulary=256)
        numels = [sum(p.numel() for p in block.parameters()) for block in model.blocks]
        rest = sum(p.numel() for p in model.parameters()) - sum(numels)
        sharded(model, param_dtype=param_dtype)
        optimizer = torch.optim.AdamW(model.parameters())
        x, y = (torch.zeros(2, 64, dtype=torch.int64) for _ in "xy")
        with Meter(model, optimizer, inputs=(x, y)) as meter:
            for _ in range(2):
                model(x, y).backward()
                clip_grad_norm_(model, 1.0)
                optimizer.step()
                held = meter.timeline.bytes_by_category(len(meter.timeline.events) - 1)
                optimizer.zero_grad()
    pieces = sum(-(-n // world) for n in (*numels, rest))
    assert held["parameter"] == held["gradient"] == 4 * pieces
    itemsize = 2 if param_dtype else 4
    gathered = [s for s in meter.timeline.storages.values() if s.shape == (-(-numels[0] // world) * world,)]
    assert {s.nbytes for s in gathered} == {itemsize * -(-numels[0] // world) * world}
    assert gathered_bytes(model) == 0
