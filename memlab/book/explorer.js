// The memory explorer's face. The kernel sends each timeline once; every moment after that is computed here, from the
// same events as in Python, so the explorer also answers while the kernel is busy training.

const MOST_ROWS = 200;
const HEIGHT = 300;
const MARGIN = { left: 62, right: 12, top: 24, bottom: 34 };
const COLUMNS = ["size", "category", "shape", "module", "line", "why it is there"];
const MINUS = "\u2212";

function formatBytes(bytes) {
  if (bytes < 0) return MINUS + formatBytes(-bytes);
  if (bytes < 1024) return `${bytes} B`;
  const units = ["KiB", "MiB", "GiB", "TiB"];
  let scaled = bytes / 1024;
  while (units.length > 1 && Number(scaled.toFixed(1)) >= 1024) {
    scaled /= 1024;
    units.shift();
  }
  return `${scaled.toLocaleString("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 })} ${units[0]}`;
}

const signed = (bytes) => (bytes < 0 ? formatBytes(bytes) : `+${formatBytes(bytes)}`);
const count = (number) => number.toLocaleString("en");
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// ---- one timeline: what is held, and by whom, at any event

class Step {
  constructor(sent, categories) {
    const numbers = (view, kind) => new kind(view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength));
    this.name = sent.name;
    this.peak = sent.peak;
    this.categories = categories;
    this.before = numbers(sent.before, Float64Array);
    this.delta = numbers(sent.delta, Float64Array);
    this.storage = numbers(sent.storage, Int32Array);
    this.category = numbers(sent.category, Int32Array);
    this.length = this.delta.length;
    const texts = (view) => Array.from(numbers(view, Int32Array), (i) => sent.texts[i]);
    this.op = texts(sent.op);
    this.phase = texts(sent.phase);
    this.rows = ["shape", "module", "line", "reason"].map((column) => texts(sent[column]));
    this.searched = this.rows[1].map((module, i) => `${module}\n${this.rows[2][i]}\n${this.rows[3][i]}`.toLowerCase());
    this.addUp();
  }

  // For each category the height of its upper edge after each event; the last edge is the total.
  addUp() {
    const held = new Float64Array(this.categories.length);
    this.before.forEach((bytes, i) => (held[this.category[i]] += bytes));
    this.edges = this.categories.map(() => new Float64Array(this.length + 1));
    for (let event = 0; event <= this.length; event++) {
      if (event > 0) held[this.category[this.storage[event - 1]]] += this.delta[event - 1];
      let sum = 0;
      held.forEach((bytes, i) => (this.edges[i][event] = sum += bytes));
    }
    this.totals = this.edges[this.edges.length - 1];
  }

  heldAt(event, category) {
    return this.edges[category][event] - (category ? this.edges[category - 1][event] : 0);
  }

  // [storage, bytes] of everything alive just after an event.
  alive(event) {
    const held = this.before.slice();
    for (let i = 0; i < event; i++) held[this.storage[i]] += this.delta[i];
    const found = [];
    held.forEach((bytes, i) => bytes > 0 && found.push([i, bytes]));
    return found;
  }

  lifetime(storage) {
    let held = this.before[storage];
    let born = held > 0 ? 0 : null;
    let freed = null;
    for (let i = 0; i < this.length; i++) {
      if (this.storage[i] !== storage) continue;
      held += this.delta[i];
      if (born === null) born = i + 1;
      freed = held > 0 ? null : i + 1;
    }
    return [born, freed];
  }

  fullest(from, to) {
    let best = from;
    for (let event = from + 1; event < to; event++) if (this.totals[event] > this.totals[best]) best = event;
    return best;
  }

  describe(event) {
    const moment = `event ${count(event)} of ${count(this.length)}`;
    if (event === 0) return [`${moment} · before the first op`, "what the step found there"];
    const i = event - 1;
    const what = this.rows[3][this.storage[i]] || this.categories[this.category[this.storage[i]]].name;
    const change = this.delta[i] < 0 ? `${signed(this.delta[i])} freed` : `${signed(this.delta[i])} born`;
    return [`${moment} · ${this.phase[i]} · ${this.op[i]}`, `${change}: ${what}`];
  }
}

