"""accumulate against the full batch: ragged micro-batches, scalers, ranks; sums and means in autograd's graph."""

import importlib
import itertools
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
from tests.tiers import pairs

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


def gpt(dtype=torch.float64) -> GPT:
    torch.manual_seed(1)
    return GPT(layers=2, width=32, heads=2, context=CONTEXT).to(dtype)


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


@pairs("k, reduction", [1, 4, 16], ["sum", "mean"])
def test_ragged_micro_batches_give_the_gradients_of_the_full_batch(k, reduction):
    model, texts = gpt(), ragged()
    loss, expected = full_batch(model, texts)
    mean = accumulate(summed(model, reduction), cut(texts, k), count=labels, reduction=reduction)
    assert distance(gradients(model), expected) <= 1e-13
    assert abs(float(mean / loss) - 1) <= 1e-14


def test_gradients_are_added_to_those_that_are_there_and_ignored_labels_count_for_nothing():
    model, texts = gpt(), ragged(8)
    _, expected = full_batch(model, texts)
    ignored = padded([(x, torch.full_like(y, IGNORED)) for x, y in texts])
    for group in (cut(texts, 2), [ignored, *cut(texts, 4), ignored]):
        accumulate(summed(model), group, count=labels)
    assert distance(gradients(model), {name: 2 * g for name, g in expected.items()}) <= 1e-13


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


def test_a_count_may_be_a_fraction():
    w, x = torch.ones(3, requires_grad=True), torch.ones(4, 3)
    mean = accumulate(lambda rows: (rows * w).sum(), x.split(2), count=lambda rows: Fraction(1, 2))
    assert mean == 12 and torch.equal(w.grad, torch.full((3,), 4.0))


def test_the_mean_loss_is_detached_fp32_of_no_dimension_when_losses_are_16_bit_or_of_one_element():
    model, x = nn.Linear(4, 1, dtype=torch.bfloat16), torch.ones(8, 4, dtype=torch.bfloat16)
    mean = accumulate(lambda rows: model(rows).square().sum().reshape(1), x.split(1))
    assert mean.dtype == torch.float32 and mean.shape == () and not mean.requires_grad
    assert torch.allclose(mean, model(x[0]).float().square(), rtol=1e-2)


def test_labels_can_be_counted_on_imagined_hardware():
    with imagine("H100-80GB"):
        model = GPT(layers=1, width=32, heads=2)
        batch = torch.randint(256, (2, 4, 16), device="cpu").unbind()
        mean = accumulate(summed(model), [batch, batch], count=labels)
        assert all(parameter.grad is not None for parameter in model.parameters())
    assert mean.shape == ()


@pytest.fixture
def counts_stay_tensors(monkeypatch):
    """As on a device that would have to be waited for: nobody looks into the counts."""
    monkeypatch.setattr(
        importlib.import_module("memlab.gradient_accumulation.accumulate"), "plain", lambda count: count
    )


def test_counts_on_a_device_give_the_gradients_of_the_full_batch_and_those_of_no_label_are_zero(counts_stay_tensors):
    model, texts = gpt(), ragged()
    _, expected = full_batch(model, texts)
    for reduction in ("sum", "mean"):
        accumulate(summed(model, reduction), cut(texts, 4), count=labels, reduction=reduction)
        assert distance(gradients(model), expected) <= 1e-13
    accumulate(summed(model), [(x, torch.full_like(y, IGNORED)) for x, y in texts[:2]], count=labels)
    assert all(torch.count_nonzero(gradient) == 0 for gradient in gradients(model).values())


def test_a_whole_below_one_on_a_device_is_no_whole_of_one(counts_stay_tensors):
    w = torch.ones(2, requires_grad=True, dtype=torch.float64)
    counts = torch.full((), 0.125, dtype=torch.float64)
    accumulate(lambda x: (w * x).sum(), torch.ones(4, 2).double().split(2), count=lambda x: counts)
    assert torch.equal(w.grad, torch.full((2,), 16.0, dtype=torch.float64))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_count_may_be_a_tensor_of_one_element_through_which_no_gradient_goes(device):
    w, weight = (torch.ones(3, requires_grad=True, device=device) for _ in range(2))
    batches = torch.ones(4, 3, device=device).split(2)
    mean = accumulate(lambda x: (x * w).sum(), batches, count=lambda x: weight.sum().reshape(1))
    assert mean.shape == () and not mean.requires_grad
    assert w.grad.shape == (3,) and weight.grad is None


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


def test_the_mean_of_two_ranks_gradients_that_agree_on_the_labels_is_the_full_batchs():
    texts = ragged(12)
    loss, expected = full_batch(gpt(), texts)
    halves = texts[:4], texts[4:]
    agreed = sum(int(labels(padded(half))) for half in halves) / 2
    found = []
    for half in halves:
        model = gpt()
        mean = accumulate(summed(model), cut(half, 2), count=labels, agree=lambda count: torch.tensor(agreed))
        found.append((mean, gradients(model)))
    (mean, one), (other_mean, other) = found
    assert distance({name: (one[name] + other[name]) / 2 for name in one}, expected) <= 1e-13
    assert abs(float((mean + other_mean) / 2 / loss) - 1) <= 1e-6  # the count that they agreed on is FP32


