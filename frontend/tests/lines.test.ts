// Thinning, alignment and means of lines.
import assert from "node:assert/strict";
import test from "node:test";
import { aligned, digitsOf, logTicks, meanOf, nearest, range, thinned } from "../src/charts/lines";

test("thinning keeps the extremes and the last point", () => {
  const x = Array.from({ length: 10_000 }, (_, n) => n);
  const y = x.map((n) => Math.sin(n / 50));
  y[4321] = 99;
  y[1234] = -99;
  const kept = thinned(x, y, 500);
  assert.ok(kept.length <= 1001);
  for (const place of [4321, 1234, 9999]) assert.ok(kept.includes(place));
  assert.deepEqual(kept, [...kept].sort((a, b) => a - b));
});

test("thinning leaves out what is no number, and what a logarithm cannot show", () => {
  assert.deepEqual(thinned([1, 2, 3, 4], [NaN, 0, 1, -1], 10), [1, 2, 3]);
  assert.deepEqual(thinned([1, 2, 3, 4], [NaN, 0, 1, -1], 10, true), [2]);
});

test("lines are put on one axis", () => {
  const lines = [{ label: "a", index: 0, x: [1, 3], y: [10, 30] }, { label: "b", index: 1, x: [2, 3], y: [200, 300] }];
  assert.deepEqual(aligned(lines), [[1, 2, 3], [10, null, 30], [null, 200, 300]]);
});

test("many lines share a grid that keeps the order and number of their points", () => {
  const lines = Array.from({ length: 20 }, (_, index) => ({ label: "", index, x: Array.from({ length: 600 }, (_, n) => n + index / 21), y: Array.from({ length: 600 }, (_, n) => n) }));
  const [x, ...columns] = aligned(lines);
  assert.equal(x.length, 4000);
  for (const column of columns) assert.deepEqual(column.filter((value) => value !== null), lines[0]!.y);
});

test("means and deviations are of the lines that got there", () => {
  const lines = [{ label: "a", index: 0, x: [0, 2], y: [0, 2] }, { label: "b", index: 0, x: [0, 1, 3], y: [2, 3, 3] }];
  const { x, mean, deviation, num } = meanOf(lines);
  assert.deepEqual(x, [0, 1, 2, 3]);
  assert.deepEqual(mean, [1, 2, 2.5, 3]);
  assert.deepEqual(num, [2, 2, 2, 1]);
  assert.ok(Math.abs(deviation[0]! - Math.SQRT2) < 1e-12);
  assert.equal(deviation[3], 0);
});

test("ranges, ticks and the nearest point", () => {
  assert.deepEqual(range(0.5, 1, true), [0.47, 1]);
  assert.equal(range(0, 2, false)[0], 0);
  assert.ok(range(-1, 1, false)[0] < -1);
  assert.deepEqual(logTicks(0.1, 3), [0.1, 0.2, 0.5, 1, 2]);
  assert.deepEqual([5, 2.5, 0.25, 1 / 3].map(digitsOf), [0, 1, 2, 3]);
  assert.equal(nearest([1, 4, 9], 6), 1);
  assert.equal(nearest([1, 4, 9], 7), 2);
});