// ---- the explorer of one or several steps

class Explorer {
  constructor(model, root) {
    this.model = model;
    this.root = root;
    this.categories = model.get("categories");
    this.steps = model.get("timelines").map((sent) => new Step(sent, this.categories));
    this.budget = model.get("budget");
    // A step of n events has n + 1 moments, and each is a column: moment i is drawn from x(i) to x(i + 1).
    this.longest = Math.max(2, ...this.steps.map((step) => step.length + 1));
    this.highest = Math.max(1, this.budget || 0, ...this.steps.map((step) => step.totals[step.peak])) * 1.1;
    this.view = [0, this.longest];
    this.hidden = new Set();
    this.order = { column: 0, down: true };
    this.selected = null;
    this.reach = 0;
    this.ended = new AbortController();
    this.build();
    this.listen();
    this.adopt();
  }

  get step() {
    return this.steps[this.model.get("shown")];
  }

  get pinned() {
    const event = this.model.get("event");
    return event === null ? null : clamp(event, 0, this.step.length);
  }

  // The moment that the table tells of: the pin, or else where the pointer or the arrow keys last were.
  get moment() {
    return this.pinned === null ? this.event : this.pinned;
  }

  build() {
    const button = (label, key, title) => make("button", { type: "button", "data-key": key, title }, label);
    this.chooser = make("select", { "aria-label": "which timeline the table tells of" });
    this.steps.forEach((step, i) => this.chooser.append(make("option", { value: i }, step.name)));
    this.chooser.hidden = this.steps.length < 2;
    this.readout = make("div", { class: "memlab-readout" });
    this.base = make("canvas", { "aria-hidden": "true" });
    this.top = make("canvas", { tabindex: 0, role: "slider", "aria-label": "moment of the step", "aria-valuemin": 0 });
    this.search = make("input", { type: "search", placeholder: "search line, module or reason" });
    this.search.setAttribute("aria-label", "search by line, module or reason");
    this.chips = this.categories.map((category, i) => this.chip(category, i));
    this.heads = COLUMNS.map((name, i) => make("button", { type: "button", "data-column": i }, name));
    this.body = make("tbody");
    const names = make("tr", {}, ...this.heads.map((head) => make("th", { scope: "col" }, head)));
    this.detail = make("div", { class: "memlab-detail" });
    this.foot = make("div", { class: "memlab-foot", role: "status" });
    this.root.append(
      make("div", { class: "memlab-plot" },
        make("div", { class: "memlab-title" }, this.model.get("title")),
        make("div", { class: "memlab-tools" }, this.chooser,
          button("peak", "p", "jump to the peak (P)"), button("+", "+", "zoom in (+)"),
          button(MINUS, "-", "zoom out (\u2212)"), button("whole step", "0", "show the whole step (0)"), this.readout),
        make("div", { class: "memlab-canvas" }, this.base, this.top),
        make("div", { class: "memlab-hint" },
          "hover or \u2190 \u2192 to move (Shift: ten at a time, Page keys: a phase) · click or Enter to pin, Esc to let go · " +
          "P peak · Ctrl + wheel or + \u2212 to zoom, drag to pan, 0 for the whole step")),
      make("div", { class: "memlab-list" },
        make("div", { class: "memlab-chips", role: "group", "aria-label": "categories in the table" }, ...this.chips),
        this.search,
        make("div", { class: "memlab-scroll" },
          make("table", { role: "grid", "aria-label": "what is held" }, make("thead", {}, names), this.body)),
        this.detail, this.foot));
  }

  chip(category, i) {
    const swatch = make("canvas", { width: 14, height: 14, "aria-hidden": "true" });
    const pen = swatch.getContext("2d");
    pen.fillStyle = this.fill(pen, category, 1);
    pen.fillRect(0, 0, 14, 14);
    pen.strokeRect(0.5, 0.5, 13, 13);
    return make("button", { type: "button", "data-category": i, "aria-pressed": "true" }, swatch, make("span"));
  }

