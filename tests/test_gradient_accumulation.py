"""accumulate against the full batch, torch's DDP and hand-written loops; every byte of its peak."""

import importlib
import inspect
import itertools
import math
import warnings
from contextlib import contextmanager
from fractions import Fraction

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from memlab.book.workloads import GPT, lengths
from memlab.gradient_accumulation import accumulate, examples, groups, labels
from memlab.gradient_accumulation.reductions import reduction_of
from memlab.memory_timeline import Meter, imagine
from memlab.mixed_precision import LossScaler

IGNORED = -100
CONTEXT = 48


def ragged(count: int = 32, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Texts of random bytes with real lengths, up to CONTEXT: (1, tokens) each, y padded nowhere."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for length in itertools.islice(itertools.cycle(lengths()), count):
        text = torch.randint(256, (1, min(length, CONTEXT) + 1), generator=generator)
        made.append((text[:, :-1], text[:, 1:]))
    return made


def padded(texts) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts as one micro-batch, filled up with 0 in x and ignored labels in y."""
    longest = max(x.shape[1] for x, _ in texts)
    x = torch.cat([F.pad(x, (0, longest - x.shape[1])) for x, _ in texts])
    return x, torch.cat([F.pad(y, (0, longest - y.shape[1]), value=IGNORED) for _, y in texts])


def cut(texts, k: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """k micro-batches of as many texts each, each padded to its own longest."""
    return [padded(texts[start : start + len(texts) // k]) for start in range(0, len(texts), len(texts) // k)]


def gpt(dtype=torch.float64, **sizes) -> GPT:
    torch.manual_seed(1)
    return GPT(**({"layers": 2, "width": 32, "heads": 2, "context": CONTEXT} | sizes)).to(dtype)


def summed(model, reduction="sum"):
    return lambda batch: F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), reduction=reduction)


def gradients(model) -> dict[str, torch.Tensor]:
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    return found


def full_batch(model, texts) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss and gradients of all texts at once, by PyTorch's own mean over labels that are not ignored."""
    loss = summed(model, "mean")(padded(texts))
    loss.backward()
    return loss.detach(), gradients(model)


def distance(found: dict, expected: dict) -> float:
    """The largest distance of a tensor from the expected one, relative to its norm."""
    return max(
        float((found[name] - g).detach().norm() / g.detach().norm()) for name, g in expected.items() if g.norm() > 1e-12
    )


# ---- the answer


@pytest.mark.parametrize("k", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_ragged_micro_batches_give_the_gradients_of_the_full_batch(k, reduction):
    model, texts = gpt(), ragged()
    loss, expected = full_batch(model, texts)
    mean = accumulate(summed(model, reduction), cut(texts, k), count=labels, reduction=reduction)
    assert distance(gradients(model), expected) <= 1e-13
    assert abs(float(mean / loss) - 1) <= 1e-14


@pytest.mark.parametrize("k", range(1, 17))
def test_examples_dealt_into_unequal_micro_batches_give_the_gradients_of_the_full_batch(k):
    torch.manual_seed(k)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).double()
    x, y = torch.randn(64, 16, dtype=torch.float64), torch.randn(64, 4, dtype=torch.float64)
    F.mse_loss(model(x), y).backward()
    expected = gradients(model)
    edges = [0, *sorted(torch.randperm(63)[: k - 1].add(1).tolist()), 64]
    micro_batches = [(x[a:b], y[a:b]) for a, b in itertools.pairwise(edges)]
    accumulate(lambda b: F.mse_loss(model(b[0]), b[1], reduction="sum") / 4, micro_batches)
    assert distance(gradients(model), expected) <= 1e-13
    accumulate(lambda b: F.mse_loss(model(b[0]), b[1]), micro_batches, reduction="mean")
    assert distance(gradients(model), expected) <= 1e-13


def test_the_mean_of_means_over_ragged_texts_is_another_gradient():
    model, texts = gpt(), ragged()
    _, expected = full_batch(model, texts)
    for micro_batch in cut(texts, 8):
        (summed(model, "mean")(micro_batch) / 8).backward()
    assert distance(gradients(model), expected) > 0.01


def test_a_micro_batch_whose_labels_are_all_ignored_counts_for_nothing():
    model, texts = gpt(), ragged(8)
    _, expected = full_batch(model, texts)
    ignored = [(x, torch.full_like(y, IGNORED)) for x, y in texts]
    accumulate(summed(model), [padded(ignored), *cut(texts, 4), padded(ignored)], count=labels)
    assert distance(gradients(model), expected) <= 1e-13


def test_gradients_are_added_to_those_that_are_there():
    model, texts = gpt(), ragged(8)
    _, expected = full_batch(model, texts)
    for _ in range(3):
        accumulate(summed(model), cut(texts, 2), count=labels)
    assert distance(gradients(model), {name: 3 * g for name, g in expected.items()}) <= 1e-13


def test_a_micro_batch_may_be_a_tensor_or_a_dict_and_the_group_an_iterator():
    model, x = nn.Linear(4, 1).double(), torch.randn(6, 4, dtype=torch.float64)
    model(x).square().mean().backward()
    expected = gradients(model)
    accumulate(lambda rows: model(rows).square().sum(), x.split(2))
    assert distance(gradients(model), expected) <= 1e-15
    as_dicts = ({"rows": rows, "name": "a text"} for rows in x.split(4))
    accumulate(lambda batch: model(batch["rows"]).square().sum(), as_dicts)
    assert distance(gradients(model), expected) <= 1e-15


def test_labels_are_counted_in_pairs_and_dicts_without_the_ignored():
    x, y = torch.zeros(2, 3, dtype=torch.long), torch.tensor([[1, -100, 2], [-100, 0, 5]])
    assert labels((x, y)) == labels({"input_ids": x, "labels": y}) == 4
    assert labels((x, y), ignore_index=0) == 5
    assert examples((x, y)) == 2


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        (torch.zeros(4, 5, dtype=torch.long), "found a Tensor without;"),
        ((torch.zeros(4),), "found a tuple without"),
        ((torch.zeros(4), [1, 2]), "found list there"),
        ({"y": torch.zeros(4)}, "found a dict without"),
        ((torch.zeros(4), torch.rand(4)), "found torch.float32"),
        ({"labels": torch.ones(4, dtype=torch.bool)}, "found torch.bool"),
    ],
)
def test_labels_of_what_has_no_class_numbers_are_refused_with_what_to_count(batch, found):
    with pytest.raises(TypeError, match=f"expected class numbers .*{found}.*count=lambda batch"):
        labels(batch)


