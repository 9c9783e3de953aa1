"""The op that made the first inf or nan is named, with its module and line; what is inf on purpose is not."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from memlab.book.workloads import GPT, text_batch
from memlab.mixed_precision import LossScaler, first_nonfinite
from tests.harness import nothing_left_behind, refused
from tests.memory_timeline_helpers import one_thread  # noqa: F401
from tests.tiers import some
from tests.torch_ops import ops_of_torch

INF, NAN = float("inf"), float("nan")


class Layers(nn.Module):
    """Two linear layers, in FP16 or whatever it is moved to."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        for layer in (self.up, self.down):
            nn.init.constant_(layer.weight, 0.5)

    def forward(self, x):
        hidden = self.up(x)
        return self.down(hidden)


def report(fn, *args, **kwargs):
    found = first_nonfinite(fn, *args, **kwargs)
    assert found is not None
    return found


def test_an_fp16_overflow_in_a_linear_layer_names_the_layer_and_its_line():
    model = Layers().half()
    model.down.weight.data.fill_(300.0)
    found = report(model, torch.full((2, 4), 100.0).half())
    assert (found.op, found.phase, found.module, found.kind) == ("mm", "forward", "down", "inf")
    assert str(found.line) == "Layers.forward: return self.down(hidden)"
    assert (found.count, found.shape, found.dtype) == (8, (2, 4), torch.float16)
    assert (found.largest_input, found.limit) == (300.0, 65504.0)
    assert found.came_in == "" and found.backward_of == ""
    assert str(found).startswith("mm made 8 inf of 8 float16 in forward of down, `Layers.forward: return self.down")


def test_the_reader_sees_the_number_that_did_not_fit_in_a_step_without_epsilon_too():
    found = report(lambda: torch.tensor([1.0, 70_000.0]).half())
    assert "largest finite input is 70,000, the largest number of its format 65,504" in str(found)
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([parameter], eps=0.0, foreach=True)
    parameter.grad = torch.zeros(2)
    found = report(lambda: optimizer.step())
    assert (found.op, found.phase, found.kind, found.came_in) == ("_foreach_addcdiv_", "optimizer", "nan", "")


def test_an_overflow_only_in_backward_names_its_forward_op_module_and_line():
    model = Layers().half()
    model.up.weight.data.fill_(2.0**-12)
    model.down.weight.data.fill_(2.0**-4)
    scaler = LossScaler(init_scale=2.0**15)
    found = report(lambda: scaler.scale(model(torch.full((1, 4), 16.0).half()).float().sum()).backward())
    assert (found.op, found.backward_of, found.phase) == ("mm", "mm", "backward")
    assert found.largest_input == 2.0**13  # four times 2^15 · 2^-4; times 16 it is 2^17
    assert (found.module, str(found.line)) == ("up", "Layers.forward: hidden = self.up(x)")
    assert "mm (the backward of mm) made" in str(found)


def where_finite(x):
    return torch.where(x.isfinite(), x, 0.0)


KEPT = []


def keep_in_a_list():
    KEPT[:] = [torch.tensor([300.0, 1.0]).half() ** 2]
    KEPT[0][1:] * 2


def zero_the_gradients_of_a_bucket():
    bucket = torch.zeros(4)
    bucket[:2].add_(torch.full((2,), 3e38)).mul_(10)
    bucket[:2].zero_()
    return bucket[:2].add_(1).sum()


def mend_half():
    x = torch.full((4,), 3e38) * 10
    x[:2].mul_(2).clamp_(max=1.0)
    return x[2:] + 1


def neighbours():
    both = torch.zeros(4)
    both[:2].div_(0)
    both[2:].add_(1)


