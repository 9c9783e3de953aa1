"""The roofline of chapter 03: what it draws is what was counted."""

from memlab.book.roofline import GROUPS, counted, draw_roofline, group_of, grouped, waiting


def test_every_op_of_a_step_is_in_one_group_and_groups_lose_nothing():
    for attention in ("fused", "by hand"):
        ops = counted(1, attention)
        groups = grouped(ops, "H100-80GB")
        assert set(groups) <= {*GROUPS, "the rest"} and {"linear", "attention", "LayerNorm", "AdamW"} <= set(groups)
        assert sum(flops for flops, _, _ in groups.values()) == sum(op.flops for op in ops)
        assert sum(nbytes for _, nbytes, _ in groups.values()) == sum(op.nbytes for op in ops)
    assert {group_of(op) for op in counted(1, "by hand") if op.name in ("bmm", "_softmax", "mul")} == {"attention"}
    assert all(group_of(op) == "the rest" for op in counted(1) if op.name.startswith(("_log_softmax", "embedding")))


def test_nearly_all_flops_and_by_far_not_all_time_are_in_ops_that_wait_for_no_memory():
    of_flops, of_time = waiting(counted(1), "H100-80GB")
    assert of_flops < 0.02 and 0.2 < of_time < 0.8
    by_hand = waiting(counted(1, "by hand"), "H100-80GB")
    assert by_hand[0] > of_flops and by_hand[1] > of_time


def test_the_roofline_says_in_words_what_it_draws():
    alt = draw_roofline("T4-16GB", 1).alt
    assert "T4-16GB" in alt and "linear" in alt and "% of the FLOPs" in alt


def test_a_group_keeps_its_colour_and_marker_whatever_its_share():
    looks = []
    for attention in ("fused", "by hand"):
        points = draw_roofline("H100-80GB", 1, attention).figure.axes[0].collections
        look = lambda point: (point.get_facecolor().tolist(), len(point.get_paths()[0]))  # noqa: E731
        looks.append({point.get_label().partition(":")[0]: look(point) for point in points})
    assert looks[0] == looks[1] and len(looks[0]) == len(GROUPS) + 1
