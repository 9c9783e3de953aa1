"""A split model's whole: state dicts, files, optimizer states, the norm of its gradients."""

from __future__ import annotations

import copy
import errno
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn.utils import clip_grad_norm_ as plain_clip

from memlab import tensor_parallelism as tp
from memlab.memory_timeline import Meter, imagine
from memlab.ranks import Traffic, imagined_ranks, one_rank, place_in, run_ranks
from tests.tensor_parallelism_helpers import groups, raised

FP64 = torch.float64


class Plain(nn.Module):
    """A layer of every kind; the head is tied to the table."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(24, 8), nn.Linear(8, 24, bias=False)
        self.qkv, self.out, self.norm = nn.Linear(8, 16), nn.Linear(8, 8), nn.LayerNorm(8)
        self.register_buffer("seen", torch.tensor(7))
        self.head.weight = self.table.weight
        self.double()


class Split(nn.Module):
    """The same on ranks; of keys and values there are two pieces, which four ranks share."""

    def __init__(self, group):
        super().__init__()
        options = {"group": group, "dtype": FP64}
        pieces = min(2, place_in(group)[1])
        self.table = tp.VocabularyParallelEmbedding(24, 8, **options)
        self.head = tp.ColumnParallelLinear(8, 24, bias=False, **options)
        self.qkv = tp.ColumnParallelLinear(8, 16, sections=(8, (4, pieces), (4, pieces)), **options)
        self.out, self.norm = tp.RowParallelLinear(8, 8, **options), nn.LayerNorm(8, dtype=FP64)
        self.register_buffer("seen", torch.tensor(0))
        self.head.weight = self.table.weight


class Counting(nn.Module):
    """A layer in parts, with extra state."""

    def __init__(self):
        super().__init__()
        self.layer = tp.ColumnParallelLinear(8, 8)

    def get_extra_state(self):
        return {"count": 7}


def plain() -> Plain:
    torch.manual_seed(0)
    model = Plain()
    for p in model.parameters():
        nn.init.normal_(p)
    return model


def part(p: Tensor, full: Tensor) -> Tensor:
    return full.clone() if tp.cut_of(p) is None else tp.cut_of(p).part_of(full)


def same(split: nn.Module, full: dict[str, Tensor]) -> bool:
    """Whether this rank's parts are those of the full model."""
    return all(torch.equal(p, part(p, full[name])) for name, p in split.state_dict(keep_vars=True).items())


def alike(found: dict, expected: dict) -> bool:
    return list(found) == list(expected) and all(torch.equal(found[k], expected[k]) for k in expected)


def forget(split: nn.Module) -> nn.Module:
    with torch.no_grad():
        for t in (*split.parameters(), *split.buffers()):
            t.zero_()
    return split


def states(group, folder: Path) -> dict:
    rank, ranks = place_in(group)
    full, split, facts = plain(), Split(group), {}
    expected = full.state_dict()
    tp.load_full_state_dict(split, expected, group)
    facts["loaded"] = same(split, expected)
    with Meter() as meter, Traffic() as traffic:
        found = tp.full_state_dict(split, group)
    facts["sent"], facts["parts"] = traffic.sent_bytes, sum(p.nbytes for p in split.parameters() if tp.cut_of(p))
    facts["peak"] = meter.timeline.peak_bytes - sum(t.nbytes for t in (*split.parameters(), *split.buffers()))
    facts["gathered"] = alike(found, {} if rank else expected)
    facts["tied"] = rank > 0 or found["head.weight"] is found["table.weight"]
    tp.load_full_state_dict(forget(split), found, group)
    facts["loaded from rank 0"] = same(split, expected)
    split.seen = torch.arange(16.0, dtype=FP64)[::2]  # every other number of its memory
    strided = torch.arange(8.0, dtype=FP64) + 100
    tp.load_full_state_dict(split, {} if rank else expected | {"seen": strided}, group)
    facts["strided"] = torch.equal(split.seen, strided) and split.seen._base[1::2].tolist() == [*range(1, 16, 2)]
    split.seen = torch.zeros(4, dtype=torch.float8_e4m3fn)
    eighths = torch.tensor([0.125, -3, 448, 0]).to(torch.float8_e4m3fn)
    tp.load_full_state_dict(split, {} if rank else expected | {"seen": eighths}, group)
    facts["float8"] = split.seen.tolist() == [0.125, -3, 448, 0]
    split.seen = torch.tensor(7)
    tp.load_full_state_dict(split, {name: t.float() for name, t in expected.items()}, group)
    facts["converted"] = same(split, {name: t.float().to(t.dtype) for name, t in expected.items()})

    last = rank == ranks - 1
    own_part = split.qkv.bias.detach() if ranks > 1 else expected["norm.bias"]
    before = {name: t.clone() for name, t in split.state_dict().items()}
    facts["said"] = [
        raised(lambda: tp.load_full_state_dict(split, state, group))  # noqa: B023
        for state in (
            {name: t for name, t in expected.items() if name != "out.bias" or not last},
            expected | ({"other": torch.ones(1)} if last else {}),
            expected | ({"out.weight": torch.ones(8, 9)} if last else {}),
            expected | {"qkv.bias": own_part},
        )
    ]
    facts["unchanged"] = alike(split.state_dict(), before)
    return facts