def test_nothing_of_a_micro_batch_is_held_after_the_last():
    model, x = nn.Linear(64, 64), torch.randn(32, 64)
    gradient_bytes = sum(4 * parameter.numel() for parameter in model.parameters())
    with Meter(model, inputs=x) as meter:
        mean = accumulate(lambda rows: model(rows).square().sum(), x.split(4))
    timeline = meter.timeline
    assert timeline.totals[-1] - timeline.totals[0] == gradient_bytes + mean.nbytes


def test_a_mean_over_one_label_is_its_sum_and_a_mean_that_was_multiplied_is_believed():
    w, v = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    accumulate(lambda x: (w * x).mean(), torch.ones(2, 3).split(1))
    assert torch.equal(w.grad, torch.full((3,), 1 / 3))
    accumulate(lambda x: (v * x).sum(1).mean() * len(x), torch.ones(4, 3).split(2))
    assert torch.equal(v.grad, torch.ones(3))


# Arguments of every loss in torch.nn.functional that has a reduction: predictions with a gradient come from `made`.
Y, P = torch.tensor([0, 3, 1, 2]), torch.rand(4, 8, generator=torch.Generator().manual_seed(0)).softmax(1)


def made(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, requires_grad=True)


OF_NUMBERS = ("binary_cross_entropy_with_logits", "huber_loss", "kl_div", "l1_loss", "mse_loss", "poisson_nll_loss")
OF_CLASSES = ("cross_entropy", "multi_margin_loss", "nll_loss")
LOSSES = {
    **dict.fromkeys((*OF_NUMBERS, "smooth_l1_loss"), lambda: (made(4, 8), P)),
    **dict.fromkeys(OF_CLASSES, lambda: (made(4, 8), Y)),
    **dict.fromkeys(("triplet_margin_loss", "triplet_margin_with_distance_loss"), lambda: [made(4, 8)] * 3),
    "binary_cross_entropy": lambda: (made(4, 8).sigmoid(), P),
    "cosine_embedding_loss": lambda: (made(4, 8), made(4, 8), torch.ones(4)),
    "ctc_loss": lambda: (made(5, 4, 8).log_softmax(-1), torch.ones(4, 2, dtype=torch.long), (5,) * 4, (2,) * 4),
    "gaussian_nll_loss": lambda: (made(4, 8), P, P),
    "hinge_embedding_loss": lambda: (made(4, 8), torch.ones(4, 8)),
    "linear_cross_entropy": lambda: (made(4, 6), made(8, 6), Y),
    "margin_ranking_loss": lambda: (made(4), made(4), torch.ones(4)),
    "multilabel_margin_loss": lambda: (made(4, 8), torch.full((4, 8), -1)),
    "multilabel_soft_margin_loss": lambda: (made(4, 8), P.round()),
    "soft_margin_loss": lambda: (made(4, 8), P.sign()),
}


each_reduction = pytest.mark.parametrize("reduction", ["sum", "mean"])


@each_reduction
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning")
def test_the_reduction_of_every_loss_of_torch_is_seen(reduction):
    found = {name: getattr(F, name)(*LOSSES[name](), reduction=reduction) for name in LOSSES if hasattr(F, name)}
    assert {name: reduction_of(loss) for name, loss in found.items()} == dict.fromkeys(found, reduction)


@each_reduction
def test_the_reduction_is_seen_through_what_leaves_a_mean_a_mean(reduction):
    logits, by = made(4, 8), {"reduction": reduction}
    loss = F.cross_entropy(logits, Y, **by)
    for same in (
        F.cross_entropy(logits, Y, label_smoothing=0.1, **by),
        F.cross_entropy(logits, Y, label_smoothing=0.1, weight=torch.ones(8), **by),
        F.cross_entropy(logits, P, **by),
        F.cross_entropy(logits[None].transpose(1, 2), Y[None], **by),
        loss.double(),
        loss + 0.01 * logits.square().mean(),
        *(loss - 1, -loss, loss.clone(), loss.unsqueeze(0), loss.unsqueeze(0).squeeze(), loss.reshape(1).view(())),
        *(loss.mean(), loss.sum(), loss.unsqueeze(0).mean(0), loss.reshape(1, 1).sum((0, 1))),
    ):
        assert reduction_of(same) == reduction


class MeanBackwardOfMine(torch.autograd.Function):
    """A sum whose node's name begins like that of a mean."""

    @staticmethod
    def forward(ctx, x):
        ctx.shape = x.shape
        return x.sum()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.expand(ctx.shape)


UNTOLD = {
    "a sum of means": lambda x: torch.stack([x.square().mean(), x.mean()]).sum(),
    "a sum of columns' means": lambda x: x.mean(0).sum(),
    "a function of one's own": lambda x: MeanBackwardOfMine.apply(x),
    "a mean, multiplied": lambda x: F.cross_entropy(x, Y) * 4,
    "a sum, divided": lambda x: F.cross_entropy(x, Y, reduction="sum") / 4,
    "batchmean": lambda x: F.kl_div(x, P, reduction="batchmean"),
    "a weighted square": lambda x: F.mse_loss(x, P, weight=torch.ones(4, 8)),
    "a weighted distance": lambda x: F.l1_loss(x, P, weight=torch.ones(4, 8)),
}


@pytest.mark.parametrize("loss", UNTOLD.values(), ids=UNTOLD)
def test_no_reduction_is_seen_where_nobody_can_tell(loss):
    assert reduction_of(loss(made(4, 8))) is None


def test_a_loss_added_to_itself_many_times_is_looked_through_once():
    loss = F.cross_entropy(made(4, 8), Y)
    for _ in range(60):
        loss = loss + loss
    assert reduction_of(loss) == "mean"
