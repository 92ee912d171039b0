// uPlot with Atoll's colours: builds the drawing when the lines change, and else only gives it new numbers.
import uPlot from "uplot";
import { count, percent, short } from "../format";
import { t } from "../i18n";
import { colour } from "../theme";
import type { ChartData } from "./chart";
import { type Line, aligned, colourName, dashOf, logTicks, digitsOf, nearest, range } from "./lines";
import { Tip } from "./tip";

const HEIGHT = 310;
const FEW_POINTS = 40;
/** Steps between ticks of rounds: 1, 2, 5, 10, 20, ... */
const WHOLE = Array.from({ length: 30 }, (_, n) => [1, 2, 5][n % 3]! * 10 ** Math.floor(n / 3));
const FONT = '12px system-ui, -apple-system, "Segoe UI", Roboto, "PingFang SC", "Noto Sans SC", sans-serif';

export class Plot {
  current: ChartData | null = null;
  private chart: uPlot | null = null;
  private readonly tip: Tip;
  private built = "";
  private zoomed = false;
  private at = -1;
  private title = "";

  constructor(
    private readonly place: HTMLElement,
    private readonly say: (text: string) => void,
  ) {
    this.tip = new Tip(place);
  }

  get width(): number {
    return Math.max(this.place.clientWidth, 200);
  }

  get canvas(): HTMLCanvasElement | null {
    return this.chart?.ctx.canvas ?? null;
  }

  /** Draw new numbers. */
  update(data: ChartData, title: string): void {
    this.current = data;
    this.title = title;
    const shape = JSON.stringify([data.lines.map((line) => [line.index, line.thin, !!line.high, line.x.length <= FEW_POINTS]), data.xTitle, data.share, data.log, data.whole]);
    if (!data.lines.length) this.clear();
    else if (this.chart && shape === this.built) {
      this.chart.setData(aligned(data.lines) as uPlot.AlignedData, !this.zoomed);
      if (this.zoomed) this.chart.redraw();
    } else {
      this.clear();
      this.built = shape;
      this.chart = new uPlot(this.options(data), aligned(data.lines) as uPlot.AlignedData, this.place);
    }
    this.label();
  }

  /** Draw everything anew with the next numbers, as the colours changed. */
  rebuild(): void {
    this.built = "";
  }

  /** Fit the width; return whether it changed. */
  resize(): boolean {
    if (!this.chart || this.chart.width === this.width) return false;
    this.chart.setSize({ width: this.width, height: HEIGHT });
    return true;
  }

  /** Move the cursor by a key; return whether the key means something. */
  key(name: string): boolean {
    const longest = this.longest();
    if (!this.chart || !longest) return false;
    if (name === "Escape") {
      this.hide();
      this.zoomed = false;
      this.chart.setData(this.chart.data, true);
      return true;
    }
    const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity }[name];
    if (move === undefined) return false;
    const last = longest.x.length - 1;
    this.at = Math.max(0, Math.min(last, (this.at < 0 ? last + (move < 0 ? 1 : 0) : this.at) + move));
    const x = longest.x[this.at]!;
    this.chart.setCursor({ left: this.chart.valToPos(x, "x"), top: 0 }, false);
    this.read(x);
    this.say(this.spoken(x));
    return true;
  }

  hide(): void {
    this.at = -1;
    this.tip.hide();
    this.chart?.setCursor({ left: -10, top: -10 }, false);
  }

  destroy(): void {
    this.clear();
    this.tip.remove();
  }

  private clear(): void {
    this.tip.hide();
    this.chart?.destroy();
    this.chart = null;
    this.built = "";
    this.zoomed = false;
  }

  private longest(): Line | undefined {
    return this.current?.lines.reduce((a, b) => (b.x.length > a.x.length ? b : a), this.current.lines[0]!);
  }

  private text(value: number): string {
    return this.current?.share ? percent(value) : short(value);
  }

  /** Say the newest values in the label of the canvas, for screen readers. */
  private label(): void {
    const canvas = this.canvas;
    if (!canvas || !this.current) return;
    const newest = this.current.lines.slice(0, 6).map((line) => `${line.label} ${this.text(line.y[line.y.length - 1]!)}`);
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", t("chart.newest", { title: this.title, values: newest.join(", ") }));
  }

  private spoken(x: number): string {
    const data = this.current!;
    const values = data.lines.map((line) => `${line.label} ${this.text(line.y[nearest(line.x, x)]!)}`);
    return `${data.xTitle} ${short(x)}: ${values.join(", ")}`;
  }

  private read(x: number): void {
    if (!this.chart || !this.current) return;
    this.tip.show(this.current, x, this.chart.valToPos(x, "x") + this.chart.over.offsetLeft, this.width, (value) => this.text(value));
  }

  private options(data: ChartData): uPlot.Options {
    const muted = colour("muted");
    const line = colour("line");
    const axis = { stroke: muted, font: FONT, labelFont: FONT, ticks: { show: false } };
    const yValues = (_: uPlot, splits: number[]): string[] => {
      const digits = digitsOf(100 * ((splits[1] ?? 1) - (splits[0] ?? 0)));
      return splits.map((value) => (value === null ? "" : data.share ? percent(value, digits) : short(value)));
    };
    const logarithmic = data.log && { splits: (_: uPlot, __: number, low: number, high: number) => logTicks(low, high), filter: (_: uPlot, splits: number[]) => splits };
    const bands: uPlot.Band[] = [];
    const series: uPlot.Series[] = [{}];
    for (const one of data.lines) {
      const stroke = colour(colourName(one.index));
      const points = one.x.length <= FEW_POINTS && !one.thin ? { show: true, size: 5, fill: stroke } : { show: false };
      series.push({ stroke, width: one.thin ? 1.3 : 2, dash: dashOf(one), spanGaps: true, points });
      if (!one.high) continue;
      const edge = { stroke: "transparent", width: 0, spanGaps: true, points: { show: false } };
      bands.push({ series: [series.length, series.length + 1], fill: `${stroke}29` });
      series.push(edge, { ...edge });
    }
    return {
      width: this.width,
      height: HEIGHT,
      padding: [12, 12, 0, 0],
      legend: { show: false },
      series,
      bands,
      scales: {
        x: { time: false, range: (_, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) },
        y: data.log ? { distr: 3 } : { range: (_, low, high) => (low === null ? [0, 1] : range(low, high, data.share)) },
      },
      axes: [
        { ...axis, grid: { show: false }, label: data.xTitle, labelSize: 22, size: 28, ...(data.whole && { incrs: WHOLE }), values: (_, splits) => splits.map((x) => (Number.isInteger(x) ? count(x) : short(x))) },
        { ...axis, grid: { stroke: line, width: 1 }, size: 58, values: yValues, ...logarithmic },
      ],
      cursor: { y: false, points: { size: 9, width: 2, stroke: colour("paper"), fill: (chart, n) => (chart.series[n]!.stroke as () => string)() }, drag: { x: true, y: false } },
      hooks: {
        setSelect: [(chart) => (this.zoomed = this.zoomed || chart.select.width > 0)],
        setCursor: [
          (chart) => {
            if (this.at >= 0) return;
            const left = chart.cursor.left ?? -1;
            if (left < 0) this.tip.hide();
            else this.read(this.closest(chart.posToVal(left, "x")));
          },
        ],
      },
    };
  }

  /** Return the x of a point of any line that is nearest to where the pointer is. */
  private closest(x: number): number {
    const found = this.current!.lines.map((line) => line.x[nearest(line.x, x)]!);
    return found.reduce((a, b) => (Math.abs(b - x) < Math.abs(a - x) ? b : a));
  }
}