MADE = [
    (lambda: torch.zeros(3).log(), "log", "inf"),
    (lambda: torch.zeros(3) / 0, "div", "nan"),
    (lambda: torch.full((3,), -INF).softmax(0), "_softmax", "nan"),
    (lambda: torch.full((3,), 3e38).mul_(10), "mul_", "inf"),
    (lambda: (lambda x: x.mul_(x))(torch.full((3,), 1e30)), "mul_", "inf"),
    (lambda: torch._foreach_mul_([torch.ones(2), torch.full((2,), 3e38)], 10.0), "_foreach_mul_", "inf"),
    (lambda: torch.log(torch.zeros(2), out=torch.full((2,), NAN)), "log", "inf"),
    (lambda: torch.full((2,), NAN).half().copy_(torch.full((2,), 7e4)), "copy_", "inf"),
    (lambda: torch.sparse_coo_tensor([[0]], [3e38], (2,), check_invariants=True) * 10.0, "mul", "inf"),
    (lambda: torch.linalg.vector_norm(torch.full((2,), 3e38)), "linalg_vector_norm", "inf"),
    (lambda: torch.linalg.slogdet(torch.zeros(2, 2)), "_linalg_slogdet", "inf"),  # its second result
    (lambda: [torch.zeros(1).log(), torch.zeros(1) / 0], "log", "inf"),  # the first
    (lambda: torch.ones(2) + 1e39, "add", "inf"),  # 1e39 is a number, beyond FP32
    (lambda: with_gradient(lambda x: (x - 1).sgn() / 0, torch.ones(3)), "div", "nan"),  # zeros without memory
    # only tested, be it as a copy
    (lambda: (torch.ones(3) * 1e30 * 1e30).isfinite(), "mul", "inf"),
    (lambda: (torch.ones(3) * 1e30 * 1e30).clone() > 0, "mul", "inf"),
    (lambda: where_finite(torch.zeros(3).log()) + torch.zeros(3).log().abs(), "log", "inf"),
    (lambda: (torch.zeros(3) / 0).argmax(), "div", "nan"),
    # beside what is finite, or something else that is not
    (lambda: torch.where(torch.tensor([True, False]), torch.full((2,), -1e30) * 1e30, NAN).nanmedian(), "mul", "inf"),
    (lambda: torch.tensor([0.0, 1.0]).log() + torch.full((2,), -1.0).sqrt(), "sqrt", "nan"),
    (neighbours, "div_", "nan"),
    (mend_half, "mul", "inf"),
    (keep_in_a_list, "pow", "inf"),
    # overwritten
    (lambda: torch.zeros(3).log().zero_() + 1, "log", "inf"),
    (zero_the_gradients_of_a_bucket, "mul_", "inf"),
]


@pytest.mark.parametrize("fn, op, kind", MADE)
def test_what_makes_an_inf_or_nan_is_named(fn, op, kind):
    found = report(fn)
    assert (found.op, found.kind, found.came_in) == (op, kind, "")


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_under_checkpointing_the_forward_is_named(use_reentrant):
    model, x = Layers(), torch.ones(2, 4, requires_grad=True)
    assert first_nonfinite(lambda: checkpoint(model, x, use_reentrant=use_reentrant).sum().backward()) is None
    model.down.weight.data.fill_(3e38)
    found = report(lambda: checkpoint(model, x * 10, use_reentrant=use_reentrant).sum().backward())
    assert (found.op, found.phase, found.module) == ("mm", "forward", "down")


@pytest.mark.parametrize("bad, kind", [(NAN, "nan"), (-INF, "inf")])
def test_a_parameter_that_is_not_finite_is_named(bad, kind):
    model = Layers()
    model.down.weight.data[1, 2] = bad
    x = torch.ones(2, 4)
    found = report(lambda: model(x).sum().backward())
    assert (found.came_in, found.kind, found.count, found.shape) == ("parameter down.weight", kind, 1, (4, 4))
    assert (found.op, found.module) == ("mm", "down")
    assert "came in with parameter down.weight, first read by mm in forward of down" in str(found)


def test_a_batch_that_is_not_finite_is_named_as_the_argument_it_is():
    model, x = Layers(), torch.ones(2, 4)
    x[0, 0] = INF
    assert report(model, x).came_in == "argument 0"
    assert report(lambda batch: model(batch["x"]), batch={"x": x}).came_in == "argument batch"
    assert report(lambda: model(x)).came_in == "argument 0 of Layers"
    assert report(lambda: x + 1).came_in == "a tensor from outside"