def through_files(group, folder: Path) -> dict:
    rank, ranks = place_in(group)
    full, split, facts = plain(), Split(group), {}
    expected, path = full.state_dict(), folder / "split.pt"
    if rank == 0:
        torch.save(expected, folder / "plain.pt")
    distributed.barrier(group)
    tp.load_full(split, folder / "plain.pt", group)
    facts["read"] = same(split, expected)
    tp.save_full(split, path, group)
    written = torch.load(path)
    facts["written"] = alike(written, expected)
    facts["tied"] = written["head.weight"].data_ptr() == written["table.weight"].data_ptr()
    names_and_alignment = 4096
    facts["size"] = abs(os.path.getsize(path) - os.path.getsize(folder / "plain.pt")) <= names_and_alignment
    tp.load_full(forget(split), path, group)
    facts["read again"] = same(split, expected)

    forget(split)
    distributed.barrier(group)
    said = [
        raised(lambda: tp.load_full(split, folder / "nowhere.pt", group)),
        raised(lambda: tp.save_full(split, folder / "nowhere" / "split.pt", group)),
    ]
    write = tp.Cut.write
    if rank == ranks - 1:
        tp.Cut.write = lambda *_: 1 / 0
    said.append(raised(lambda: tp.save_full(split, path, group)))
    tp.Cut.write = write
    distributed.barrier(group)
    facts["nothing left"] = {"plain.pt", "split.pt"} <= {one.name for one in folder.iterdir()} and not list(
        folder.glob("*.unfinished")
    )
    facts["old file"] = alike(torch.load(path), expected)
    model = tp.TensorParallelGPT(1 + bool(rank), 16, 4, 8, 16, group=group)
    said.append(raised(lambda: tp.save_full(model, folder / "mixed.pt", group)))
    facts["mixed"] = (folder / "mixed.pt").exists() == (ranks == 1)
    facts["said"] = said
    return facts


