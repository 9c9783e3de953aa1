"""Imagined hardware: what runs on it is the real stream of events, with the GPU's ops where those differ."""

import contextlib
import copy
import logging
import re
import sys
import threading
import warnings

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.amp.autocast_mode import autocast
from torch.autograd.graph import save_on_cpu
from torch.nn import functional as F
from torch.optim import optimizer as optim
from torch.utils.checkpoint import checkpoint

from memlab.book.workloads import GPT, text_batch
from memlab.memory_timeline import CARDS, Meter, OutOfMemory, imagine, in_main_memory, main_memory, on_imagined_card
from memlab.memory_timeline.imagined.gpu_ops import RMS_NORM_IN_32_BIT, _choose
from memlab.units import GiB, MiB, format_bytes, parse_bytes
from tests.harness import refusals, refused
from tests.memory_timeline_helpers import WORKLOADS, Checkpointed, batch_for, of, one_thread, shape_of  # noqa: F401
from tests.tiers import pairs, some

BF16 = torch.bfloat16
H100 = "imagined H100-80GB"
OPTIMIZERS = {
    "AdamW, for-loop": lambda p: torch.optim.AdamW(p, foreach=False),
    "AdamW, default": torch.optim.AdamW,
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
}


@pytest.fixture
def bf16():
    """Models made in the test are BF16."""
    torch.set_default_dtype(BF16)
    yield
    torch.set_default_dtype(torch.float32)


def two_steps(make, batch, optimizer=torch.optim.AdamW, cast=None):
    """Timelines of a model's first and second step, with clipping, under autocast to `cast` if there is one."""
    model = make()
    algorithm = optimizer(model.parameters())
    found = []
    for _ in range(2):
        with Meter(model, algorithm, batch) as meter:
            with torch.autocast("cuda", cast) if cast else contextlib.nullcontext():
                loss = model(*batch)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            algorithm.step()
            algorithm.zero_grad()
            del loss
        found.append(meter.timeline)
    return found


def forward_backward(model, *inputs):
    with Meter(model, inputs=inputs) as meter:
        model(*inputs).sum().backward()
    return meter.timeline


def kept(timeline):
    """(op, shape, dtype) of everything with bytes that autograd saved."""
    saved = [s for s in of(timeline, "activation") if s.nbytes and s.reason.startswith("saved by")]
    return {(s.op, s.shape, s.dtype) for s in saved}


def made_by(timeline, op):
    return [s for s in timeline.storages.values() if s.op == op]


def on(card):
    """A block on imagined hardware, or on this machine as it is."""
    return imagine(card) if card else contextlib.nullcontext()


CASES = [("GPT", name) for name in OPTIMIZERS if name != "AdamW, default"]
CASES += [(workload, "AdamW, default") for workload in WORKLOADS if workload not in ("LSTM", "Llama", "T5", "Mamba")]


@some("workload, optimizer", CASES, keep=6)
def test_an_imagined_cpu_has_the_event_stream_of_the_real_one(workload, optimizer):
    if workload == "GPT2":
        pytest.importorskip("transformers")
    torch.manual_seed(0)
    batch = batch_for(workload)
    real = two_steps(WORKLOADS[workload], batch, OPTIMIZERS[optimizer])
    with imagine("cpu") as gpu:
        imagined = two_steps(WORKLOADS[workload], gpu.imagined(batch), OPTIMIZERS[optimizer])
    for ours, theirs in zip(imagined, real, strict=True):
        assert shape_of(ours) == shape_of(theirs)
        assert ours.totals == theirs.totals
        reasons = [[s.reason for s in timeline.storages.values() if s.nbytes] for timeline in (ours, theirs)]
        assert reasons[0] == reasons[1]


Q = (2, 4, 8, 16)
GROUPED = {"key": (2, 2, 8, 16), "grouped": True}
LONGER_KEYS = {"key": (2, 4, 16, 16), "causal": True}
FP32, A100, T4 = {"dtype": torch.float32}, {"architecture": (8, 0)}, {"architecture": (7, 5)}
WHO_MAY_BE_FUSED = {
    "heads, keys and values alike": ("cudnn", {}),
    "FP16": ("cudnn", {"dtype": torch.float16}),
    "FP64": ("math", {"dtype": torch.float64}),
    "grouped keys": ("cudnn", GROUPED),
    "grouped keys in FP32": ("math", GROUPED | FP32),
    "one head of keys, not said to be grouped": ("math", {"key": (2, 1, 8, 16)}),
    "a batch that broadcasts": ("math", {"key": (1, 4, 8, 16)}),
    "three dimensions": ("math", {"query": (4, 8, 16)}),
    "a mask": ("cudnn", {"mask": True}),
    "a mask with a gradient": ("efficient", {"mask": True, "learned": True}),
    "a mask whose rows are columns": ("math", {"mask": True, "turned": True}),
    "causal and not square": ("cudnn", LONGER_KEYS),
    "one query": ("cudnn", {"query": (2, 4, 1, 16), "key": Q}),
    "one query with dropout": ("flash", {"query": (2, 4, 1, 16), "key": Q, "dropout": 0.1}),
    "one key": ("flash", {"key": (2, 4, 1, 16)}),
    "heads of 12": ("flash", {"query": (2, 4, 8, 12)}),
    "heads of 256": ("cudnn", {"query": (1, 1, 8, 256)}),
    "heads of 264": ("efficient", {"query": (1, 1, 8, 264)}),
    "FP32": ("efficient", FP32 | {"query": (2, 4, 8, 12)}),
    "FP32 and a mask whose rows are columns": ("math", FP32 | {"mask": True, "turned": True}),
    "FP32, heads of 10": ("math", FP32 | {"query": (2, 4, 8, 10)}),
    "an A100": ("flash", A100),
    "an A100 and a mask": ("efficient", A100 | {"mask": True}),
    "an A100, causal and not square": ("efficient", A100 | LONGER_KEYS),
    "a T4": ("efficient", T4 | {"dtype": torch.float16}),
    "BF16 on a T4": ("math", T4),
    "FP32, heads of 10 on a T4": ("efficient", FP32 | T4 | {"query": (2, 4, 8, 10)}),
    "heads of 192 in training on an RTX 4090": ("flash", {"query": (1, 1, 8, 192), "architecture": (8, 9)}),
    "heads of 224 in training on an RTX 4090": ("efficient", {"query": (1, 1, 8, 224), "architecture": (8, 9)}),
}


def asked_of_attention(device, query=Q, key=None, dtype=BF16, mask=False, learned=False, turned=False, **options):
    """Query, key, value, mask, dropout, whether it is causal and whether grouped, as `_choose` has them."""
    q, k, v = (
        torch.zeros(shape, dtype=dtype, device=device, requires_grad=True)
        for shape in (query, key or query, key or query)
    )
    bias = torch.ones(8, 8, dtype=dtype, device=device, requires_grad=learned) if mask else None
    bias = bias.t() if turned else bias
    return q, k, v, bias, options.get("dropout", 0.0), options.get("causal", False), options.get("grouped", False)