def test_a_count_may_be_a_fraction():
    w, x = torch.ones(3, requires_grad=True), torch.ones(4, 3)
    mean = accumulate(lambda rows: (rows * w).sum(), x.split(2), count=lambda rows: Fraction(1, 2))
    assert mean == 12 and torch.equal(w.grad, torch.full((3,), 4.0))


def test_the_mean_loss_is_fp32_when_the_losses_are_16_bit():
    model, x = nn.Linear(4, 1, dtype=torch.bfloat16), torch.randn(8, 4, dtype=torch.bfloat16)
    mean = accumulate(lambda rows: model(rows).square().sum(), x.split(1))
    assert mean.dtype == torch.float32
    assert not mean.requires_grad


def test_a_loss_of_one_element_gives_a_mean_of_no_dimension():
    w = torch.ones(3, requires_grad=True)
    mean = accumulate(lambda x: (w * x).sum().reshape(1), torch.ones(4, 3).split(2))
    assert mean.shape == () and mean == 3
    assert torch.equal(w.grad, torch.ones(3))


def test_a_weighted_cross_entropy_is_a_mean_over_its_weights():
    weight, y = torch.tensor([0.01, 0.02, 0.5, 0.9], dtype=torch.float64), torch.tensor([0, 1, 0, 0, 3, 2, 3, 3])
    model, x = nn.Linear(5, 4).double(), torch.randn(8, 5, dtype=torch.float64)
    F.cross_entropy(model(x), y, weight=weight).backward()
    expected = gradients(model)
    batches = list(zip(x.split(4), y.split(4), strict=True))
    accumulate(
        lambda b: F.cross_entropy(model(b[0]), b[1], weight=weight),
        batches,
        count=lambda b: weight[b[1]].sum(),
        reduction="mean",
    )
    assert distance(gradients(model), expected) <= 1e-14


