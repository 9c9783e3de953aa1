"""A GPT as layers on data x tensor x pipeline: the plain GPT's weights, values, steps, norm and state."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

from memlab import pipeline_parallelism as pp
from memlab.book.workloads import GPT, name_in_layers
from memlab.data_parallelism import DataParallel, ZeroOptimizer, fully_shard
from memlab.data_parallelism import full_state_dict as whole_of_shards
from memlab.memory_timeline import imagine
from memlab.ranks import Traffic, imagined_ranks, mesh, one_rank, run_ranks
from memlab.tensor_parallelism import TensorParallelGPT
from tests.tensor_parallelism_helpers import raised

SIZES = {"layers": 2, "width": 16, "heads": 4, "context": 8, "vocabulary": 32}
TIED = [("0.token_embedding.weight", "3.head.weight")]


def made(layers) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[layer() for layer in layers])


def text(batch: int = 4, tokens: int = 8) -> tuple[Tensor, Tensor]:
    found = torch.randint(32, (batch, tokens + 1), generator=torch.Generator().manual_seed(1))
    return found[:, :-1], found[:, 1:]


def test_without_a_process_group_it_is_the_plain_gpt_to_the_bit_in_weights_and_rounding_in_values():
    layers = made(pp.gpt_layers(**SIZES, dtype=torch.float64))
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(0)
        plain = GPT(**SIZES)
    finally:
        torch.set_default_dtype(torch.float32)
    state = {name_in_layers(name, 2): p for name, p in plain.state_dict().items()}
    assert state.keys() == layers.state_dict().keys()
    assert all(torch.equal(p, state[name]) for name, p in layers.state_dict().items())
    dropping = made(pp.gpt_layers(**SIZES, dropout=0.5, dtype=torch.float64))
    assert not torch.equal(dropping(text()[0]), dropping(text()[0]))
    assert torch.equal(dropping.eval()(text()[0]), layers(text()[0]))
    x, y = text(tokens=5)
    assert pp.gpt_loss(layers(x), y).item() == pytest.approx(plain(x, y).item(), rel=1e-14)


@pytest.mark.parametrize(
    "more", [{}, {"kv_heads": 2, "hidden": 48}, {"sequence_parallel": True, "keep_gathered": True}]
)
def test_on_ranks_of_a_tensor_group_weights_are_those_of_the_whole_split_gpt_to_the_bit(more):
    with imagined_ranks(4, rank=1):
        group = mesh(data=2, tensor=2).get_group("tensor")
        layers = made(pp.gpt_layers(**SIZES, **more, group=group))
        torch.manual_seed(0)
        whole = TensorParallelGPT(**SIZES, **more, group=group)
        state = {name_in_layers(name, 2): p for name, p in whole.state_dict().items()}
        assert state.keys() == layers.state_dict().keys()
        assert all(torch.equal(p, state[name]) for name, p in layers.state_dict().items())


def trained_once(schedule, group=None, tensor_group=None, tied=TIED, seed=0) -> pp.Pipeline:
    plan = pp.plan_pipeline(
        pp.gpt_layers(**SIZES, group=tensor_group, dtype=torch.float64), schedule, text()[0], tied=tied
    )
    torch.manual_seed(seed)
    pipeline = pp.Pipeline(plan, functools.partial(pp.gpt_loss, group=tensor_group), group=group)
    pipeline.step(*text())
    return pipeline


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_norms_are_pytorchs_own_and_others_are_refused(norm_type):
    with one_rank("cpu"):
        pipeline, other = trained_once(pp.gpipe(1, 2)), trained_once(pp.gpipe(1, 2))
        norm = pp.clip_grad_norm_(pipeline, 0.5, norm_type)
        expected = torch.nn.utils.clip_grad_norm_(list(other.parameters()), 0.5, norm_type)
        assert norm.dtype == torch.float64 and norm.item() == pytest.approx(expected.item(), rel=1e-14)
        for p, q in zip(pipeline.parameters(), other.parameters(), strict=True):
            assert torch.allclose(p.grad, q.grad, rtol=1e-13, atol=0)
        with pytest.raises(ValueError, match="norm_type above 0"):
            pp.clip_grad_norm_(pipeline, 1.0, 0.0)
        next(pipeline.parameters()).grad.fill_(torch.nan)
        with pytest.raises(RuntimeError, match="expected a finite norm"):
            pp.clip_grad_norm_(pipeline, 1.0, error_if_nonfinite=True)


@pytest.mark.parametrize("rank", [0, 3])
def test_on_imagined_ranks_norms_and_states_run_and_a_state_has_this_ranks_layers(rank):
    with imagine("H100-80GB"), imagined_ranks(8, rank):
        axes = mesh(data=2, pipeline=2, tensor=2)
        split = {"group": axes.get_group("tensor")}
        x = torch.zeros(4, 8, dtype=torch.int64)
        plan = pp.plan_pipeline(pp.gpt_layers(**SIZES, **split), pp.gpipe(2, 2), x, tied=TIED)
        pipeline = pp.Pipeline(plan, functools.partial(pp.gpt_loss, **split), group=axes.get_group("pipeline"))
        pipeline.step(x, x)
        with pytest.raises(ValueError, match="cut for 2 ranks and a group of 1; give that group"):
            pp.clip_grad_norm_(pipeline, 1.0)
        norm = pp.clip_grad_norm_(pipeline, 1.0, tensor_group=split["group"])
        state = pp.full_state_dict(pipeline, split["group"])
        pp.load_full_state_dict(pipeline, state, split["group"])
    assert norm.shape == () and {name[0] for name in state} == ({"0", "1", "3"} if rank == 0 else set())


class Named(torch.nn.Linear):
    """Its weight has two names."""

    def __init__(self):
        super().__init__(4, 4)
        self.again = self.weight


def sent_of_two_names(group, tensor) -> int:
    """Bytes sent for a full state of such layers."""
    plan = pp.plan_pipeline([Named, Named], pp.gpipe(2, 2), torch.zeros(4, 4))
    pipeline = pp.Pipeline(plan, torch.nn.functional.mse_loss, group=group)
    with Traffic() as traffic:
        state = pp.full_state_dict(pipeline, tensor)
    if state:
        assert state["1.again"] is state["1.weight"]
    return sum(message.sent_bytes for message in traffic.records if message.name == "send")


def on_four(rank: int) -> dict:
    axes = mesh(pipeline=2, tensor=2)
    pipeline, tensor = axes.get_group("pipeline"), axes.get_group("tensor")
    whole = trained_once(pp.interleaved(2, 2, 2), pipeline, tensor)
    state = pp.full_state_dict(whole, tensor)
    found = {"state": state, "shared": state and state[TIED[0][0]] is state[TIED[0][1]]}
    found["sent"] = sent_of_two_names(pipeline, tensor)
    found["norm"] = pp.clip_grad_norm_(whole, 1.0, tensor_group=tensor).item()

    again = trained_once(pp.gpipe(2, 2), pipeline, tensor, seed=5)  # other weights, other stages
    for name, given in {"from one rank": state, "from each": gathered(state)}.items():
        with torch.no_grad():
            for p in again.parameters():
                p.zero_()
        pp.load_full_state_dict(again, given, tensor)
        found[name] = pp.full_state_dict(again, tensor)

    whole = gathered(state)
    other = {name: t[:1] if name == "3.head.weight" else torch.zeros_like(t) for name, t in state.items()}
    found["said"] = [
        raised(lambda: pp.load_full_state_dict(again, given, tensor))  # noqa: B023
        for given in (
            {n: t for n, t in whole.items() if n != "2.norm1.weight"},
            whole | {"9.weight": whole["2.norm1.bias"]},
            other,
        )
    ]
    found["unharmed"] = pp.full_state_dict(again, tensor)
    return found


def gathered(state: dict) -> dict:
    """Rank 0's state, on every rank."""
    box = [state]
    torch.distributed.broadcast_object_list(box)
    return box[0]


