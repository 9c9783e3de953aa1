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
from torch.nn.utils import prune

from memlab.book.workloads import GPT
from memlab.memory_timeline import Meter, imagine
from memlab.ranks import Traffic, imagined_ranks, one_rank, place_in, run_ranks
from memlab.tensor_parallelism import (
    ColumnParallelLinear,
    Cut,
    RowParallelLinear,
    TensorParallelGPT,
    VocabularyParallelEmbedding,
    clip_grad_norm_,
    cut_of,
    full_optimizer_state,
    full_state_dict,
    load_full,
    load_full_optimizer,
    load_full_optimizer_state,
    load_full_state_dict,
    save_full,
    save_full_optimizer,
)
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
        self.table = VocabularyParallelEmbedding(24, 8, **options)
        self.head = ColumnParallelLinear(8, 24, bias=False, **options)
        self.qkv = ColumnParallelLinear(8, 16, sections=(8, (4, pieces), (4, pieces)), **options)
        self.out, self.norm = RowParallelLinear(8, 8, **options), nn.LayerNorm(8, dtype=FP64)
        self.register_buffer("seen", torch.tensor(0))
        self.head.weight = self.table.weight


class Counting(nn.Module):
    """A layer in parts; what it has counted travels as extra state, as anything or as a tensor."""

    def __init__(self, group, as_tensor: bool):
        super().__init__()
        self.layer, self.count, self.as_tensor = ColumnParallelLinear(8, 8, group=group), 0, as_tensor

    def get_extra_state(self):
        return torch.tensor(self.count) if self.as_tensor else {"count": self.count}

    def set_extra_state(self, state):
        self.count = int(state) if self.as_tensor else state["count"]


def extra_states(group, folder: Path) -> list:
    """Counts after loading from rank 0, from every rank and from a file, and the error without them."""
    model = nn.Sequential(Counting(group, False), Counting(group, True))
    path, found = folder / f"extra {place_in(group)[1]}, {distributed.get_rank() // place_in(group)[1]}.pt", []
    model[0].count, model[1].count = 5 + place_in(group)[0], 7 + place_in(group)[0]
    full = full_state_dict(model, group)
    save_full(model, path, group)
    for load in (
        lambda: load_full_state_dict(model, full, group),
        lambda: load_full_state_dict(model, torch.load(path), group),
        lambda: load_full(model, path, group),
    ):
        model[0].count = model[1].count = 0
        load()
        found.append((model[0].count, model[1].count))
    lacking = {name: t for name, t in full.items() if name != "1._extra_state"}
    return [found, raised(lambda: load_full_state_dict(model, lacking, group))]


def plain(seed: int = 0) -> Plain:
    torch.manual_seed(seed)
    model = Plain()
    for p in model.parameters():
        nn.init.normal_(p)
    return model


def part(p: Tensor, full: Tensor) -> Tensor:
    return full.clone() if cut_of(p) is None else cut_of(p).part_of(full)


def same(split: nn.Module, full: dict[str, Tensor]) -> bool:
    """Whether this rank's parts are those of the full model."""
    return all(torch.equal(p, part(p, full[name])) for name, p in split.state_dict(keep_vars=True).items())


def forget(split: nn.Module) -> nn.Module:
    with torch.no_grad():
        for t in (*split.parameters(), *split.buffers()):
            t.zero_()
    return split