def test_labels_can_be_counted_on_imagined_hardware():
    with imagine("H100-80GB"):
        model = GPT(layers=1, width=32, heads=2)
        batch = torch.randint(256, (2, 4, 16), device="cpu").unbind()
        mean = accumulate(summed(model), [batch, batch], count=labels)
        assert all(parameter.grad is not None for parameter in model.parameters())
    assert mean.shape == ()


class Elsewhere:
    """Counts as on a device that would have to be waited for: tensors that nobody looks into."""

    @pytest.fixture(autouse=True)
    def counts_stay_tensors(self, monkeypatch):
        module = importlib.import_module("memlab.gradient_accumulation.accumulate")
        monkeypatch.setattr(module, "plain", lambda count: count)


class TestCountsOnADevice(Elsewhere):
    def test_the_gradients_are_those_of_the_full_batch(self):
        model, texts = gpt(), ragged()
        _, expected = full_batch(model, texts)
        for reduction in ("sum", "mean"):
            accumulate(summed(model, reduction), cut(texts, 4), count=labels, reduction=reduction)
            assert distance(gradients(model), expected) <= 1e-13

    def test_a_whole_below_one_is_no_whole_of_one(self):
        w = torch.ones(2, requires_grad=True, dtype=torch.float64)
        counts = torch.full((), 0.125, dtype=torch.float64)
        accumulate(lambda x: (w * x).sum(), torch.ones(4, 2).double().split(2), count=lambda x: counts)
        assert torch.equal(w.grad, torch.full((2,), 16.0, dtype=torch.float64))

    def test_a_group_without_a_label_has_gradient_zero(self):
        model, texts = gpt(), ragged(2)
        accumulate(summed(model), [(x, torch.full_like(y, IGNORED)) for x, y in texts], count=labels)
        assert all(torch.count_nonzero(gradient) == 0 for gradient in gradients(model).values())


# ---- a step: what comes after the last micro-batch, once


def test_clipped_once_the_step_is_the_full_batchs():
    texts = ragged(16)
    ours, theirs = gpt(), gpt()
    for model, k in ((ours, 8), (theirs, 1)):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(3):
            accumulate(summed(model), cut(texts, k), count=labels)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        assert norm > 0.1
    assert distance(dict(ours.named_parameters()), dict(theirs.named_parameters())) <= 1e-10


def test_the_last_group_is_shorter_and_is_divided_by_what_it_has():
    model, texts = gpt(), ragged(10)
    sizes = []
    for group in groups(cut(texts, 10), 4):
        sizes.append(len(group))
        accumulate(summed(model), group, count=labels)
        found = gradients(model)
    assert sizes == [4, 4, 2]
    assert distance(found, full_batch(model, texts[8:])[1]) <= 1e-13


def test_groups_reads_no_further_than_it_gives():
    loader = iter(range(7))
    assert next(groups(loader, 3)) == [0, 1, 2]
    assert next(loader) == 3


@pytest.mark.parametrize("make", [LossScaler, lambda s: torch.amp.GradScaler("cpu", s)], ids=["memlab", "torch"])
def test_a_scaler_scales_every_share_and_unscales_once(make):
    model, texts = gpt(torch.float32), ragged(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    plain = accumulate(summed(model), cut(texts, 4), count=labels)
    expected = gradients(model)
    scaler = make(2.0**10)
    mean = accumulate(summed(model), cut(texts, 4), count=labels, scaler=scaler)
    scaler.unscale_(optimizer)
    found = gradients(model)
    assert all(torch.equal(found[name], g) for name, g in expected.items())
    assert torch.equal(mean, plain)


def test_an_overflow_in_one_micro_batch_skips_the_whole_step():
    model = nn.Linear(4, 1)
    before, x = model.weight.clone(), torch.randn(8, 4)
    x[5] = 1e30
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1.0), LossScaler(2.0**10)
    accumulate(lambda rows: model(rows).square().sum(), x.split(2), scaler=scaler)
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(model.weight, before)
    assert scaler.get_scale() == 2.0**9


def test_fp16_gradients_that_a_scaler_lifts_stay_near_fp32s():
    texts = ragged(8)
    reference, model = gpt(torch.float32, width=16), gpt(torch.float16, width=16)
    _, expected = full_batch(reference, texts)

    def loss(batch):
        return F.cross_entropy(model(batch[0]).flatten(0, 1).float(), batch[1].flatten(), reduction="sum")

    accumulate(loss, cut(texts, 4), count=labels, scaler=LossScaler(2.0**8))
    found = {name: gradient.float() / 2**8 for name, gradient in gradients(model).items()}
    assert 0 < distance(found, expected) < 0.02


