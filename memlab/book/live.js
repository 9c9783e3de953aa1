// The live figure's face. The monitor's thread sends what was added; here it is kept, thinned and drawn, at most once a
// frame. Nothing is asked of the kernel, which is busy with the training loop.

const HEIGHT = 420;
const MARGIN = { left: 66, right: 150 };
const LEVELS = { top: 26, bottom: 182 }; // the upper half: every level over the seconds
const STEPS = { top: 240, bottom: 384 }; // the lower half: ends and peaks over the steps
const MOST_BUCKETS = 250; // each is drawn as two points, its least and its most
const COLOURS = {
  resident: "#0072B2",
  heap: "#D55E00",
  storages: "#009E73",
  allocated: "#CC79A7",
  reserved: "#E69F00",
  driver: "#56B4E9",
};
const DASHES = { resident: [], heap: [6, 3], storages: [2, 2], allocated: [9, 3, 2, 3], reserved: [12, 4], driver: [3, 5] };

function formatBytes(bytes) {
  if (bytes < 1024) return `${bytes} B`;
  const units = ["KiB", "MiB", "GiB", "TiB"];
  let scaled = bytes / 1024;
  while (units.length > 1 && Number(scaled.toFixed(1)) >= 1024) {
    scaled /= 1024;
    units.shift();
  }
  return `${scaled.toLocaleString("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 })} ${units[0]}`;
}

const count = (number) => number.toLocaleString("en");

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function floats(view) {
  if (!view || !view.byteLength) return new Float64Array(0);
  return new Float64Array(view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength));
}

// The least or the most of two figures, or the one that is there: a level that was not seen is NaN.
function either(choose, a, b) {
  if (!(a >= 0)) return b;
  return b >= 0 ? choose(a, b) : a;
}

// ---- the run, as far as it was sent

class Run {
  constructor() {
    this.levels = [];
    this.buckets = []; // {seconds, looks, low: [a level], high: [], last: []}
    this.looks = 0; // how many samples have been taken in
    this.looksInBucket = 1;
    this.ends = [];
    this.peaks = [];
    this.alarms = [];
    this.steps = 0;
    this.stepsInBlock = 1;
    this.stepsBefore = 0; // those of a history that was forgotten: the run was another one then
    this.seconds = 0;
    this.watch = this.forecast = null;
    this.ended = false;
  }

  take(sent, rows, ends, peaks) {
    if (!sent || sent.levels === undefined) return;
    this.levels = sent.levels;
    const wide = 2 + sent.levels.length;
    for (let i = Math.max(0, this.looks - sent.first); i * wide < rows.length; i++)
      this.look(rows.subarray(i * wide, (i + 1) * wide));
    this.looks = Math.max(this.looks, sent.first + rows.length / wide);
    if (sent.from_block !== null) {
      this.ends.splice(sent.from_block, Infinity, ...ends);
      this.peaks.splice(sent.from_block, Infinity, ...peaks);
      this.stepsInBlock = sent.steps_in_block;
      this.steps = sent.steps_before + sent.steps;
      this.stepsBefore = sent.steps_before;
    }
    this.alarms.splice(sent.from_alarm, Infinity, ...sent.alarms);
    this.watch = sent.watch;
    this.forecast = sent.forecast;
    this.ended = sent.ended;
  }

  look(row) {
    this.seconds = row[0];
    const values = Array.from(row.subarray(2));
    const bucket = this.buckets[this.buckets.length - 1];
    if (bucket && bucket.looks < this.looksInBucket) {
      this.merge(bucket, { seconds: row[0], looks: 1, low: values, high: values, last: values });
      return;
    }
    this.buckets.push({ seconds: row[0], looks: 1, low: values, high: [...values], last: [...values] });
    if (this.buckets.length > MOST_BUCKETS) {
      const thinned = [];
      for (let i = 0; i < this.buckets.length; i += 2) {
        if (i + 1 < this.buckets.length) this.merge(this.buckets[i], this.buckets[i + 1]);
        thinned.push(this.buckets[i]);
      }
      this.buckets = thinned;
      this.looksInBucket *= 2;
    }
  }

  merge(bucket, next) {
    bucket.seconds = next.seconds;
    bucket.looks += next.looks;
    bucket.low = next.low.map((value, i) => either(Math.min, bucket.low[i], value));
    bucket.high = next.high.map((value, i) => either(Math.max, bucket.high[i], value));
    bucket.last = [...next.last];
  }