@pytest.mark.parametrize("case", WHO_MAY_BE_FUSED)
def test_who_may_be_fused(case):
    chosen, options = WHO_MAY_BE_FUSED[case]
    assert _choose(*asked_of_attention("cpu", **options), options.get("architecture", (9, 0))) == chosen


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, which chooses by itself")
@pytest.mark.parametrize("case", WHO_MAY_BE_FUSED)
def test_a_gpu_chooses_the_same(case):
    chosen, options = WHO_MAY_BE_FUSED[case]
    if options.get("architecture", (9, 0)) != torch.cuda.get_device_capability():
        pytest.skip("a choice of another architecture")
    *tensors, dropout, causal, grouped = asked_of_attention("cuda", **options)
    kinds = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}
    assert kinds[torch._fused_sdp_choice(*tensors, dropout, causal, enable_gqa=grouped)] == chosen


def test_a_reader_may_forbid_a_kernel_and_rows_must_be_whole():
    q = torch.zeros(2, 4, 8, 16, dtype=BF16)
    for backend in ("MATH", "EFFICIENT_ATTENTION", "FLASH_ATTENTION", "CUDNN_ATTENTION"):
        with nn.attention.sdpa_kernel(nn.attention.SDPBackend.__members__[backend]):
            assert _choose(q, q, q, None, 0.0, False, False, (9, 0)) == backend.partition("_")[0].lower()
    torch.use_deterministic_algorithms(True)
    try:
        assert _choose(q, q, q, None, 0.0, False, False, (9, 0)) == "flash"
    finally:
        torch.use_deterministic_algorithms(False)
    across = torch.zeros(2, 4, 16, 8, dtype=BF16).mT
    assert _choose(across, across, across, None, 0.0, False, False, (9, 0)) == "math"


ON_CARDS = [
    ("H100-80GB", BF16, False, "_scaled_dot_product_cudnn_attention", [8, 8]),
    ("A100-80GB", BF16, False, "_scaled_dot_product_flash_attention", [8, 16]),
    ("H100-80GB", torch.float32, False, "_scaled_dot_product_efficient_attention", []),
    ("T4-16GB", torch.float16, True, "_scaled_dot_product_efficient_attention", []),
    ("T4-16GB", BF16, False, "_safe_softmax", None),
]


@pytest.mark.parametrize(("card", "dtype", "masked", "op", "state"), ON_CARDS)
def test_fused_attention_keeps_its_output_one_float_a_query_and_a_random_state(card, dtype, masked, op, state):
    with imagine(card):
        q, k, v = (torch.randn(2, 4, 64, 16, dtype=dtype, requires_grad=True) for _ in range(3))
        mask = torch.ones(64, 64, dtype=torch.bool) if masked else None
        with Meter(inputs=(q, k, v)) as meter:
            F.scaled_dot_product_attention(q, k, v, mask, is_causal=not masked).sum().backward()
        assert op in {name for name, *_ in kept(meter.timeline)}
        if state is not None:
            sizes = sorted(s.nbytes for s in of(meter.timeline, "activation") if s.op == op)
            assert sizes == [*state, 2 * 4 * 64 * 4, q.nbytes]


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_fused_attention_keeps_no_float_a_query_for_a_backward_that_will_not_come(dtype):
    with imagine("H100-80GB"), torch.no_grad():
        q = torch.randn(2, 4, 64, 16, dtype=dtype, requires_grad=True)
        with Meter(inputs=q) as meter:
            F.scaled_dot_product_attention(q, q, q)
    made = [e.delta for e in meter.timeline.events if e.delta > 0 and "attention" in e.op and e.storage]
    assert made == ([q.nbytes, 8, 8] if dtype is BF16 else [q.nbytes])


@pytest.mark.parametrize(("width", "row", "padded"), [(20, 20, 24), (16, 16, 0), (20, 24, 0), (16, 17, 24)])
def test_a_masks_rows_are_padded_to_8_for_the_memory_efficient_kernel_unless_they_are_aligned(width, row, padded):
    with imagine("H100-80GB"):
        q, mask = torch.randn(1, 1, width, 8), torch.zeros(width, row)[:, :width]
        with Meter(inputs=(q, mask)) as meter:
            F.scaled_dot_product_attention(q, q, q, mask)
        assert {s.shape for s in made_by(meter.timeline, "constant_pad_nd")} == ({(width, padded)} if padded else set())


def test_a_head_of_odd_width_is_padded_for_flash_attention_and_cut_again():
    with imagine("H100-80GB"):
        q, k, v = (torch.randn(2, 4, 8, 12, dtype=BF16, requires_grad=True) for _ in range(3))
        with Meter(inputs=(q, k, v)) as meter:
            out = F.scaled_dot_product_attention(q, k, v)
        assert [s.shape for s in made_by(meter.timeline, "constant_pad_nd")] == [(2, 4, 8, 16)] * 3
        out.sum().backward()
        assert out.shape == q.grad.shape == (2, 4, 8, 12)


BY_OPS = {
    "plain": {},
    "a mask of bools": {"mask": torch.bool},
    "causal, in BF16": {"causal": True, "dtype": BF16},
    "grouped, with a scale": {"heads": 2, "scale": -0.3},
    "under autocast": {"cast": True},
    "causal under autocast": {"cast": True, "causal": True},
    "a mask of bools under autocast": {"cast": True, "mask": torch.bool},
    "FP16 under an autocast to BF16": {"cast": True, "dtype": torch.float16},
}


def by_ops(device, heads=4, mask=None, causal=False, dtype=torch.float32, cast=False, dropout=0.0, scale=None):
    q, k, v = (torch.randn(2, n, 20, 8, dtype=dtype, requires_grad=True) for n in (4, heads, heads))
    given = None if mask is None else torch.ones(20, 20, dtype=mask)
    with Meter(inputs=(q, k, v, given)) as meter, nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        with torch.autocast(device, BF16, enabled=cast):
            out = F.scaled_dot_product_attention(q, k, v, given, dropout, causal, scale=scale, enable_gqa=heads < 4)
        out.sum().backward()
    return meter.timeline


@pytest.mark.parametrize("case", BY_OPS)
def test_attention_by_ops_is_the_one_that_pytorch_takes_apart_in_c(case, monkeypatch):
    options = BY_OPS[case]
    for dropout in (0.0,) if options.get("cast") else (0.0, 0.1):
        real = by_ops("cpu", dropout=dropout, **options)
        with imagine("H100-80GB"), monkeypatch.context() as patch:
            patch.setattr(F, "dropout", lambda x, p: torch.dropout(x, p, True))  # a CPU's, as C++ calls it
            imagined = by_ops("cuda", dropout=dropout, **options)
        assert [(e.op, e.delta, e.phase) for e in imagined.events] == [(e.op, e.delta, e.phase) for e in real.events]
    with imagine("H100-80GB"):
        found = kept(by_ops("cuda", dropout=0.1, **options))
    assert ("native_dropout", (2, 4, 20, 20), "bool") in found


KEEPS = {  # what a layer of 16 numbers keeps on a GPU
    "dropout": (nn.Dropout(0.1), {("native_dropout", (8, 16), "bool")}),
    "dropout in evaluation": (nn.Dropout(0.1).eval(), set()),
    "dropout of nothing": (nn.Dropout(0.0), set()),
    "logsigmoid": (nn.LogSigmoid(), set()),
}


