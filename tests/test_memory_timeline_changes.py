"""Whose a storage is where things change inside the block: models, their hooks, what optimizers keep and call."""

from __future__ import annotations

import copy
import os

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from memlab.memory_timeline import Meter, Timeline, lines
from memlab.memory_timeline.lines import AUTOGRAD, OPTIMIZER, READER, TORCH, Owners


def tensors_in(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for item in values for tensor in tensors_in(item)]


def held(*values: object) -> int:
    """The bytes of the storages of all tensors in some values, each counted once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors_in(values)}.values())


def names(timeline: Timeline, category: str) -> set[str]:
    return {storage.name for storage in timeline.storages.values() if storage.category == category}


def phases(timeline: Timeline, source: str) -> set[str]:
    return {s.phase for s in timeline.storages.values() if source in s.line.source and s.phase != "before"}


@pytest.mark.parametrize("steps_before", [0, 2])
def test_states_in_lists_are_counted_as_lbfgs_has_them(steps_before):
    model, x = nn.Linear(100, 100, bias=False), torch.randn(3, 100)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=6, history_size=5)

    def closure():
        optimizer.zero_grad()
        loss = model(x).pow(2).sum()
        loss.backward()
        return loss

    for _ in range(steps_before):
        optimizer.step(closure)
    with Meter(model, optimizer, inputs=x) as meter:
        at_entry = meter.held_bytes
        expected = held(model.weight, x, model.weight.grad, *optimizer.state.values())
        loss = optimizer.step(closure)
        now = meter.held_bytes
    assert at_entry == expected
    assert now == held(model.weight, x, model.weight.grad, loss, *optimizer.state.values())
    end = meter.timeline.bytes_by_category(len(meter.timeline))
    assert end["optimizer_state"] >= held(optimizer.state[model.weight]["old_dirs"]) > 0
    assert "old_dirs 0 of weight" in names(meter.timeline, "optimizer_state")
    assert phases(meter.timeline, "loss = model(x)") == {"forward", "backward"}
    assert phases(meter.timeline, "optimizer.step(closure)") >= {"optimizer"}


def test_parameters_that_others_replace_give_no_names_to_what_has_their_ids():
    model, x = nn.Sequential(*[nn.Linear(4, 4) for _ in range(6)]), torch.randn(3, 4)
    with Meter(model, inputs=x) as meter:
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        model(x).sum().backward()
        numbers = {meter._live[p.grad.untyped_storage()._cdata]: name for name, p in model.named_parameters()}
        optimizer.step()
    storages = meter.timeline.storages
    assert {storages[number].name: name for number, name in numbers.items()} == {
        name: name for name in numbers.values()
    }
    assert names(meter.timeline, "optimizer_state") == {f"momentum_buffer of {name}" for name in numbers.values()}


def test_parameters_of_nobody_have_nobodys_name_whatever_ids_they_get():
    model = nn.Linear(8, 4)
    with Meter(model) as meter:
        model.weight = nn.Parameter(torch.zeros(8, 4))
        others = [nn.Parameter(torch.zeros(7)) for _ in range(20)]
        optimizer = torch.optim.SGD(others, 0.1, momentum=0.9)
        sum(other.sum() for other in others).backward()
        optimizer.step()
    assert names(meter.timeline, "gradient") == {"a parameter"}
    assert names(meter.timeline, "optimizer_state") == {"momentum_buffer of a parameter"}


def test_a_layer_that_comes_in_has_its_name_by_the_first_step():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(3, 4)
    with Meter(model, inputs=x) as meter:
        model[1] = nn.Linear(4, 2)
        optimizer = torch.optim.Adam(model.parameters())
        model(x).sum().backward()
        optimizer.step()
    expected = {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert names(meter.timeline, "gradient") == expected
    assert {name.split(" of ")[1] for name in names(meter.timeline, "optimizer_state")} == expected


def test_another_module_is_not_called_by_the_name_of_one_whose_id_it_has():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(3, 4)
    with Meter(model, inputs=x) as meter:
        for _ in range(20):
            model[1] = nn.Identity()
            probe = nn.Linear(4, 4)
            probe(x)
            del probe
    assert {s.module for s in meter.timeline.storages.values() if s.op == "addmm"} == {""}


def test_of_two_models_one_whose_parameter_is_the_others_buffer_is_a_parameter():
    teacher, student = nn.Module(), nn.Linear(4, 2)
    teacher.register_buffer("shared", student.weight.detach())
    with Meter([teacher, student]) as meter:
        pass
    found = {(s.category, s.name) for s in meter.timeline.alive(0)}
    assert found == {("parameter", "1.weight"), ("parameter", "1.bias")}


def test_a_lazy_batch_norm_is_metered_from_when_it_has_bytes():
    model, x = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d()), torch.randn(4, 3)
    with Meter(model, inputs=x) as meter:
        model(x).sum().backward()
        model.append(nn.LazyBatchNorm1d())
    end = meter.timeline.bytes_by_category(len(meter.timeline))
    assert end["parameter"] == sum(p.nbytes for p in model.parameters() if not torch.nn.parameter.is_lazy(p))
    assert end["gradient"] == end["parameter"]
    assert end["buffer"] == 2 * 8 * 4 + 8 + 8  # means and variances of one, and of both how many batches
    counters = {"1.num_batches_tracked", "2.num_batches_tracked"}
    assert names(meter.timeline, "buffer") == {"1.running_mean", "1.running_var", *counters}


def test_an_averaged_model_that_is_called_runs_forward():
    averaged, x = AveragedModel(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))), torch.randn(3, 4)
    with Meter(averaged, inputs=x) as meter:
        averaged(x).pow(2).sum().backward()
    made = {s.op: (s.category, s.phase) for s in meter.timeline.storages.values()}
    assert made["relu"] == ("activation", "forward") and made["addmm"][1] == "forward"


class SharpnessAware(torch.optim.Optimizer):
    """Steps up, asks the closure again, and steps from there."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure):
        with torch.enable_grad():
            closure()
        for p in self.param_groups[0]["params"]:
            self.state[p]["up"] = p.grad * 0.05
            self.state[p].setdefault("all", []).append({"twice": p.grad * 2})
            p.add_(self.state[p]["up"])
        with torch.enable_grad():
            closure()
        for p in self.param_groups[0]["params"]:
            p.sub_(self.state[p]["up"])
            update = p.grad * 0.1
            p.sub_(update)