  listen() {
    const on = (target, name, act, options = {}) =>
      target.addEventListener(name, act, { signal: this.ended.signal, ...options });
    on(this.root, "keydown", (event) => this.pressed(event));
    on(window, "keydown", (event) => this.shield(event), { capture: true }); // the window hears of it before JupyterLab
    on(this.root, "click", (event) => this.clicked(event));
    on(this.body, "focusin", (event) => this.reached(event.target.closest("tr").sectionRowIndex));
    on(this.chooser, "change", () => this.save({ event: null, shown: Number(this.chooser.value) }));
    on(this.search, "input", () => this.changed());
    on(this.top, "pointerdown", (event) => {
      if (event.button !== 0) return;
      this.drag = { x: event.offsetX, view: [...this.view], moved: false };
      this.top.setPointerCapture(event.pointerId);
    });
    on(this.top, "pointermove", (event) => this.moved(event));
    on(this.top, "pointerup", (event) => {
      if (this.drag && !this.drag.moved) this.pin(this.pinned === null ? this.eventAt(event.offsetX) : null);
      this.drag = null;
    });
    on(this.top, "pointercancel", () => (this.drag = null));
    on(this.top, "dblclick", () => this.zoom(Infinity));
    on(this.top, "wheel", (event) => this.wheeled(event), { passive: false });
    this.follow = () => this.adopt();
    this.model.on("change:event change:shown", this.follow);
    this.watch = new ResizeObserver(() => this.resize());
    this.watch.observe(this.root);
  }

  close() {
    this.ended.abort();
    this.watch.disconnect();
    this.model.off("change:event change:shown", this.follow);
    cancelAnimationFrame(this.frame);
    this.root.replaceChildren();
    this.steps = this.model = this.current = null; // whoever still holds the closed explorer does not hold its numbers
  }

  // ---- what the reader does

  // The letters typed here are no commands of JupyterLab's, but its chords are (Ctrl+S), unless they edit the search.
  shield({ key, ctrlKey, metaKey, target }) {
    const chord = (ctrlKey || metaKey) && !(target === this.search && "acvxyz".includes(key.toLowerCase()));
    this.root.toggleAttribute("data-lm-suppress-shortcuts", !chord);
  }