  highestLevel() {
    return Math.max(1, ...this.buckets.flatMap((bucket) => bucket.high.filter((value) => value >= 0)));
  }
}

// ---- its figure

class Figure {
  constructor(model, root, run) {
    this.model = model;
    this.root = root;
    this.run = run;
    this.budget = model.get("budget");
    this.readout = make("div", { class: "memlab-live-readout" });
    this.canvas = make("canvas", { role: "img" });
    this.list = make("ul", { class: "memlab-live-alarms", role: "log", "aria-label": "alarms" });
    root.append(make("div", { class: "memlab-live-title" }, model.get("title")), this.readout, this.canvas, this.list);
    this.told = 0;
    this.watcher = new ResizeObserver(() => this.resize());
    this.watcher.observe(root);
    this.resize();
  }

  close() {
    this.watcher.disconnect();
    cancelAnimationFrame(this.frame);
    this.root.replaceChildren();
  }

  resize() {
    const outer = this.root.clientWidth;
    if (!outer || outer === this.outer) return;
    this.outer = outer;
    const ratio = window.devicePixelRatio || 1;
    this.canvas.width = outer * ratio;
    this.canvas.height = HEIGHT * ratio;
    this.canvas.style.width = `${outer}px`;
    this.canvas.style.height = `${HEIGHT}px`;
    this.pen = this.canvas.getContext("2d");
    this.pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.changed();
  }