@pytest.fixture(scope="module")
def ranks() -> list[dict]:
    return run_ranks(on_four, 4)


def test_a_full_state_is_the_plain_models_in_its_order_and_on_the_first_rank_only(ranks):
    plain = made(pp.gpt_layers(**SIZES, dtype=torch.float64)).state_dict()
    plain[TIED[0][1]] = plain[TIED[0][0]]
    state = ranks[0]["state"]
    assert list(state) == list(plain)
    assert all(torch.equal(state[name], p) for name, p in plain.items())
    assert ranks[0]["shared"] and all(rank["state"] == {} for rank in ranks[1:])


def test_a_weight_of_two_names_is_sent_once(ranks):
    assert ranks[2]["sent"] == 4 * (4 * 4 + 4)


def test_a_full_state_loads_into_other_stages_from_one_rank_or_from_each(ranks):
    for name in ("from one rank", "from each"):
        assert all(torch.equal(p, ranks[0]["state"][key]) for key, p in ranks[0][name].items())
        assert ranks[0][name].keys() == ranks[0]["state"].keys()


def test_a_state_of_another_model_is_refused_on_every_rank_and_nothing_is_loaded(ranks):
    for rank in ranks:
        lacking, too_many, unlike = rank["said"]
        assert "KeyError" in lacking and "found no 2.norm1.weight (1 missing)" in lacking
        assert "KeyError" in too_many and "found also 9.weight (1 too many)" in too_many
        assert "ValueError: expected 3.head.weight of shape (32, 16), found (1, 16)" in unlike
    assert all(torch.equal(p, ranks[0]["state"][name]) for name, p in ranks[0]["unharmed"].items())