# ---- ranks


class Averaged(nn.Linear):
    """A model that notes in which micro-batches its gradients would travel."""

    def __init__(self):
        super().__init__(4, 1)
        self.travelled, self.quiet = [], False

    @contextmanager
    def no_sync(self):
        self.quiet = True
        try:
            yield
        finally:
            self.quiet = False

    def forward(self, x):
        y = super().forward(x)
        y.register_hook(lambda gradient: self.travelled.append((self.quiet, "backward")))
        self.travelled.append((self.quiet, "forward"))
        return y


@pytest.mark.parametrize("k", [1, 3])
def test_gradients_travel_in_the_last_forward_and_backward_only(k):
    model = Averaged()
    accumulate(lambda rows: model(rows).square().sum(), torch.randn(2 * k, 4).split(2), model=model)
    assert model.travelled == [
        (quiet, pass_) for quiet in [True] * (k - 1) + [False] for pass_ in ("forward", "backward")
    ]


def rank_of_two(rank: int, file: str, results) -> None:
    """Rank of a real DistributedDataParallel: half of the texts, unequally many labels, through gloo."""
    store = torch.distributed.FileStore(file, 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    try:
        model, texts = gpt(), ragged(12)
        parallel = nn.parallel.DistributedDataParallel(model)
        mine = texts[:4] if rank == 0 else texts[4:]

        def mean_of_ranks(count):
            total = torch.tensor(float(count))
            torch.distributed.all_reduce(total)
            return total / 2

        accumulate(summed(parallel), cut(mine, 2), count=labels, model=parallel, agree=mean_of_ranks)
        results.put((rank, {name: g.numpy() for name, g in gradients(model).items()}))
    finally:
        torch.distributed.destroy_process_group()


def test_two_ranks_of_ddp_with_unequal_labels_give_the_full_batchs_gradient(tmp_path):
    context = torch.multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [context.Process(target=rank_of_two, args=(rank, str(tmp_path / "store"), results)) for rank in (0, 1)]
    for rank in ranks:
        rank.start()
    found = dict(results.get(timeout=120) for _ in ranks)
    for rank in ranks:
        rank.join(60)
    _, expected = full_batch(gpt(), ragged(12))
    for gradient in found.values():
        assert distance({name: torch.from_numpy(g) for name, g in gradient.items()}, expected) <= 1e-13


# ---- bytes


def peak_with_gradients(model, batch, inputs) -> int:
    """A trainer that keeps a running loss meters one micro-batch, its gradients there from the one before."""
    (F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="sum") / 2).backward()
    running = torch.zeros(())
    with Meter(model, inputs=[*inputs, running]) as meter:
        share = F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="sum") / 2
        share.backward()
        running.add_(share.detach())
    model.zero_grad()
    return meter.timeline.peak_bytes


@pytest.mark.parametrize("attention", ["fused", "by hand"])
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("rows", [1, 4])
def test_from_two_micro_batches_on_the_peak_is_that_of_one_with_gradients_already_allocated(layers, rows, attention):
    model = gpt(torch.float32, layers=layers, attention=attention)
    batch = torch.randint(256, (2, rows, CONTEXT)).unbind()
    expected = peak_with_gradients(model, batch, batch)
    for k in (2, 3, 8):
        with Meter(model, inputs=batch) as meter:
            accumulate(summed(model), [batch] * k, count=lambda batch: batch[1].numel())
        assert meter.timeline.peak_bytes == expected
        model.zero_grad()


def test_nothing_of_a_micro_batch_is_held_after_the_last():
    model, x = nn.Linear(64, 64), torch.randn(32, 64)
    gradient_bytes = sum(4 * parameter.numel() for parameter in model.parameters())
    with Meter(model, inputs=x) as meter:
        mean = accumulate(lambda rows: model(rows).square().sum(), x.split(4))
    timeline = meter.timeline
    assert timeline.totals[-1] - timeline.totals[0] == gradient_bytes + mean.nbytes


# ---- what can be wrong


