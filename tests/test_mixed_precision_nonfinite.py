"""The op that made the first inf or nan is named, with its module and line; what is inf on purpose is not."""

import functools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from memlab.book.workloads import GPT, text_batch
from memlab.mixed_precision.looking import writes
from memlab.mixed_precision.loss_scaler import LossScaler
from memlab.mixed_precision.nonfinite import first_nonfinite
from tests.memory_timeline_helpers import one_thread  # noqa: F401
from tests.torch_ops import ops_of_torch

INF, NAN = float("inf"), float("nan")


class Layers(nn.Module):
    """Two linear layers, and a normalisation by hand, in FP16 or whatever it is moved to."""

    def __init__(self, normalised=False):
        super().__init__()
        self.up, self.down = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.normalised = normalised
        for layer in (self.up, self.down):
            nn.init.constant_(layer.weight, 0.5)

    def forward(self, x):
        hidden = self.up(x)
        if self.normalised:
            centred = hidden - hidden.mean(-1, keepdim=True)
            hidden = centred / centred.square().mean(-1, keepdim=True).sqrt()
        return self.down(hidden)


def report(fn, *args, **kwargs):
    found = first_nonfinite(fn, *args, **kwargs)
    assert found is not None
    return found


# ---- what is made


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


def test_the_reader_sees_the_number_that_did_not_fit():
    found = report(lambda: torch.tensor([1.0, 70_000.0]).half())
    assert (found.op, found.largest_input, found.limit, found.count) == ("_to_copy", 70_000.0, 65504.0, 1)
    assert "largest finite input is 70,000, the largest number of its format 65,504" in str(found)


def test_an_overflow_only_in_backward_names_its_forward_op_module_and_line():
    model = Layers().half()
    model.up.weight.data.fill_(2.0**-12)
    model.down.weight.data.fill_(2.0**-4)
    scaler = LossScaler(init_scale=2.0**15)
    found = report(lambda: scaler.scale(model(torch.full((1, 4), 16.0).half()).float().sum()).backward())
    assert (found.op, found.backward_of, found.phase) == ("mm", "mm", "backward")
    assert found.largest_input == 2.0**13  # four times 2^15 · 2^-4; times 16 it is 2^17
    assert (found.module, str(found.line)) == ("up", "Layers.forward: hidden = self.up(x)")


def test_zero_by_zero_in_a_normalisation_is_nan_from_the_division():
    found = report(lambda: Layers(normalised=True)(torch.ones(2, 4)))
    assert (found.op, found.kind, found.count) == ("div", "nan", 8)
    assert found.line.source == "hidden = centred / centred.square().mean(-1, keepdim=True).sqrt()"


@pytest.mark.parametrize(
    "fn, op, kind",
    [
        (lambda: torch.zeros(3).log(), "log", "inf"),
        (lambda: torch.ones(3) / 0, "div", "inf"),
        (lambda: torch.zeros(3) / 0, "div", "nan"),
        (lambda: torch.full((3,), INF) * 0, "mul", "nan"),
        (lambda: torch.full((3,), -INF).softmax(0), "_softmax", "nan"),
        (lambda: torch.ones(3, 3).triu(1) * -INF, "mul", "nan"),
        (lambda: torch.full((3,), 3e38).mul_(10), "mul_", "inf"),
        (lambda: (lambda x: x.mul_(x))(torch.full((3,), 1e30)), "mul_", "inf"),
        (lambda: torch._foreach_mul([torch.ones(2), torch.full((2,), 3e38)], 10.0), "_foreach_mul", "inf"),
        (lambda: torch._foreach_mul_([torch.ones(2), torch.full((2,), 3e38)], 10.0), "_foreach_mul_", "inf"),
        (lambda: torch.log(torch.zeros(2), out=torch.full((2,), NAN)), "log", "inf"),
        (lambda: torch.full((2,), NAN).half().copy_(torch.full((2,), 7e4)), "copy_", "inf"),
        (lambda: torch.full((2,), 3e38, dtype=torch.complex64) * 10, "mul", "inf"),
        (lambda: torch.sparse_coo_tensor([[0]], [3e38], (2,), check_invariants=True) * 10.0, "mul", "inf"),
        (lambda: torch.linalg.vector_norm(torch.full((2,), 3e38)), "linalg_vector_norm", "inf"),
        (lambda: torch.linalg.slogdet(torch.zeros(2, 2)), "_linalg_slogdet", "inf"),  # its second result
    ],
)
def test_what_makes_an_inf_or_nan_is_named(fn, op, kind):
    found = report(fn)
    assert (found.op, found.kind, found.came_in) == (op, kind, "")


