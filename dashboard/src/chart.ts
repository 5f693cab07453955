// A chart of a few series over the last minutes: axes with units, a legend that has the figures.

import { draw, make, mark, say } from "./dom.js";
import { clock, span, tick } from "./format.js";
import { type Series, WINDOW_MS } from "./series.js";

export interface Curve {
  name: string;
  /** Its class, which has its colour and its dashes. */
  style: string;
  series: Series;
}

const HEIGHT = 168;
const LEFT = 48;
const RIGHT = 8;
const TOP = 8;
const BOTTOM = 22;
/** What is shown until more is known. */
const SHORT_MS = 60_000;
/** Where the axis of time has a word, in parts of the window. */
const WORDS: Record<number, [number, string][]> = {
  [SHORT_MS]: [[0, "−60 s"], [1 / 3, "−40 s"], [2 / 3, "−20 s"], [1, "now"]],
  [WINDOW_MS]: [[0, "−5 min"], [0.2, "−4 min"], [0.4, "−3 min"], [0.6, "−2 min"], [0.8, "−1 min"], [1, "now"]],
};

export class Chart {
  readonly element: HTMLElement;
  private readonly text = make("p.note");
  private readonly svg = draw("svg", { role: "img", height: HEIGHT });
  private readonly grid = draw("g", { class: "grid" });
  private readonly cross = draw("line", { class: "cross", y1: TOP, y2: HEIGHT - BOTTOM });
  private readonly figures: HTMLElement[] = [];
  private readonly names: HTMLElement[] = [];
  private readonly aside = make("span.aside");
  private readonly when = make("span.when");
  private readonly paths: SVGPathElement[] = [];
  private width = 0;
  private top = 0;
  private windowMs = SHORT_MS;
  private now = Date.now();
  private pointer: number | undefined;
  private beside = "";

  constructor(
    private readonly title: string,
    private readonly unit: string,
    private curves: Curve[],
    private readonly format: (value: number) => string,
    /** Stays at its value until the next one, as stock does. */
    private readonly steps = false,
  ) {
    const legend = make("ul.legend");
    for (const curve of curves) {
      const key = draw("svg", { width: 18, height: 10, "aria-hidden": "true" });
      key.append(draw("line", { class: `curve ${curve.style}`, x1: 1, x2: 17, y1: 5, y2: 5 }));
      const figure = make("b", {}, "–");
      this.figures.push(figure);
      const name = make("span", {}, curve.name);
      this.names.push(name);
      legend.append(make("li", {}, key, name, figure));
      this.paths.push(draw("path", { class: `curve ${curve.style}` }));
    }
    legend.firstElementChild?.append(this.aside);
    this.svg.append(this.grid, ...this.paths, this.cross);
    const head = make("h3", {}, title, make("small", {}, unit), this.when);
    this.element = make("section.card.chart", {}, head, this.svg, legend, this.text);
    this.svg.addEventListener("pointermove", (event) => this.point(event.offsetX));
    this.svg.addEventListener("pointerleave", () => this.point(undefined));
    new ResizeObserver(([entry]) => {
      this.width = Math.floor(entry?.contentRect.width ?? 0);
      this.update(this.now);
    }).observe(this.svg);
  }

  /** A sentence below. */
  note(text: string): void {
    say(this.text, text);
  }

  /** A few words beside the figure of its first curve, which hold for now. */
  add(text: string): void {
    this.beside = text;
  }

  /** Its first curve becomes that of something else. */
  show(name: string, series: Series): void {
    const [first] = this.curves;
    if (!first) return;
    this.curves = [{ ...first, name, series }, ...this.curves.slice(1)];
    say(this.names[0] as Element, name);
    this.update(this.now);
  }

