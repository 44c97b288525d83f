"use strict";
/* A line over time, in steps: a figure holds for the whole stretch that it was counted over. */

class Chart {
  /** about: {id, title, says, digits, least: what the scale reaches at least, idle: the figure while nothing runs}. */
  constructor(box, about) {
    this.about = about;
    const figure = document.createElement("figure");
    figure.className = "chart";
    figure.id = `chart-${about.id}`;
    const caption = document.createElement("figcaption"), title = document.createElement("b"), name = document.createElement("span");
    title.textContent = about.title;
    name.append(title, ` ${about.says}`);
    this.output = document.createElement("output");
    caption.append(name, this.output);
    this.svg = Chart.element("svg", { viewBox: "0 0 1000 100", preserveAspectRatio: "none", role: "img" });
    const grids = [0.5, 50, 99.5].map((y) => Chart.element("line", { class: "grid", x1: 0, x2: 1000, y1: y, y2: y }));
    this.under = Chart.element("path", { class: "under" });
    this.path = Chart.element("path", { class: "line" });
    this.svg.append(this.under, ...grids, this.path);
    const scale = document.createElement("p");
    scale.className = "scale";
    this.scale = document.createElement("span");
    const span = document.createElement("span");
    span.textContent = "now";
    scale.append(this.scale, span);
    figure.append(caption, this.svg, scale);
    box.append(figure);
  }

  static element(name, attributes) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    return element;
  }

  /** points: [{from, until, value}] in the order of time. now: where the line ends. seconds: how far it goes back. */
  draw(points, now, seconds) {
    const { least, idle, digits, title } = this.about;
    const begin = now - seconds;
    const shown = points.filter(({ until }) => until > begin);
    const end = shown.length ? shown[shown.length - 1].until : begin;
    if (now - end > 1) shown.push({ from: end, until: now, value: idle });
    const values = shown.map(({ value }) => value).filter((value) => value !== null);
    const top = Chart.ceiling(Math.max(least, ...values));
    const x = (time) => Math.max(0, (1000 * (time - begin)) / seconds).toFixed(1);
    const y = (value) => (99.5 - (99 * value) / top).toFixed(2);
    let line = "", under = "", isOpen = false;
    for (const { from, until, value } of shown) {
      if (value === null) { isOpen = false; continue; }
      line += `${isOpen ? "L" : "M"}${x(from)} ${y(value)}L${x(until)} ${y(value)}`;
      under += `M${x(from)} 99.5V${y(value)}H${x(until)}V99.5Z`;
      isOpen = true;
    }
    this.path.setAttribute("d", line);
    this.under.setAttribute("d", under);
    const last = shown.length ? shown[shown.length - 1].value : null;
    const latest = Chart.number(last, digits);
    this.output.textContent = latest;
    this.scale.textContent = `0 to ${Chart.number(top, top < 10 ? 1 : 0)}, ${Math.round(seconds)} s`;
    const range = values.length ? `; between ${Chart.number(Math.min(...values), digits)} and ${Chart.number(Math.max(...values), digits)} over ${Math.round(seconds)} seconds` : "";
    this.svg.setAttribute("aria-label", `${title}: ${latest === "–" ? "none" : latest} now${range}`);
  }

  /** The next round number. */
  static ceiling(value) {
    const unit = 10 ** Math.floor(Math.log10(value));
    return unit * [1, 1.5, 2, 3, 5, 7, 10].find((step) => value <= step * unit * 1.0001);
  }

  static number(value, digits) {
    return value === null ? "–" : value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  }
}