@pytest.mark.parametrize("name", KEEPS)
def test_dropout_keeps_a_mask_of_one_byte_an_element_and_logsigmoid_its_input_alone_on_a_gpu(name):
    layer, expected = KEEPS[name]
    with imagine("A100-80GB"):
        x = torch.randn(8, 16, requires_grad=True)
        with Meter(inputs=x) as meter:
            y = layer(x)
            held = meter.held_bytes
            y.sum().backward()
    assert kept(meter.timeline) == expected
    assert held == x.nbytes + (y.nbytes if y is not x else 0) + sum(8 * 16 for _ in expected)


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_rmsnorm_is_one_op_on_a_gpu_and_keeps_one_float_a_row_unless_it_is_of_two_dtypes(dtype):
    with (
        imagine("H100-80GB"),
        contextlib.nullcontext() if dtype is BF16 else pytest.warns(UserWarning, match="ismatch"),
    ):
        x = torch.randn(8, 16, dtype=BF16, requires_grad=True)
        found = kept(forward_backward(nn.RMSNorm(16, dtype=dtype), x))
        assert x.grad.shape == (8, 16) and x.grad.dtype is BF16
    fused = {("_fused_rms_norm", (8, 1), "float32")}
    assert found == fused if dtype is BF16 else not found & fused


@pytest.mark.parametrize(("card", "dtype"), [("H100-80GB", "float32"), ("cpu", "bfloat16")])
def test_norms_of_16_bit_input_keep_statistics_of_32_bit_on_a_gpu(card, dtype):
    with imagine(card):
        layer, batch = nn.LayerNorm(16).to(BF16), nn.BatchNorm1d(16).to(BF16)
        x = torch.randn(8, 16, dtype=BF16, requires_grad=True)
        assert ("native_layer_norm", (8, 1), dtype) in kept(forward_backward(layer, x.detach()))
        timeline = forward_backward(batch, x)
        if card != "cpu":
            statistics = [s.dtype for s in made_by(timeline, "native_batch_norm") if s.shape == (16,)]
            assert statistics == [dtype] * 2
        assert batch.weight.grad.dtype is x.grad.dtype is BF16


@pytest.mark.parametrize(
    ("dtype", "weights", "shape", "kept_in_evaluation"),
    [
        (BF16, BF16, (2, 4, 8, 8), 4),
        (BF16, torch.float32, (2, 4, 8, 8), 4),
        (torch.float16, torch.float16, (2, 4, 8, 8), 4),
        (torch.float16, torch.float32, (2, 4, 8, 8), 0),
        (torch.float32, torch.float32, (2, 4, 8), 0),
        (torch.float32, torch.float32, (8, 4), 4),
        (torch.float32, None, (2, 4, 8, 8), 4),
    ],
)
def test_batchnorm_keeps_statistics_in_evaluation_where_it_is_not_cudnns(dtype, weights, shape, kept_in_evaluation):
    with imagine("H100-80GB"):
        norm = (nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d)(4, affine=weights is not None, dtype=weights)
        x = torch.randn(shape, dtype=dtype, requires_grad=True)
        for training, kept_then in ((True, 4), (False, kept_in_evaluation)):
            _, *statistics = torch.native_batch_norm(
                x, norm.weight, norm.bias, norm.running_mean, norm.running_var, training, 0.1, 1e-5
            )
            assert [(each.shape, each.dtype) for each in statistics] == [((kept_then,), torch.float32)] * 2
            norm.train(training)(x).sum().backward()


@pytest.mark.parametrize("mode", ["mean", "max"])
def test_a_bag_of_embeddings_notes_the_bag_of_each_index_on_a_gpu(mode):
    with imagine("H100-80GB"):
        table, bags = torch.randn(100, 16, requires_grad=True), torch.zeros(5, 7, dtype=torch.long)
        with Meter(inputs=(table, bags)) as meter:
            out = F.embedding_bag(bags, table, mode=mode)
        notes = 8 * (5 * 7 + 5 + 5) + 8 * out.numel() * (mode == "max")  # bags of indices, sizes and beginnings of bags
        assert meter.timeline.totals[-1] == meter.timeline.totals[0] + out.nbytes + notes
        out.sum().backward()
        assert table.grad.shape == table.shape


@pytest.mark.parametrize("card", ["cpu", "H100-80GB"])
def test_one_hot_holds_its_result_alone(card):
    with imagine(card):
        index = torch.zeros(8, 4, dtype=torch.long)
        with Meter(inputs=index) as meter:
            found = F.one_hot(index, 10)
        assert found.shape == (8, 4, 10) and found.dtype is torch.long
        assert meter.timeline.peak_bytes == index.nbytes + found.nbytes
    assert torch.equal(F.one_hot(torch.tensor([1]), 2), torch.tensor([[0, 1]]))


def test_a_gpus_adamw_takes_all_tensors_at_once_unless_told_otherwise():
    with imagine("H100-80GB") as gpu:
        batch, make = gpu.imagined(text_batch(1, 8)), lambda: GPT(layers=2, width=64)
        steps = {name: two_steps(make, batch, optimizer)[1] for name, optimizer in OPTIMIZERS.items()}
        weights = sum(parameter.nbytes for parameter in make().parameters())
    assert shape_of(steps["AdamW, default"]) == shape_of(steps["AdamW, foreach"])
    at_peak = steps["AdamW, default"].bytes_by_category(steps["AdamW, default"].peak_event)
    assert at_peak["temporary"] >= weights  # the square roots of all second moments
    assert steps["AdamW, for-loop"].peak_bytes < steps["AdamW, default"].peak_bytes


