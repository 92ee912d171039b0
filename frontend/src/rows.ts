// The measurements of a run, one typed array a column. Missing numbers are NaN.
import type { Measure, Row, RowsTable } from "./types";

export const MOST_ROWS = 20_000;

export class Rows {
  length = 0;
  /** Changes with every change of the rows. */
  version = 0;
  measures: Measure[] = [];
  /** The server sent every k-th round only, or rounds were left out here to bound memory. */
  thinned = false;
  private capacity = 256;
  private readonly columns = new Map<string, Float64Array>([["round", new Float64Array(256)]]);

  constructor(private readonly most = MOST_ROWS) {}

  static fromTable(table: RowsTable, most = MOST_ROWS): Rows {
    const rows = new Rows(most);
    const keys = Object.keys(table.columns);
    const rounds = table.columns["round"] ?? [];
    rounds.forEach((round, n) => {
      if (round !== null) rows.append(round, keys, (key) => table.columns[key]?.[n]);
    });
    rows.measures = table.measures;
    rows.thinned ||= table.every > 1;
    return rows;
  }

  get lastRound(): number {
    return this.length ? (this.column("round")[this.length - 1] ?? 0) : 0;
  }

  get keys(): string[] {
    return [...this.columns.keys()];
  }

  /** Return the numbers of a column, without copying them; all NaN if there is no such column. */
  column(key: string): Float64Array {
    return this.columns.get(key)?.subarray(0, this.length) ?? new Float64Array(this.length).fill(NaN);
  }

  has(key: string): boolean {
    return this.columns.has(key);
  }

  /** Return the newest number of a column and its round, or null. */
  newest(key: string): { round: number; value: number } | null {
    const values = this.column(key);
    for (let n = this.length - 1; n >= 0; n--)
      if (Number.isFinite(values[n])) return { round: this.column("round")[n]!, value: values[n]! };
    return null;
  }

  /** Drop the rounds after `keep`, then add rows. Applying a message twice is the same as once. */
  apply(keep: number, rows: Row[]): void {
    this.version++;
    this.dropAfter(keep);
    for (const row of rows) this.append(row.round, Object.keys(row), (key) => row[key]);
  }

  private append(round: number, keys: string[], value: (key: string) => number | null | undefined): void {
    if (this.length && round <= this.lastRound) this.dropAfter(round - 1);
    if (this.length === this.most) this.halve();
    if (this.length === this.capacity) this.grow();
    for (const column of this.columns.values()) column[this.length] = NaN;
    for (const key of keys) {
      const number = value(key);
      if (typeof number !== "number") continue;
      let column = this.columns.get(key);
      if (!column) this.columns.set(key, (column = new Float64Array(this.capacity).fill(NaN)));
      column[this.length] = number;
    }
    this.length++;
  }

  private dropAfter(round: number): void {
    const rounds = this.column("round");
    let low = 0;
    let high = this.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (rounds[middle]! <= round) low = middle + 1;
      else high = middle;
    }
    this.length = low;
  }

  private grow(): void {
    this.capacity *= 2;
    for (const [key, old] of this.columns) {
      const column = new Float64Array(this.capacity).fill(NaN);
      column.set(old);
      this.columns.set(key, column);
    }
  }

  /** Keep one row of every two: the one with more numbers, so that evaluated rounds stay; else the later. */
  private halve(): void {
    const columns = [...this.columns.values()];
    const numbers = (n: number): number => columns.reduce((sum, column) => sum + (Number.isNaN(column[n]) ? 0 : 1), 0);
    const half = (this.length + 1) >> 1;
    for (let n = 0; n < half; n++) {
      const later = Math.min(2 * n + 1, this.length - 1);
      const kept = numbers(2 * n) > numbers(later) ? 2 * n : later;
      for (const column of columns) column[n] = column[kept]!;
    }
    this.length = half;
    this.thinned = true;
  }
}