def test_what_came_in_with_a_factor_is_not_the_masks():
    mask, bad = torch.tensor([[-INF, 0.0]]), torch.tensor([[0.0, NAN]])
    assert report(lambda factor: mask.addmm(torch.ones(1, 1), factor), bad).came_in == "argument 0"


def test_a_gradient_that_came_in_is_named_whoever_reads_it_first():
    model = Layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.ones(1, 4)).sum().backward()
    model.up.weight.grad[0, 0] = -INF
    found = report(lambda _: optimizer.step(), model)
    assert (found.came_in, found.phase) == ("the gradient of up.weight", "optimizer")


@pytest.mark.parametrize("foreach", [False, True], ids=["for-loop", "foreach"])
def test_without_a_model_to_name_them_what_came_in_is_still_told_from_masks(foreach):
    parameter = nn.Parameter(torch.tensor([-INF]))
    assert report(lambda: parameter * 2).came_in == "a parameter"
    parameter.data.fill_(1.0)
    parameter.grad = torch.tensor([-INF])
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, foreach=foreach)
    assert report(lambda: optimizer.step()).came_in == "the gradient of a parameter"
    parameter.data.fill_(1.0)
    parameter.grad.fill_(1.0)
    optimizer.state[parameter]["momentum_buffer"].fill_(-INF)
    assert report(lambda: optimizer.step()).came_in == "momentum_buffer of a parameter"


def test_a_nan_scalar_came_in_and_an_inf_one_is_on_purpose():
    parameter = nn.Parameter(torch.ones(2))
    found = report(lambda: (parameter * NAN).sum().backward())
    assert (found.came_in, found.op, found.kind, found.count) == ("a scalar", "mul", "nan", 2)
    parameter.grad = None
    assert first_nonfinite(lambda: (parameter * INF).sum().backward()) is None
    parameter.grad = torch.ones(2)
    found = report(torch.optim.SGD([parameter], lr=NAN).step)
    assert (found.came_in, found.op, found.phase) == ("a scalar", "add_", "optimizer")


def test_a_complex_number_is_counted_once_and_a_complex_scalar_comes_in_like_a_real_one():
    found = report(lambda: torch.ones(3, dtype=torch.complex64) * complex(NAN, 0))
    assert (found.kind, found.count, found.came_in) == ("nan", 3, "a scalar")
    assert report(lambda: torch.full((3,), 3e38 + 3e38j).mul_(10)).count == 3
    large = torch.full((2,), 1e300, dtype=torch.float64)
    assert report(lambda: large * 1e300).largest_input == 1e300


def with_gradient(fn, x):
    """Forward and backward of fn at x, where gradients are finite."""
    x = x.clone().requires_grad_()
    loss = fn(x).sum()
    loss.backward()
    assert x.grad.isfinite().all()
    return loss


def ctc(x):
    return F.ctc_loss(x.log_softmax(-1), torch.tensor([[1, 2], [3, 3]]), torch.tensor([6, 6]), torch.tensor([2, 2]))


POWERS = torch.tensor([2.0, 0.0, 1.0], requires_grad=True)


@pytest.mark.parametrize(
    "fn, x",
    [
        (lambda x: x.norm(), torch.zeros(3)),
        (lambda x: F.normalize(x, dim=-1), torch.zeros(2, 3)),
        (lambda x: x**POWERS, torch.zeros(3)),
        (lambda x: (x + torch.finfo(x.dtype).min).softmax(0), torch.tensor([0.0, -3e38])),
        (ctc, torch.linspace(-1, 1, 60).view(6, 2, 5)),
        (lambda x: (x * 1e30 * 1e30).nan_to_num(), torch.ones(1)),
        (lambda x: (x * 1e30 * -1e30).clamp_min_(0), torch.ones(3)),
        (torch.sgn, torch.ones(3)),
    ],
)
def test_an_inf_or_nan_that_the_next_op_forgives_is_no_finding(fn, x):
    assert first_nonfinite(with_gradient, fn, x) is None