def test_no_micro_batch_is_refused():
    with pytest.raises(ValueError, match="at least one micro-batch, found none"):
        accumulate(lambda batch: batch.sum(), [])


@pytest.mark.parametrize("batch", [torch.zeros(4, 2), {"x": torch.zeros(4)}, "text"])
def test_a_batch_in_place_of_a_list_of_them_is_refused(batch):
    with pytest.raises(TypeError, match="expected micro-batches, in a list"):
        accumulate(lambda batch: batch.sum(), batch)


def test_micro_batches_on_different_devices_are_refused_before_anything_runs():
    ran = []
    x = torch.zeros(2, 2)
    with pytest.raises(ValueError, match="the first on cpu, number 3 of 3 on meta"):
        accumulate(ran.append, [(x, x), (x, x), (x.to("meta"), x.to("meta"))])
    with pytest.raises(ValueError, match="number 2 of 2 on cpu and meta"):
        accumulate(ran.append, [(x, x), (x, x.to("meta"))])
    assert ran == []


def test_a_group_without_a_label_is_refused():
    model, texts = gpt(), ragged(2)
    ignored = [(x, torch.full_like(y, IGNORED)) for x, y in texts]
    with pytest.raises(ValueError, match="found 2 micro-batches with 0 examples or labels"):
        accumulate(summed(model), ignored, count=labels)


def test_a_micro_batch_without_a_label_has_no_mean():
    model, texts = gpt(), ragged(2)
    micro_batches = [texts[0], (texts[1][0], torch.full_like(texts[1][1], IGNORED))]
    with pytest.raises(ValueError, match="found one with 0 examples or labels; return sums"):
        accumulate(summed(model, "mean"), micro_batches, count=labels, reduction="mean")


@pytest.mark.parametrize(
    ("count", "error"),
    [(-1, ValueError), (math.inf, ValueError), (math.nan, ValueError), (None, TypeError), ("2", TypeError)]
    + [(True, TypeError), (torch.tensor(True), TypeError)],
)
def test_a_count_that_makes_no_sense_is_refused(count, error):
    with pytest.raises(error, match="expected a micro-batch's count"):
        accumulate(lambda batch: batch.sum(), [torch.zeros(2)], count=lambda batch: count)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_count_of_several_elements_is_refused_wherever_it_is_and_one_of_one_element_is_a_number(device):
    w = torch.ones(3, requires_grad=True, device=device)
    batches = torch.ones(4, 3, device=device).split(2)
    several = torch.ones(2, device=device)
    with pytest.raises(ValueError, match=r"a micro-batch's count to be one number, found a tensor of shape \(2,\)"):
        accumulate(lambda x: (x * w).sum(), batches, count=lambda x: several)
    with pytest.raises(ValueError, match="a micro-batch's count to be one number"):
        accumulate(lambda x: (x * w).sum(), batches, agree=lambda whole: several)
    assert accumulate(lambda x: (x * w).sum(), batches, count=lambda x: several[:1]).shape == ()
    assert w.grad.shape == (3,)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_no_gradient_goes_through_a_count(device):
    w, weight = (torch.ones(3, requires_grad=True, device=device) for _ in range(2))
    batches = torch.ones(4, 3, device=device).split(2)
    mean = accumulate(lambda x: (x * w).sum(), batches, count=lambda x: weight.sum())
    assert w.grad is not None and weight.grad is None and not mean.requires_grad


def test_a_model_without_no_sync_is_refused():
    with pytest.raises(TypeError, match=r"expected model to have no_sync\(\).*found Linear"):
        accumulate(lambda batch: batch.sum(), [torch.zeros(2)], model=nn.Linear(2, 2))


@pytest.mark.parametrize("reduction", ["none", "average", None])
def test_another_reduction_is_refused(reduction):
    with pytest.raises(ValueError, match="expected reduction to be one of 'sum', 'mean'"):
        accumulate(lambda batch: batch.sum(), [torch.zeros(2)], reduction=reduction)