def test_the_step_of_a_readers_own_optimizer_goes_on_after_a_closure_and_its_states_have_names():
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(3, 4)
    optimizer = SharpnessAware(model.parameters())

    def closure():
        optimizer.zero_grad()
        loss = model(x).pow(2).sum()
        loss.backward()
        return loss

    with Meter(model, optimizer, inputs=x) as meter:
        optimizer.step(closure)
        after = model(x)
    assert phases(meter.timeline, '["up"] = ') == {"optimizer"} == phases(meter.timeline, "update = ")
    assert phases(meter.timeline, "loss = model(x)") == {"forward", "backward"}
    assert phases(meter.timeline, "after = ") == {"forward"} and after.shape == (3, 2)
    states = [f"{state} of {name}" for state in ("up", "all 0 twice") for name, _ in model.named_parameters()]
    assert names(meter.timeline, "optimizer_state") == set(states)


class ShrinkingNAdam(torch.optim.NAdam):
    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            shrink = p * 0.01
            p.sub_(shrink)


def test_the_step_of_a_subclass_goes_on_after_that_of_its_base_class():
    torch.optim.NAdam([torch.zeros(1)])  # from then on the base class's step tells when it ends, too
    model, x = nn.Linear(2, 2, bias=False), torch.randn(2, 2)
    optimizer = ShrinkingNAdam(model.parameters())
    with Meter(model, optimizer, inputs=x) as meter:
        model(x).sum().backward()
        optimizer.step()
    assert phases(meter.timeline, "shrink = ") == {"optimizer"}


def test_a_graph_that_is_kept_is_not_said_to_be_held_by_a_variable_alone():
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(3, 4)
    with Meter(model, inputs=x) as meter:
        kept = model(x).pow(2).mean()
        model(x).sum().backward()
        last = model(x).pow(2).mean()
    timeline = meter.timeline
    reasons = [s.reason for s in timeline.alive(len(timeline)) if s.op == "relu"]
    assert None not in (kept.grad_fn, last.grad_fn)
    assert reasons == [
        "held by a variable, or by the graph of one: backward never read it",
        "result of relu in forward",
    ]


def test_the_line_of_a_copy_is_the_readers_not_that_of_pythons_copy():
    model = nn.Linear(4, 4)
    with Meter(model) as meter:
        average = copy.deepcopy(model)
    lines = {s.line.source for s in meter.timeline.storages.values() if s.op}
    assert average is not model and lines == {"average = copy.deepcopy(model)"}


def test_torch_and_models_that_are_installed_inside_pythons_own_folder_are_what_they_are(monkeypatch, tmp_path):
    """As where a virtual environment sees the packages of the Python it was made with."""
    python = f"{tmp_path}{os.sep}"
    installed = os.path.join(tmp_path, "site-packages")
    torch_there = os.path.join(installed, "torch") + os.sep
    monkeypatch.setattr(lines, "_PYTHON", python)
    monkeypatch.setattr(lines, "_TORCH", torch_there)
    monkeypatch.setattr(lines, "_OPTIM", os.path.join(torch_there, "optim") + os.sep)
    monkeypatch.setattr(lines, "_AUTOGRAD", os.path.join(torch_there, "autograd", "__init__.py"))
    owners = Owners()
    assert owners[os.path.join(python, "copy.py")] == TORCH
    assert owners[os.path.join(python, "multiprocessing", "queues.py")] == TORCH
    assert owners[os.path.join(installed, "transformers", "models", "gpt2.py")] == READER
    assert owners[os.path.join(torch_there, "optim", "adam.py")] == TORCH | OPTIMIZER
    assert owners[os.path.join(torch_there, "autograd", "__init__.py")] == TORCH | AUTOGRAD


def test_a_model_that_is_converted_for_one_step_has_parameters_all_the_time():
    model, x = nn.Linear(64, 64, bias=False), torch.ones(4, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Meter(model, optimizer, x) as meter:
        model.bfloat16()
        model(x.bfloat16()).sum().backward()
        optimizer.step()
        in_step = len(meter.timeline)
        model.float()
        after = len(meter.timeline)
    timeline = meter.timeline
    assert timeline.bytes_by_category(in_step)["parameter"] == 2 * 64 * 64
    assert timeline.bytes_by_category(after)["parameter"] == 4 * 64 * 64