  changed() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = undefined;
      this.tell();
      if (this.outer) this.draw();
    });
  }

  tell() {
    const { run } = this;
    const last = run.buckets[run.buckets.length - 1];
    const ends = run.ends;
    const parts = [`step ${count(run.steps)}`, `${run.seconds.toFixed(1)} s`];
    if (ends.length)
      parts.push(`${run.watch} at the last step's end ${formatBytes(ends[ends.length - 1])}, ` +
        `at its peak ${formatBytes(run.peaks[run.peaks.length - 1])}`);
    if (run.ended) parts.push("ended");
    this.readout.textContent = last ? parts.join(" · ") : "waiting for the run to begin";
    this.canvas.setAttribute("aria-label", `${this.readout.textContent}. ` + (last
      ? run.levels.map((level, i) => `${level} ${last.last[i] >= 0 ? formatBytes(last.last[i]) : "gone"}`).join(", ") : "nothing is drawn yet"));
    if (run.alarms.length < this.told) this.list.replaceChildren((this.told = 0));
    for (const [kind, step, message] of run.alarms.slice(this.told))
      this.list.append(make("li", {}, `step ${count(step)}, ${kind}: ${message}`));
    this.told = run.alarms.length;
  }

  draw() {
    const style = getComputedStyle(this.root);
    this.ink = style.color;
    this.paper = style.backgroundColor;
    this.right = Math.max(MARGIN.left + 60, this.outer - MARGIN.right);
    this.pen.clearRect(0, 0, this.outer, HEIGHT);
    this.pen.font = "11px sans-serif";
    this.pen.lineJoin = "round";
    this.drawLevels();
    this.drawSteps();
  }

  // Axes of a panel: from nothing to `most` seconds or steps, and to `highest` bytes. Returns where a value stands.
  axes(panel, most, highest, name, what) {
    const { pen } = this;
    const x = (value) => MARGIN.left + (value / most) * (this.right - MARGIN.left);
    const y = (bytes) => panel.bottom - (bytes / highest) * (panel.bottom - panel.top);
    pen.strokeStyle = pen.fillStyle = this.ink;
    pen.lineWidth = 1;
    pen.textBaseline = "middle";
    pen.textAlign = "right";
    for (const bytes of ticks(highest, 4, 2)) {
      pen.fillText(formatBytes(bytes), MARGIN.left - 6, y(bytes));
      pen.globalAlpha = 0.15;
      this.line([[MARGIN.left, y(bytes)], [this.right, y(bytes)]]);
      pen.globalAlpha = 1;
    }
    pen.textAlign = "center";
    for (const value of ticks(most, 6, 10)) pen.fillText(count(value), x(value), panel.bottom + 11);
    pen.fillText(name, (MARGIN.left + this.right) / 2, panel.bottom + 26);
    pen.textAlign = "left";
    pen.fillText(what, MARGIN.left - 60, panel.top - 14);
    this.line([[MARGIN.left, panel.top], [MARGIN.left, panel.bottom], [this.right, panel.bottom]]);
    return [x, y];
  }

  line(points) {
    this.pen.beginPath();
    for (const [x, y] of points) this.pen.lineTo(x, y);
    this.pen.stroke();
  }

  drawLevels() {
    const { pen, run } = this;
    const high = run.highestLevel() * 1.1;
    const [x, y] = this.axes(LEVELS, Math.max(1, run.seconds), high, "seconds", "bytes of each level, at every look");
    const last = run.buckets[run.buckets.length - 1];
    if (!last) return;
    const labels = [];
    run.levels.forEach((level, i) => {
      const points = [];
      for (const { seconds, low, high } of run.buckets) {
        if (!(high[i] >= 0)) continue;
        points.push([x(seconds), y(low[i])]);
        if (high[i] > low[i]) points.push([x(seconds), y(high[i])]);
      }
      const [colour, dash] = looks(level, i);
      pen.lineWidth = 1.7;
      pen.setLineDash(dash);
      pen.strokeStyle = colour;
      this.line(points);
      pen.setLineDash([]);
      if (last.last[i] >= 0)
        labels.push({ y: y(last.last[i]), text: `${level} ${formatBytes(last.last[i])}`, colour, dash });
    });
    this.drawLabels(labels, LEVELS);
  }

  // A line's name and figure stand where it ends, pushed apart where lines end close together.
  drawLabels(labels, panel) {
    const { pen } = this;
    labels.sort((a, b) => a.y - b.y);
    labels.forEach((label, i) => (label.y = i ? Math.max(label.y, labels[i - 1].y + 13) : Math.max(label.y, panel.top)));
    let floor = panel.bottom;
    for (const label of [...labels].reverse()) floor = (label.y = Math.min(label.y, floor)) - 13;
    pen.textAlign = "left";
    pen.textBaseline = "middle";
    for (const { y, text, colour, dash } of labels) {
      pen.strokeStyle = colour;
      pen.lineWidth = 1.7;
      pen.setLineDash(dash);
      this.line([[this.right + 4, y], [this.right + 26, y]]);
      pen.setLineDash([]);
      pen.fillStyle = this.ink;
      pen.fillText(text, this.right + 30, y);
    }
  }

  drawSteps() {
    const { pen, run, budget } = this;
    const fan = run.forecast;
    const highest = Math.max(1, ...run.peaks, ...run.ends);
    // A budget far above what is held would press the run flat: it is drawn once it is near, or once the run is called.
    const near = budget && (fan || budget < 4 * highest);
    const top = Math.max(highest, near ? budget : 0) * 1.12;
    let most = Math.max(10, run.steps);
    if (fan) most = Math.min(Math.max(most, fan.step + (fan.latest ?? Infinity)) * 1.03, 4 * most);
    const watched = run.watch ? `${run.watch} at each step's end and peak` : "at each step's end and peak";
    const [x, y] = this.axes(STEPS, most, top, "steps", watched);
    if (fan) this.drawFan(x, y, fan, most);
    const at = (i) => Math.min(run.stepsBefore + (i + 1) * run.stepsInBlock, run.steps);
    pen.strokeStyle = COLOURS.heap;
    pen.lineWidth = 1.3;
    pen.setLineDash([3, 2]);
    this.line(run.peaks.map((bytes, i) => [x(at(i)), y(bytes)]));
    pen.setLineDash([]);
    pen.strokeStyle = COLOURS.resident;
    pen.lineWidth = 1.8;
    this.line(run.ends.map((bytes, i) => [x(at(i)), y(bytes)]));
    const labels = [];
    if (run.ends.length) {
      labels.push({ y: y(run.ends[run.ends.length - 1]), text: "end of step", colour: COLOURS.resident, dash: [] });
      labels.push({ y: y(run.peaks[run.peaks.length - 1]), text: "peak of step", colour: COLOURS.heap, dash: [3, 2] });
    }
    if (near) {
      pen.strokeStyle = this.ink;
      pen.lineWidth = 1.5;
      pen.setLineDash([8, 4]);
      this.line([[MARGIN.left, y(budget)], [this.right, y(budget)]]);
      pen.setLineDash([]);
      labels.push({ y: y(budget), text: `budget ${formatBytes(budget)}`, colour: this.ink, dash: [8, 4] });
    } else if (budget) {
      pen.fillStyle = this.ink;
      pen.textAlign = "right";
      pen.fillText(`budget ${formatBytes(budget)}, above the picture ↑`, this.right, STEPS.top - 14);
    }
    this.drawLabels(labels, STEPS);
    this.drawAlarms(x);
  }

  // From the peak at the call to the budget: between the earliest and the latest step, and the likeliest as a line.
  drawFan(x, y, fan, most) {
    const { pen } = this;
    const end = (left) => [x(fan.step + (left ?? 1e12)), y(fan.budget)];
    const start = [x(fan.step), y(fan.peak)];
    pen.save();
    pen.beginPath();
    pen.rect(MARGIN.left, STEPS.top - 4, this.right - MARGIN.left, STEPS.bottom - STEPS.top + 4);
    pen.clip();
    pen.beginPath();
    for (const [px, py] of [start, end(fan.earliest), fan.latest === null ? [x(most), start[1]] : end(fan.latest)])
      pen.lineTo(px, py);
    if (fan.latest === null) {
      pen.lineTo(x(most), start[1]);
      pen.lineTo(x(most), y(fan.budget));
      pen.lineTo(...end(fan.earliest));
    }
    pen.globalAlpha = 0.22;
    pen.fillStyle = this.ink;
    pen.fill();
    pen.globalAlpha = 1;
    pen.strokeStyle = this.ink;
    pen.lineWidth = 1;
    pen.setLineDash([2, 3]);
    this.line([start, end(fan.steps_left)]);
    pen.setLineDash([]);
    pen.restore();
  }

  drawAlarms(x) {
    const { pen, run } = this;
    pen.fillStyle = pen.strokeStyle = this.ink;
    pen.lineWidth = 1;
    pen.textAlign = "center";
    for (const [kind, step] of run.alarms) {
      const at = Math.min(x(step), this.right);
      pen.setLineDash([1, 3]);
      this.line([[at, STEPS.top], [at, STEPS.bottom]]);
      pen.setLineDash([]);
      pen.beginPath();
      pen.moveTo(at, STEPS.bottom - 1);
      pen.lineTo(at - 5, STEPS.bottom - 10);
      pen.lineTo(at + 5, STEPS.bottom - 10);
      pen.fill();
      pen.strokeStyle = this.paper;
      pen.lineWidth = 3;
      pen.strokeText(kind, at, STEPS.bottom - 18);
      pen.strokeStyle = this.ink;
      pen.lineWidth = 1;
      pen.fillText(kind, at, STEPS.bottom - 18);
    }
  }
}