@pytest.mark.parametrize(("size", "error"), [(0, ValueError), (-1, ValueError), (2.0, TypeError), (True, TypeError)])
def test_a_group_of_another_size_is_refused(size, error):
    with pytest.raises(error, match="expected size"):
        groups([], size)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (lambda w: w * 1.0, r"shape \(3,\)"),
        (lambda w: w.detach().sum(), "without a gradient"),
        (lambda w: 1.5, "found float"),
        (lambda w: None, "found NoneType"),
    ],
)
def test_a_loss_that_is_no_scalar_with_a_gradient_is_refused(returned, words):
    w = torch.ones(3, requires_grad=True)
    with pytest.raises(TypeError, match=f"a scalar tensor that has a gradient, .*{words}"):
        accumulate(lambda batch: returned(w), [torch.zeros(2)])


def test_a_mean_where_a_sum_was_asked_for_is_refused_before_its_backward():
    model, texts = gpt(), ragged(4)
    with pytest.raises(ValueError, match="expected a loss that is summed, found a mean"):
        accumulate(summed(model, "mean"), cut(texts, 2), count=labels)
    with pytest.raises(ValueError, match="expected a mean loss, found a sum"):
        accumulate(summed(model), cut(texts, 2), count=labels, reduction="mean")
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_mean_over_one_label_is_its_sum():
    w = torch.ones(3, requires_grad=True)
    accumulate(lambda x: (w * x).mean(), torch.ones(2, 3).split(1))
    assert torch.equal(w.grad, torch.full((3,), 1 / 3))


def test_a_mean_that_was_multiplied_is_believed():
    w = torch.ones(3, requires_grad=True)
    accumulate(lambda x: (w * x).sum(1).mean() * len(x), torch.ones(4, 3).split(2))
    assert torch.equal(w.grad, torch.ones(3))


# Arguments of every loss in torch.nn.functional that has a reduction: predictions with a gradient come from `made`.
Y, P = torch.tensor([0, 3, 1, 2]), torch.rand(4, 8, generator=torch.Generator().manual_seed(0)).softmax(1)


def made(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, requires_grad=True)


LOSSES = {
    "binary_cross_entropy": lambda: (made(4, 8).sigmoid(), P),
    "binary_cross_entropy_with_logits": lambda: (made(4, 8), P),
    "cosine_embedding_loss": lambda: (made(4, 8), made(4, 8), torch.ones(4)),
    "cross_entropy": lambda: (made(4, 8), Y),
    "ctc_loss": lambda: (
        made(5, 4, 8).log_softmax(-1),
        torch.ones(4, 2, dtype=torch.long),
        torch.full((4,), 5),
        torch.full((4,), 2),
    ),
    "gaussian_nll_loss": lambda: (made(4, 8), P, P),
    "hinge_embedding_loss": lambda: (made(4, 8), torch.ones(4, 8)),
    "huber_loss": lambda: (made(4, 8), P),
    "kl_div": lambda: (made(4, 8), P),
    "l1_loss": lambda: (made(4, 8), P),
    "linear_cross_entropy": lambda: (made(4, 6), made(8, 6), Y),
    "margin_ranking_loss": lambda: (made(4), made(4), torch.ones(4)),
    "mse_loss": lambda: (made(4, 8), P),
    "multi_margin_loss": lambda: (made(4, 8), Y),
    "multilabel_margin_loss": lambda: (made(4, 8), torch.full((4, 8), -1)),
    "multilabel_soft_margin_loss": lambda: (made(4, 8), P.round()),
    "nll_loss": lambda: (made(4, 8), Y),
    "poisson_nll_loss": lambda: (made(4, 8), P),
    "smooth_l1_loss": lambda: (made(4, 8), P),
    "soft_margin_loss": lambda: (made(4, 8), P.sign()),
    "triplet_margin_loss": lambda: (made(4, 8), made(4, 8), made(4, 8)),
    "triplet_margin_with_distance_loss": lambda: (made(4, 8), made(4, 8), made(4, 8)),
}


def test_every_loss_of_torch_with_a_reduction_is_tried():
    reducing = {
        name
        for name, function in vars(F).items()
        if callable(function) and not name.startswith("_") and "reduction" in _signature(function)
    }
    assert reducing - set(LOSSES) == set()


def _signature(function) -> str:
    try:
        return str(inspect.signature(function))
    except (TypeError, ValueError):
        return str(function.__doc__).split("\n")[0]