def test_the_norm_on_stages_and_tensor_ranks_is_that_of_the_whole_with_its_tied_table_once(ranks):
    with one_rank("cpu"):
        expected = torch.nn.utils.clip_grad_norm_(list(trained_once(pp.gpipe(1, 2)).parameters()), 1.0).item()
    assert [rank["norm"] for rank in ranks] == pytest.approx([expected] * 4, rel=1e-13)


LAYERS, WIDTH, HEADS, CONTEXT, VOCABULARY, BATCH, STEPS = 4, 16, 4, 8, 32, 8, 4
FOUR_BLOCKS = (LAYERS, WIDTH, HEADS, CONTEXT, VOCABULARY)
TABLE_AND_HEAD = [("0.token_embedding.weight", f"{LAYERS + 1}.head.weight")]
ADAM = {"lr": 1e-2, "eps": 1e-6}  # a key's bias has no gradient but rounding, which a small eps would make a step of
CLIP = 0.5
LAST_STAGES = {"1F1B": 1, "data x tensor": 4, "2 x 2 x 2": 4}  # how many ranks have one, if not 2


def texts(step: int) -> Tensor:
    """(BATCH, CONTEXT + 1)"""
    return torch.randint(VOCABULARY, (BATCH, CONTEXT + 1), generator=torch.Generator().manual_seed(step))


def plain(clip: bool) -> tuple[dict[str, Tensor], list[float], list[float]]:
    """The book's GPT in one process, parameters under a pipeline's names, losses, norms."""
    torch.manual_seed(0)
    model = GPT(layers=LAYERS, width=WIDTH, heads=HEADS, context=CONTEXT, vocabulary=VOCABULARY)
    model.head.weight = model.token_embedding.weight
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    losses, norms = [], []
    for step in range(STEPS):
        loss = model(texts(step)[:, :-1], texts(step)[:, 1:])
        loss.backward()
        if clip:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {name_in_layers(name, LAYERS): p for name, p in model.state_dict().items()}, losses, norms


def sharded(stage, group):
    """Both tables as units of their own, so that the tied copies are cut alike."""
    for name, module in stage.named_modules():
        if name.endswith(("token_embedding", "head")):
            fully_shard(module, group=group)
    return fully_shard(stage, group=group)