def states(group) -> dict:
    full, rank = plain(), place_in(group)[0]
    expected, split, facts = full.state_dict(), Split(group), {}
    load_full_state_dict(split, expected, group)
    facts["loaded"] = same(split, expected)
    with Meter() as meter, Traffic() as traffic:
        found = full_state_dict(split, group)
    facts["sent"], facts["parts"] = traffic.sent_bytes, sum(p.nbytes for p in split.parameters() if cut_of(p))
    facts["peak"] = meter.timeline.peak_bytes - sum(t.nbytes for t in (*split.parameters(), *split.buffers()))
    if rank == 0:
        facts["gathered"] = list(found) == list(expected) and all(torch.equal(found[k], expected[k]) for k in expected)
        facts["gathered"] &= found["head.weight"] is found["table.weight"]
    else:
        facts["gathered"] = found == {}
    load_full_state_dict(forget(split), found, group)
    facts["loaded from rank 0"] = same(split, expected)
    split.seen = torch.arange(16.0, dtype=FP64)[::2]  # every other number of its memory
    strided = torch.arange(8.0, dtype=FP64) + 100
    load_full_state_dict(split, expected | {"seen": strided} if rank == 0 else {}, group)
    facts["strided"] = torch.equal(split.seen, strided) and split.seen._base[1::2].tolist() == [*range(1, 16, 2)]
    split.seen = torch.zeros(4, dtype=torch.float8_e4m3fn)
    eighths = torch.tensor([0.125, -3, 448, 0]).to(torch.float8_e4m3fn)
    facts["float8"] = raised(
        lambda: load_full_state_dict(split, expected | {"seen": eighths} if rank == 0 else {}, group)
    ) + str(split.seen.tolist())
    split.seen = torch.tensor(7)
    load_full_state_dict(split, {name: t.float() for name, t in expected.items()}, group)
    facts["converted"] = same(split, {name: t.float().to(t.dtype) for name, t in expected.items()})

    last = rank == place_in(group)[1] - 1
    less = {name: t for name, t in expected.items() if name != "out.bias" or not last}
    more = expected | {"other": torch.ones(1)} if last else expected
    other = expected | {"out.weight": torch.ones(8, 9)} if last else expected
    own_part = expected | (
        {"qkv.bias": split.qkv.bias.detach()} if place_in(group)[1] > 1 else {"qkv.bias": expected["norm.bias"]}
    )
    before = {name: t.clone() for name, t in split.state_dict().items()}
    facts["raised"] = [
        raised(lambda: load_full_state_dict(split, state, group))  # noqa: B023
        for state in (less, more, other, own_part)
    ]
    facts["unchanged"] = all(torch.equal(t, before[name]) for name, t in split.state_dict().items())
    return facts


def through_files(group, folder: Path) -> dict:
    rank, ranks = place_in(group)
    full, split, facts = plain(), Split(group), {}
    expected = full.state_dict()
    folder = folder / f"{ranks} ranks, from {distributed.get_rank() // ranks * ranks}"
    if rank == 0:
        folder.mkdir()
        torch.save(expected, folder / "plain.pt")
    distributed.barrier(group)
    load_full(split, folder / "plain.pt", group)
    facts["read"] = same(split, expected)
    save_full(split, folder / "split.pt", group)
    written = torch.load(folder / "split.pt")
    facts["written"] = list(written) == list(expected) and all(torch.equal(written[k], expected[k]) for k in expected)
    facts["tied"] = written["head.weight"].data_ptr() == written["table.weight"].data_ptr()
    facts["bytes"] = os.path.getsize(folder / "split.pt") - os.path.getsize(folder / "plain.pt")
    load_full(forget(split), folder / "split.pt", group)
    facts["read again"] = same(split, expected)

    forget(split)
    distributed.barrier(group)
    facts["raised"] = [
        raised(lambda: load_full(split, folder / "nowhere.pt", group)),
        raised(lambda: save_full(split, folder / "nowhere" / "split.pt", group)),
    ]
    write = Cut.write
    if rank == ranks - 1:
        Cut.write = lambda *_: 1 / 0
    facts["raised"].append(raised(lambda: save_full(split, folder / "split.pt", group)))
    Cut.write = write
    distributed.barrier(group)
    facts["left"] = sorted(path.name for path in folder.iterdir())
    facts["old file"] = torch.equal(torch.load(folder / "split.pt")["table.weight"], expected["table.weight"])
    return facts