  /** Draws what was known until then. */
  update(now: number): void {
    this.now = now;
    if (this.width <= LEFT + RIGHT) return;
    mark(this.svg, "viewBox", `0 0 ${this.width} ${HEIGHT}`);
    const first = Math.min(...this.curves.map(({ series }) => series.times[0] ?? now));
    this.windowMs = now - first > SHORT_MS ? WINDOW_MS : SHORT_MS;
    const from = now - this.windowMs;
    const x = (time: number): number =>
      LEFT + ((time - from) / this.windowMs) * (this.width - LEFT - RIGHT);
    this.scale(from);
    const y = (value: number): number =>
      HEIGHT - BOTTOM - (value / this.top) * (HEIGHT - BOTTOM - TOP);
    this.curves.forEach(({ series }, nth) => {
      mark(this.paths[nth] as Element, "d", this.line(series, from, now, x, y));
    });
    const at = this.pointer === undefined ? now : from + this.time(this.pointer);
    mark(this.cross, "visibility", this.pointer === undefined ? "hidden" : "visible");
    mark(this.cross, "x1", x(at).toFixed(0));
    mark(this.cross, "x2", x(at).toFixed(0));
    say(this.when, this.pointer === undefined ? "" : clock(at));
    say(this.aside, this.pointer === undefined && this.beside ? `· ${this.beside}` : "");
    this.curves.forEach(({ series }, nth) => {
      const value = series.at(at);
      say(this.figures[nth] as Element, value === undefined ? "–" : this.format(value));
    });
    // Read when somebody goes there; it is no live region.
    const told = this.curves.map(({ name, series }, nth) => {
      const [first, last] = [series.at(from) ?? series.values[0], series.last];
      if (first === undefined || last === undefined) return `${name}: nothing yet`;
      const beside = nth === 0 && this.beside ? `, ${this.beside}` : "";
      return `${name}: from ${this.format(first)} to ${this.format(last)}${beside}`;
    });
    mark(this.svg, "aria-label", `${this.title}, ${this.unit}, last ${span(this.windowMs / 1000)}. ${told.join("; ")}.`);
  }

  private line(
    series: Series,
    from: number,
    now: number,
    x: (time: number) => number,
    y: (value: number) => number,
  ): string {
    const { times, values } = series;
    let path = "";
    let before: number | undefined;
    let most = 0;
    for (let nth = 0; nth < times.length; nth += 1) {
      const time = times[nth] as number;
      const value = values[nth] as number;
      if ((times[nth + 1] ?? now) < from) continue;
      const left = x(Math.max(time, from)).toFixed(1);
      if (path === "") path = `M${left} ${y(value).toFixed(1)}`;
      else if (this.steps && before !== undefined) path += `H${left}V${y(value).toFixed(1)}`;
      else path += `L${left} ${y(value).toFixed(1)}`;
      before = value;
      most = Math.max(most, value);
    }
    // Curves of nothing would only hide each other.
    if (before === undefined || (most === 0 && this.curves.length > 1)) return "";
    return `${path}H${x(now).toFixed(1)}`;
  }

  /** Draws the axes anew when the largest value needs another one. */
  private scale(from: number): void {
    let most = 0;
    for (const { series } of this.curves) {
      series.values.forEach((value, nth) => {
        if ((series.times[nth + 1] ?? Infinity) >= from) most = Math.max(most, value);
      });
    }
    const step = nice(Math.max(most, 1) / 4);
    const top = Math.max(step * Math.ceil(Math.max(most, 1) / step), step);
    const key = `${top} ${step} ${this.width} ${this.windowMs}`;
    if (this.grid.getAttribute("data-key") === key) return;
    this.grid.setAttribute("data-key", key);
    this.top = top;
    this.grid.replaceChildren();
    for (let value = 0; value <= top * 1.001; value += step) {
      const y = HEIGHT - BOTTOM - (value / top) * (HEIGHT - BOTTOM - TOP);
      this.grid.append(
        draw("line", { x1: LEFT, x2: this.width - RIGHT, y1: y, y2: y }),
        this.label(tick(value), LEFT - 6, y + 4, "end"),
      );
    }
    const words = WORDS[this.windowMs] ?? [];
    const isNarrow = (this.width - LEFT - RIGHT) / (words.length - 1) < 76;
    words.forEach(([part, word], nth) => {
      if (isNarrow && nth % 2 === 1 && part < 1) return;
      const x = LEFT + part * (this.width - LEFT - RIGHT);
      this.grid.append(this.label(word, x, HEIGHT - 5, part === 1 ? "end" : part === 0 ? "start" : "middle"));
    });
  }

  private label(text: string, x: number, y: number, anchor: string): SVGTextElement {
    const label = draw("text", { x, y, "text-anchor": anchor });
    label.textContent = text;
    return label;
  }

  private time(x: number): number {
    const inside = (x - LEFT) / (this.width - LEFT - RIGHT);
    return Math.min(Math.max(inside, 0), 1) * this.windowMs;
  }

  private point(x: number | undefined): void {
    this.pointer = x;
    this.update(this.now);
  }
}

/** The next of 1, 2, 5, 10, 20 and so on; figures are whole, so nothing below 1. */
function nice(step: number): number {
  const power = 10 ** Math.floor(Math.log10(Math.max(step, 1)));
  const first = [1, 2, 5, 10].find((first) => first * power >= step) ?? 10;
  return Math.max(first * power, 1);
}