class CountsElements(torch.optim.Optimizer):
    """A reader's optimizer, with a step of its own for each element."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].setdefault("step", torch.zeros_like(parameter)).add_(1)


class MyAdam(torch.optim.Adam):
    def step(self):
        super().step()


STEPS = {
    "a reader's": (CountsElements, True),
    "made on the card": (torch.optim.ASGD, True),
    "fused": (OPTIMIZERS["AdamW, fused"], True),
    "torch's counter": (torch.optim.NAdam, False),
    "a subclass's": (MyAdam, False),
}


@pytest.mark.parametrize(("kind", "on_card"), STEPS.values(), ids=STEPS)
def test_what_is_called_step_is_on_the_card_where_it_is_no_counter_of_torchs_or_is_made_there(kind, on_card):
    with imagine("H100-80GB"):
        model = nn.Linear(8, 8, bias=False)
        optimizer = kind(model.parameters())
        with Meter(model, optimizer) as meter:
            model(torch.empty(2, 8)).sum().backward()
            optimizer.step()
    (step,) = (s for s in meter.timeline.of_all_devices[0] if s.name == "step of weight")
    assert (step.device == H100) == on_card and step.nbytes == (256 if kind is CountsElements else 4)


def test_a_mark_is_an_event_of_each_device_also_where_step_counters_lie_on_another():
    with imagine("H100-80GB"):
        model = nn.Linear(8, 8)
        optimizer = torch.optim.Adam(model.parameters())
        with Meter(model, optimizer) as meter:
            marks = [(meter.event_count, meter.held_bytes)]
            for _ in range(2):
                model(torch.empty(2, 8)).sum().backward()
                optimizer.step()
                marks.append((meter.event_count, meter.held_bytes))
            highest = meter.highest_since(marks[1][0])
    card, beside = meter.timeline.on(H100), meter.timeline.on("cpu")
    assert [card.bytes_at(card.event_of(mark)) for mark, _ in marks] == [held for _, held in marks]
    assert [beside.bytes_at(beside.event_of(mark)) for mark, _ in marks] == [0, 8, 8]
    assert card.event_of(marks[0][0]) == 0 and card.event_of(meter.event_count) == len(card)
    assert highest == max(card.totals[card.event_of(marks[1][0]) :])
    refused(lambda: card.event_of(10**6), ValueError, "expected a mark from 0")


def test_torch_may_read_values_in_its_own_initialisation_and_optimizers_and_a_later_step_is_seen_too():
    with imagine("H100-80GB"):
        nn.init.trunc_normal_(torch.empty(4, 4))
        for kind in (torch.optim.Adafactor, torch.optim.ASGD):
            model = nn.Linear(4, 4)
            optimizer = kind(model.parameters())
            with Meter(model) as meter:
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
            assert meter.timeline.bytes_by_category(len(meter.timeline))["optimizer_state"] > 0
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer.step()
        with Meter(model) as meter:  # which is not given the optimizer
            optimizer.step()
        assert meter.timeline.on(H100).bytes_at(0) == 2 * (4 * 4 + 4) * 4  # parameters and gradients


def test_converting_a_model_keeps_its_parameters_and_the_optimizers_hold_on_them():
    with imagine("H100-80GB") as gpu:
        model = GPT(layers=1, width=32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = list(model.parameters())
        model.to(BF16)
        assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
        model(*gpu.imagined(text_batch(2, 8))).backward()
        optimizer.step()
        assert {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()} == {BF16}
        model.half()
        assert {p.grad.dtype for p in model.parameters()} == {torch.float16}


def test_what_is_made_in_main_memory_lies_beside_the_card_and_counts_for_no_budget():
    with imagine("H100-80GB", "5 MiB"):
        on_card = torch.empty(MiB // 2)
        with Meter() as meter:
            with main_memory():
                copied = on_card.clone()
                on_card.copy_(copied).add_(1)  # written to where it is
                rows = copied.view(2, -1)
                more = torch.empty(MiB)
            back = rows + on_card[: MiB // 4]
        with Meter(inputs=(on_card, copied)) as later:
            total = copied.sum()
    assert meter.timeline.devices == later.timeline.devices == ("cpu", H100)
    assert meter.timeline.on("cpu").peak_bytes == 2 * MiB + more.nbytes
    assert [event.delta for event in meter.timeline.on(H100).events] == [2 * MiB, back.nbytes]
    assert later.timeline.on("cpu").peak_bytes == 2 * MiB
    assert later.timeline.on(H100).peak_bytes == 2 * MiB + total.nbytes


@pytest.mark.parametrize("card, beside", [("H100-80GB", True), ("cpu", False)])
def test_a_tensor_says_whether_it_lies_on_the_imagined_card_or_in_main_memory(card, beside):
    with imagine(card):
        made = torch.empty(4)
        with main_memory(), main_memory():
            copied = made.clone()
        for tensor in (made, made[1:]):
            assert on_imagined_card(tensor) == beside and in_main_memory(tensor) == (not beside)
        for tensor in (copied, copied[1:]):
            assert in_main_memory(tensor) and not on_imagined_card(tensor)
    with main_memory(), Meter() as meter:
        real = torch.empty(4)
    assert in_main_memory(real) and not on_imagined_card(real) and meter.timeline.devices == ("cpu",)
    assert not in_main_memory(real.to("meta"))


def bytes_by_device(code, *inputs):
    with Meter(inputs=inputs) as meter:
        held = code()  # noqa: F841
    found = {device: meter.timeline.on(device).totals[-1] for device in meter.timeline.devices}
    return [found.get(device, 0) for device in (H100, "cpu")]


@pytest.mark.parametrize(
    "move", [lambda t: t.cuda(), lambda t: t.to("cuda"), lambda t: t.to(device=torch.device("cuda", 0))]
)
def test_what_lies_in_main_memory_comes_to_the_card_by_cuda_and_by_to(move):
    with imagine("H100-80GB"):
        with main_memory():
            beside, layer = torch.empty(MiB), nn.Linear(8, 8)
        assert bytes_by_device(lambda: move(beside), beside) == [beside.nbytes] * 2
        assert on_imagined_card(move(move(beside))) and in_main_memory(beside)
        on_card = torch.empty(4)
        assert move(on_card) is on_card
        move(layer)
        assert on_imagined_card(layer.weight) and on_imagined_card(layer.bias)
    with imagine("H100-80GB", "1 MiB"), pytest.raises(OutOfMemory):
        with main_memory():
            layer = nn.Linear(1024, 1024)
        move(layer)


def test_what_lies_on_the_card_goes_to_main_memory_by_cpu_and_comes_back_by_the_name_of_a_device():
    with imagine("H100-80GB"):
        on_card, layer = torch.empty(MiB), nn.Linear(8, 8)
        assert bytes_by_device(lambda: on_card.cpu(), on_card) == [on_card.nbytes] * 2
        beside = on_card.cpu()
        assert beside.cpu() is beside and in_main_memory(beside)
        for device in ("cpu", on_card.device):
            assert on_imagined_card(beside.to(device)) and beside.to(device, BF16).dtype is BF16
            assert on_card.to(device) is on_card and layer.to(device) is layer and on_imagined_card(layer.weight)
            with main_memory():
                assert beside.to(device) is beside
        layer.cpu()
        assert in_main_memory(layer.weight) and in_main_memory(layer.bias) and on_imagined_card(layer.cuda().bias)
        leaf = torch.empty(4, requires_grad=True)
        leaf.cpu().cuda().sum().backward()
        assert leaf.grad.shape == (4,)
        assert bytes_by_device(lambda: torch.empty(MiB, pin_memory=True)) == [0, 4 * MiB]
        assert in_main_memory(torch.empty_like(torch.empty(2), pin_memory=True))
    with imagine("cpu"):
        here = torch.empty(4)
        assert here.cpu() is here


@pytest.mark.parametrize("pin_memory", [False, True])
def test_save_on_cpu_keeps_what_backward_needs_in_main_memory_and_brings_it_back(pin_memory):
    peaks = {}
    with imagine("H100-80GB"):
        layers = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(64, 64, bias=False), nn.Tanh())))
        x = torch.empty(1024, 64)
        for context in (contextlib.nullcontext(), save_on_cpu(pin_memory)):
            layers.zero_grad()
            with Meter(layers, inputs=x) as meter:
                with context:
                    loss = layers(x).sum()
                loss.backward()
            peaks[meter.timeline.devices] = meter.timeline.on(H100).peak_bytes
    (plain, both), (held, moved) = peaks.keys(), peaks.values()
    assert plain == (H100,) and both == ("cpu", H100)
    assert moved < held - 5 * x.nbytes


def test_a_slice_comes_to_the_card_as_what_it_shows_and_what_stands_twice_comes_once():
    data, tokens = torch.zeros(1000, 100), torch.zeros(4, 129, dtype=torch.long)
    batch = data[:32], tokens[:, :-1], tokens[:, 1:], torch.zeros(1).expand(1000)
    for card, counted in {"H100-80GB": 32 * 400 + 2 * 4096 + 4000, "cpu": data.nbytes + tokens.nbytes + 4}.items():
        with imagine(card, counted) as gpu:
            imagined = gpu.imagined(batch)
            with Meter(inputs=imagined) as meter:
                pass
        assert meter.timeline.totals == [counted]
        assert [tensor.shape for tensor in imagined] == [tensor.shape for tensor in batch]
    x = torch.zeros(8, requires_grad=True)
    with imagine("H100-80GB") as gpu:
        pair = gpu.imagined({"x": x, "same": [x, 3]})
        assert pair["x"] is pair["same"][0] and pair["x"].requires_grad and pair["x"].is_leaf and pair["same"][1] == 3
        with main_memory():
            assert in_main_memory(gpu.imagined(x))


@pytest.mark.parametrize("card", ["cpu", "H100-80GB"])
def test_what_an_op_made_outside_comes_in_as_a_leaf_and_cuda_is_the_imagined_card(card):
    made = torch.randn(8, requires_grad=True) * 2
    with imagine(card) as gpu:
        x = gpu.imagined(made)
        (x * x).sum().backward()
        assert x.is_leaf and x.grad.shape == (8,)
    with imagine("H100-80GB"):
        x = torch.ones(2, device="cuda").to("cuda", BF16).cuda(0)
        model = nn.Linear(2, 2).to(torch.device("cuda", 1)).cuda()
        assert model(torch.ones(2).to(device="cuda:0")).shape == x.shape and x.dtype is BF16


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_autocast_runs_matrix_products_in_16_bit_and_norms_and_losses_in_32(device):
    with imagine("H100-80GB") as gpu:
        x, y = gpu.imagined(text_batch(2, 16))
        model = GPT(layers=1, width=32)
        with Meter(model, inputs=(x, y)) as meter:
            with torch.autocast(device, BF16):
                loss = model(x, y)
            loss.backward()
    found = kept(meter.timeline)
    assert found >= {
        ("_log_softmax", (32, 256), "bfloat16"),  # which nll_loss reads, and keeps, in 32 bit
        ("_to_copy", (32, 256), "float32"),
        ("native_layer_norm", (2, 16, 1), "float32"),
        ("gelu", (2, 16, 128), "bfloat16"),
    }
    assert any(op == "_scaled_dot_product_cudnn_attention" and dtype == "bfloat16" for op, _, dtype in found)
    casts = sum(s.nbytes for s in of(meter.timeline, "activation") if s.op == "_to_copy" and s.line.source != "")
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "embedding" not in name)
    assert casts >= 2 * matrices  # the weights' 16-bit copies wait for backward


def test_cudas_autocast_is_fp16_unless_told_otherwise_and_casts_what_attention_and_rmsnorm_read():
    with imagine("H100-80GB"), torch.autocast("cuda"):
        x = torch.randn(1, 2, 8, 16)
        assert (x @ x.mT).dtype is torch.float16
        mask = torch.zeros(8, 8)
        with Meter(inputs=(x, mask)) as meter:
            assert F.scaled_dot_product_attention(x, x, x, mask).dtype is torch.float16
        assert ((8, 8), "float16") in {(s.shape, s.dtype) for s in made_by(meter.timeline, "_to_copy")}
        assert nn.RMSNorm(16)(x.half()).dtype is (torch.float32 if RMS_NORM_IN_32_BIT else torch.float16)


def made_before_the_block():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # without a GPU it is switched off at once, and torch says so
        cast = torch.autocast("cuda", BF16)
    cast._enabled = True  # as it is where there is a GPU
    return cast


def test_an_autocast_for_cuda_that_was_made_before_the_block_casts_in_it_and_ends_with_it():
    cast = made_before_the_block()
    with imagine("H100-80GB"):
        x = torch.ones(2, 2)
        for _ in range(2):
            with cast, cast:
                assert (x @ x).dtype is BF16 and (x @ x).softmax(-1).dtype is torch.float32
                with torch.autocast("cuda", enabled=False):
                    assert (x @ x).dtype is torch.float32 and x.to(BF16).softmax(-1).dtype is BF16
            assert (x @ x).dtype is torch.float32 and cast.device == "cuda"
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_autocast_of_an_imagined_card_gives_the_dtypes_of_cudas(dtype):
    with imagine("H100-80GB"), torch.autocast("cuda", dtype):
        image, volume = torch.randn(1, 2, 8, 8, dtype=dtype), torch.randn(1, 2, 4, 4, 4, dtype=dtype)
        for as_it_is in (
            nn.AvgPool3d(2)(volume),
            nn.AdaptiveAvgPool3d(1)(volume),
            F.pad(image, (1, 1, 1, 1), "replicate"),
            F.grid_sample(image, torch.zeros(1, 4, 4, 2, dtype=dtype), align_corners=False),
        ):
            assert as_it_is.dtype is dtype
        matrix, vector, x = torch.ones(4, 4), torch.ones(4), torch.randn(4, 4, dtype=dtype)
        for product in (torch.mv(matrix, vector), vector.addmv(matrix, vector), torch.addr(matrix, vector, vector)):
            assert product.dtype is dtype
        for found in (torch.softmax(input=x, dim=-1), torch.softmax(x, -1, None), torch.sum(input=x), F.normalize(x)):
            assert found.dtype is torch.float32
        for asked in (torch.float32, torch.float64, dtype):
            assert torch.softmax(x, -1, asked).dtype is x.softmax(-1, dtype=asked).dtype is asked


PUBLIC = torch.overrides.get_overridable_functions()


def of_autocast(dtype, make, cast, step):
    """The dtype of each of PyTorch's functions under autocast, by what it is called with: (owner, name, arguments).

    step: 1 for all functions, 2 for every second.
    """
    half, wide, volume = make((4, 4), dtype), make((4, 4), torch.float32), make((1, 1, 4, 4, 4), dtype)
    calls = {"one": (half,), "two": (half, half), "two wide": (wide, wide), "wide and narrow": (wide, half)}
    calls |= {"three": (half, half, half), "three wide": (wide, wide, wide)}
    calls |= {"a dimension": (half, 1), "a number": (half, 2.0), "a volume": (volume, 2)}
    found = {}
    for owner, functions in PUBLIC.items():
        for function in functions[::step]:
            name = getattr(function, "__name__", "")
            if name.startswith(("__get", "__set", "__del", "__i")) or (name.endswith("_") and name[-2:] != "__"):
                continue  # attributes, and what writes to its argument
            for called_with, arguments in calls.items():
                with contextlib.suppress(Exception), cast():
                    result = function(*arguments)
                    if isinstance(result, torch.Tensor) and result.is_floating_point():
                        found[owner.__name__, name, called_with] = result.dtype
    with cast():
        found["torch", "einsum", "two wide"] = torch.einsum("ij,jk->ik", wide, wide).dtype
        found["torch", "rdiv", "one"] = (1 / half).dtype
        index = make((4, 4), torch.long)
        found["torch", "scatter_add", "wide and narrow"] = wide.scatter_add(0, index, half).dtype
    return found


INSIDE_THEMSELVES = {
    "cumulative_trapezoid", "frobenius_norm", "gumbel_softmax", "local_response_norm", "multilabel_soft_margin_loss",
    "norm_except_dim", "pairwise_distance", "sum_to_size", "trapezoid", "trapz", "triplet_margin_with_distance_loss",
}  # fmt: skip
"""Functions that call one of the list inside themselves, where nobody sees it."""
NOT_IN_16_BIT = ("cholesky", "cond", "eig", "fft", "inv", "qr", "solve", "svd")
"""Parts of the names of what a CPU's autocast runs in 32 bit, and CUDA as it is: refused in BF16."""