@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": True}])
def test_an_optimizer_without_epsilon_makes_nan_in_its_step(options):
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([parameter], eps=0.0, **options)
    parameter.grad = torch.zeros(2)

    def step():
        optimizer.step()

    found = report(step)
    assert (found.phase, found.kind, found.came_in) == ("optimizer", "nan", "")
    assert str(found.line).endswith("step: optimizer.step()")
    expected = "_fused_adamw_" if "fused" in options else "_foreach_addcdiv_" if options["foreach"] else "addcdiv_"
    assert found.op == expected


def test_only_the_first_is_named_and_the_run_goes_on_to_its_end():
    done = []

    def run():
        torch.zeros(1).log()
        torch.zeros(1) / 0
        done.append(True)

    assert report(run).op == "log" and done == [True]


def test_autocast_and_its_casts_are_seen():
    model = Layers()
    model.up.weight.data.fill_(7e4)

    def run():
        with torch.autocast("cpu", torch.float16):
            model(torch.ones(1, 4))

    found = report(run)
    assert (found.op, found.module, found.largest_input) == ("_to_copy", "up", 7e4)


@pytest.mark.parametrize("masked", ["outside", "inside", "log"])
def test_an_attention_overflow_beside_a_causal_mask_is_the_products_and_not_the_softmaxs(masked):
    attention = nn.MultiheadAttention(8, 1, bias=False).half()
    nn.init.constant_(attention.in_proj_weight, 1.0)
    x = torch.full((4, 1, 8), 100.0).half()
    outside = torch.full((4, 4), -INF).half().triu(1)

    def run():
        made_here = {"inside": lambda: torch.full((4, 4), -INF).half().triu(1), "log": lambda: outside.exp().log()}
        attention(x, x, x, attn_mask=made_here.get(masked, lambda: outside)(), need_weights=True)

    found = report(run)
    assert (found.op, found.module, found.kind) == ("baddbmm", "MultiheadAttention", "inf")
    assert (found.count, found.shape, found.largest_input) == (10, (1, 4, 4), 800.0)  # what the mask leaves of 16

    attention.in_proj_weight.data.mul_(0.01)
    assert first_nonfinite(run) is None


SQUARE, ROW, BATCH = torch.full((2, 2), 1e30), torch.full((2,), 1e30), torch.full((1, 2, 2), 1e30)
PRODUCTS = [
    (torch.addmm, (2,), (SQUARE, SQUARE)),
    (torch.addmm, (2, 2), (SQUARE, SQUARE)),
    (torch.addmv, (2,), (SQUARE, ROW)),
    (torch.addbmm, (2, 2), (BATCH, BATCH)),
    (torch.baddbmm, (1, 2, 2), (BATCH, BATCH)),
    (torch.addr, (2, 2), (ROW, ROW)),
]


@pytest.mark.parametrize("add, shape, factors", PRODUCTS)
@pytest.mark.parametrize("in_place", [False, True])
def test_the_overflow_of_a_product_beside_the_inf_of_what_it_is_added_to_is_found(add, shape, factors, in_place):
    added = torch.zeros(shape)
    added[..., 0] = -INF
    small = [factor / 1e30 for factor in factors]

    def run(factors):
        added_here = added.expand_as(add(added, *small)).clone() if in_place else added
        getattr(added_here, add.__name__ + "_")(*factors) if in_place else add(added_here, *factors)

    found = report(run, factors)
    assert (found.op, found.kind, found.came_in) == (add.__name__ + "_" * in_place, "inf", "")
    assert found.count == math.prod(found.shape) // 2  # beside the -inf of each row
    assert first_nonfinite(run, small) is None


