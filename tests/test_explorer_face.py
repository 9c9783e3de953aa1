"""What the explorer draws, pixel by pixel, and how it answers: in a browser's bare page, with a model like Jupyter's.

Skipped without Chromium, unless MEMLAB_BROWSER=required says that there must be one.
"""

import base64
import functools
import itertools
import random
from pathlib import Path

import pytest

from memlab.book.explorer import columns
from memlab.book.style import COLOURS
from memlab.memory_timeline import Event, Line, Storage, Timeline
from memlab.units import MiB, format_bytes
from tests.browser_helpers import need_browser
from tests.tiers import some

need_browser()

from memlab.book.browser import browser  # noqa: E402

BOOK = Path(__file__).parents[1] / "memlab" / "book"
LINE = Line("f", "y = x")
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 24, 300 - 34  # the margins beside the axes; where they begin and end
LIGHT, DARK = ("#ffffff", "#111111"), ("#111111", "#ffffff")
OPEN = """async ([sent, values, [paper, ink], width]) => {
  if (window.face) face.close();
  const bytes = (text) => new DataView(Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)).buffer);
  const decoded = ([name, value]) => [name, value?.bytes === undefined ? value : bytes(value.bytes)];
  const timelines = sent.map((one) => Object.fromEntries(Object.entries(one).map(decoded)));
  const state = { timelines, shown: 0, event: null, title: "", ...values };
  window.listeners = new Set();
  window.model = {
    get: (name) => state[name],
    set: (name, value) => {
      const changed = state[name] !== value;
      state[name] = value;
      if (changed) [...listeners].filter((one) => one.names.includes(`change:${name}`)).forEach((one) => one.act());
    },
    save_changes: () => {},
    on: (names, act) => listeners.add({ names: names.split(" "), act }),
    off: (names, act) => listeners.forEach((one) => one.act === act && listeners.delete(one)),
  };
  document.body.style.margin = 0;
  window.root = document.createElement("div");
  root.className = "memlab-explorer";
  root.style = `width: ${width}px; --jp-layout-color0: ${paper}; --jp-content-font-color1: ${ink}`;
  document.body.replaceChildren(root);
  window.face = new Explorer(model, root);
  while (!face.width || face.frame) await new Promise(requestAnimationFrame);
}"""


@pytest.fixture(scope="module")
def page():
    """A page that knows the explorer's code and look."""
    with browser() as opened:
        page = opened.new_page(viewport={"width": 1000, "height": 900})
        page.failures = []
        page.on("pageerror", lambda error: page.failures.append(str(error)))
        page.add_style_tag(content=(BOOK / "explorer.css").read_text(encoding="utf-8"))
        code = (BOOK / "explorer.js").read_text(encoding="utf-8")
        page.add_script_tag(content=f"{code}\nwindow.Explorer = Explorer;", type="module")
        page.wait_for_function("() => window.Explorer")
        yield page


@pytest.fixture
def show(page):
    """A function that shows timelines in the page, which must end without an error."""

    def show(*timelines, budget=None, theme=LIGHT, width=900):
        sent = [sendable(timeline) | {"name": f"step {number}"} for number, timeline in enumerate(timelines)]
        categories = [{"name": name, "colour": colour, "hatch": ""} for name, colour in COLOURS.items()]
        page.evaluate(OPEN, [sent, {"budget": budget, "categories": categories}, theme, width])
        return page

    yield show
    assert page.failures == []


@functools.cache
def sendable(timeline):
    """The timeline's columns as JSON can have them."""
    sent = columns("", timeline)
    return {k: {"bytes": base64.b64encode(v).decode()} if isinstance(v, bytes) else v for k, v in sent.items()}


def storage(id, nbytes, category="activation"):
    return Storage(id, nbytes, category, (nbytes,), "uint8", "cpu", "add", "forward", LINE, "m", "", f"reason {id}")