@pytest.mark.filterwarnings("ignore")
@some("dtype, step", [(BF16, 4), (BF16, 1), (torch.float16, 1)], keep=1)
def test_functions_have_the_dtypes_that_cudas_own_autocast_gives_to_fake_tensors_of_a_gpu(dtype, step, caplog):
    caplog.set_level(logging.CRITICAL, "torch._subclasses.fake_tensor")  # it tells of each call that is refused
    with torch.no_grad(), imagine("H100-80GB"):
        ours = of_autocast(
            dtype, lambda shape, kind: torch.empty(shape, dtype=kind), lambda: torch.autocast("cuda", dtype), step
        )
    mode = FakeTensorMode()  # of a GPU's device its tensors go through AutocastCUDA's kernels, without a GPU

    @contextlib.contextmanager
    def cast():
        torch.set_autocast_dtype("cuda", dtype)
        torch.set_autocast_enabled("cuda", True)
        try:
            yield
        finally:
            torch.set_autocast_enabled("cuda", False)
            torch.clear_autocast_cache()

    def fake(shape, kind):
        return FakeTensor(mode, torch.empty(shape, dtype=kind, device="meta"), torch.device("cuda:0"))

    with torch.no_grad(), mode:
        theirs = of_autocast(dtype, fake, cast, step)
    both = ours.keys() & theirs.keys()
    assert len(both) > 1400 // step
    differing = {call: (ours[call], theirs[call]) for call in both if ours[call] != theirs[call]}
    assert not [
        call
        for call in differing
        if call[1] not in INSIDE_THEMSELVES and not any(part in call[1] for part in NOT_IN_16_BIT)
    ]