def test_what_came_in_with_a_factor_is_not_the_masks():
    mask, bad = torch.tensor([[-INF, 0.0]]), torch.tensor([[0.0, NAN]])
    assert report(lambda factor: mask.addmm(torch.ones(1, 1), factor), bad).came_in == "argument 0"
    found = report(lambda: mask.exp().log().addmm(torch.ones(1, 1), torch.full((1, 2), 3e38) * 10))
    assert found.op == "mul"


@pytest.mark.parametrize("add, shape, factors", PRODUCTS)
def test_at_beta_0_what_the_product_is_added_to_is_not_read(add, shape, factors):
    fresh = torch.full(shape, NAN)
    found = report(lambda: add(fresh, *factors, beta=0))
    assert (found.op, found.kind, found.came_in) == (add.__name__, "inf", "")
    assert found.largest_input == torch.tensor(1e30).item()
    small = [factor / 1e30 for factor in factors]
    assert first_nonfinite(lambda: add(fresh, *small, beta=0) + 1) is None
    in_place = add(torch.ones(shape), *small).fill_(NAN)
    assert first_nonfinite(lambda: getattr(in_place, add.__name__ + "_")(*small, beta=0)) is None
    # nor is it forgiven: nothing has read it
    assert report(lambda: add(torch.zeros(shape).log(), *small, beta=0)).op == "log"


@pytest.mark.parametrize("affine", [False, True])
def test_an_overflow_of_batch_norms_running_variance_is_found(affine):
    torch.manual_seed(0)
    norm, x = nn.BatchNorm1d(2, affine=affine).half(), (torch.randn(64, 2) * 3000).half()
    found = report(lambda: norm(x).sum().backward() if affine else norm(x))
    assert (found.op, found.kind, found.count, found.shape) == ("native_batch_norm", "inf", 2, (2,))
    assert (found.module, found.phase, found.came_in) == ("BatchNorm1d", "forward", "")
    assert norm.running_var.isinf().all() and norm(x).isfinite().all()  # nothing else shows it
    assert report(lambda: norm(x)).came_in == "buffer running_var"
    norm.reset_running_stats()
    assert first_nonfinite(lambda: norm(x / 100)) is None
    assert first_nonfinite(lambda: norm.eval()(x / 100)) is None


@pytest.mark.parametrize(
    "op, before, after",
    [
        (torch.ops.aten.native_batch_norm.default, (None, None), (True, 0.1, 1e-5)),
        (torch.ops.aten.batch_norm_update_stats.default, (), (0.1,)),
    ],
)
def test_what_torchs_schemas_do_not_say_that_batch_norms_write_is_known(op, before, after):
    mean, variance = torch.zeros(2), torch.ones(2)
    arguments = (torch.arange(6.0).view(3, 2), *before, mean, variance, *after)
    op(*arguments)
    assert mean.tolist() != [0, 0] and variance.tolist() != [1, 1]
    assert not op._schema.is_mutable
    assert list(map(id, (arguments[place] for place in sorted(writes(op)[0])))) == [id(mean), id(variance)]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_under_checkpointing_the_forward_is_named_and_the_gradients_stay(use_reentrant):
    model = Layers()
    x = torch.ones(2, 4, requires_grad=True)
    assert first_nonfinite(lambda: checkpoint(model, x, use_reentrant=use_reentrant).sum().backward()) is None
    expected, model.up.weight.grad = model.up.weight.grad, None
    model(x).sum().backward()
    assert torch.equal(model.up.weight.grad, expected)
    model.down.weight.data.fill_(3e38)
    found = report(lambda: checkpoint(model, x * 10, use_reentrant=use_reentrant).sum().backward())
    assert (found.op, found.phase, found.module) == ("mm", "forward", "down")


# ---- what came in


@pytest.mark.parametrize("bad, kind", [(NAN, "nan"), (INF, "inf"), (-INF, "inf")])
def test_a_parameter_that_is_not_finite_is_named(bad, kind):
    model = Layers()
    model.down.weight.data[1, 2] = bad
    x = torch.ones(2, 4)
    found = report(lambda: model(x).sum().backward())
    assert (found.came_in, found.kind, found.count, found.shape) == ("parameter down.weight", kind, 1, (4, 4))
    assert (found.op, found.module) == ("mm", "down")
    assert "came in with parameter down.weight, first read by mm in forward of down" in str(found)


