// Axes and lines of the rows of runs: against rounds, seconds, simulated seconds or bytes.
import { t } from "../i18n";
import type { Rows } from "../rows";
import { type Line, thinned } from "./lines";

export type Against = "round" | "seconds" | "simulated_seconds" | "bytes";
export const AXES: Record<Against, string> = {
  round: "round",
  seconds: "seconds",
  simulated_seconds: "simulated_seconds",
  bytes: "bytes_up",
};

export const axisOf = (text: string | null): Against => (text && text in AXES ? (text as Against) : "round");

/** Return the axes on which some run moves. */
export function movingAxes(all: readonly (Rows | undefined)[]): Against[] {
  return (Object.keys(AXES) as Against[]).filter(
    (axis) => axis === "round" || all.some((rows) => rows?.has(AXES[axis]) && (rows.newest(AXES[axis])?.value ?? 0) > 0),
  );
}

export interface Axis {
  title: string;
  /** What a number of the column is divided by. */
  per: number;
}

export function axis(against: Against, all: readonly (Rows | undefined)[]): Axis {
  if (against === "round") return { title: t("axis.round"), per: 1 };
  const largest = Math.max(0, ...all.map((rows) => rows?.newest(AXES[against])?.value ?? 0));
  if (against === "bytes") {
    const power = largest >= 1e10 ? 9 : largest >= 1e5 ? 6 : 3;
    return { title: t("axis.bytes", { unit: { 9: "GB", 6: "MB", 3: "kB" }[power] }), per: 10 ** power };
  }
  const hours = largest >= 7200;
  const unit = hours ? t("unit.h") : t("unit.s");
  return { title: t(against === "seconds" ? "axis.seconds" : "axis.simulated", { unit }), per: hours ? 3600 : 1 };
}

interface LineOptions {
  label: string;
  index: number;
  per: number;
  buckets: number;
  positive?: boolean;
  thin?: boolean;
}

/** Lines that were drawn last, so that of many runs only those that went on are thinned again. */
const drawn = new WeakMap<Rows, Map<string, { asked: string; line: Line | null }>>();

/** Return the line of a measure of a run; null if it has no number. */
export function lineOf(rows: Rows | undefined, key: string, against: Against, options: LineOptions): Line | null {
  if (!rows?.has(key)) return null;
  let known = drawn.get(rows);
  if (!known) drawn.set(rows, (known = new Map<string, { asked: string; line: Line | null }>()));
  const asked = JSON.stringify([rows.version, against, options]);
  const last = known.get(key);
  if (last?.asked === asked) return last.line;
  const line = thinnedLine(rows, key, against, options);
  known.set(key, { asked, line });
  return line;
}

function thinnedLine(rows: Rows, key: string, against: Against, options: LineOptions): Line | null {
  const xs = rows.column(AXES[against]);
  const ys = rows.column(key);
  const rounds = rows.column("round");
  const kept = thinned(xs, ys, options.buckets, options.positive);
  if (!kept.length) return null;
  const line: Line = {
    label: options.label,
    index: options.index,
    x: kept.map((n) => xs[n]! / options.per),
    y: kept.map((n) => ys[n]!),
    rounds: kept.map((n) => rounds[n]!),
  };
  if (options.thin) line.thin = true;
  return line;
}
