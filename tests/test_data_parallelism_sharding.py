"""fully_shard: every rank holds a piece of the weights, and trains as the single process does."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from memlab.data_parallelism import full_state_dict, fully_shard
from memlab.data_parallelism.shard import divide_factors
from memlab.data_parallelism.sharding import units_of
from memlab.gradient_checkpointing import checkpoint
from memlab.memory_timeline import Meter
from memlab.ranks import one_rank
from tests.harness import refused
from tests.ranks_helpers import Cases, FailsInBackward
from tests.sharding_helpers import (
    Decoder,
    apart,
    assert_same_gradients,
    assert_same_training,
    backward,
    both,
    gathered_bytes,
    gpt,
    mine,
    rows,
    sharded,
    stack,
    texts,
)

RANKS = 2
on_two_ranks = Cases(2)


@on_two_ranks
def gradients_accumulate_over_micro_batches():
    for quiet in (False, True):
        plain, model = both(gpt)
        for step in range(3):
            (plain(*texts(step)) / 3).backward()
            with model.no_sync() if quiet and step < 2 else nullcontext():
                (model(*mine(texts(step))) / 3).backward()
                if quiet and step < 2:
                    assert gathered_bytes(model) == 0 and all(p.grad is None for p in model.parameters())
        assert_same_gradients(plain, model)


@on_two_ranks
def weights_tied_in_a_unit():
    def make():
        model = gpt()
        model.head.weight = model.token_embedding.weight
        model.blocks[1].norm1.weight = model.blocks[1].norm2.weight
        return model

    plain, model = both(make)
    assert len(list(model.parameters())) == len(list(plain.parameters()))
    assert sum(s.layout.numel for u in units_of(model) for s in u.shards) == sum(p.numel() for p in plain.parameters())
    assert_same_training(plain, model, texts)


@on_two_ranks
def frozen_parameters():
    def make():
        model = gpt()
        for p in (*model.blocks[0].parameters(), model.blocks[1].attention.qkv.weight, model.token_embedding.weight):
            p.requires_grad_(False)
        return model

    plain, model = both(make)
    for thawed in (False, True, True, False):
        for each in (plain, model):
            each.blocks[1].attention.qkv.weight.requires_grad_(thawed)
            each.blocks[2].norm1.weight.requires_grad_(not thawed)
        assert_same_training(plain, model, texts, times=1)


@on_two_ranks
def frozen_weights_of_any_dtype():
    class Quantized(nn.Module):
        def __init__(self):
            super().__init__()
            self.gathered = torch.ones(3)  # a name that fully_shard likes, too
            for dtype in (torch.int16, torch.uint16, torch.int64, torch.bool, torch.float8_e4m3fn):
                base = (torch.arange(15).view(3, 5) % 2 + distributed.get_rank()).to(dtype)
                setattr(self, str(dtype).partition(".")[2], nn.Parameter(base, requires_grad=False))
            self.halves = nn.ParameterList(torch.arange(6 * 4.0).view(6, 4).chunk(2))

        def forward(self, x):
            frozen = [p.float() for p in self.parameters() if not p.requires_grad]
            return (x @ sum(frozen)).sum() + self.halves[0].sum() * self.halves[1].square().sum()

    plain, model = Quantized(), fully_shard(Quantized())
    for name, p in plain.named_parameters():  # rank 0's are everybody's
        distributed.broadcast(p.data.view(torch.uint8), 0)
        assert name.startswith("halves") or model.get_parameter(name).dtype is p.dtype
    model(torch.ones(1, 3)).backward()
    plain(torch.ones(1, 3)).backward()
    assert model.gathered.tolist() == [1.0] * 3 and model.gathered_2.numel() == 0
    assert_same_gradients(plain, model, 1e-6)


@on_two_ranks
def unused_parameters():
    def make():
        model = stack()
        model.layers[1].extra = nn.Linear(8, 5).double()  # in a Sequential of three, so: not called
        model.layers[1].forward = lambda x, layer=model.layers[1]: layer[2](layer[1](layer[0](x)))
        model.aside = nn.Linear(4, 4).double()
        return model

    plain, model = make(), make()
    for layer in (*model.layers, model.aside, model):
        fully_shard(layer)
    assert_same_training(plain, model)


class Lookup(nn.Module):
    """A linear layer, an embedding that is added where rows are asked for, and one that nobody uses."""

    def __init__(self):
        super().__init__()
        self.linear, self.table, self.idle = nn.Linear(4, 6), nn.Embedding(10, 6), nn.Linear(3, 3)

    def forward(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """x: (n, 4), rows: (n,) or None → a loss, ()."""
        found = self.linear(x)
        return (found if rows is None else found + self.table(rows)).square().sum()


@on_two_ranks
def a_parameter_that_only_the_last_rank_uses_trains_as_in_one_process_zeros_in_its_gradient_included():
    rank, asked = distributed.get_rank(), [None, torch.tensor([9, 8])]
    for two_units in (False, True):  # True: on rank 0 no gradient of the outer unit ever comes
        torch.manual_seed(0)
        model, plain = (nn.ModuleList([Lookup().double()]) for _ in range(2))
        plain.load_state_dict(model.state_dict())
        if two_units:
            fully_shard(model[0].linear)
        fully_shard(model[0])
        optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01, weight_decay=0.5) for each in (model, plain)]
        for _ in range(3):
            x = torch.randn(RANKS, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
            model[0](x[rank], asked[rank]).backward()
            (sum(plain[0](x[r], asked[r]) for r in range(RANKS)) / RANKS).backward()
            assert [p.grad for p in model[0].idle.parameters()] == [None, None]
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        found = full_state_dict(model)
        assert rank or apart(found, plain.state_dict()) <= 1e-12


@on_two_ranks
def a_unit_called_twice():
    def make():
        model = stack()
        model.forward = lambda x: model.last(model.layers[0](model.layers[1](model.layers[0](x))) + model.layers[2](x))
        return model

    assert_same_training(*both(make))


@on_two_ranks
def forwards_without_backward():
    plain, model = both(gpt)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for step in range(2):
        model(*mine(texts(9)))  # with gradients, and thrown away
        assert gathered_bytes(model) == sum(shard.flat_bytes for shard in units_of(model)[0].shards)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                assert torch.allclose(model(*texts(step)), plain(*texts(step)), atol=1e-13)
            assert gathered_bytes(model) == 0
        for each, inputs in ((plain, texts(step)), (model, mine(texts(step)))):
            backward(each, inputs)
        for optimizer in optimizers:
            optimizer.step()
        assert_same_gradients(plain, model)
        model(*mine(texts(9)))  # the root's weights are kept for a backward; the next step changes them
    for each in (model, plain):
        each.eval()
    assert torch.allclose(model(*texts(5)), plain(*texts(5)), atol=1e-13)


@on_two_ranks
def exceptions_leave_nothing_behind():
    plain, model = both()

    def broken(where, layer, x):
        x = layer(x)
        if layer is model.layers[2]:
            if where == "forward":
                raise ArithmeticError("planted in forward")
            x = FailsInBackward.apply(x)
        return x

    for where in ("forward", "backward", "forward", "backward"):
        model.around = partial(broken, where)
        refused(lambda: backward(model, mine(rows())), ArithmeticError, where)
        assert where == "backward" or gathered_bytes(model) == 0
        model.zero_grad()
        model.around = plain.around
        assert_same_training(plain, model, times=1)


def _checkpointed(run, inside):
    def inputs(seed):
        return (rows(seed)[0].requires_grad_(),)

    plain, model = stack(), stack(around=(lambda layer, x: layer(x)) if inside else (lambda layer, x: run(layer, x)))
    if inside:
        for layer in model.layers:
            layer.forward = lambda x, layer=layer: run(lambda x: layer[2](layer[1](layer[0](x))), x)
    assert_same_training(plain, sharded(model), inputs)


for _name, _run in {
    "ours": checkpoint,
    "torchs": partial(torch_checkpoint, use_reentrant=False),
    "a_reentrant": partial(torch_checkpoint, use_reentrant=True),
}.items():
    on_two_ranks[f"{_name}_checkpoint_around_units"] = partial(_checkpointed, _run, False)
    on_two_ranks[f"{_name}_checkpoint_inside_units"] = partial(_checkpointed, _run, True)


@on_two_ranks
def several_forwards_and_backwards():
    plain, model = both()
    batches = [(rows(seed), mine(rows(seed))) for seed in range(2)]

    def losses():
        return [[each(*x[i]).square().mean() for x in batches] for i, each in enumerate((plain, model))]

    for one, two in losses():
        (one + two).backward(retain_graph=True)
        one.backward(retain_graph=True)
        one.backward()
    assert_same_gradients(plain, model)
    for one, two in losses():
        one.backward()
        two.backward()
    assert_same_gradients(plain, model)


@on_two_ranks
def gradients_of_gradients():
    """A penalty on the gradient of the input, after which nothing is gathered."""
    for reshard in (None, False):
        plain, model = both(reshard_after_forward=reshard)
        for _ in range(2):
            for each, (x,) in ((plain, rows()), (model, mine(rows()))):
                x = x.clone().requires_grad_()
                (gradient,) = torch.autograd.grad(each(x).square().sum(), x, create_graph=True)
                (each(x).square().mean() + (gradient.norm(dim=1) - 1).square().mean()).backward()
            assert_same_gradients(plain, model)


@on_two_ranks
def hidden_outputs_and_in_place_writes():
    def boxed(layer, x):
        x += layer[2](layer[1](layer[0](x * 1)))
        return SimpleNamespace(value=x[:, :].view(-1, 8))

    def opened(layer, x):
        x = layer(x * 1).value
        x *= 0.5  # in place, into a view
        return x

    def make():
        model = stack(around=opened)
        for layer in model.layers:
            layer.forward = partial(boxed, layer)
        return model

    assert_same_training(*both(make))


@on_two_ranks
def an_lstm():
    def make():
        torch.manual_seed(0)
        model = nn.LSTM(8, 8, num_layers=2, batch_first=True).double()
        inside = model.forward
        model.forward = lambda x: inside(x[:, None])[0]
        return model

    assert_same_training(make(), fully_shard(make()))


@on_two_ranks
def blocks_without_their_root():
    plain, model = stack(), stack()
    for layer in model.layers:
        fully_shard(layer)
    for _ in range(2):
        backward(plain, rows())
        backward(model, mine(rows()))
        assert model.last.weight.shape == (8, 8)
        for pair in zip(plain.layers, model.layers, strict=True):
            assert_same_gradients(*pair)


@on_two_ranks
def units_and_a_root_that_are_kept_or_freed_between_forward_and_backward():
    for reshard in (False, True):
        plain, model = both(reshard_after_forward=reshard)
        backward(plain, rows())
        loss = model(*mine(rows())).square().mean()
        whole = sum(shard.flat_bytes for unit in units_of(model) for shard in unit.shards)
        assert gathered_bytes(model) == (0 if reshard else whole)
        assert all(p.dim() == 1 for p in model.parameters())
        loss.backward()
        assert_same_gradients(plain, model)


@on_two_ranks
def a_memory_that_all_units_learn_through():
    def make(passed_on):
        torch.manual_seed(0)
        return Decoder(passed_on).double()

    for passed_on in (False, True):
        assert_same_training(*both(partial(make, passed_on)))


@on_two_ranks
def an_optimizer_of_before_and_one_in_backward():
    plain, model = stack(), stack()
    before, alone = (torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, plain))
    sharded(model)
    backward(plain, rows())
    backward(model, mine(rows()))
    for optimizer in (before, alone):
        optimizer.step()
        optimizer.zero_grad()
    steps = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    for p in steps:
        p.register_post_accumulate_grad_hook(lambda p: steps[p].step())
    backward(model, mine(rows()))
    backward(plain, rows())
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    with torch.no_grad():
        assert torch.allclose(model(*rows()), plain(*rows()), atol=1e-12)


@on_two_ranks
def mixed_precision():
    layer = fully_shard(nn.Linear(8, 8), param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    output = layer(torch.ones(2, 8))
    output.sum().backward()
    assert output.dtype is torch.bfloat16 and all(p.dtype is p.grad.dtype is torch.float32 for p in layer.parameters())


@on_two_ranks
def numbers_are_those_of_fsdp2_and_the_peak_is_no_higher_than_five_percent_above():
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.fsdp import fully_shard as fsdp2

    mesh = distributed.init_device_mesh("cpu", (RANKS,))  # by default the GPUs', if there are any
    halves, found = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}, []
    for shard in (partial(fully_shard, **halves), partial(fsdp2, mesh=mesh, mp_policy=MixedPrecisionPolicy(**halves))):
        model = gpt(dtype=torch.float32, width=64)
        for layer in (*model.blocks, model):
            shard(layer)
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
        for step in range(5):
            x, y = mine(texts(step))
            with Meter(model, optimizer, inputs=(x, y)) as meter:
                loss = model(x, y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        with torch.no_grad():
            found.append(([*losses, model(*texts(7)).item()], meter.timeline.peak_bytes))
    assert found[0][0] == found[1][0] and found[0][1] <= 1.05 * found[1][1]


@on_two_ranks
def one_unit_and_the_next_are_gathered():
    model, most = sharded(stack(layers=6)), {"forward": 0, "backward": 0}
    units = units_of(model)[1:]

    def count(where, *_):
        most[where] = max(most[where], sum(unit.gathered for unit in units))

    model(*mine(rows())).sum().backward()
    for layer in model.layers:
        layer[0].register_forward_hook(partial(count, "forward"))
        layer[2].register_full_backward_hook(partial(count, "backward"))
    model(*mine(rows())).sum().backward()
    assert most == {"forward": 2, "backward": 2}


@on_two_ranks
def the_graph_is_freed_with_its_last_reference():
    model, dead = sharded(stack()), []
    gc.collect()
    gc.disable()
    try:
        hook = model.layers[1][0].register_forward_hook(
            lambda _module, _args, output: dead.append(weakref.ref(output.untyped_storage()))
        )
        backward(model, mine(rows()))
        model(*mine(rows())).square().mean()
        hook.remove()
        assert [ref() for ref in dead] == [None, None]
    finally:
        gc.enable()


@on_two_ranks
def gradients_that_no_sync_added_up_go_with_zero_grad():
    plain, model = both()
    for set_to_none in (False, True):
        with model.no_sync():
            (1000 * model(*mine(rows()))).square().mean().backward()
        model.zero_grad(set_to_none)
        assert_same_training(plain, model, times=1)


@on_two_ranks
def what_is_wrong_with_a_model_is_said():
    model, shared = sharded(stack()), stack()
    shared.last.bias.data = shared.layers[1][2].weight.data[1]
    tied = stack()
    tied.layers[2][0].weight = tied.layers[0][0].weight
    fully_shard(tied.layers[0])
    used, hooked, thin = stack(), nn.Linear(8, 4).double(), nn.Embedding(8, 4, sparse=True)
    backward(used, rows())
    handle = hooked.weight.register_hook(print)
    for call, error, words in (
        (lambda: fully_shard(model), ValueError, "once…called on before"),
        (lambda: fully_shard(model.last), ValueError, "inner modules first"),
        (nn.Sequential(model).half, RuntimeError, "before fully_shard"),
        (lambda: copy.deepcopy(model), RuntimeError, "before fully_shard"),
        (lambda: torch.save(nn.Sequential(model), io.BytesIO()), TypeError, "full_state_dict"),
        (lambda: fully_shard(shared), ValueError, "memory of their own, found"),
        (lambda: fully_shard(tied), ValueError, "found weight of Stack tied to one in a Sequential…the root have both"),
        (lambda: fully_shard(used), ValueError, "without gradients"),
        (lambda: fully_shard(hooked), ValueError, "without register_hook, found one at weight; autograd … never call"),
        (lambda: fully_shard(thin)(torch.arange(3)).sum().backward(), TypeError, "sparse=False"),
    ):
        refused(call, error, words)
    assert all(p.dim() == 2 for p in (shared.last.weight, shared.layers[1][2].weight))  # nothing is cut then
    handle.remove()
    fully_shard(hooked).bias.register_hook(print)
    refused(lambda: hooked(*rows()), RuntimeError, "expected no register_hook on bias of Linear")


@on_two_ranks
def weights_that_were_changed_or_put_in_are_noticed():
    model, x = sharded(stack()), mine(rows())[0]
    loss = model(x).square().mean()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.9)
    refused(loss.backward, RuntimeError, "expected a weight as it was in the forward")
    model.layers[1][0].weight = nn.Parameter(torch.ones(12, 8))
    refused(lambda: model(x), RuntimeError, "expected weight of Linear as fully_shard left it")
    for late in (nn.Linear(8, 8).double(), nn.ParameterList([torch.ones(8)])):
        grown = sharded(stack())
        grown.layers[1].append(late)
        refused(lambda grown=grown: grown(x), RuntimeError, "as fully_shard left it, found a parameter that is in no")
        late.requires_grad_(False)
        grown.layers[1].forward = lambda x: x
        grown(x)


def test_without_a_process_group_it_is_said_what_to_do():
    refused(lambda: fully_shard(nn.Linear(2, 2)), RuntimeError, "expected a process group")


def test_halves_are_divided_before_and_after_the_sum():
    assert divide_factors(torch.bfloat16, 6) == (1, 6) and divide_factors(torch.float16, 64) == (8, 8)
    for ranks in range(1, 65):
        before, after = divide_factors(torch.float16, ranks)
        assert before * after == ranks and before <= 8


def test_a_sharded_model_that_was_trained_is_freed_when_nobody_holds_it():
    with one_rank("cpu"):
        model = fully_shard(nn.Sequential(fully_shard(nn.Linear(4, 4)), nn.Linear(4, 4)))
        model(torch.randn(2, 4)).sum().backward()
        watched = [weakref.ref(model), *map(weakref.ref, model.parameters())]
        del model
        gc.collect()
        assert [one() for one in watched] == [None] * 5


@pytest.mark.parametrize("name", on_two_ranks)
def test_on_two_ranks(name):
    on_two_ranks.assert_holds(name)