@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_batch_that_is_not_finite_is_named_as_the_argument_it_is(bad):
    model, x = Layers(), torch.ones(2, 4)
    x[0, 0] = bad
    assert report(model, x).came_in == "argument 0"
    assert report(lambda batch: model(batch["x"]), batch={"x": x}).came_in == "argument batch"
    assert report(lambda: model(x)).came_in == "argument 0 of Layers"
    assert report(lambda: x + 1).came_in == "a tensor from outside"


def test_a_gradient_that_came_in_is_named_whoever_reads_it_first():
    model = Layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.ones(1, 4)).sum().backward()
    model.up.weight.grad[0, 0] = -INF
    found = report(lambda _: optimizer.step(), model)
    assert (found.came_in, found.phase) == ("the gradient of up.weight", "optimizer")


def test_without_a_model_to_name_them_parameters_and_gradients_are_still_told_from_masks():
    parameter = nn.Parameter(torch.tensor([-INF]))
    assert report(lambda: parameter * 2).came_in == "a parameter"
    parameter.data.fill_(1.0)
    parameter.grad = torch.tensor([-INF])
    optimizer = torch.optim.SGD([parameter])
    assert report(lambda: optimizer.step()).came_in == "the gradient of a parameter"


@pytest.mark.parametrize("foreach", [False, True], ids=["for-loop", "foreach"])
def test_a_state_from_before_came_in_by_its_name(foreach):
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, foreach=foreach)
    parameter.grad = torch.ones(3)
    optimizer.step()
    optimizer.state[parameter]["momentum_buffer"].fill_(-INF)
    assert report(lambda: optimizer.step()).came_in == "momentum_buffer of a parameter"


# ---- what is not reported


def test_what_the_run_made_inf_on_purpose_does_not_come_in_with_the_model_it_is_given_to():
    model = Layers()
    assert first_nonfinite(lambda: model(torch.full((2, 4), INF))) is None


def test_gradscalers_own_check_is_no_maker():
    parameter = nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([parameter], lr=1.0), torch.amp.GradScaler("cpu")

    def run():
        scaler.scale(parameter.sum() * INF).backward()
        scaler.step(optimizer)
        scaler.update()

    assert first_nonfinite(run) is None
    assert parameter.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize("make_scaler", [LossScaler, functools.partial(torch.amp.GradScaler, "cpu")])
def test_an_overflow_that_a_scaler_skips_is_found_though_at_the_end_all_is_finite(make_scaler, set_to_none):
    model = Layers()
    model.down.weight.data.fill_(3e38)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1.0), make_scaler()

    def run():
        scaler.scale(model(torch.ones(2, 4)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=set_to_none)

    found = report(run)
    assert (found.op, found.module, found.kind) == ("mm", "down", "inf")
    assert all(p.isfinite().all() and (p.grad is None or not p.grad.any()) for p in model.parameters())


# ---- what is made and forgiven


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
        (lambda x: F.cosine_similarity(x, torch.ones(2, 3)), torch.zeros(2, 3)),
        (lambda x: x.std(), torch.ones(4)),
        (lambda x: x**POWERS, torch.zeros(3)),
        (lambda x: x.cumprod(0), torch.tensor([0.0, 1.0, 0.0])),
        (lambda x: (x + torch.finfo(x.dtype).min).softmax(0), torch.tensor([0.0, -3e38])),
        (ctc, torch.linspace(-1, 1, 60).view(6, 2, 5)),
        (lambda x: (x * 1e30 * 1e30).nan_to_num(), torch.ones(1)),
        (lambda x: (x * 1e30 * -1e30).clamp_min_(0), torch.ones(3)),
    ],
)
def test_an_inf_or_nan_that_the_next_op_forgives_is_no_finding(fn, x):
    assert first_nonfinite(with_gradient, fn, x) is None


def where_finite(x):
    return torch.where(x.isfinite(), x, 0.0)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: torch.where(x > 0, x.log(), 0.0),
        lambda x: x.log().nan_to_num(),
        lambda x: x.log()[1:].sum(),
        lambda x: ctc(torch.zeros(6, 2, 5)),
        lambda x: torch.where(x > 0, x.log().long(), 0),
        lambda x: where_finite(x.log()),
    ],
)
def test_an_inf_that_is_dropped_is_no_finding(fn):
    assert first_nonfinite(fn, torch.arange(4.0)) is None