def timeline(*changes, category="activation"):
    """A timeline of (storage, delta) events."""
    largest = {}
    for id, delta in changes:
        largest[id] = max(delta, largest.get(id, 0))
    return Timeline(
        [storage(id, nbytes, category) for id, nbytes in largest.items()],
        [Event(id, delta, "add", "forward", LINE) for id, delta in changes],
    )


@functools.cache
def births(count, category="activation"):
    """A step that only grows: its peak is its last moment."""
    return timeline(*((id, MiB) for id in range(count)), category=category)


@functools.cache
def busy(events, spike):
    """Births and deaths of all categories as chance has it, and for one moment, after event `spike`, far more."""
    chance = random.Random(0)
    storages, changes, alive = [], [], []
    for number in range(1, events + 1):
        if number == spike + 1:
            changes.append((alive.pop(), -(10**9)))
        elif number != spike and alive and chance.random() < 0.5:
            storage_ = alive.pop(chance.randrange(len(alive)))
            changes.append((storage_, -storages[storage_].nbytes))
        else:
            nbytes, category = chance.randrange(1, 10**6), chance.choice(list(COLOURS))
            one = storage(len(storages), *((10**9, "activation") if number == spike else (nbytes, category)))
            storages.append(one)
            alive.append(one.id)
            changes.append((one.id, one.nbytes))
    return Timeline(storages, [Event(id, delta, "add", "forward", LINE) for id, delta in changes])


RESIZED = timeline((1, 1000), (2, 500), (1, -400), (1, 900), (3, 1), (1, -1500), (1, 700), (2, -500), (3, -1))


def settle(page):
    page.evaluate("async () => { do await new Promise(requestAnimationFrame); while (face.frame); }")


def press(page, *keys):
    for key in keys:
        page.keyboard.press(key)
    settle(page)


def moment(page):
    return int(page.locator("canvas[tabindex]").get_attribute("aria-valuenow"))


def text(page, name):
    return page.locator(f".memlab-{name}").inner_text()


def colours(page, x, y, width=1, height=1):
    """What is drawn there: [red, green, blue, opacity] of each pixel, line by line."""
    return page.evaluate(
        """([x, y, width, height]) => {
          const { data } = face.base.getContext("2d").getImageData(Math.round(x), Math.round(y), width, height);
          return Array.from({ length: width * height }, (_, i) => [...data.slice(4 * i, 4 * i + 4)]);
        }""",
        [x, y, width, height],
    )


def inked(pixels):
    return sum(opacity > 100 for *_, opacity in pixels)


def alike(pixel, colour):
    wanted = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return pixel[3] > 200 and all(abs(one - other) < 40 for one, other in zip(pixel, wanted, strict=False))


def place(timelines, event, nbytes, budget=0):
    """Where a moment's column begins, and how high so many bytes stand: in a whole step, 900 pixels wide."""
    moments = max(len(one) for one in timelines) + 1
    highest = 1.1 * max(budget, *(one.peak_bytes for one in timelines))
    return LEFT + event / moments * (900 - LEFT - RIGHT), BOTTOM - nbytes / highest * (BOTTOM - TOP)


@some("events, spike", [(3001, 3001), (50_000, 33_333), (1717, 1000), (12, 12), (5, 3)], keep=3)
def test_no_view_of_a_step_however_long_leaves_out_its_fullest_moment(show, events, spike):
    lost = show(busy(events, spike)).evaluate(
        """() => {
          const { step, longest } = face;
          const most = (events) => Math.max(...Array.from(events, (event) => step.totals[event]));
          const lost = [];
          for (let n = 0; n < 50; n++) {
            const least = Math.min(10, longest);
            const width = n ? least + ((n * 37) % 101) / 101 * (longest - least) : longest;
            face.look([0, longest, ((n * 53) % 97) / 97 * longest][n % 3], width);
            const [from, to] = face.view;
            const seen = Array.from({ length: Math.ceil(to) - Math.floor(from) }, (_, i) => Math.floor(from) + i);
            const wanted = most(seen.filter((event) => event <= step.length));
            const { points, end } = face.columns(step);
            const wide = points.filter(([x], i) => (i + 1 < points.length ? points[i + 1][0] : end) > x);
            const under = Array.from({ length: Math.floor(face.width) + 9 }, (_, i) => face.eventAt(58 + i));
            const found = [most(wide.map(([, event]) => event)), most(under)];
            if (found.some((bytes) => bytes !== wanted)) lost.push([from, to, wanted, ...found]);
          }
          return lost;
        }"""
    )
    assert lost == []