@pairs("options, dtype", [{}, {"ignore_index": 3, "reduction": "sum"}, {"label_smoothing": 0.1}], [torch.float32, BF16])
def test_cross_entropy_under_autocast_is_32_bit_and_takes_every_argument(options, dtype):
    with imagine("H100-80GB"), torch.autocast("cuda", BF16):
        for shape in ((4, 8), (2, 8, 3), (8,)):
            logits = torch.randn(shape, dtype=dtype, requires_grad=True)
            target = torch.zeros(shape[:1] + shape[2:] if len(shape) > 1 else (), dtype=torch.long)
            loss = F.cross_entropy(logits, target, torch.ones(8), **options)
            loss.backward()
            assert loss.dtype is torch.float32 and loss.shape == () and logits.grad.dtype is dtype
        assert F.cross_entropy(logits.detach().unsqueeze(0), torch.zeros(1, 8)).dtype is torch.float32


@pytest.mark.parametrize(
    "run",
    [
        lambda wide, narrow: torch.cat([wide, narrow]),
        lambda wide, narrow: narrow.norm(),
        lambda wide, narrow: F.normalize(narrow),
    ],
)
def test_what_is_joined_or_is_a_norm_under_autocast_is_32_bit_without_copies_of_16(run):
    with imagine("H100-80GB"), torch.autocast("cuda", BF16):
        wide, narrow = torch.randn(64, 64), torch.randn(64, 64, dtype=BF16, requires_grad=True)
        with Meter(inputs=(wide, narrow)) as meter:
            found = run(wide, narrow)
    assert found.dtype is torch.float32 and not made_by(meter.timeline, "_to_copy")


def build_and_step(gpu):
    x, y = gpu.imagined(text_batch(4, 64))
    model = GPT(layers=2, width=64, context=64)
    optimizer = torch.optim.AdamW(model.parameters())
    model(x, y).backward()
    optimizer.step()


@pytest.fixture(scope="module")
def unbounded():
    """What building the model and one step take without a budget."""
    with imagine("H100-80GB") as gpu, Meter() as meter:
        build_and_step(gpu)
    return meter.timeline


@pytest.mark.parametrize("part", [None, 2, 10])
def test_the_allocation_that_exceeds_the_budget_raises_and_names_its_line_and_the_largest_holders(unbounded, part):
    timeline = unbounded
    budget = timeline.peak_bytes // part if part else timeline.peak_bytes - 1
    first = next(i for i, total in enumerate(timeline.totals) if total > budget)
    event = timeline.events[first - 1]
    with pytest.raises(OutOfMemory) as caught, imagine("H100-80GB", budget) as gpu:
        build_and_step(gpu)
    asked_for = str(caught.value)
    assert f"more asked for by {event.op} in {event.phase}, at\n    {event.line}\n" in asked_for
    assert f"found {format_bytes(timeline.totals[first - 1])} held" in asked_for
    holds = dict.fromkeys((str(storage.line) for storage in timeline.storages.values()), 0)
    for storage in timeline.alive(first - 1):
        holds[str(storage.line)] += storage.nbytes
    holders = asked_for.split("The largest holders:\n")[1].splitlines()[:-1]
    assert 1 <= len(holders) <= 5
    for holder in holders:
        size, line = re.fullmatch(r" +([\d.,]+ \w+)  [a-z ]+, \d+ × (.*)", holder).groups()
        assert parse_bytes(size.replace(",", "")) <= 1.06 * holds[line]  # some lines hold more than one kind
    assert max(holds.values()) <= 1.06 * max(holds[holder.partition(" × ")[2]] for holder in holders)


def test_a_budget_of_exactly_the_peak_suffices_and_counts_a_batch_from_outside(unbounded):
    with imagine("H100-80GB", unbounded.peak_bytes) as gpu:
        build_and_step(gpu)
    batch = torch.zeros(2 * MiB, dtype=torch.uint8)
    with pytest.raises(OutOfMemory, match="2.0 MiB more asked for by a batch"), imagine("H100-80GB", "1 MiB") as gpu:
        gpu.imagined(batch)
    message = r"parameter, \d+ × FeedForward.__init__: self.up = nn.Linear"
    with pytest.raises(torch.OutOfMemoryError, match=message), imagine("H100-80GB", 250_000):
        GPT(layers=2, width=64)


def test_gradients_and_states_are_named_as_what_they_are_and_main_memory_as_nothing():
    x, y = text_batch(2, 8)
    with imagine("H100-80GB", "64 MiB") as gpu:
        model = GPT(layers=1, width=64)
        optimizer = torch.optim.AdamW(model.parameters())
        model(*gpu.imagined((x, y))).backward()
        optimizer.step()
        with main_memory():
            beside = torch.empty(100 * MiB)  # noqa: F841
        with pytest.raises(OutOfMemory) as caught:
            torch.empty(64 * MiB, dtype=torch.uint8)
    message = str(caught.value)
    for kind in ("parameter", "gradient", "optimizer state"):
        assert re.search(rf"{kind}, \d+ × ", message), message
    assert "beside" not in message