def trained(axes, schedule, *, kind="replicas", sequence_parallel=False):
    """Some steps on this rank of a mesh: the whole state dict (on one rank), losses and norms."""
    data, tensor = axes.get_group("data"), axes.get_group("tensor")
    split = {"group": tensor if tensor.size() > 1 else None}
    layers = pp.gpt_layers(*FOUR_BLOCKS, sequence_parallel=sequence_parallel, **split)
    rows = BATCH // data.size()
    mine = slice(data.rank() * rows, (data.rank() + 1) * rows)
    plan = pp.plan_pipeline(layers, schedule, texts(0)[mine, :-1], tied=TABLE_AND_HEAD)
    torch.manual_seed(0)
    wraps = {"replicas": functools.partial(DataParallel, group=data), "shards": functools.partial(sharded, group=data)}
    wrap = wraps.get(kind) if data.size() > 1 else None
    loss_fn = functools.partial(pp.gpt_loss, **split)
    pipeline = pp.Pipeline(plan, loss_fn, group=axes.get_group("pipeline"), wrap=wrap)
    make = torch.optim.AdamW
    if kind == "zero":
        make = functools.partial(ZeroOptimizer, optimizer_class=make, stage=1, group=data)
    optimizer = make(pipeline.parameters(), **ADAM)
    losses, norms = [], []
    for step in range(STEPS):
        loss = pipeline.step(texts(step)[mine, :-1], texts(step)[mine, 1:])
        if kind == "replicas":
            norms.append(pp.clip_grad_norm_(pipeline, CLIP, tensor_group=split["group"]).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(None if loss is None else loss.item())
    if kind == "shards":
        state = {name: t for stage in pipeline.modules.values() for name, t in whole_of_shards(stage).items()}
    else:
        state = pp.full_state_dict(pipeline, split["group"])
    copies = [tie.parameter.detach() for tie in pipeline.tied.ties] if kind != "shards" else []
    return state, losses, norms, copies


def trains_on_four(rank):
    by = {
        "4 stages": mesh(data=1, pipeline=4, tensor=1),
        "data x pipeline": mesh(data=2, pipeline=2, tensor=1),
        "pipeline x tensor": mesh(data=1, pipeline=2, tensor=2),
        "data x tensor": mesh(data=2, pipeline=1, tensor=2),
    }
    two = pp.one_forward_one_backward(2, 2)
    return {
        "1F1B": trained(by["4 stages"], pp.one_forward_one_backward(4, 4)),
        "data x pipeline, interleaved": trained(by["data x pipeline"], pp.interleaved(2, 2, 2)),
        "pipeline x tensor": trained(by["pipeline x tensor"], two),
        "pipeline x tensor, sequence parallel": trained(by["pipeline x tensor"], two, sequence_parallel=True),
        "data x tensor": trained(by["data x tensor"], pp.gpipe(1, 2)),
        "ZeRO 1, tied": trained(by["data x pipeline"], two, kind="zero"),
        "ZeRO 3": trained(by["data x pipeline"], two, kind="shards"),
    }


def on_eight(rank):
    axes = mesh(data=2, pipeline=2, tensor=2)
    return {"2 x 2 x 2": trained(axes, pp.one_forward_one_backward(2, 2), sequence_parallel=True)}


@pytest.fixture(scope="module")
def runs():
    """By name: of each rank (state, losses, norms, copies)."""
    with torch.random.fork_rng():
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            reference = {"clipped": plain(clip=True), "tied": plain(clip=False)}
        finally:
            torch.set_default_dtype(before)
    four, eight = run_ranks(in_double, 4, trains_on_four), run_ranks(in_double, 8, on_eight)
    return reference, {name: [each[name] for each in found] for found in (four, eight) for name in found[0]}


def in_double(rank, function):
    torch.set_default_dtype(torch.float64)
    return function(rank)


def expected_of(runs, name: str) -> tuple:
    reference, _ = runs
    return reference["tied" if name.startswith("ZeRO") else "clipped"]


def test_steps_on_every_mesh_are_those_of_one_process_with_its_losses_and_norms(runs):
    """The last stages have the losses of their share of the batch. A tied table counts once in the norm."""
    for name, ranks in runs[1].items():
        state, losses, norms = expected_of(runs, name)
        whole = {key: p for found, *_ in ranks for key, p in found.items()}
        assert whole.keys() == state.keys(), name
        for key, p in state.items():
            assert (whole[key] - p).norm() <= 1e-12 * p.norm(), (name, key)
        told = [own for _, own, *_ in ranks if own[0] is not None]
        assert len(told) == LAST_STAGES.get(name, 2), name
        assert torch.tensor(told, dtype=torch.float64).mean(0).tolist() == pytest.approx(losses, rel=1e-12), name
        assert max(norms, default=1) > CLIP
        for _, _, own, _ in ranks:
            assert own == pytest.approx(norms, rel=1e-12)


def test_tied_copies_are_equal_to_the_bit_after_some_steps(runs):
    for name, ranks in runs[1].items():
        tensors = 2 if "tensor" in name or name == "2 x 2 x 2" else 1
        for tensor in range(tensors):
            copies = [copy for _, _, _, found in ranks[tensor::tensors] for copy in found]
            assert all(torch.equal(copies[0], copy) for copy in copies), name
        assert bool(copies) == (name not in {"ZeRO 3", "data x tensor"}), name


def test_a_full_state_is_on_the_first_rank_of_the_pipeline_and_of_the_tensor_group_and_nowhere_else(runs):
    holders = {name: [rank for rank, (state, *_) in enumerate(ranks) if state] for name, ranks in runs[1].items()}
    assert holders["1F1B"] == holders["pipeline x tensor"] == [0]
    assert holders["data x pipeline, interleaved"] == [0, 2] and holders["2 x 2 x 2"] == [0, 4]
