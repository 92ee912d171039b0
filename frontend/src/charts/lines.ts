// What a chart draws: lines of points, thinned to what a screen can show.

export interface Line {
  label: string;
  /** Place in the palette. */
  index: number;
  x: number[];
  y: number[];
  /** Rounds of the points, for reading; absent where x is the round. */
  rounds?: number[];
  /** Bounds of a band around the line. */
  low?: number[];
  high?: number[];
  /** Drawn dotted and thin, as training losses are. */
  thin?: boolean;
}

export const COLOURS = 7;
const MOST_X = 4000;
const DASHES: readonly number[][] = [[], [10, 4], [3, 3], [12, 3, 3, 3]];

export const colourName = (index: number): string => `c${index % COLOURS}`;
export const dashOf = (line: Pick<Line, "index" | "thin">): number[] =>
  line.thin ? [1.5, 4] : (DASHES[Math.floor(line.index / COLOURS) % DASHES.length] ?? []);

/** Keep the extremes of each of `buckets` stretches of points, so that a hundred thousand rounds draw as fast as a thousand. */
export function thinned(x: ArrayLike<number>, y: ArrayLike<number>, buckets: number, positive = false): number[] {
  const finite: number[] = [];
  for (let n = 0; n < y.length; n++)
    if (Number.isFinite(y[n]) && Number.isFinite(x[n]) && (!positive || y[n]! > 0)) finite.push(n);
  if (finite.length <= 2 * buckets) return finite;
  const per = Math.ceil(finite.length / buckets);
  const kept: number[] = [];
  for (let start = 0; start < finite.length; start += per) {
    const end = Math.min(start + per, finite.length);
    let low = finite[start]!;
    let high = low;
    for (let n = start + 1; n < end; n++) {
      const at = finite[n]!;
      if (y[at]! < y[low]!) low = at;
      if (y[at]! > y[high]!) high = at;
    }
    if (low === high) kept.push(low);
    else kept.push(Math.min(low, high), Math.max(low, high));
  }
  const last = finite[finite.length - 1]!;
  if (kept[kept.length - 1] !== last) kept.push(last);
  return kept;
}

/** Return the place of the point nearest to x in ascending numbers. */
export function nearest(xs: ArrayLike<number>, x: number): number {
  let low = 0;
  let high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle]! < x) low = middle;
    else high = middle;
  }
  return Math.abs(xs[low]! - x) <= Math.abs(xs[high]! - x) ? low : high;
}

/** Return every x of some lines once, in order. */
function ascending(lines: readonly Line[]): number[] {
  const all = new Float64Array(lines.reduce((sum, line) => sum + line.x.length, 0));
  let num = 0;
  for (const line of lines) for (const x of line.x) all[num++] = x;
  all.sort();
  return [...all.filter((x, n) => !n || x !== all[n - 1])];
}

const spaced = (low: number, high: number, num: number): number[] =>
  Array.from({ length: num }, (_, n) => low + (n / (num - 1)) * (high - low));

/** Put lines on one ascending x, as uPlot wants them: [x, y, y, ...] with null where a line has no point.
 *  Where they have too many different x, points move to the next place of a grid that is finer than pixels. */
export function aligned(lines: readonly Line[]): [number[], ...(number | null)[][]] {
  const first = lines[0];
  const same = first && lines.every((line) => line.x.length === first.x.length && line.x.every((x, n) => x === first.x[n]));
  const every = same ? first.x : ascending(lines);
  const all = !same && every.length > MOST_X ? spaced(every[0]!, every[every.length - 1]!, MOST_X) : every;
  const on = (line: Line, values: number[]): (number | null)[] => {
    if (same) return values;
    const column: (number | null)[] = new Array<number | null>(all.length).fill(null);
    let place = -1;
    line.x.forEach((x, n) => {
      place = Math.min(place + 1, all.length - 1);
      while (place < all.length - 1 && all[place]! < x) place++; // both ascend
      column[place] = values[n]!;
    });
    return column;
  };
  const columns = lines.flatMap((line) =>
    line.low && line.high ? [on(line, line.y), on(line, line.high), on(line, line.low)] : [on(line, line.y)],
  );
  return [all, ...columns];
}

/** Return the range of an axis with some air, within [0, 1] for shares and from 0 up for what cannot be negative. */
export function range(low: number, high: number, share: boolean): [number, number] {
  const air = (high - low) * 0.06 || Math.abs(high) * 0.05 || 0.05;
  const bottom = low >= 0 ? Math.max(low - air, 0) : low - air;
  return [bottom, share ? Math.min(high + air, Math.max(1, high)) : high + air];
}

/** Return the ticks of a logarithmic axis: 1, 2 and 5 of each power of ten, or fewer where there are many. */
export function logTicks(low: number, high: number): number[] {
  const [first, last] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
  const all: number[] = [];
  for (let power = first; power <= last; power++) for (const times of last - first > 3 ? [1] : [1, 2, 5]) all.push(times * 10 ** power);
  const step = Math.ceil(all.length / 10);
  return all.filter((value, n) => n % step === 0 && value >= low && value <= high);
}

/** Return how many digits after the point a step between ticks needs: 0 for 5, 1 for 2.5. */
export function digitsOf(step: number): number {
  let digits = 0;
  while (digits < 3 && Math.abs(step * 10 ** digits - Math.round(step * 10 ** digits)) > 1e-6) digits++;
  return digits;
}

/** Mean and sample standard deviation over lines, at every x that one of them has; linear between points. */
export function meanOf(lines: readonly Line[]): { x: number[]; mean: number[]; deviation: number[]; num: number[] } {
  const xs = ascending(lines);
  const places = lines.map(() => 0);
  const mean: number[] = [];
  const deviation: number[] = [];
  const num: number[] = [];
  for (const x of xs) {
    const values: number[] = [];
    lines.forEach((line, which) => {
      const { x: own, y } = line;
      if (!own.length || x < own[0]! || x > own[own.length - 1]!) return;
      let n = places[which]!;
      while (n + 1 < own.length && own[n + 1]! <= x) n++;
      places[which] = n;
      const left = own[n]!;
      const right = own[n + 1];
      values.push(right === undefined || left === x ? y[n]! : y[n]! + ((x - left) / (right - left)) * (y[n + 1]! - y[n]!));
    });
    const average = values.reduce((sum, value) => sum + value, 0) / values.length;
    const squares = values.reduce((sum, value) => sum + (value - average) ** 2, 0);
    mean.push(average);
    deviation.push(values.length > 1 ? Math.sqrt(squares / (values.length - 1)) : 0);
    num.push(values.length);
  }
  return { x: xs, mean, deviation, num };
}
