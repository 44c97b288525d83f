"use strict";
/* The timeline: a bar for each round, as wide as it took and as high as it wrote. */

class Timeline {
  constructor(onChoose) {
    this.onChoose = onChoose;
    this.canvas = document.getElementById("timeline");
    this.tip = document.getElementById("tip");
    this.rounds = [];
    this.selected = 0;
    this.zoom = 1;
    this.canvas.addEventListener("click", (event) => {
      const index = this.roundAt(event);
      if (index !== null) this.onChoose(index);
    });
    this.canvas.addEventListener("pointermove", (event) => this.showTip(event));
    this.canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
    const zoomTo = (zoom) => { this.zoom = zoom; this.draw(); };
    document.getElementById("zoom-in").addEventListener("click", () => zoomTo(Math.min(this.zoom * 2, 512)));
    document.getElementById("zoom-out").addEventListener("click", () => zoomTo(Math.max(this.zoom / 2, 1)));
    document.getElementById("zoom-fit").addEventListener("click", () => zoomTo(1));
    new ResizeObserver(() => this.draw()).observe(this.canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  show(text) {
    this.rounds = text.rounds;
    this.steps = text.rounds.map((round) => Data.steps[round.step]);
    this.zoom = 1;
    const first = this.steps[0], last = this.steps[this.steps.length - 1];
    this.from = first ? first.start : 0;
    this.until = last ? Timeline.end(last) : 1;
    this.most = Math.max(1, ...this.rounds.map((round) => Data.longestOf(round) + 1));
    this.tellShares();
    this.canvas.setAttribute(
      "aria-label",
      `Timeline of ${this.rounds.length} rounds over ${Data.seconds(this.until - this.from)}; the table below says the same`,
    );
  }

  static end(step) {
    return step.start + step.draft + step.verify + step.rest;
  }

  tellShares() {
    const sum = (name) => this.steps.reduce((total, step) => total + step[name], 0);
    const times = { draft: sum("draft"), verify: sum("verify"), rest: sum("rest") };
    const whole = times.draft + times.verify + times.rest;
    document.getElementById("shares").replaceChildren(
      ...Object.entries(times).map(([name, time]) => {
        const item = document.createElement("li");
        const share = document.createElement("b");
        item.className = name;
        share.textContent = Data.percent(time, whole);
        item.append(`${name} `, share, ` ${Data.seconds(time)}`);
        return item;
      }),
    );
  }

  /** The stretch of time that is shown: around the selected round when zoomed in. */
  range() {
    const whole = this.until - this.from || 1, width = whole / this.zoom;
    const step = this.steps[this.selected];
    const middle = step ? (step.start + Timeline.end(step)) / 2 : this.from;
    const begin = Math.max(this.from, Math.min(middle - width / 2, this.until - width));
    return [begin, begin + width];
  }

  select(index) {
    this.selected = index;
    this.draw();
  }

  draw() {
    const width = this.canvas.clientWidth, height = this.canvas.clientHeight;
    if (!width || !this.steps) return;
    const scale = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(height * scale);
    const pen = this.canvas.getContext("2d");
    pen.scale(scale, scale);
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const [begin, end] = this.range();
    const x = (time) => ((time - begin) / (end - begin)) * width;
    const floor = height - 22, unit = (floor - 14) / this.most;
    this.grid(pen, width, floor, unit, colour);
    const hatch = Timeline.hatch(pen, colour("--time-verify"), colour("--surface"));
    const fills = [["draft", colour("--time-draft")], ["verify", hatch], ["rest", colour("--time-rest")]];
    this.steps.forEach((step, index) => {
      if (Timeline.end(step) < begin || step.start > end) return;
      const tall = Math.max(1, Data.keptOf(this.rounds[index]).length * unit - 1);
      let time = step.start;
      for (const [name, fill] of fills) {
        pen.fillStyle = fill;
        pen.fillRect(x(time), floor - tall, Math.max(0.3, x(time + step[name]) - x(time)), tall);
        time += step[name];
      }
    });
    this.pointAt(pen, x, floor, colour("--ink"));
    pen.fillStyle = colour("--muted");
    pen.font = "12px system-ui, sans-serif";
    pen.fillText(Data.seconds(begin - this.from), 0, height - 5);
    pen.textAlign = "right";
    pen.fillText(Data.seconds(end - this.from), width, height - 5);
  }

  grid(pen, width, floor, unit, colour) {
    pen.fillStyle = colour("--line");
    for (let tokens = 0; tokens <= this.most; tokens += Math.ceil(this.most / 6)) {
      pen.fillRect(0, Math.round(floor - tokens * unit), width, 1);
    }
  }

  pointAt(pen, x, floor, ink) {
    const step = this.steps[this.selected];
    if (!step) return;
    const left = x(step.start), right = Math.max(left + 2, x(Timeline.end(step)));
    const middle = (left + right) / 2;
    pen.strokeStyle = pen.fillStyle = ink;
    pen.lineWidth = 1.5;
    pen.strokeRect(left - 0.75, 9, right - left + 1.5, floor - 9);
    pen.beginPath();
    pen.moveTo(middle - 5, 0);
    pen.lineTo(middle + 5, 0);
    pen.lineTo(middle, 7);
    pen.fill();
  }

  static hatch(pen, colour, ground) {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 6;
    const brush = tile.getContext("2d");
    brush.fillStyle = colour;
    brush.fillRect(0, 0, 6, 6);
    brush.strokeStyle = ground;
    brush.globalAlpha = 0.35;
    brush.lineWidth = 1.6;
    for (const shift of [-6, 0, 6]) {
      brush.beginPath();
      brush.moveTo(shift, 6);
      brush.lineTo(shift + 6, 0);
      brush.stroke();
    }
    return pen.createPattern(tile, "repeat");
  }

  /** The round under the pointer, or the nearest. */
  roundAt(event) {
    if (!this.rounds.length) return null;
    const box = this.canvas.getBoundingClientRect();
    const [begin, end] = this.range();
    const time = begin + ((event.clientX - box.left) / box.width) * (end - begin);
    let low = 0, high = this.steps.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (Timeline.end(this.steps[middle]) < time) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  showTip(event) {
    const index = this.roundAt(event);
    if (index === null) return;
    const step = this.steps[index];
    const name = document.createElement("b");
    name.textContent = `Round ${index + 1}`;
    const times = `draft ${Data.seconds(step.draft)}, verify ${Data.seconds(step.verify)}, rest ${Data.seconds(step.rest)}`;
    this.tip.replaceChildren(name, `\n${Data.said(this.rounds[index])}\n${times}`);
    this.tip.hidden = false;
    Tip.place(this.tip, { left: event.clientX + 10, top: event.clientY, bottom: event.clientY + 12 });
  }
}