def test_the_first_step_of_torchs_own_radam_has_nothing_to_report():
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    assert first_nonfinite(torch.optim.RAdam([parameter], foreach=True).step) is None
    assert parameter.isfinite().all()


def relative_positions(x):
    """T5's: the log of 0 is among them, and dropped."""
    distance = torch.arange(4)
    return x + torch.where(distance < 2, distance, (distance / 2).log().mul(4).long())


def test_the_culprit_after_a_harmless_inf_is_named():
    model = Layers()
    assert first_nonfinite(lambda: model(relative_positions(torch.ones(2, 4))).sum().backward()) is None
    model.down.weight.data.fill_(3e38)
    found = report(lambda: model(relative_positions(torch.ones(2, 4))).sum().backward())
    assert (found.op, found.module, found.phase, found.kind) == ("mm", "down", "forward", "inf")


def test_a_transformers_t5_is_healthy_and_its_culprit_is_named():
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    model, ids = transformers.T5ForConditionalGeneration(config), torch.arange(1, 13).view(2, 6)

    def step():
        model(input_ids=ids, labels=ids).loss.backward()

    assert first_nonfinite(step) is None
    model.encoder.block[0].layer[-1].DenseReluDense.wo.weight.data.fill_(3e38)
    assert report(step).module == "encoder.block.0.layer.1.DenseReluDense.wo"


def test_an_inf_that_was_only_tested_is_found_be_it_as_a_copy():
    assert report(lambda: (torch.ones(3) * 1e30 * 1e30).isfinite()).op == "mul"
    assert report(lambda: (torch.ones(3) * 1e30 * 1e30).clone() > 0).op == "mul"
    assert report(lambda: where_finite(torch.zeros(3).log()) + torch.zeros(3).log().abs()).op == "log"


def test_an_overflow_is_found_though_a_nan_was_placed_beside_it_on_purpose():
    kept = torch.tensor([True, False, True])
    assert report(lambda: torch.where(kept, torch.full((3,), -1e30) * 1e30, NAN).nanmedian()).op == "mul"


def test_a_gradient_of_zeros_without_memory_is_finite():
    assert first_nonfinite(with_gradient, torch.sgn, torch.ones(3)) is None
    assert report(with_gradient, lambda x: (x - 1).sgn() / 0, torch.ones(3)).op == "div"


def test_a_nan_that_argmax_read_or_that_a_finite_neighbour_hides_is_still_found():
    assert report(lambda: (torch.zeros(3) / 0).argmax()).op == "div"

    def neighbours():
        both = torch.zeros(4)
        both[:2].div_(0)
        both[2:].add_(1)

    assert report(neighbours).op == "div_"


@pytest.mark.parametrize("width", [3, 4, 5])
@pytest.mark.parametrize("freed", [False, True])
def test_an_inf_in_one_gradient_of_a_bucket_is_found_though_the_norm_of_the_other_was_read(width, freed):
    first, second = nn.Parameter(torch.ones(4).half()), nn.Parameter(torch.ones(width).half())

    def run():
        bucket = torch.zeros(4 + width).half()
        first.grad, second.grad = bucket[:4], bucket[4:]
        ((first.float() * 1e6).sum() + second.float().sum()).backward()
        second.grad.norm()
        if freed:
            first.grad = second.grad = None

    found = report(run)
    assert (found.op, found.kind, found.count, found.shape) == ("_to_copy", "inf", 4, (4,))


def keep_all():
    x = torch.tensor([300.0, 1.0]).half() ** 2
    x[1:] * 2
    return x


def keep_the_odd():
    x = torch.tensor([1.0, 300.0, 1.0]).half() ** 2
    x[::2] * 2
    return x


KEPT = []


def keep_in_a_list():
    KEPT[:] = [torch.tensor([300.0, 1.0]).half() ** 2]
    KEPT[0][1:] * 2


def overwrite():
    buffer = torch.zeros(4)
    buffer[:2] = torch.full((2,), 3e38) * 10
    buffer[:2] = 1
    return buffer.sum()