def test_every_card_has_a_capacity_below_its_name_and_a_step_that_is_larger_runs_on_without_a_budget():
    for name in CARDS:
        advertised = int(name.rpartition("-")[2].removesuffix("GB"))
        assert 0.9 * advertised < imagine(name).capacity_bytes / GiB < advertised
    with imagine("T4-16GB") as gpu:
        with Meter() as meter:
            x = torch.empty(20 * GiB, dtype=torch.uint8)
        assert meter.timeline.peak_bytes == x.nbytes > gpu.capacity_bytes
    assert repr(gpu) == "imagined T4-16GB (14.8 GiB)"
    assert repr(imagine("cpu", "1 GiB")) == "imagined cpu (no limit, budget 1.0 GiB)"


@pairs("name, use_cache", ["GPT2", "Llama"], [False, True])
def test_transformers_models_take_fused_attention_as_on_a_gpu(name, use_cache, bf16):
    pytest.importorskip("transformers")
    with imagine("H100-80GB"):
        model, x = WORKLOADS[name]().model, torch.randint(256, (2, 16))
        with Meter(model, inputs=x) as meter:
            model(input_ids=x, labels=x, use_cache=use_cache).loss.backward()
    attention = {op for op, *_ in kept(meter.timeline) if "attention" in op}
    assert attention == {"_scaled_dot_product_cudnn_attention"}


def test_transformers_imported_too_late_is_told(monkeypatch):
    pytest.importorskip("transformers")
    masks = "transformers.masking_utils"
    monkeypatch.delitem(sys.modules, masks, raising=False)
    with pytest.warns(UserWarning, match="Import it before `with imagine") as told, imagine("H100-80GB"):
        monkeypatch.setitem(sys.modules, masks, object())
    assert told[0].filename == __file__


@pytest.mark.parametrize("card", [None, "cpu", "H100-80GB"])
def test_a_copy_of_a_model_has_no_gradients_and_one_of_a_tensor_has_as_with_real_ones(card):
    with on(card):
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        tensor = torch.randn(3, 2, requires_grad=True)
        model(tensor).sum().backward()
        twin, other = copy.deepcopy((model, tensor))
        assert [type(p) for p in twin.parameters()] == [type(p) for p in model.parameters()]
        assert [p.grad for p in twin.parameters()] == [None] * 4
        assert other.grad.shape == (3, 2) and other.grad is not tensor.grad
        assert twin[0].weight.untyped_storage()._cdata != model[0].weight.untyped_storage()._cdata
        refused(lambda: copy.deepcopy(tensor * 2), RuntimeError, "deepcopy")
        torch.optim.swa_utils.AveragedModel(model)


@pytest.mark.parametrize("card", [None, "cpu", "H100-80GB"])
def test_a_copy_of_views_has_the_whole_storage_behind_them_once_as_with_real_ones(card):
    with on(card):
        whole, added = torch.zeros(300), []
        for what in (whole[:10], [whole, whole[:100], whole[100:]], {"a": whole[::2], "b": nn.Parameter(whole[:5])}):
            with Meter(inputs=whole) as meter:
                copied = copy.deepcopy(what)
            added.append(meter.timeline.totals[-1] - whole.nbytes)
        assert copied["a"].stride() == (2,) and copied["a"].dtype is torch.float32
        assert added == [1200, 1200, 1220]
        with main_memory():
            beside = torch.zeros(4)
        assert in_main_memory(copy.deepcopy(beside)) and in_main_memory(copy.deepcopy(nn.Parameter(beside)))


LOSSES = {"binary_cross_entropy": lambda x, y, **how: F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), **how)}
LOSSES |= {
    name: getattr(F, name)
    for name in ("mse_loss", "smooth_l1_loss", "soft_margin_loss", "huber_loss", "l1_loss", "poisson_nll_loss")
}


@pairs("name, reduction", LOSSES, ["mean", "sum", "none"])
def test_a_reduced_loss_holds_the_bytes_that_a_real_one_holds(name, reduction):
    def events():
        x, y = torch.randn(8, 16, requires_grad=True), torch.randn(8, 16)
        with Meter(inputs=(x, y)) as meter:
            LOSSES[name](x, y, reduction=reduction).sum().backward()
        return [(event.op, event.delta) for event in meter.timeline.events]

    with imagine("cpu"):
        imagined = events()
    assert imagined == events()


def test_a_tensor_from_a_list_is_born_once_and_an_optimizers_own_numbers_are_in_main_memory():
    with imagine("H100-80GB"):
        with Meter() as meter:
            found = torch.tensor([1.0, 2.0])
        assert [(event.op, event.delta) for event in meter.timeline.events] == [("lift_fresh", found.nbytes)]
        weight = nn.Parameter(torch.randn(8))
        optimizer = torch.optim.AdamW([weight])
        weight.grad = torch.randn(8)
        with Meter(optimizer=optimizer) as meter:
            optimizer.step()
        assert on_imagined_card(found) and in_main_memory(optimizer.state[weight]["step"])
    small = {s.device for s in meter.timeline.on("cpu").storages.values() if s.nbytes == 4}
    assert small == {"cpu"} and 4 not in {e.delta for e in meter.timeline.on(H100).events}


@pytest.mark.parametrize("card", [None, "cpu", "H100-80GB"])
def test_an_op_in_place_that_would_grow_its_tensor_is_refused_as_a_real_one_is(card):
    with on(card):
        for name in ("add_", "pow_", "clamp_min_", "copysign_", "lt_"):
            refused(lambda name=name: getattr(torch.ones(5, 1), name)(torch.ones(5, 5)), RuntimeError, "shape")
        changed = torch.ones(2, 3).t_().unsqueeze_(0).resize_(7).squeeze_()
        assert changed.set_(torch.ones(9)).shape == (9,)
        one, three = torch.ones(1, dtype=torch.long), torch.ones(3, dtype=torch.long)
        assert (one << three).shape == (one & three).shape == (3,)  # `__lshift__` ends like a name of one in place


@pytest.mark.parametrize("card", ["cpu", "H100-80GB"])
def test_what_torch_asks_to_check_its_arguments_is_answered(card):
    with imagine(card):
        x = torch.randn(4, 8, requires_grad=True)
        nn.GaussianNLLLoss()(x, x * 2, x.square()).backward()
        q = torch.distributions.Normal(x, x.exp())
        p = torch.distributions.Normal(torch.zeros(8), torch.ones(8))
        (q.rsample() + torch.distributions.kl_divergence(q, p)).sum().backward()
        assert x.grad.shape == (4, 8)


def test_another_thread_trains_for_real_meanwhile_and_cannot_imagine_too():
    found = []

    def train():
        q = torch.randn(1, 1, 4, 8, requires_grad=True)
        F.scaled_dot_product_attention(F.dropout(q), q, q).sum().backward()
        found.append(type(q.grad) is torch.Tensor and 0 < q.grad.abs().sum().item() < float("inf"))
        try:
            with imagine("cpu"):
                pass
        except RuntimeError as error:
            found.append(str(error))

    with imagine("H100-80GB"):
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
    assert found == [True, "expected one imagined machine at a time, found another that is still on"]