function looks(level, i) {
  const names = Object.keys(COLOURS);
  const like = names.find((name) => level.split(" ").includes(name)) || names[i % names.length];
  return [COLOURS[like], DASHES[like]];
}

// Round values below `most`, at most `number` of them: in powers of two for bytes, of ten for seconds and steps.
function ticks(most, number, base) {
  let step = base === 2 ? 2 ** Math.floor(Math.log2(most / number)) : 10 ** Math.floor(Math.log10(most / number));
  const grow = base === 2 ? [2] : [2, 2.5, 2];
  for (let i = 0; most / step > number; i++) step *= grow[i % grow.length];
  const found = [];
  for (let value = step; value <= most; value += step) found.push(value);
  return found;
}

// Called once for each figure that Python made: what was sent outlives the views of it.
export default () => {
  const run = new Run();
  const figures = new Set();
  return {
    initialize({ model }) {
      const { rows, ends, peaks, ...sent } = model.get("whole") || {};
      run.take(sent, floats(rows), floats(ends), floats(peaks));
      const hear = (sent, buffers) => {
        run.take(sent, ...buffers.map(floats));
        figures.forEach((figure) => figure.changed());
      };
      model.on("msg:custom", hear);
      return () => model.off("msg:custom", hear);
    },
    render({ model, el }) {
      const root = make("div", { class: "memlab-live" });
      el.append(root);
      const figure = new Figure(model, root, run);
      figures.add(figure);
      return () => {
        figures.delete(figure);
        figure.close();
      };
    },
  };
};
