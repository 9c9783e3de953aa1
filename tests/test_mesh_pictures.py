"""Pictures of a mesh and of layers on stages: groups and links are the library's own mesh's, bars the costs."""

import pytest

from memlab.book.mesh_pictures import (
    MOST_RANKS,
    ORDERS,
    between_nodes,
    draw_balance,
    draw_mesh,
    mesh_links,
    stage_costs,
)
from memlab.pipeline_parallelism import StageCost
from memlab.units import format_bytes

PNG = b"\x89PNG"
CUBE = {"data": 2, "pipeline": 2, "tensor": 2}


# ---- the mesh


def test_data_and_tensor_talk_in_rings_and_a_pipeline_in_a_row():
    assert mesh_links({"data": 4}, "data") == [(0, 1), (1, 2), (2, 3), (0, 3)]
    assert mesh_links({"pipeline": 4}, "pipeline") == [(0, 1), (1, 2), (2, 3)]
    assert mesh_links({"tensor": 2}, "tensor") == [(0, 1)]


def test_the_order_of_the_axes_decides_which_of_them_leaves_the_node():
    for order in ORDERS.values():
        axes = dict.fromkeys(order, 2)
        crossing = [between_nodes(mesh_links(axes, name), 4) for name in order]
        assert crossing == [4, 0, 0]  # only the outermost does
        assert [between_nodes(mesh_links(axes, name), 2) for name in order] == [4, 4, 0]


def test_the_picture_of_a_mesh_names_every_group_and_how_many_links_leave_a_node():
    picture = draw_mesh(CUBE, 4)
    assert "mesh(data=2, pipeline=2, tensor=2): 8 ranks in nodes of 4" in picture.alt
    assert "Along data: 4 links, 4 between nodes; groups A 0, 4; B 1, 5; C 2, 6; D 3, 7." in picture.alt
    assert "Along tensor: 4 links, none between nodes; groups A 0, 1; B 2, 3; C 4, 5; D 6, 7." in picture.alt
    for axes in picture.figure.axes:
        texts = [text.get_text() for text in axes.texts]
        assert {str(rank) for rank in range(8)} <= set(texts)
        assert all(texts.count(letter) == 2 for letter in "ABCD")
    assert picture.png().startswith(PNG)


def test_meshes_of_one_axis_and_of_many_ranks_are_drawn_and_larger_ones_refused():
    assert draw_mesh({"data": 3}, 2).png().startswith(PNG)
    picture = draw_mesh({"data": 2, "pipeline": 4, "tensor": 4, "sequence": 1}, 8)
    assert len(picture.figure.axes) == 3
    assert picture.png().startswith(PNG)
    with pytest.raises(ValueError, match=f"expected a mesh of 2 to {MOST_RANKS} ranks to draw, found 64"):
        draw_mesh({"data": 64})
    with pytest.raises(ValueError, match="expected a mesh of 2"):
        draw_mesh({"data": 1})
    with pytest.raises(ValueError, match="node"):
        draw_mesh(CUBE, 0)


# ---- layers on stages

LAYERS = [StageCost(0.001, 0.002, saved_bytes=2 * 2**20, static_bytes=(4 + 9 * (i == 0)) * 2**20) for i in range(6)]
SECONDS = [cost.forward_seconds + cost.backward_seconds for cost in LAYERS[:-1]] + [0.008]
CUTS = {"by bytes": [range(1), range(1, 3), range(3, 6)], "by time": [range(3), range(3, 5), range(5, 6)]}


def nbytes(layer, stage):
    return LAYERS[layer].static_bytes + (3 - stage) * LAYERS[layer].saved_bytes


def test_costs_may_depend_on_the_stage_and_every_layer_is_on_one():
    found = stage_costs(nbytes, CUTS["by time"])
    assert list(map(len, found)) == [3, 2, 1]
    assert found[0][0] == 19 * 2**20
    assert stage_costs(SECONDS, CUTS["by time"]) == [SECONDS[:3], SECONDS[3:5], SECONDS[5:]]


def test_the_bars_are_the_costs_and_the_words_name_the_dearest_stages():
    picture = draw_balance(CUTS, nbytes, SECONDS)
    for axes, costs, scale in zip(picture.figure.axes, (nbytes, SECONDS), (1 / 2**20, 1e3), strict=True):
        totals = [sum(stage) for cut in CUTS.values() for stage in stage_costs(costs, cut)]
        frames = [bar.get_height() for bar in axes.patches if not bar.get_fill()]
        assert frames == pytest.approx([scale * total for total in totals])
        drawn = sum(bar.get_height() for bar in axes.patches if bar.get_fill())
        assert drawn == pytest.approx(sum(frames))
        assert sum(not bar.get_fill() and bar.get_linewidth() == 2 for bar in axes.patches) == len(CUTS)
    most = {name: max(map(sum, stage_costs(nbytes, cut))) for name, cut in CUTS.items()}
    assert f"by bytes, stage 0 with {format_bytes(most['by bytes'])}" in picture.alt
    assert f"by time, stage 0 with {format_bytes(most['by time'])}" in picture.alt
    assert "by time, stage 0 with 9 ms" in picture.alt
    assert "by bytes, stage 2 with 14 ms" in picture.alt
    assert picture.png().startswith(PNG)


def test_cuts_of_different_layers_and_none_at_all_are_refused():
    with pytest.raises(ValueError, match="expected cuts of the same layers"):
        draw_balance({"one": [range(2)], "other": [range(3)]}, [1, 1, 1], [1, 1, 1])
    with pytest.raises(ValueError, match="expected cuts of the same layers"):
        draw_balance({}, [], [])
