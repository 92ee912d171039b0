// What the page knows of runs: their summaries, and the rows of those that are drawn.
import { get } from "./api";
import { Rows } from "./rows";
import { Topic } from "./topic";
import type { RowsMessage, RowsTable, Summary } from "./types";

const MOST_IDLE = 8;

/** Summaries by id. */
export const runs = new Map<string, Summary>();
export const runsTopic = new Topic(100);
/** Rows of runs by id; those that were used last come last. */
const rowsById = new Map<string, Rows>();
export const rowsTopic = new Topic();
/** As `rowsTopic`, for tables of figures, which nobody reads sixty times a second. */
export const figuresTopic = new Topic(500);
export const clientsTopic = new Topic(1000);

let received = false;
type FileListener = (id: string, names: readonly string[]) => void;
const fileListeners = new Set<FileListener>();
const fetching = new Map<string, Promise<void>>();

/** Return whether the server has listed its runs. */
export const hasRuns = (): boolean => received;
export const rowsOf = (id: string): Rows | undefined => rowsById.get(id);
export const isLive = (run: Summary): boolean => run.status === "running" || run.status === "waiting";

/** Take over summaries, and forget rows that were fetched before a run went on. */
export function updateRuns(changed: Summary[], followed: ReadonlySet<string>): void {
  received = true;
  for (const run of changed) {
    const before = runs.get(run.id);
    const moved = before && (before.round !== run.round || before.started !== run.started);
    if (moved && !followed.has(run.id)) rowsById.delete(run.id);
    runs.set(run.id, run);
  }
  runsTopic.notify();
}

export function removeRuns(ids: string[]): void {
  for (const id of ids) {
    runs.delete(id);
    rowsById.delete(id);
  }
  runsTopic.notify();
}

export function updateRows(message: RowsMessage): void {
  const rows = rowsById.get(message.id) ?? new Rows();
  rows.apply(message.keep, message.rows);
  if (message.measures) rows.measures = message.measures;
  rowsById.set(message.id, rows);
  rowsTopic.notify();
  figuresTopic.notify();
}

/** Fetch the rows of a run that is not followed. */
export function fetchRows(id: string): Promise<void> {
  const running = fetching.get(id);
  if (running) return running;
  const request = get<RowsTable>("rows", { id, most: 4000 })
    .then((table) => {
      rowsById.set(id, Rows.fromTable(table));
      rowsTopic.notify();
      figuresTopic.notify();
    })
    .finally(() => fetching.delete(id));
  fetching.set(id, request);
  return request;
}

/** Forget the rows of runs that are not wanted, but for the few that were used last. */
export function pruneRows(wanted: readonly string[]): void {
  for (const id of wanted) {
    const rows = rowsById.get(id);
    if (!rows) continue;
    rowsById.delete(id);
    rowsById.set(id, rows);
  }
  const idle = [...rowsById.keys()].filter((id) => !wanted.includes(id));
  for (const id of idle.slice(0, Math.max(0, idle.length - MOST_IDLE))) rowsById.delete(id);
}

/** Call `listener` with the id of a run and the names of its files that changed. */
export function whenFilesChange(listener: FileListener): () => void {
  fileListeners.add(listener);
  return () => fileListeners.delete(listener);
}

export function filesChanged(id: string, names: readonly string[]): void {
  for (const listener of fileListeners) listener(id, names);
}

export function forgetAll(): void {
  runs.clear();
  rowsById.clear();
  received = false;
  runsTopic.notify();
}