def rank_of_0(x):
    rank = x.log()
    rank[0] = 0
    return rank, rank + 1


@pytest.mark.parametrize(
    "drop",
    [
        lambda x: torch.where(x > 0, x.log(), 0.0),
        lambda x: ctc(torch.zeros(6, 2, 5)),
        lambda x: where_finite(x.log()),
        rank_of_0,
        lambda x: ((x - 1).log()[[2, 3]] + 1).sum(),
        lambda x: (x.log().index_fill_(0, torch.tensor([0]), 0.0) + 1).sum(),
    ],
)
def test_an_inf_that_is_dropped_is_no_finding(drop):
    assert first_nonfinite(drop, torch.arange(4.0)) is None


def empty_and_used():
    """Memory with nan in it is given back, for `empty` to find it."""
    for _ in range(8):
        torch.full((1000,), NAN)
    fresh = [torch.empty(1000) for _ in range(8)][0].fill_(1.0)
    torch.empty_like(fresh)
    fresh.new_empty(1000)
    torch.empty_strided((1000,), (1,))
    return fresh.view(10, 100)[1:].t() * 2


OUTSIDE = torch.full((4, 4), -INF).triu(1)  # 0 and -inf
GARBAGE = torch.full((4,), NAN)


@pytest.mark.parametrize(
    "fn",
    [
        lambda: torch.zeros(4, 4).masked_fill(torch.eye(4).bool(), -INF).softmax(-1),
        lambda: torch.full((3,), INF),
        lambda: torch.ones(3) * INF,
        lambda: Layers()(torch.full((2, 4), INF)),  # made here, given to a model here
        lambda: (torch.zeros(4, 4) + OUTSIDE).softmax(-1),
        lambda: F.scaled_dot_product_attention(*torch.ones(3, 1, 1, 4, 4), attn_mask=OUTSIDE),
        lambda: F.scaled_dot_product_attention(*torch.ones(3, 1, 1, 4, 4), attn_mask=torch.ones(4, 4).tril().bool()),
        lambda: torch.linalg.vector_norm(torch.ones(3), INF),
        lambda: GARBAGE[:2].copy_(torch.ones(2)),
        lambda: torch.add(torch.ones(4), 1, out=GARBAGE),
        lambda: torch.tensor([2**62, 1]) * 4,
        lambda: torch.ones(3, device="meta").log(),
        lambda: torch.ones(0).log(),
        lambda: torch.sparse_coo_tensor([[0]], [1.0], (2,), check_invariants=True) * 2.0,
        lambda: F.max_pool1d(torch.ones(1, 1, 4), 3, padding=1),
        empty_and_used,
    ],
)
def test_what_is_not_finite_on_purpose_or_not_a_value_is_passed_over(fn):
    GARBAGE.fill_(NAN)
    assert first_nonfinite(fn) is None


def test_scalers_own_checks_make_no_inf_and_no_nan():
    parameter = nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([parameter], lr=1.0), torch.amp.GradScaler("cpu")

    def run():
        scaler.scale(parameter.sum() * INF).backward()
        scaler.step(optimizer)
        scaler.update()

    assert first_nonfinite(run) is None and parameter.tolist() == [1.0, 1.0]
    ours, hidden, zeros = LossScaler(4.0), torch.tensor([0.0, -INF]), nn.Parameter(torch.zeros(2))
    ours.scale((parameter * INF).sum()).backward()
    ours.step(optimizer)  # skipped; and update() is still to come
    optimizer.zero_grad()
    assert first_nonfinite(lambda: ours.scale((parameter * 2).sum()).backward()) is None
    assert first_nonfinite(lambda: ours.scale(parameter + hidden).exp().sum().backward()) is None
    assert first_nonfinite(lambda: ours.scale(zeros.sqrt().sum()).backward()).op == "div"