def test_every_moment_has_a_column_of_its_own_and_the_last_is_as_wide_as_any(show):
    one = births(5)
    page = show(one)
    for event, part in itertools.product(range(6), (0.1, 0.9)):
        x, _ = place([one], event + part, 0)
        page.mouse.move(x, page.locator("canvas[tabindex]").bounding_box()["y"] + 100)
        settle(page)
        assert moment(page) == event and text(page, "readout").startswith(f"{format_bytes(event * MiB)} held")
        for height, filled in ((event + 0.2, False), (event - 0.2, event > 0)):
            pixel = colours(page, x, place([one], 0, height * MiB)[1])[0]
            assert alike(pixel, COLOURS["activation"]) == filled
    press(page, "Control+Home")
    assert moment(page) == 5
    page = show(Timeline([], []))
    page.locator("canvas[tabindex]").focus()
    press(page, "End", "+", "ArrowRight", "PageDown", "p")
    assert moment(page) == 0 and "0 storages" in text(page, "foot")


def test_what_is_alive_and_how_long_is_as_in_python_also_where_storages_are_resized(show):
    for one in (RESIZED, busy(300, 100)):
        ids = list(one.storages)
        alive, lives = show(one).evaluate(
            """(count) => [
              Array.from({ length: face.step.length + 1 }, (_, event) => face.step.alive(event)),
              Array.from({ length: count }, (_, storage) => face.step.lifetime(storage)),
            ]""",
            len(ids),
        )
        for event, found in enumerate(alive):
            assert {(ids[i], nbytes) for i, nbytes in found} == {(s.id, s.nbytes) for s in one.alive(event)}
        assert [tuple(life) for life in lives] == [one.lifetime(id) for id in ids]


@some(
    "events, spike, theme",
    [
        (2000, 1999, LIGHT),
        (5, 3, LIGHT),
        (50_000, 33_333, LIGHT),
        (50_000, 33_333, DARK),
        (2000, 1999, DARK),
        (5, 3, DARK),
    ],
    keep=2,
)
def test_the_peak_has_the_colour_of_its_category_up_to_its_top(show, events, spike, theme):
    one = busy(events, spike)
    page = show(one, theme=theme)
    x, y = place([one], spike, one.peak_bytes)
    width = max(1, int(place([one], spike + 1, 0)[0] - x))
    found = [pixel for pixel in colours(page, x - 1, y + 4, width + 2) if alike(pixel, COLOURS["activation"])]
    assert len(found) >= min(width, 2)
    assert inked(colours(page, x, y - 6)) == 1  # the mark of the peak


def test_the_budget_is_a_line_across_the_whole_step(show):
    for budget, drawn in ((9 * MiB, True), (None, False)):
        page = show(births(5), births(9), budget=budget)
        _, y = place([births(9)], 0, 9 * MiB, 9 * MiB)
        line = colours(page, LEFT, y - 1, 500, 2)
        assert (inked(line) > 250) == drawn


def test_each_other_timeline_is_drawn_as_an_outline(show):
    x, y = place([births(9)], 8.5, 8 * MiB)
    page = show(births(5), births(9))
    assert inked(colours(page, x - 20, y - 1, 40, 3)) > 20 and inked(colours(page, x - 20, y + 10, 40, 9)) == 0
    page.locator("select").select_option("1")
    settle(page)
    assert alike(*colours(page, x, y + 10), COLOURS["activation"])