def test_the_block_leaves_nothing_behind_even_when_it_raises_and_can_be_entered_again():
    def patched():
        return (
            *(getattr(F, name) for name in ("dropout", "scaled_dot_product_attention", "rms_norm")),
            *(autocast.__dict__[name] for name in ("__init__", "__enter__", "__exit__")),
            *(torch._VF.lstm, torch.utils.checkpoint._get_autocast_kwargs, nn.Module._apply),
            *(optim._get_foreach_kernels_supported_devices, tuple(optim._foreach_supported_types)),
            *(len(nn.modules.module._global_parameter_registration_hooks),),
        )

    before = patched()
    gpu = imagine("H100-80GB", "1 MiB")
    for _ in range(2):
        with pytest.raises(OutOfMemory), gpu:
            x = torch.ones(3)
            assert all(a is not b for a, b in zip(patched()[:6], before, strict=False))
            torch.empty(2 * MiB)
        assert patched() == before
    assert torch.ones(2).sum().item() == 2 and (x + x).shape == (3,)


def inside(call, card="H100-80GB"):
    """The call, which is given the imagined machine, inside its block."""

    def run():
        with imagine(card) as gpu:
            call(gpu)

    return run


def within(outer, inner):
    with outer(), inner():
        pass


def checkpointed(_):
    with torch.autocast("cuda", BF16):
        layer, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
        checkpoint(layer, x, use_reentrant=False).sum().backward()


def of_two_dtypes(_):
    q, k = torch.randn(1, 1, 8, 8, dtype=BF16), torch.randn(1, 1, 8, 8)
    F.scaled_dot_product_attention(q, k, k)


def binary_cross_entropy(_):
    with torch.autocast("cuda", BF16):
        nn.BCELoss()(torch.ones(4), torch.ones(4))


def sparse_gradient(_):
    nn.Embedding(100, 8, sparse=True)(torch.zeros(4, dtype=torch.long)).sum().backward()


REAL, REAL_LAYER, SPARSE = torch.ones(2, 4), nn.Linear(4, 4), torch.eye(4).to_sparse()
CPU_AUTOCAST = lambda: torch.autocast("cpu", BF16)  # noqa: E731
NO_VALUES = (RuntimeError, "imagined tensors have shapes and no values")
DENSE = (NotImplementedError, "expected dense tensors…sparse=False")
REFUSALS = {
    "a card nearly known": (lambda: imagine("a100"), ValueError, "did you mean 'A100-80GB'"),
    "a card unknown": (lambda: imagine("banana"), ValueError, "expected one of T4-16GB"),
    "a budget of nothing": (lambda: imagine("H100-80GB", 0), ValueError, "more than 0 bytes"),
    "two machines": (inside(lambda _: inside(print)()), RuntimeError, "one imagined machine at a time"),
    "inside a meter": (lambda: within(Meter, lambda: imagine("cpu")), RuntimeError, "expected the Meter inside"),
    "inside autocast": (lambda: within(CPU_AUTOCAST, lambda: imagine("cpu")), RuntimeError, "expected autocast inside"),
    "workspace": (inside(lambda _: Meter(workspace=True).__enter__()), ValueError, "expected workspace=False"),
    "outside": (lambda: imagine("cpu").imagined(REAL), RuntimeError, "expected to be inside"),
    "a real batch": (inside(lambda _: nn.Linear(4, 4)(REAL)), RuntimeError, "gpu.imagined(batch)"),
    "a real model": (inside(lambda _: REAL_LAYER(torch.ones(2, 4))), RuntimeError, "build the model inside the block"),
    "item": (inside(lambda _: torch.ones(3).sum().item(), "cpu"), *NO_VALUES),
    "a mask as an index": (inside(lambda _: torch.ones(3)[torch.ones(3) > 0]), *NO_VALUES),
    "a sparse gradient": (inside(sparse_gradient), *DENSE),
    "a real sparse tensor": (inside(lambda gpu: gpu.imagined(SPARSE)), *DENSE),
    "a lazy layer": (inside(lambda _: nn.LazyLinear(4)), NotImplementedError, "LazyLinear, which learns them"),
    "a recurrent layer": (inside(lambda _: nn.LSTM(2, 2)(torch.ones(1, 2))), NotImplementedError, "imagine('cpu')"),
    "a compiler": (inside(lambda _: torch.compile(nn.Linear(2, 2))), NotImplementedError, "expected eager code"),
    "attention of two dtypes": (inside(of_two_dtypes), RuntimeError, "of one dtype"),
    "a loss that overflows": (inside(binary_cross_entropy), RuntimeError, "binary_cross_entropy_with_logits"),
    "checkpointing under autocast": (inside(checkpointed), NotImplementedError, "checkpointing without autocast"),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@refusals(REFUSALS)
def test_what_cannot_be_imagined_is_refused_in_a_sentence(call, error, words):
    refused(call, error, words)
    assert not torch.is_autocast_enabled("cpu") and nn.LazyLinear(4)(torch.ones(2, 3)).shape == (2, 4)


def changes(timeline):
    """The bytes of every event on the card, in order; what died before the first op is left out."""
    before = {event.storage for event in timeline._before}
    return [event.delta for event in timeline.events if event.storage not in before or event.delta < 0]


SMALL = {"layers": 4, "width": 512, "heads": 8, "context": 512}
LIKE_A_REAL_CARDS = {
    "FP32": (GPT, {}, torch.float32, None),
    "FP32, attention by hand, dropout": (GPT, {"attention": "by hand", "dropout": 0.1}, torch.float32, None),
    "BF16": (GPT, {}, BF16, None),
    "BF16, dropout": (GPT, {"dropout": 0.1}, BF16, None),
    "autocast": (GPT, {}, torch.float32, BF16),
    "BF16, checkpointed": (Checkpointed, {"use_reentrant": False}, BF16, None),
}


needs_a_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU, such as is imagined, to compare with",
)


@pytest.mark.gpu
@needs_a_hopper
@pytest.mark.parametrize("case", LIKE_A_REAL_CARDS)
def test_an_imagined_step_has_the_events_of_the_real_cards(case):
    kind, options, dtype, cast = LIKE_A_REAL_CARDS[case]
    batch = text_batch(8, 512)

    def steps(batch):
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            make = lambda: kind(**SMALL, **options).cuda()  # noqa: E731
            return two_steps(make, batch, cast=cast)
        finally:
            torch.set_default_dtype(before)

    with imagine("H100-80GB") as gpu:
        imagined = steps(gpu.imagined(batch))
    real = steps(tuple(tensor.cuda() for tensor in batch))
    for ours, theirs in zip(imagined, real, strict=True):
        assert ours.peak_bytes == theirs.peak_bytes
        if cast is None:
            assert changes(ours) == changes(theirs)
        else:  # in which order autocast's cache lets go of its copies, their addresses decide
            assert sorted(changes(ours)) == sorted(changes(theirs))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_storages_and_scratch_are_all_that_the_cards_allocator_was_asked_for():
    model, batch = GPT(**SMALL).cuda(), tuple(tensor.cuda() for tensor in text_batch(8, 512))
    optimizer = torch.optim.AdamW(model.parameters())
    for workspace in (False, True):  # in the first step libraries take room of their own, and keep it
        with Meter(model, optimizer, batch, workspace=workspace) as meter:
            model(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    requested = meter.timeline.levels["requested"]
    held_by_others = requested["before"] - meter.timeline.totals[0]
    assert meter.timeline.peak_bytes == requested["peak"] - held_by_others