@pytest.mark.parametrize("attention", ["fused", "by hand"])
def test_a_healthy_step_has_nothing_to_report_and_is_the_step_it_would_have_been(attention):
    batch, weights = text_batch(2, 16, nbytes=100_000), []
    for watched in (False, True):
        torch.manual_seed(0)
        model = GPT(layers=2, width=16, heads=2, context=16, attention=attention, dropout=0.1)
        optimizer, scaler = torch.optim.AdamW(model.parameters()), LossScaler()

        def step(model=model, optimizer=optimizer, scaler=scaler):
            scaler.scale(model(*batch)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()

        assert (first_nonfinite(step) if watched else step()) is None
        weights.append([p.detach().clone() for p in model.parameters()] + [torch.rand(1)])
    assert all(map(torch.equal, *weights))


def test_fn_runs_once_with_its_arguments_and_what_it_raises_passes_through_with_everything_off():
    def run(*args, **kwargs):
        calls.append((args, kwargs))
        model(torch.zeros(1, 4).log())
        raise OSError("the reader's own")

    calls, model, hooks = [], Layers(), nn.modules.module._global_forward_pre_hooks.copy()
    with nothing_left_behind(model):
        refused(lambda: first_nonfinite(run, 1, two=2), OSError, "the reader's own")
    assert nn.modules.module._global_forward_pre_hooks == hooks and calls == [((1,), {"two": 2})]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_the_nested_tensors_of_transformer_encoder_are_refused_with_a_way_out():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 4, batch_first=True), 1).eval()
    padding = torch.tensor([[False, False], [False, True]])
    with torch.no_grad(), pytest.raises(NotImplementedError, match="set_fastpath_enabled"):
        first_nonfinite(model, torch.ones(2, 2, 4), src_key_padding_mask=padding)


NAN_AFTER_ALL = ("masked.log_softmax", "masked.logaddexp")  # -inf where everything is masked, on purpose


def finite(values):
    tensors = [x.to_dense() if x.layout is not torch.strided else x for x in tree_leaves(values) if torch.is_tensor(x)]
    return all(bool(x.isfinite().all()) for x in tensors if x.is_floating_point() or x.is_complex())


def differentiated(op, sample, broken):
    """Forward and backward of a sample, whose first number sqrt has made nan, if it is to be broken; the results."""
    leaf = sample.input.detach().clone().requires_grad_()
    factor = torch.ones(leaf.shape)
    if broken:
        factor[(0,) * leaf.dim()] = -1
    outputs = op.op(leaf * factor.sqrt(), *sample.args, **sample.kwargs)
    summed = [x.sum() for x in tree_leaves(outputs) if torch.is_tensor(x) and x.requires_grad]
    if summed:
        sum(summed).abs().backward()
    return outputs, summed, leaf.grad


@some("part", range(20), keep=1)
@pytest.mark.filterwarnings("ignore")
def test_in_torchs_own_list_of_ops_a_nan_has_its_origin_and_finite_numbers_have_none(part):
    wrong, counts = [], {True: 0, False: 0}
    for op in ops_of_torch()[part::20]:
        if not op.supports_autograd or torch.float32 not in op.supported_dtypes("cpu") or op.name in NAN_AFTER_ALL:
            continue
        torch.manual_seed(0)
        sample = next(iter(op.sample_inputs("cpu", torch.float32)))
        if not torch.is_tensor(sample.input) or sample.input.layout is not torch.strided or not sample.input.numel():
            continue
        for broken in (False, True):
            run = functools.partial(differentiated, op, sample, broken)
            try:
                made = run()
            except (RuntimeError, ValueError):  # the op takes no nan, or has no gradient for this sample
                continue
            if finite(made) is broken:  # it drops the nan, or makes one of its own
                continue
            found = first_nonfinite(run)
            counts[broken] += 1
            if broken != (found is not None) or broken and found.op != "sqrt":
                wrong.append((op.name, op.variant_test_name, str(found)))
    assert wrong == []
    assert min(counts.values()) > 5