@pytest.mark.parametrize("name", [name for name in LOSSES if hasattr(F, name)])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_the_reduction_of_every_loss_of_torch_is_seen(name, reduction):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "reduction: 'mean' divides", UserWarning)
        assert reduction_of(getattr(F, name)(*LOSSES[name](), reduction=reduction)) == reduction


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_the_reduction_is_seen_through_smoothing_weights_probabilities_casts_and_sums(reduction):
    logits, by = made(4, 8), {"reduction": reduction}
    for loss in (
        F.cross_entropy(logits, Y, label_smoothing=0.1, **by),
        F.cross_entropy(logits, Y, label_smoothing=0.1, weight=torch.ones(8), **by),
        F.cross_entropy(logits, P, **by),
        F.cross_entropy(logits, Y, **by).double(),
        F.cross_entropy(logits, Y, **by) + 0.01 * logits.square().mean(),
        F.cross_entropy(logits[None].transpose(1, 2), Y[None], **by),
    ):
        assert reduction_of(loss) == reduction


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_the_reduction_is_seen_through_changes_of_shape_and_copies(reduction):
    loss = F.cross_entropy(made(4, 8), Y, reduction=reduction)
    for same in (loss.clone(), loss.unsqueeze(0), loss.unsqueeze(0).squeeze(), loss.reshape(1).view(())):
        assert reduction_of(same) == reduction


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_the_reduction_is_seen_through_the_mean_or_sum_of_a_loss_that_is_one_number(reduction):
    loss = F.cross_entropy(made(4, 8), Y, reduction=reduction)
    for same in (loss.mean(), loss.sum(), loss.unsqueeze(0).mean(0), loss.reshape(1, 1).sum((0, 1))):
        assert reduction_of(same) == reduction


def test_a_sum_of_means_may_be_meant():
    x = made(4, 8)
    assert reduction_of(torch.stack([x.square().mean(), x.mean()]).sum()) is None
    assert reduction_of(x.mean(0).sum()) is None


class MeanBackwardOfMine(torch.autograd.Function):
    """A sum whose node's name begins like that of a mean."""

    @staticmethod
    def forward(ctx, x):
        ctx.shape = x.shape
        return x.sum()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.expand(ctx.shape)


def test_a_function_of_ones_own_is_no_mean_by_its_name():
    assert reduction_of(MeanBackwardOfMine.apply(made(4))) is None


def test_a_loss_added_to_itself_many_times_is_looked_through_once():
    loss = F.cross_entropy(made(4, 8), Y)
    for _ in range(60):
        loss = loss + loss
    assert reduction_of(loss) == "mean"


def test_no_reduction_is_seen_where_python_multiplied_or_divided():
    loss = F.cross_entropy(made(4, 8), Y)
    assert reduction_of(loss * 4) is None
    assert reduction_of(F.cross_entropy(made(4, 8), Y, reduction="sum") / 4) is None


@pytest.mark.parametrize(
    "loss",
    [
        lambda x: F.kl_div(x, P, reduction="batchmean"),
        lambda x: F.mse_loss(x, P, weight=torch.ones(4, 8)),
        lambda x: F.l1_loss(x, P, weight=torch.ones(4, 8)),
    ],
)
def test_the_means_of_torch_that_are_a_sum_divided_in_python_are_told_from_no_other(loss):
    assert reduction_of(loss(made(4, 8))) is None


def test_a_weighted_mean_is_a_sum_that_is_divided_by_its_weights_as_the_refusal_says():
    model, x, y, w = nn.Linear(8, 4).double(), torch.randn(4, 8).double(), Y, torch.rand(4).double()

    def loss(divided):
        def of(batch):
            x, y, w = batch
            terms, weights = F.cross_entropy(model(x), y, reduction="none"), w / w.sum()
            return (weights * terms).sum() / weights.sum() if divided else (weights * terms).sum()

        return of

    (loss(False)((x, y, w))).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    group, by = list(zip(x.split(3), y.split(3), w.split(3), strict=True)), {"reduction": "mean"}
    with pytest.raises(ValueError, match=r"as \(weights \* terms\).sum\(\) / weights.sum\(\)"):
        accumulate(loss(False), group, count=lambda batch: batch[2].sum(), **by)
    accumulate(loss(True), group, count=lambda batch: batch[2].sum(), **by)
    assert all(torch.allclose(p.grad, g, rtol=1e-12) for p, g in zip(model.parameters(), expected, strict=True))