@pytest.mark.parametrize("pin", [3, 1999])
def test_another_timeline_opens_at_its_peak_wherever_the_pin_was(show, pin):
    page = show(busy(2000, 1500), births(5))
    page.evaluate("(pin) => model.set('event', pin)", pin)
    settle(page)
    assert f"pinned event {pin:,}" in text(page, "foot")
    page.locator("select").select_option("1")
    settle(page)
    assert page.evaluate("() => [model.get('event'), model.get('shown')]") == [None, 1]
    assert moment(page) == 5 and "pinned" not in text(page, "foot")
    page.evaluate("() => model.set('event', 9)")  # beyond the end
    settle(page)
    assert moment(page) == 5 and "pinned event 5" in text(page, "foot")


def test_only_the_main_button_pins(show):
    page = show(births(5))
    for button, pinned in (("right", None), ("middle", None), ("left", 2)):
        x, _ = place([births(5)], 2.5, 0)
        page.locator("canvas[tabindex]").click(position={"x": x, "y": 100}, button=button)
        assert page.evaluate("() => model.get('event')") == pinned


def test_a_category_left_out_of_the_table_is_told_and_a_long_table_says_how_much_of_it_is_shown(show):
    page = show(births(5))
    chip = page.locator(".memlab-chips button", has_text="activation")
    for pressed, rows in (("true", 5), ("false", 0), ("true", 5)):
        assert chip.get_attribute("aria-pressed") == pressed
        assert page.locator("tbody tr:not([hidden])").count() == rows
        chip.click()
        settle(page)
    page = show(births(300))
    assert page.locator("tbody tr:not([hidden])").count() == 200
    assert "the first 200 of 300 storages, 300.0 MiB alive" in text(page, "foot")


def test_one_row_can_be_reached_with_tab_and_the_focus_is_not_lost_when_the_table_shrinks(show):
    page = show(births(9))
    assert page.locator("table").get_attribute("role") == "grid"
    reachable = lambda: page.evaluate("() => [...face.body.rows].flatMap((row, i) => row.tabIndex ? [] : [i])")  # noqa: E731
    focused = lambda: page.evaluate("() => document.activeElement.sectionRowIndex ?? document.activeElement.role")  # noqa: E731
    assert reachable() == [0]
    page.locator("tbody tr").first.focus()
    press(page, *["ArrowDown"] * 6)
    assert reachable() == [6] and focused() == 6
    press(page, *["ArrowLeft"] * 5)  # event 4: four rows are left
    assert moment(page) == 4 and reachable() == [3] and focused() == 3
    press(page, "Home")
    assert focused() == "slider"


def test_letters_are_kept_from_jupyterlab_and_chords_are_not_unless_they_edit_the_search(show):
    page = show(births(5))
    page.evaluate(  # JupyterLab asks on the way down; what is above the explorer hears on the way up
        """() => {
          window.asked = [];
          window.heard = [];
          const kept = () => root.hasAttribute("data-lm-suppress-shortcuts");
          document.addEventListener("keydown", ({ key }) => asked.push([key, kept()]), { capture: true });
          document.body.addEventListener("keydown", ({ key }) => heard.push(key));
        }"""
    )
    page.locator("canvas[tabindex]").focus()
    press(page, "d", "Control+s", "Meta+z")
    page.locator("input").focus()
    press(page, "x", "Control+z", "Control+s")
    asked, heard = ([one for one in keys if one[0][0] in "dsxz"] for keys in page.evaluate("() => [asked, heard]"))
    assert asked == [["d", True], ["s", False], ["z", False], ["x", True], ["z", True], ["s", False]]
    assert heard == ["s", "z", "z", "s"]


def test_a_closed_explorer_listens_to_nothing_and_holds_nothing(show):
    page = show(busy(2000, 100))
    assert page.evaluate("() => listeners.size") == 1
    left = page.evaluate("() => { face.close(); return [listeners.size, root.children.length, face.steps]; }")
    assert left == [0, 0, None]
    page.mouse.move(300, 200)
    press(page, "Control", "p")
    page.evaluate("() => { root.style.width = '500px'; window.face = null; }")