def with_gradients(model: nn.Module, seed: int) -> nn.Module:
    """The same gradients for a plain model and for the parts of a split one."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: tp.cut_of(p).shape if tp.cut_of(p) else p.shape for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        p.grad = part(p, torch.randn(shapes[name], dtype=FP64, generator=generator))
    return model


def norms(group, folder: Path) -> dict:
    full, split, facts = plain(), Split(group), {}
    tp.load_full_state_dict(split, full.state_dict(), group)
    for norm_type in (2.0, 1.0, 3.0, float("inf")):
        for max_norm in (0.5, 1e9):
            expected = plain_clip(with_gradients(full, 1).parameters(), max_norm, norm_type)
            found = tp.clip_grad_norm_(with_gradients(split, 1), max_norm, norm_type, group=group)
            gradients = dict(full.named_parameters())
            apart = [(p.grad - part(p, gradients[n].grad)).norm() / p.grad.norm() for n, p in split.named_parameters()]
            facts[norm_type, max_norm] = max(abs(float(found / expected) - 1), *map(float, apart)) <= 1e-14
    split.out.weight.grad.fill_(float("nan") if place_in(group)[0] == 0 else 1.0)
    facts["said"] = [raised(lambda: tp.clip_grad_norm_(split.parameters(), 1.0, error_if_nonfinite=True, group=group))]
    split.zero_grad()
    facts["none"] = float(tp.clip_grad_norm_(split.parameters(), 1.0, group=group)) == 0
    facts["one"] = float(tp.clip_grad_norm_(split.norm.weight, 1.0, group=group)) == 0
    return facts


def equal_states(found: dict, expected: dict) -> bool:
    return found["param_groups"] == expected["param_groups"] and all(
        torch.equal(found["state"][number][name], value)
        for number, values in expected["state"].items()
        for name, value in values.items()
    )


def in_groups(model: nn.Module) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    return torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=0.1)


def optimizers(group, folder: Path) -> dict:
    rank = place_in(group)[0]
    full, split, facts = plain(), Split(group), {}
    tp.load_full_state_dict(split, full.state_dict(), group)
    one, many = in_groups(full), in_groups(split)
    for step in range(2):
        with_gradients(full, step)
        with_gradients(split, step)
        one.step()
        many.step()
    found, expected = tp.full_optimizer_state(many, group), one.state_dict()
    facts["gathered"] = found == {} if rank else equal_states(found, expected)
    for name, given in {"each": expected, "rank 0": {} if rank else expected}.items():
        start, other, twin = full.state_dict(), Split(group), plain()
        tp.load_full_state_dict(other, start, group)
        again = in_groups(other)
        tp.load_full_optimizer_state(again, given, group)
        twin.load_state_dict(start)
        truth = in_groups(twin)
        truth.load_state_dict(copy.deepcopy(expected))
        with_gradients(twin, 9)
        with_gradients(other, 9)
        truth.step()
        again.step()
        facts[name] = same(other, twin.state_dict())
    fresh = torch.optim.AdamW(split.parameters())
    smaller = {"state": {0: {"exp_avg": torch.ones(3, 3)}}, "param_groups": fresh.state_dict()["param_groups"]}
    factored = torch.optim.Adafactor([split.table.weight])
    factored.step()
    facts["said"] = [
        raised(lambda: tp.load_full_optimizer_state(fresh, expected, group)),
        raised(lambda: tp.load_full_optimizer_state(fresh, {} if rank else smaller, group)),
        raised(lambda: tp.load_full_optimizer_state(fresh, {"weights": 1}, group)),
        raised(lambda: tp.full_optimizer_state(factored, group)),
    ]
    return facts


def in_rank(rank: int, folder: str) -> dict:
    made, found = groups(), {}
    for group in made:
        size = place_in(group)[1]
        own = Path(folder) / f"{size} ranks, from {rank // size * size}"
        own.mkdir(exist_ok=True)
        distributed.barrier(group)
        for fact in (states, through_files, norms, optimizers):
            found[size, fact.__name__] = fact(group, own)
    whole = Split(None)
    found["other group"] = raised(lambda: tp.full_state_dict(whole, made[1]))
    found["other group's norm"] = raised(lambda: tp.clip_grad_norm_(with_gradients(whole, 1), 1.0, group=made[1]))
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    return run_ranks(in_rank, 4, str(tmp_path_factory.mktemp("states")), timeout=240)


SIZES = pytest.mark.parametrize("size", (1, 2, 4))


@SIZES
@pytest.mark.parametrize("what", ["states", "through_files", "norms", "optimizers"])
def test_states_files_norms_and_optimizers_are_the_plain_models_on_every_rank(ranks, size, what):
    for rank in ranks:
        facts = rank[size, what]
        assert not [
            name for name, right in facts.items() if name not in ("said", "sent", "parts", "peak") and not right
        ]


@SIZES
def test_to_gather_a_state_each_rank_sends_its_parts_and_rank_0_holds_one_more_at_most(ranks, size):
    whole = sum(p.nbytes for p in plain().parameters()) + 8
    for number, rank in enumerate(ranks):
        found = rank[size, "states"]
        gathers = number % size == 0
        assert found["sent"] == (0 if gathers else found["parts"])
        if gathers:
            assert whole <= found["peak"] <= whole + 24 * 8 * 8 // 2 * (size > 1)
        else:
            assert found["peak"] <= 0


@SIZES
def test_what_does_not_fit_on_one_rank_or_fails_there_is_told_on_all(ranks, size):
    for rank in ranks:
        less, more, other, own_part = rank[size, "states"]["said"]
        assert less.startswith("KeyError") and "found no out.bias (1 missing)" in less
        assert more.startswith("KeyError") and "found also other (1 too many)" in more
        assert other.startswith("ValueError: expected out.weight of shape (8, 8), found (8, 9)")
        assert own_part.startswith("ValueError: expected qkv.bias of shape (16,), found (")
        assert ("one rank's part of this one" in own_part) == (size > 1)
        nowhere, no_folder, failed, mixed = rank[size, "through_files"]["said"]
        assert nowhere.startswith("FileNotFoundError") and failed.startswith("ZeroDivisionError")
        assert "nowhere" in no_folder and "Error: " in no_folder
        words = "expected the same model on all ranks, found the cut of blocks.1"
        assert words in mixed if size > 1 else mixed == "nothing"
        (nan,) = rank[size, "norms"]["said"]
        assert nan.startswith("RuntimeError: expected a finite norm of the gradients, found nan")
        grouping, smaller, other, factored = rank[size, "optimizers"]["said"]
        assert grouping.startswith("ValueError: expected parameter groups of [7] parameters, found [3, 4]")
        assert smaller.startswith("ValueError: expected exp_avg of parameter 0 of shape (24, 8), found (3, 3)")
        assert other.startswith("ValueError: expected state and param_groups, as state_dict() gives them")
        assert factored.startswith("ValueError: expected states of their parameter's")


def test_a_group_of_another_size_than_the_models_is_refused(ranks):
    for rank in ranks:
        words = "expected the group that the model was made with, found "
        assert f"{words}table.weight cut for 4 ranks" in rank["other group"]
        assert f"{words}a part of (6, 8) cut for 4 ranks" in rank["other group's norm"]


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="the system does not reserve room in files")
def test_a_full_disk_is_told_of_before_anything_is_written(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with one_rank("cpu"), pytest.raises(OSError, match="No space left"):
        tp.save_full(Split(None), tmp_path / "split.pt")
    assert not list(tmp_path.iterdir())


def test_a_model_on_meta_is_refused_a_state_which_it_would_not_keep():
    with one_rank("cpu"):
        model = Split(None)
        state = tp.full_state_dict(model)
        with pytest.raises(ValueError, match=r"expected seen in memory, found it on meta.*to_empty"):
            tp.load_full_state_dict(model.to("meta"), state)
        tp.load_full_state_dict(model.to_empty(device="cpu"), state)
        assert same(model, state)


def test_what_is_made_in_a_parts_place_or_put_into_a_state_by_a_hook_is_not_saved_as_a_whole(tmp_path):
    with imagined_ranks(2):
        with pytest.raises(ValueError, match="found _extra_state, a module's extra state; save it beside"):
            tp.full_state_dict(Counting())
        model = Split(None)
        model.register_state_dict_post_hook(lambda _module, state, *_: state.update(seen=torch.tensor(8)))
        with pytest.raises(ValueError, match=r"found another tensor as seen: a state-dict hook.*remove the hook"):
            tp.save_full(model, tmp_path / "hooked.pt")
        model = Split(None)
        nn.utils.parametrizations.weight_norm(model.out)
        words = "found out.parametrizations.weight.original0 in a part's place; remove the parametrization"
        with pytest.raises(ValueError, match=words):
            tp.full_state_dict(model)
        model = Split(None)  # a part that is itself a parameter is whole then
        nn.utils.parametrize.register_parametrization(model.out, "weight", nn.Tanh())
        assert tp.full_state_dict(model)["out.parametrizations.weight.original"].shape == (8, 8)
    assert not list(tmp_path.iterdir())


def test_states_of_imagined_ranks_have_the_full_models_shapes():
    with imagine("H100-80GB"), imagined_ranks(64):
        model = tp.TensorParallelGPT(2, 1024, 64, 1024, 4096, dtype=torch.bfloat16)
        full = tp.full_state_dict(model)
        assert full["blocks.1.attention.qkv.weight"].shape == (3072, 1024)
        tp.load_full_state_dict(model, full)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        assert tp.clip_grad_norm_(model, 1.0).shape == ()