def zero_the_gradients_of_a_bucket():
    bucket = torch.zeros(4)
    bucket[:2].add_(torch.full((2,), 3e38)).mul_(10)
    bucket[:2].zero_()
    return bucket[:2].add_(1).sum()


def mend_half():
    x = torch.full((4,), 3e38) * 10
    x[:2].mul_(2).clamp_(max=1.0)
    return x[2:] + 1


@pytest.mark.parametrize(
    "fn, op",
    [
        (mend_half, "mul"),
        (keep_all, "pow"),
        (keep_the_odd, "pow"),
        (keep_in_a_list, "pow"),
        (overwrite, "mul"),
        (zero_the_gradients_of_a_bucket, "mul_"),
    ],
)
def test_an_inf_is_found_though_something_finite_in_the_same_memory_was_read(fn, op):
    assert report(fn).op == op


@pytest.mark.parametrize(
    "drop",
    [
        lambda x: x.log()[1:].mul_(2),
        lambda x: x.log()[1:].expand(5, 3) + 1,
        lambda x: (x - 1).log()[[2, 3]] + 1,
        lambda x: (x - 1).abs().log()[::2] + 1,
        lambda x: torch.eye(5).log().diagonal() + 1,
        lambda x: x.log().index_fill_(0, torch.tensor([0]), 0.0) + 1,
        lambda x: x.log()[1:].argmax(),
    ],
)
def test_an_inf_that_a_view_drops_is_no_finding(drop):
    assert first_nonfinite(lambda x: drop(x).sum(), torch.arange(5.0)[:4]) is None


def test_an_inf_that_is_replaced_in_a_tensor_that_is_then_read_is_no_finding():
    def rank_of_0(x):
        rank = x.log()
        rank[0] = 0
        return rank, rank + 1

    assert first_nonfinite(rank_of_0, torch.arange(4.0)) is None


def test_an_inf_that_was_overwritten_is_found_though_what_stands_there_afterwards_is_read():
    assert report(lambda: torch.zeros(3).log().zero_() + 1).op == "log"


def test_the_inf_of_a_mask_is_not_blamed_for_the_nan_beside_it():
    mask = torch.tensor([0.0, 1.0])
    found = report(lambda: mask.log() + torch.full((2,), -1.0).sqrt())
    assert (found.op, found.kind) == ("sqrt", "nan")


def test_a_scalar_beyond_fp32_is_a_number_and_no_inf_on_purpose():
    large = torch.full((2,), 1e300, dtype=torch.float64)
    assert report(lambda: large * 1e300).largest_input == 1e300
    assert report(lambda: torch.ones(2) + 1e39).op == "add"
    assert first_nonfinite(lambda: large.clamp(max=1e200)) is None


def test_a_complex_number_is_counted_once_and_a_complex_scalar_comes_in_like_a_real_one():
    found = report(lambda: torch.ones(3, dtype=torch.complex64) * complex(NAN, 0))
    assert (found.kind, found.count, found.came_in) == ("nan", 3, "a scalar")
    assert report(lambda: torch.full((3,), 3e38 + 3e38j).mul_(10)).count == 3


def test_a_nan_scalar_came_in_and_an_inf_one_is_on_purpose():
    parameter = nn.Parameter(torch.ones(2))
    found = report(lambda: (parameter * NAN).sum().backward())
    assert (found.came_in, found.op, found.kind, found.count) == ("a scalar", "mul", "nan", 2)
    parameter.grad = None
    assert first_nonfinite(lambda: (parameter * INF).sum().backward()) is None
    parameter.grad = torch.ones(2)
    found = report(torch.optim.SGD([parameter], lr=NAN).step)
    assert (found.came_in, found.op, found.phase) == ("a scalar", "add_", "optimizer")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_the_nested_tensors_of_transformer_encoder_are_refused_with_a_way_out():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 4, batch_first=True), 1).eval()
    padding = torch.tensor([[False, False], [False, True]])
    with torch.no_grad(), pytest.raises(NotImplementedError, match="set_fastpath_enabled"):
        first_nonfinite(model, torch.ones(2, 2, 4), src_key_padding_mask=padding)


def empty_and_used():
    fresh = torch.empty(1000)
    fresh.fill_(1.0)
    torch.empty_like(fresh)
    fresh.new_empty(1000)
    torch.empty_strided((4,), (1,))
    return fresh.view(10, 100)[1:].t() * 2


