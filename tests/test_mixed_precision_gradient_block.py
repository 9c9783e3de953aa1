"""The FP32 gradients of all chunks share one storage, have bytes only while a step lasts, and belong to whoever keeps
one."""

import pytest
import torch
from torch import nn, optim

from memlab.memory_timeline import Meter, imagine
from memlab.mixed_precision import MasterWeights, StochasticRounding, gradient_block
from memlab.mixed_precision.gradient_block import GradientBlock

BF16, CPU = torch.bfloat16, torch.device("cpu")


def storage(tensor):
    return tensor.untyped_storage()


def masters(*shapes):
    return [torch.zeros(shape) for shape in shapes]


def test_views_are_dense_in_the_masters_layout_apart_and_the_largest_first():
    given = [torch.zeros(5), torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.zeros(6, 7).T]
    given += [torch.zeros(0), torch.tensor(1.0)]
    found = GradientBlock(CPU).views(given)
    assert [v.shape for v in found] == [m.shape for m in given] and [v.stride() for v in found] == [
        m.stride() for m in given
    ]
    assert len({storage(v).data_ptr() for v in found}) == 1 and storage(found[0]).nbytes() == 4 * (5 + 120 + 42 + 0 + 1)
    by_size = sorted(zip(given, found, strict=True), key=lambda pair: -pair[0].numel())
    starts = [v.storage_offset() for _, v in by_size]
    assert starts == [0, 120, 162, 167, 168]


def test_equal_masters_get_the_same_views_in_every_step_and_others_get_others():
    block = GradientBlock(CPU)
    chunks = masters((3,), (2, 2)), masters((4,), (8,))
    first = [[id(v) for v in block.views(chunk)] for chunk in chunks]
    block.end()
    again = [[id(v) for v in block.views(chunk)] for chunk in chunks]
    block.end()
    assert first == again
    (other,) = block.views(masters((12,)))
    assert other.shape == (12,) and other.storage_offset() == 0
    block.end()
    transposed = block.views([torch.zeros(3), torch.zeros(2, 2).T])
    assert transposed[1].stride() == (1, 2)


def test_the_storage_is_as_large_as_expected_from_the_start_and_empty_between_steps():
    block = GradientBlock(CPU)
    block.expect(100)
    its = storage(block.views(masters((10,)))[0])
    assert its.nbytes() == 400
    block.free()
    assert its.nbytes() == 0
    assert storage(block.views(masters((1000,)))[0]) is its
    assert its.nbytes() == 4000
    block.end(keep=True)
    assert its.nbytes() == 4000
    block.end()
    assert its.nbytes() == 0


@pytest.mark.parametrize("keep", [lambda view: view, lambda view: view.data, lambda view: view[1:]])
@pytest.mark.parametrize("then", ["another chunk", "free", "end", "end, kept"])
def test_who_holds_a_view_past_its_chunk_holds_the_storage(keep, then):
    block = GradientBlock(CPU)
    views = block.views(masters((4,), (3,)))
    views[1].fill_(7.0)
    kept = keep(views[1])
    del views
    if then == "another chunk":
        block.views(masters((7,)))[0].fill_(8.0)
    elif then == "free":
        block.free()
    else:
        block.end(keep="kept" in then)
    assert (kept == 7).all()


# ---- in a step


class KeepsGradients(optim.Optimizer):
    """Steps against what has changed since the last gradient, which it keeps as it is."""

    kept = staticmethod(lambda gradient: gradient)

    def __init__(self, params, lr=0.5):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                last = self.state[p].get("last", 0)
                p.sub_(p.grad - last, alpha=group["lr"])
                self.state[p]["last"] = self.kept(p.grad)


@pytest.mark.parametrize("kept", [lambda g: g, lambda g: g.data, lambda g: g.view(-1).view(g.shape)])
@pytest.mark.parametrize("chunk_bytes", [1, 200, None, "auto"])
def test_an_optimizer_that_keeps_the_last_gradient_steps_as_on_fp32_weights(kept, chunk_bytes):
    kind = type("Kind", (KeepsGradients,), {"kept": staticmethod(kept)})
    narrow = [nn.Parameter(torch.randn(shape).to(BF16)) for shape in [(3, 4), (5,), (0,), (2, 3, 4), (7, 1)]]
    wide = [nn.Parameter(p.detach().float()) for p in narrow]
    ours, reference = MasterWeights(narrow, kind, chunk_bytes=chunk_bytes), kind(wide)
    for _ in range(4):
        for p, q in zip(narrow, wide, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.float()
        ours.step()
        reference.step()
        assert all(torch.equal(ours.state[p]["master"], q) for p, q in zip(narrow, wide, strict=True))


def test_chunks_are_of_2_mib_on_a_cpu_unless_told_otherwise():
    params = [nn.Parameter(torch.zeros(2**18, dtype=BF16)) for _ in range(10)]  # each 1 MiB of FP32
    for p in params:
        p.grad = torch.zeros_like(p)
    for words, expected in [({}, [2] * 5), ({"chunk_bytes": "4 MiB"}, [4, 4, 2]), ({"chunk_bytes": None}, [10])]:
        for kind in (MasterWeights, StochasticRounding):
            assert [len(chunk) for chunk in kind(params, optim.SGD, **words)._chunks()] == expected


def test_chunks_are_of_64_mib_on_an_imagined_card():
    with imagine("H100-80GB"):
        params = [nn.Parameter(torch.zeros(2**22, dtype=BF16)) for _ in range(10)]  # each 16 MiB of FP32
        for p in params:
            p.grad = torch.zeros_like(p)
        assert [len(chunk) for chunk in MasterWeights(params, optim.SGD)._chunks()] == [4, 4, 2]


@pytest.mark.parametrize("resizable", [("cpu",), ()])
def test_the_views_of_every_step_are_in_the_memory_that_is_there(resizable, monkeypatch):
    monkeypatch.setattr(gradient_block, "RESIZABLE", resizable)
    block, chunks = GradientBlock(CPU), (masters((3,), (2, 2)), masters((40,)))
    for _ in range(3):
        for chunk in chunks:
            for view in block.views(chunk):
                assert storage(view).nbytes() >= 4 * (view.storage_offset() + view.numel())
                assert storage(view) is storage(block._flat)
                view.fill_(1.0)
        block.end()


@pytest.mark.parametrize("resizable", [("cpu",), ()])
def test_a_step_holds_the_gradients_it_has_however_many_the_last_step_had(resizable, monkeypatch):
    monkeypatch.setattr(gradient_block, "RESIZABLE", resizable)
    model = nn.ParameterList([nn.Parameter(torch.ones(50, dtype=BF16)), nn.Parameter(torch.ones(30, dtype=BF16))])
    ours, found = MasterWeights(model.parameters(), optim.SGD), []
    for with_gradient in ([0, 1], [0, 1], [1], [0, 1]):
        for i, p in enumerate(model):
            p.grad = torch.ones_like(p) if i in with_gradient else None
        with Meter(model, ours) as meter:
            ours.step()
        found.append([event.delta for event in meter.timeline.events])
    assert found[1:] == [[4 * 80, -4 * 80], [4 * 30, -4 * 30], [4 * 80, -4 * 80]]