  pressed(event) {
    if (event.ctrlKey || event.metaKey) return;
    event.stopPropagation();
    if (event.altKey || event.target === this.search || event.target === this.chooser) return;
    if (event.target.closest("tbody") && this.pressedInTable(event)) return;
    const far = event.shiftKey ? 10 : 1;
    const acts = {
      ArrowLeft: () => this.go(this.moment - far),
      ArrowRight: () => this.go(this.moment + far),
      Home: () => this.go(0),
      End: () => this.go(this.step.length),
      PageDown: () => this.go(this.boundary(1)),
      PageUp: () => this.go(this.boundary(-1)),
      p: () => this.go(this.step.peak),
      "+": () => this.zoom(0.5),
      "=": () => this.zoom(0.5),
      "-": () => this.zoom(2),
      0: () => this.zoom(Infinity),
      Escape: () => this.pin(null),
    };
    if (event.target === this.top) acts.Enter = acts[" "] = () => this.pin(this.pinned === null ? this.event : null);
    const act = acts[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (!act) return;
    event.preventDefault();
    act();
  }

  pressedInTable(event) {
    const row = event.target.closest("tr");
    const next = { ArrowDown: row.nextElementSibling, ArrowUp: row.previousElementSibling }[event.key];
    if (next && !next.hidden) next.focus();
    else if (event.key === "Enter" || event.key === " ") this.select(row);
    else return false;
    event.preventDefault();
    return true;
  }

  // Tab reaches one row of the table, as of any grid: the one that had the focus last.
  reached(row) {
    const { rows } = this.body;
    if (rows[this.reach]) rows[this.reach].tabIndex = -1;
    if (rows[row]) rows[row].tabIndex = 0;
    this.reach = row;
  }

  clicked(event) {
    const button = event.target.closest("button");
    const row = event.target.closest("tbody tr");
    if (row) this.select(row);
    if (!button) return;
    const { key, category, column } = button.dataset;
    if (key) ({ p: () => this.go(this.step.peak), "+": () => this.zoom(0.5), "-": () => this.zoom(2), 0: () => this.zoom(Infinity) })[key]();
    if (category !== undefined) {
      if (!this.hidden.delete(Number(category))) this.hidden.add(Number(category));
      button.setAttribute("aria-pressed", !this.hidden.has(Number(category)));
    }
    if (column !== undefined) {
      const same = this.order.column === Number(column);
      this.order = { column: Number(column), down: same ? !this.order.down : Number(column) === 0 };
    }
    this.changed();
  }

  moved(event) {
    if (this.drag && Math.abs(event.offsetX - this.drag.x) > 3) this.drag.moved = true;
    if (this.drag && this.drag.moved) {
      const [from, to] = this.drag.view;
      return this.look(from - ((event.offsetX - this.drag.x) / this.width) * (to - from), to - from);
    }
    this.event = this.eventAt(event.offsetX);
    this.changed();
  }

  wheeled(event) {
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      this.zoom(event.deltaY < 0 ? 0.8 : 1.25, this.eventAt(event.offsetX));
    } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      const [from, to] = this.view;
      this.look(from + (((event.deltaX || event.deltaY) / this.width) * (to - from)), to - from);
    }
  }

  go(event) {
    event = clamp(event, 0, this.step.length);
    this.event = event;
    if (this.pinned !== null) this.pin(event);
    const [from, to] = this.view;
    if (event < from || event + 1 > to) this.look(event - (to - from) / 2, to - from);
    this.changed();
  }

  // The first event of the next phase (1) or of the one before it (-1); at the ends, the step's last or first moment.
  boundary(direction) {
    const starts = this.phases().map(([, start]) => start + 1);
    if (direction > 0) return starts.find((start) => start > this.moment) ?? this.step.length;
    return starts.reverse().find((start) => start < this.moment) ?? 0;
  }

  zoom(factor, around = this.moment) {
    const [from, to] = this.view;
    const width = clamp((to - from) * factor, Math.min(10, this.longest), this.longest);
    this.look(around - ((around - from) / (to - from)) * width, width);
  }

  look(from, width) {
    from = clamp(from, 0, this.longest - width);
    this.view = [from, from + width];
    this.stale = true;
    this.changed();
  }

  pin(event) {
    if (event !== null) this.event = event;
    this.save({ event });
  }

  select(row) {
    const storage = Number(row.dataset.storage);
    this.selected = this.selected === storage ? null : storage;
    this.changed();
  }

  // One after the other, as the kernel does it: a pin is let go before the timeline that it is of.
  save(values) {
    for (const [name, value] of Object.entries(values)) this.model.set(name, value);
    this.model.save_changes();
  }

  // The kernel, or the reader through `save`, has set the pin or the timeline.
  adopt() {
    if (this.current !== this.step) {
      this.current = this.step;
      this.selected = null;
      this.event = this.step.peak;
      this.chooser.value = this.model.get("shown");
      this.stale = true;
    }
    if (this.pinned !== null) this.event = this.pinned;
    this.changed();
  }

  // ---- what the reader sees

  changed() {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      if (!this.width) return;
      if (this.stale) this.drawBase();
      this.drawTop();
      this.tell();
      this.list();
    });
  }

  resize() {
    const outer = this.base.parentElement.clientWidth;
    if (!outer || outer === this.outer) return;
    this.outer = outer;
    this.width = outer - MARGIN.left - MARGIN.right;
    const ratio = window.devicePixelRatio || 1;
    for (const canvas of [this.base, this.top]) {
      canvas.width = outer * ratio;
      canvas.height = HEIGHT * ratio;
      canvas.style.width = `${outer}px`;
      canvas.style.height = `${HEIGHT}px`;
      canvas.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
    }
    this.stale = true;
    this.changed();
  }

  x(event) {
    return MARGIN.left + ((event - this.view[0]) / (this.view[1] - this.view[0])) * this.width;
  }

  y(bytes) {
    return HEIGHT - MARGIN.bottom - (bytes / this.highest) * (HEIGHT - MARGIN.top - MARGIN.bottom);
  }

  sees(event) {
    return this.view[0] < event + 1 && event < this.view[1];
  }

  // Where many events share a pixel, the fullest of them: neither the drawing nor the pointer misses a peak.
  eventAt(pixel) {
    const perPixel = (this.view[1] - this.view[0]) / this.width;
    const at = this.view[0] + clamp(pixel - MARGIN.left, 0, this.width - 1) * perPixel;
    const first = Math.min(Math.floor(at), this.step.length);
    return this.step.fullest(first, clamp(Math.ceil(at + perPixel), first + 1, this.after(this.step)));
  }

  // The first moment after those of a step that are in view.
  after(step) {
    return Math.min(Math.ceil(this.view[1]), step.length + 1);
  }

  // [x, event] of each drawn column of a step.
  columns(step) {
    const [from, to] = this.view;
    const start = Math.floor(from);
    const stop = this.after(step);
    const perColumn = Math.max(1, (to - from) / this.width);
    const many = Math.ceil((Math.min(to, stop) - start) / perColumn - 0.001);
    const points = Array.from({ length: Math.max(0, many) }, (_, i) => {
      const at = start + i * perColumn;
      const event = step.fullest(Math.floor(at), i + 1 < many ? Math.floor(at + perColumn) : stop);
      return [clamp(this.x(at), MARGIN.left, MARGIN.left + this.width), event];
    });
    return { points, end: clamp(this.x(step.length + 1), MARGIN.left, MARGIN.left + this.width) };
  }

  fill(pen, { colour, hatch }, ratio) {
    if (!hatch) return colour;
    const tile = make("canvas", { width: 8 * ratio, height: 8 * ratio });
    const brush = tile.getContext("2d");
    brush.scale(ratio, ratio);
    brush.fillStyle = colour;
    brush.fillRect(0, 0, 8, 8);
    brush.lineWidth = 1;
    const strokes = {
      "/": [[-2, 10, 10, -2], [-2, 2, 2, -2], [6, 10, 10, 6]],
      "\\": [[-2, -2, 10, 10], [6, -2, 10, 2], [-2, 6, 2, 10]],
      "+": [[4, 0, 4, 8], [0, 4, 8, 4]],
      ".": [[3, 4, 5, 4]],
    };
    strokes.x = [...strokes["/"], ...strokes["\\"]];
    brush.beginPath();
    for (const [x0, y0, x1, y1] of strokes[hatch]) {
      brush.moveTo(x0, y0);
      brush.lineTo(x1, y1);
    }
    brush.stroke();
    const pattern = pen.createPattern(tile, "repeat");
    pattern.setTransform(new DOMMatrix().scale(1 / ratio));
    return pattern;
  }

  drawBase() {
    this.stale = false;
    const pen = this.base.getContext("2d");
    const ink = getComputedStyle(this.root).color;
    const ratio = window.devicePixelRatio || 1;
    pen.clearRect(0, 0, this.outer, HEIGHT);
    pen.font = "11px sans-serif";
    pen.lineJoin = "round";
    this.drawAxes(pen, ink);
    const { points, end } = this.columns(this.step);
    let lower = new Float64Array(this.step.length + 1);
    this.categories.forEach((category, i) => {
      const upper = this.step.edges[i];
      if (points.some(([, event]) => upper[event] > lower[event])) {
        pen.beginPath();
        this.trace(pen, points, end, upper, false);
        this.trace(pen, points, end, lower, true);
        pen.closePath();
        pen.fillStyle = this.fill(pen, category, ratio);
        pen.fill();
        pen.strokeStyle = ink;
        pen.lineWidth = 0.5;
        if (this.roomy) pen.stroke();
      }
      lower = upper;
    });
    pen.beginPath();
    this.trace(pen, points, end, this.step.totals, false, !this.roomy);
    pen.strokeStyle = ink;
    pen.lineWidth = 1;
    pen.stroke();
    this.steps.forEach((step, i) => step !== this.step && this.drawOutline(pen, ink, step, i));
    this.steps.forEach((step) => this.drawPeak(pen, ink, step));
    if (this.budget) this.drawBudget(pen, ink);
  }

  // Outlines around columns of a pixel or two would leave nothing of their colour: those get a cap each.
  get roomy() {
    return this.width / (this.view[1] - this.view[0]) >= 3;
  }

  trace(pen, points, end, edge, back, caps = false) {
    const corners = points.flatMap(([x, event], i) => {
      const right = i + 1 < points.length ? points[i + 1][0] : end;
      return [[x, this.y(edge[event])], [right, this.y(edge[event])]];
    });
    if (back) corners.reverse();
    corners.forEach(([x, y], i) => (caps && i % 2 === 0 ? pen.moveTo(x, y) : pen.lineTo(x, y)));
  }

  drawOutline(pen, ink, step, i) {
    const { points, end } = this.columns(step);
    pen.beginPath();
    this.trace(pen, points, end, step.totals, false);
    pen.strokeStyle = getComputedStyle(this.root).backgroundColor;
    pen.lineWidth = 4;
    pen.stroke();
    pen.strokeStyle = ink;
    pen.setLineDash([[6, 3], [2, 2], [8, 3, 2, 3]][i % 3]);
    pen.lineWidth = 1.5;
    pen.stroke();
    pen.setLineDash([]);
  }

  drawPeak(pen, ink, step) {
    if (!this.sees(step.peak)) return;
    const [x, y] = [Math.max(this.x(step.peak), MARGIN.left), this.y(step.totals[step.peak])];
    pen.fillStyle = ink;
    pen.beginPath();
    pen.moveTo(x, y - 1);
    pen.lineTo(x - 5, y - 9);
    pen.lineTo(x + 5, y - 9);
    pen.fill();
    const label = (this.steps.length > 1 ? `${step.name}: ` : "peak ") + formatBytes(step.totals[step.peak]);
    const room = x + 10 + pen.measureText(label).width < MARGIN.left + this.width;
    pen.textAlign = room ? "left" : "right";
    pen.lineWidth = 4;
    pen.strokeStyle = getComputedStyle(this.root).backgroundColor;
    pen.strokeText(label, room ? x + 9 : x - 9, y - 3);
    pen.fillText(label, room ? x + 9 : x - 9, y - 3);
  }

  drawBudget(pen, ink) {
    const y = this.y(this.budget);
    pen.strokeStyle = pen.fillStyle = ink;
    pen.lineWidth = 1.5;
    pen.setLineDash([8, 4]);
    pen.beginPath();
    pen.moveTo(MARGIN.left, y);
    pen.lineTo(MARGIN.left + this.width, y);
    pen.stroke();
    pen.setLineDash([]);
    pen.textAlign = "right";
    const words = `budget ${formatBytes(this.budget)}`;
    pen.strokeStyle = getComputedStyle(this.root).backgroundColor; // a rim, to be read on any colour
    pen.lineWidth = 3;
    pen.strokeText(words, MARGIN.left + this.width - 4, y - 5);
    pen.fillText(words, MARGIN.left + this.width - 4, y - 5);
  }

  drawAxes(pen, ink) {
    const bottom = HEIGHT - MARGIN.bottom;
    pen.strokeStyle = pen.fillStyle = ink;
    pen.lineWidth = 1;
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    for (const bytes of ticks(this.highest, 7, 2)) {
      pen.fillText(formatBytes(bytes), MARGIN.left - 6, this.y(bytes));
      pen.globalAlpha = 0.15;
      pen.fillRect(MARGIN.left, Math.round(this.y(bytes)), this.width, 1);
      pen.globalAlpha = 1;
    }
    pen.textBaseline = "alphabetic";
    pen.textAlign = "center";
    const [from, to] = this.view;
    const every = ticks(to - from, Math.max(2, this.width / 90), 10)[1] || 1;
    for (let at = Math.ceil(from / every) * every; at < to; at += every) {
      const half = pen.measureText(count(at)).width / 2;
      if (Number.isInteger(at)) pen.fillText(count(at), Math.min(this.x(at), this.outer - half - 1), bottom + 14);
    }
    pen.fillText("event (an allocation or a free)", MARGIN.left + this.width / 2, bottom + 29);
    pen.textAlign = "left";
    for (const [phase, start, stop] of this.phases()) {
      const [left, right] = [Math.max(this.x(start), MARGIN.left), Math.min(this.x(stop), MARGIN.left + this.width)];
      if (right - left < pen.measureText(phase).width + 6) continue;
      pen.globalAlpha = 0.5;
      pen.fillRect(Math.round(left), MARGIN.top - 6, 1, bottom - MARGIN.top + 6);
      pen.globalAlpha = 1;
      pen.fillText(phase, left + 4, MARGIN.top - 8);
    }
  }

  phases() {
    const { phase, length } = this.step;
    const spans = [];
    for (let i = 0; i < length; i++) {
      if (i && phase[i] === phase[i - 1]) spans[spans.length - 1][2] = i + 1;
      else spans.push([phase[i], i, i + 1]);
    }
    return spans;
  }

  drawTop() {
    const pen = this.top.getContext("2d");
    const ink = getComputedStyle(this.root).color;
    const bottom = HEIGHT - MARGIN.bottom;
    pen.clearRect(0, 0, this.outer, HEIGHT);
    pen.fillStyle = pen.strokeStyle = ink;
    if (this.selected !== null) {
      const [born, freed] = this.step.lifetime(this.selected);
      const left = clamp(this.x(born), MARGIN.left, MARGIN.left + this.width);
      const right = clamp(this.x(freed === null ? this.step.length + 1 : freed), MARGIN.left, MARGIN.left + this.width);
      pen.globalAlpha = 0.12;
      pen.fillRect(left, MARGIN.top, Math.max(1, right - left), bottom - MARGIN.top);
      pen.globalAlpha = 1;
      pen.fillRect(left, bottom, Math.max(2, right - left), 4);
    }
    for (const [event, pinned] of [[this.event, false], [this.pinned, true]]) {
      if (event === null || !this.sees(event)) continue;
      const x = Math.max(this.x(event), MARGIN.left);
      pen.setLineDash(pinned ? [] : [3, 2]);
      pen.lineWidth = pinned ? 2 : 1;
      pen.beginPath();
      pen.moveTo(x, MARGIN.top - 4);
      pen.lineTo(x, bottom);
      pen.stroke();
      pen.beginPath();
      pen.arc(x, this.y(this.step.totals[event]), pinned ? 4 : 3, 0, 7);
      pen.fill();
    }
    pen.setLineDash([]);
  }

  tell() {
    const { step, event, pinned } = this;
    const [moment, change] = step.describe(event);
    const held = step.totals[event];
    const first = make("div", {}, make("b", {}, formatBytes(held)), ` held · ${moment}`);
    const notes = [change];
    if (pinned !== null) notes.push(pinned === event ? "pinned" : `${signed(held - step.totals[pinned])} from the pin at ${count(pinned)}`);
    for (const other of this.steps) {
      if (other !== step && event <= other.length) notes.push(`${other.name}: ${formatBytes(other.totals[event])} here`);
    }
    this.readout.replaceChildren(first, make("div", {}, notes.join(" · ")));
    this.top.setAttribute("aria-valuemax", step.length);
    this.top.setAttribute("aria-valuenow", event);
    this.top.setAttribute("aria-valuetext", `${formatBytes(held)} held, ${moment}, ${notes.join(", ")}`);
  }

  list() {
    const { step, moment } = this;
    const words = this.search.value.trim().toLowerCase();
    this.chips.forEach((chip, i) => {
      const held = step.heldAt(moment, i);
      chip.lastChild.textContent = `${this.categories[i].name} ${formatBytes(held)}`;
      chip.hidden = !step.category.includes(i);
    });
    const alive = step.alive(moment);
    const found = alive.filter(([i]) => !this.hidden.has(step.category[i]) && step.searched[i].includes(words));
    const { column, down } = this.order;
    const text = (i) => (column === 1 ? this.categories[step.category[i]].name : step.rows[column - 2][i]);
    const bySize = (a, b) => b[1] - a[1] || a[0] - b[0];
    const compare = column === 0 ? bySize : (a, b) => -text(a[0]).localeCompare(text(b[0])) || bySize(b, a);
    found.sort(down ? compare : (a, b) => compare(b, a));
    this.fillRows(found.slice(0, MOST_ROWS));
    this.heads.forEach((head, i) => {
      const sorted = i === column ? (down ? "descending" : "ascending") : "none";
      head.parentElement.setAttribute("aria-sort", sorted);
    });
    const sum = (rows) => formatBytes(rows.reduce((total, [, bytes]) => total + bytes, 0));
    const shown = found.length > MOST_ROWS ? `the first ${MOST_ROWS} of ` : "";
    if (this.selected !== null) {
      const [born, freed] = step.lifetime(this.selected);
      const life = freed === null ? `from event ${count(born)} on` : `from event ${count(born)} to ${count(freed)}`;
      const name = this.categories[step.category[this.selected]].name;
      this.detail.textContent = [name, ...step.rows.map((column) => column[this.selected]), life].filter(Boolean).join(" · ");
    } else this.detail.textContent = "";
    this.foot.textContent =
      `${shown}${count(found.length)} storages, ${sum(found)}` +
      (found.length < alive.length ? `, of ${count(alive.length)} alive, ${sum(alive)}` : " alive") +
      ` at ${this.pinned === null ? "" : "pinned "}event ${count(moment)}`;
  }

  fillRows(found) {
    const focused = this.body.contains(document.activeElement);
    while (this.body.rows.length < found.length) {
      this.body.append(make("tr", { tabindex: -1 }, ...COLUMNS.map(() => make("td"))));
    }
    for (let i = 0; i < this.body.rows.length; i++) {
      const row = this.body.rows[i];
      row.hidden = i >= found.length;
      if (row.hidden) continue;
      const [storage, bytes] = found[i];
      row.dataset.storage = storage;
      row.setAttribute("aria-selected", storage === this.selected);
      const cells = [formatBytes(bytes), this.categories[this.step.category[storage]].name, ...this.step.rows.map((column) => column[storage])];
      cells.forEach((text, j) => {
        const cell = row.cells[j];
        if (cell.textContent !== text) cell.textContent = cell.title = text;
      });
    }
    this.reached(clamp(this.reach, 0, Math.max(0, found.length - 1)));
    const next = found.length ? this.body.rows[this.reach] : this.top;
    if (focused && next !== document.activeElement) next.focus(); // its row has just been hidden
  }
}

// Round values from 0 to `highest`, about `wanted` of them; in bytes (base 2) or in tens.
function ticks(highest, wanted, base) {
  const rough = highest / wanted;
  const unit = base ** Math.floor(Math.log(Math.max(rough, 1)) / Math.log(base));
  const step = [1, 2, 5, 10].map((factor) => factor * unit).find((candidate) => candidate >= rough) || unit;
  return Array.from({ length: Math.floor(highest / step) + 1 }, (_, i) => i * step);
}

export default {
  render({ model, el }) {
    const root = make("div", { class: "memlab-explorer" });
    el.append(root);
    const explorer = new Explorer(model, root);
    return () => explorer.close();
  },
};