def dirty():
    """Memory with nan in it is given back, for `empty` to find it."""
    for _ in range(8):
        torch.full((1000,), NAN)
    for _ in range(8):
        torch.empty(1000)


OUTSIDE = torch.full((4, 4), -INF).triu(1)  # 0 and -inf
GARBAGE = torch.full((4,), NAN)


@pytest.mark.parametrize(
    "fn",
    [
        lambda: torch.zeros(4, 4).masked_fill(torch.eye(4).bool(), -INF).softmax(-1),
        lambda: torch.zeros(4).masked_fill_(torch.tensor([True, False, False, False]), INF),
        lambda: torch.where(torch.tensor([True, False]), 1.0, -INF),
        lambda: torch.full((3,), INF),
        lambda: torch.zeros(3).fill_(-INF).exp(),
        lambda: torch.zeros(3).new_full((2,), NAN),
        lambda: torch.tensor([1.0, INF]) * 2,
        lambda: F.pad(torch.zeros(3), (1, 1), value=-INF),
        lambda: torch.ones(3) * INF,
        lambda: (torch.zeros(4, 4) + OUTSIDE).softmax(-1),
        lambda: F.scaled_dot_product_attention(*torch.ones(3, 1, 1, 4, 4), attn_mask=OUTSIDE),
        lambda: F.scaled_dot_product_attention(*torch.ones(3, 1, 1, 4, 4), attn_mask=torch.ones(4, 4).tril().bool()),
        lambda: torch.linalg.vector_norm(torch.ones(3), INF),
        lambda: GARBAGE[:2].copy_(torch.ones(2)),
        lambda: torch.add(torch.ones(4), 1, out=GARBAGE),
        lambda: torch.full((2,), NAN).isnan(),
        lambda: torch.tensor([2**62, 1]) * 4,
        lambda: torch.ones(3, device="meta").log(),
        lambda: torch.ones(0).log(),
        lambda: torch.sparse_coo_tensor([[0]], [1.0], (2,), check_invariants=True) * 2.0,
        lambda: F.max_pool1d(torch.ones(1, 1, 4), 3, padding=1),
        dirty,
        empty_and_used,
    ],
)
def test_what_is_not_finite_on_purpose_or_not_a_value_is_passed_over(fn):
    GARBAGE.fill_(NAN)
    assert first_nonfinite(fn) is None


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


# ---- manners


def test_what_fn_raises_passes_through_with_everything_off():
    def run():
        torch.zeros(1).log()
        raise OSError("the reader's own")

    hooks = nn.modules.module._global_forward_pre_hooks.copy()
    with pytest.raises(OSError, match="the reader's own"):
        first_nonfinite(run)
    assert _get_current_dispatch_mode() is None
    assert nn.modules.module._global_forward_pre_hooks == hooks


def test_arguments_are_passed_on_and_fn_runs_once():
    calls = []

    def fn(*args, **kwargs):
        calls.append((args, kwargs))

    assert first_nonfinite(functools.partial(fn, 1), 2, three=3) is None
    assert calls == [((1, 2), {"three": 3})]


# ---- all ops of torch

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


@pytest.mark.filterwarnings("ignore")
def test_in_torchs_own_list_of_ops_a_nan_has_its_origin_and_finite_numbers_have_none():
    wrong, counts = [], {True: 0, False: 0}
    for op in ops_of_torch():
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
    assert min(counts.values()) > 300


def test_a_scaler_that_looks_at_losses_makes_no_nan_of_its_own():
    scaler, weight, hidden = LossScaler(4.0), nn.Parameter(torch.ones(2)), torch.tensor([0.0, -torch.inf])
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler.scale((weight * torch.inf).sum()).backward()
    scaler.step(optimizer)  # skipped; and update() is still to come
    optimizer.zero_grad()
    zeros = nn.Parameter(torch.zeros(2))
    assert first_nonfinite(lambda: scaler.scale((weight * 2).sum()).backward()) is None
    assert first_nonfinite(lambda: scaler.scale(weight + hidden).exp().sum().backward()) is None
    assert first_nonfinite(lambda: scaler.scale(zeros.sqrt().sum()).backward()).op == "div"