def with_gradients(model: nn.Module, seed: int) -> nn.Module:
    """The same gradients for a plain model and for the parts of a split one."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: cut_of(p).shape if cut_of(p) else p.shape for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        p.grad = part(p, torch.randn(shapes[name], dtype=FP64, generator=generator))
    return model


def norms(group) -> dict:
    full, split, facts = plain(), Split(group), {}
    load_full_state_dict(split, full.state_dict(), group)
    for norm_type in (2.0, 1.0, 3.0, float("inf")):
        for max_norm in (0.5, 1e9):
            expected = plain_clip(with_gradients(full, 1).parameters(), max_norm, norm_type)
            found = clip_grad_norm_(with_gradients(split, 1), max_norm, norm_type, group=group)
            gradients = dict(full.named_parameters())
            apart = [(p.grad - part(p, gradients[n].grad)).norm() / p.grad.norm() for n, p in split.named_parameters()]
            facts[norm_type, max_norm] = max(abs(float(found / expected) - 1), *map(float, apart))
    split.out.weight.grad.fill_(float("nan") if place_in(group)[0] == 0 else 1.0)
    facts["raised"] = raised(lambda: clip_grad_norm_(split.parameters(), 1.0, error_if_nonfinite=True, group=group))
    split.zero_grad()
    facts["none"] = float(clip_grad_norm_(split.parameters(), 1.0, group=group))
    facts["one"] = float(clip_grad_norm_(split.norm.weight, 1.0, group=group))
    return facts


def equal_states(found: dict, expected: dict) -> bool:
    return found["param_groups"] == expected["param_groups"] and all(
        torch.equal(found["state"][number][name], value)
        for number, values in expected["state"].items()
        for name, value in values.items()
    )


def optimizers(group, folder: Path) -> dict:
    rank = place_in(group)[0]
    full, split, facts = plain(), Split(group), {}
    load_full_state_dict(split, full.state_dict(), group)

    def in_groups(model):
        matrices = [p for p in model.parameters() if p.dim() > 1]
        vectors = [p for p in model.parameters() if p.dim() == 1]
        return torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=0.1)

    one, many = in_groups(full), in_groups(split)
    for step in range(3):
        with_gradients(full, step)
        with_gradients(split, step)
        one.step()
        many.step()
    found = full_optimizer_state(many, group)
    expected = one.state_dict()
    if rank == 0:
        facts["gathered"] = equal_states(found, expected)
    else:
        facts["gathered"] = found == {}
    for name, given in {"each": expected, "rank 0": expected if rank == 0 else {}}.items():
        start, other = full.state_dict(), Split(group)
        load_full_state_dict(other, start, group)
        again = in_groups(other)
        load_full_optimizer_state(again, given, group)
        twin = plain()
        twin.load_state_dict(start)
        truth = in_groups(twin)
        truth.load_state_dict(copy.deepcopy(one.state_dict()))
        with_gradients(twin, 9)
        with_gradients(other, 9)
        truth.step()
        again.step()
        facts[name] = same(other, twin.state_dict())
    fresh = in_groups(Split(group))
    path = folder / f"optimizer {place_in(group)[1]}, {distributed.get_rank() // place_in(group)[1]}.pt"
    save_full_optimizer(many, path, group)
    load_full_optimizer(fresh, path, group)
    facts["file"] = equal_states(torch.load(path), expected)
    facts["read"] = equal_states(fresh.state_dict(), many.state_dict())
    fresh = torch.optim.AdamW(split.parameters())
    smaller = {"state": {0: {"exp_avg": torch.ones(3, 3)}}, "param_groups": fresh.state_dict()["param_groups"]}
    factored = torch.optim.Adafactor([split.table.weight])
    factored.step()
    facts["raised"] = [
        raised(lambda: load_full_optimizer_state(fresh, expected, group)),
        raised(lambda: load_full_optimizer_state(fresh, smaller if rank == 0 else {}, group)),
        raised(lambda: load_full_optimizer_state(fresh, {"weights": 1}, group)),
        raised(lambda: full_optimizer_state(factored, group)),
        raised(lambda: save_full_optimizer(factored, path, group)),
    ]
    return facts


def in_rank(rank: int, folder: str) -> list:
    found = []
    for group in groups():
        path = Path(folder)
        found.append((states(group), through_files(group, path), norms(group), optimizers(group, path)))
        found[-1] += (extra_states(group, path),)
    whole = Split(None)
    found.append(raised(lambda: full_state_dict(whole, groups()[1])))
    found.append(raised(lambda: clip_grad_norm_(with_gradients(whole, 1), 1.0, group=groups()[1])))
    return found


@pytest.fixture(scope="module")
def ranks_found(tmp_path_factory) -> list:
    """By rank: [states, files, norms, optimizers, extra states] in a group of one, of two and of four."""
    return run_ranks(in_rank, 4, str(tmp_path_factory.mktemp("states")), timeout=240)


def facts(ranks_found: list, which: int) -> list[tuple[int, dict]]:
    return [(size, rank[place][which]) for rank in ranks_found for place, size in enumerate((1, 2, 4))]


def test_a_full_state_goes_into_parts_and_comes_back_bitwise(ranks_found):
    for size, found in facts(ranks_found, 0):
        assert found["loaded"] and found["gathered"] and found["loaded from rank 0"] and found["converted"], size
        assert found["strided"] and found["float8"] == "nothing[0.125, -3.0, 448.0, 0.0]", size


def test_a_modules_extra_state_is_rank_0s_and_comes_back_from_it_from_every_rank_and_from_a_file(ranks_found):
    for size, (found, lacking) in facts(ranks_found, 4):
        assert found == [(5, 7)] * 3, size
        assert "found no 1._extra_state (1 missing)" in lacking


def test_to_gather_a_state_each_rank_sends_its_parts_and_rank_0_holds_one_more_at_most(ranks_found):
    whole = sum(p.nbytes for p in plain().parameters()) + 8
    for number, rank in enumerate(ranks_found):
        for place, size in enumerate((1, 2, 4)):
            found = rank[place][0]
            gathers = number % size == 0
            assert found["sent"] == (0 if gathers else found["parts"])
            if gathers:
                assert whole <= found["peak"] <= whole + 24 * 8 * 8 // 2 * (size > 1)
            else:
                assert found["peak"] <= 0


def test_a_state_that_does_not_fit_on_one_rank_is_refused_on_all_and_nothing_is_loaded(ranks_found):
    for size, found in facts(ranks_found, 0):
        less, more, other, own_part = found["raised"]
        assert less.startswith("KeyError") and "found no out.bias (1 missing)" in less
        assert more.startswith("KeyError") and "found also other (1 too many)" in more
        assert other.startswith("ValueError: expected out.weight of shape (8, 8), found (8, 9)")
        assert own_part.startswith("ValueError: expected qkv.bias of shape (16,), found (")
        assert ("one rank's part of this one" in own_part) == (size > 1)
        assert found["unchanged"]


def test_a_group_of_another_size_than_the_models_is_refused(ranks_found):
    for rank in ranks_found:
        assert "expected the group that the model was made with, found table.weight cut for 4 ranks" in rank[3]
        assert "expected the group that the model was made with, found a part of (6, 8) cut for 4 ranks" in rank[4]


def test_a_file_is_read_and_written_in_pieces_and_is_a_plain_checkpoint(ranks_found):
    for size, found in facts(ranks_found, 1):
        assert found["read"] and found["written"] and found["tied"] and found["read again"], size
        assert abs(found["bytes"]) <= 4096  # names inside the archive, and their alignment


def test_where_one_rank_cannot_read_or_write_all_are_told_and_the_old_file_stays(ranks_found):
    for _, found in facts(ranks_found, 1):
        nowhere, no_folder, failed = found["raised"]
        assert nowhere.startswith("FileNotFoundError") and failed.startswith("ZeroDivisionError")
        assert "nowhere" in no_folder and "Error: " in no_folder
        assert found["left"] == ["plain.pt", "split.pt"] and found["old file"]


def test_gradients_are_clipped_by_the_plain_models_norm(ranks_found):
    for size, found in facts(ranks_found, 2):
        for case, apart in found.items():
            if isinstance(case, tuple):
                assert apart <= 1e-14, (size, case)
        assert found["raised"].startswith("RuntimeError: expected a finite norm of the gradients, found nan")
        assert found["none"] == found["one"] == 0


def test_an_optimizers_state_goes_into_parts_and_comes_back_and_training_goes_on(ranks_found):
    for size, found in facts(ranks_found, 3):
        assert found["gathered"] and found["each"] and found["rank 0"], size


def test_an_optimizers_file_is_the_plain_optimizers_and_is_read_in_pieces(ranks_found):
    for size, found in facts(ranks_found, 3):
        assert found["file"] and found["read"], size


def test_an_optimizers_state_that_does_not_fit_is_refused_on_all_ranks(ranks_found):
    for size, found in facts(ranks_found, 3):
        grouping, smaller, other, factored, unsaved = found["raised"]
        assert grouping.startswith("ValueError: expected parameter groups of [7] parameters, found [3, 4]")
        assert smaller.startswith("ValueError: expected exp_avg of parameter 0 of shape (24, 8), found (3, 3)")
        assert other.startswith("ValueError: expected state and param_groups, as state_dict() gives them")
        assert factored == unsaved and factored.startswith("ValueError: expected states of their parameter's"), size


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="the system does not reserve room in files")
def test_a_full_disk_is_told_of_before_anything_is_written(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with one_rank("cpu"), pytest.raises(OSError, match="No space left"):
        save_full(Split(None), tmp_path / "split.pt")
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_of_a_split_gpt_is_the_plain_ones(tmp_path):
    sizes = {"layers": 1, "width": 16, "heads": 2, "context": 8, "vocabulary": 16}
    torch.manual_seed(2)
    expected = GPT(**sizes)
    with one_rank("cpu"):
        save_full(TensorParallelGPT(**sizes), tmp_path / "gpt.pt")
    model = GPT(**sizes)
    model.load_state_dict(torch.load(tmp_path / "gpt.pt"))
    torch.manual_seed(2)
    with one_rank("cpu"):
        split = TensorParallelGPT(**sizes)
        assert same(split, expected.state_dict())


def test_a_model_on_meta_is_refused_a_state_which_it_would_not_keep():
    with one_rank("cpu"):
        model = Split(None)
        state = full_state_dict(model)
        with pytest.raises(ValueError, match=r"expected seen in memory, found it on meta.*to_empty"):
            load_full_state_dict(model.to("meta"), state)
        load_full_state_dict(model.to_empty(device="cpu"), state)
        assert same(model, state)


def in_bf16(_module, state: dict, _prefix, _metadata) -> None:
    state.update({name: t.bfloat16() for name, t in state.items()})


def test_tensors_that_a_hook_puts_into_a_state_dict_are_neither_saved_nor_loaded_into(tmp_path):
    with imagined_ranks(2):
        model = Split(None)
        state = full_state_dict(model)
        hook = model.register_state_dict_post_hook(in_bf16)
        for call in (
            lambda: full_state_dict(model),
            lambda: load_full_state_dict(model, state),
            lambda: save_full(model, tmp_path / "hooked.pt"),
        ):
            with pytest.raises(ValueError, match=r"found another tensor as seen: a state-dict hook.*remove the hook"):
                call()
        hook.remove()
        assert full_state_dict(model).keys() == state.keys()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "made"),
    [
        (nn.utils.parametrizations.weight_norm, "parametrizations.weight.original0"),
        (lambda layer: prune.l1_unstructured(layer, "weight", 2), "weight_mask"),
    ],
)
def test_what_is_made_in_a_parts_place_is_not_saved_as_a_whole(change, made):
    with imagined_ranks(2):
        model = Split(None)
        change(model.out)
        with pytest.raises(ValueError, match=f"found out.{made} in a part's place; remove the parametrization"):
            full_state_dict(model)


def test_a_parametrized_part_that_is_itself_a_parameter_is_saved_whole():
    with imagined_ranks(2):
        model = Split(None)
        nn.utils.parametrize.register_parametrization(model.out, "weight", nn.Tanh())
        assert full_state_dict(model)["out.parametrizations.weight.original"].shape == (8, 8)


def test_states_of_imagined_ranks_have_the_full_models_shapes():
    with imagine("H100-80GB"), imagined_ranks(64):
        model = TensorParallelGPT(2, 1024, 64, 1024, 4096, dtype=torch.bfloat16)
        full = full_state_dict(model)
        assert full["blocks.1.attention.qkv.weight"].shape == (3072, 1024)
        load_full_state_dict(model, full)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        assert clip_grad_norm_(model, 1.0).shape == ()


def both_groups_save(rank: int, path: Path) -> bool:
    """Two groups of two, replicas of one model, each of which saves it to one path."""
    groups = [distributed.new_group([0, 1]), distributed.new_group([2, 3])]
    model = Split(groups[rank // 2])
    expected = plain().state_dict()
    load_full_state_dict(model, expected, groups[rank // 2])
    write = Cut.write

    def all_are_here(*args):  # so that each group's file is being written while the other's is
        distributed.barrier()
        return write(*args)

    Cut.write = all_are_here
    save_full(model, path, groups[rank // 2])
    written = torch.load(path)
    return all(torch.equal(written[k], expected[k]) for k in expected)


def test_two_groups_that_save_to_one_path_at_a_time_leave_one_whole_file(tmp_path):
    assert run_ranks(both_groups_save, 4, tmp_path / "split.pt") == [True] * 4
    assert [path.name for path in tmp_path.iterdir()] == ["split.pt"]


def saves_another(rank: int, path: Path) -> str:
    torch.manual_seed(0)
    model = TensorParallelGPT(2 - rank, 16, 4, 8, 16)
    try:
        save_full(model, path)
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_with_other_models_do_not_write_a_mixture(tmp_path):
    for told in run_ranks(saves_another, 2, tmp_path / "mixed.pt"):
        assert "expected the same model on all ranks, found the cut of blocks.1" in told and "on rank 1: none" in told
    assert not list(tmp_path.iterdir())
