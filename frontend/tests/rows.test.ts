// The rows of a run under messages in any order that a server may send.
import assert from "node:assert/strict";
import test from "node:test";
import { Rows } from "../src/rows";
import type { Row } from "../src/types";

const row = (round: number, value = round): Row => ({ round, value });
const rounds = (rows: Rows): number[] => [...rows.column("round")];

test("rows are added and dropped by their rounds", () => {
  const rows = new Rows();
  rows.apply(0, [row(1), row(2), row(3)]);
  rows.apply(2, [row(3, 33), row(4)]);
  assert.deepEqual(rounds(rows), [1, 2, 3, 4]);
  assert.deepEqual([...rows.column("value")], [1, 2, 33, 4]);
  rows.apply(1, []);
  assert.deepEqual(rounds(rows), [1]);
});

test("a message that comes twice changes nothing", () => {
  const [once, twice] = [new Rows(), new Rows()];
  for (const rows of [once, twice]) rows.apply(0, [row(1), row(2), row(5)]);
  const message = [row(3), row(4), row(6)];
  once.apply(2, message);
  twice.apply(2, message);
  twice.apply(2, message);
  assert.deepEqual(rounds(once), [1, 2, 3, 4, 6]);
  assert.deepEqual(rounds(twice), rounds(once));
});

test("any restart ends with every round once and its newest value", () => {
  let seed = 7;
  const random = (most: number): number => (seed = (seed * 48271) % 2147483647) % most;
  for (let trial = 0; trial < 200; trial++) {
    const rows = new Rows();
    const truth = new Map<number, number>();
    for (let step = 0; step < 30; step++) {
      const last = Math.max(0, ...truth.keys());
      const keep = random(4) ? last : Math.max(0, last - random(60));
      for (const round of [...truth.keys()]) if (round > keep) truth.delete(round);
      const news = Array.from({ length: random(40) }, (_, n) => row(keep + n + 1, random(1000)));
      for (const one of news) truth.set(one.round, one["value"]!);
      rows.apply(keep, news);
      if (!random(5)) rows.apply(keep, news);
    }
    assert.deepEqual(rounds(rows), [...truth.keys()]);
    assert.deepEqual([...rows.column("value")], [...truth.values()]);
  }
});

test("missing numbers are NaN, also of columns that begin late", () => {
  const rows = new Rows();
  rows.apply(0, [{ round: 1 }, { round: 2, late: 5 }, { round: 3, late: null }]);
  assert.deepEqual([...rows.column("late")], [NaN, 5, NaN]);
  assert.deepEqual(rows.newest("late"), { round: 2, value: 5 });
  assert.equal(rows.newest("never"), null);
});

test("the number of rows is bounded, and evaluated rounds stay", () => {
  const rows = new Rows(64);
  for (let round = 1; round <= 1000; round++) rows.apply(round - 1, [round % 10 ? row(round) : { ...row(round), tested: 1 }]);
  assert.ok(rows.length <= 64 && rows.length >= 32);
  assert.equal(rows.lastRound, 1000);
  assert.ok(rows.thinned);
  const kept = rounds(rows);
  assert.deepEqual(kept, [...kept].sort((a, b) => a - b));
  const tested = [...rows.column("tested")].filter((value) => value === 1).length;
  assert.ok(tested >= 12, `${tested} evaluated rounds are left`);
});

test("a table of columns is the same rows", () => {
  const rows = Rows.fromTable({ id: "a", columns: { round: [1, 2], value: [3, null] }, total: 2, every: 1, measures: [] });
  assert.deepEqual(rounds(rows), [1, 2]);
  assert.deepEqual([...rows.column("value")], [3, NaN]);
});
