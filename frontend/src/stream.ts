// The stream of events. The browser reconnects by itself and names the last event that it has; where it gives up, we open anew.
import { type ApiError, address, get } from "./api";
import { leave } from "./session";
import {
  clientsTopic, fetchRows, filesChanged, hasRuns, isLive, pruneRows, removeRuns, rowsOf, runs, runsTopic, updateRows, updateRuns,
} from "./store";
import { Topic } from "./topic";
import type { RowsMessage, Summary } from "./types";

const STALE_MS = 10_000;
const MOST_WAIT_MS = 10_000;

export type Connection = "connecting" | "live" | "reconnecting";

export const connectionTopic = new Topic();

let source: EventSource | null = null;
let followed: ReadonlySet<string> = new Set();
let wanted: readonly string[] = [];
let connection: Connection = "connecting";
let retry = 500;
let timer = 0;
let staleTimer = 0;

export const currentConnection = (): Connection => connection;

export function openStream(): void {
  connect();
}

export function closeStream(): void {
  clearTimeout(timer);
  clearTimeout(staleTimer);
  source?.close();
  source = null;
  followed = new Set();
}

/** Say whose rows are drawn: those of live runs are followed, those of others are fetched once. */
export function watch(ids: readonly string[]): void {
  wanted = ids;
  pruneRows(wanted);
  refresh();
}

/** Follow or fetch what is wanted and not there; called again whenever summaries change. */
function refresh(): void {
  const missing = wanted.filter((id) => !followed.has(id) && mayGrow(id));
  for (const id of wanted)
    if (!followed.has(id) && !mayGrow(id) && runs.has(id) && !rowsOf(id)) fetchRows(id).catch(() => {}); // shown as missing
  if (!source) return;
  clearTimeout(staleTimer);
  if (missing.length) connect();
  else if ([...followed].some((id) => !wanted.includes(id))) staleTimer = window.setTimeout(connect, STALE_MS);
}

function mayGrow(id: string): boolean {
  const run = runs.get(id);
  return run ? isLive(run) : !hasRuns();
}

function connect(): void {
  clearTimeout(timer);
  clearTimeout(staleTimer);
  source?.close();
  followed = new Set(wanted.filter((id) => mayGrow(id)));
  source = new EventSource(address("api/stream", { follow: [...followed] }));
  const opened = source;
  const on = <T>(name: string, handle: (data: T) => void): void =>
    opened.addEventListener(name, (event) => opened === source && handle(JSON.parse((event as MessageEvent<string>).data) as T));
  on<{ runs: Summary[] }>("runs", (data) => updateRuns(data.runs, followed));
  on<{ ids: string[] }>("gone", (data) => removeRuns(data.ids));
  on<RowsMessage>("rows", updateRows);
  on<{ id: string; names: string[] }>("files", (data) => filesChanged(data.id, data.names));
  on("clients", () => clientsTopic.notify());
  on<{ why: string }>("bye", (data) => {
    closeStream();
    leave(data.why);
  });
  opened.onopen = () => {
    retry = 500;
    show("live");
  };
  opened.onerror = () => {
    if (opened !== source) return;
    show("reconnecting");
    if (opened.readyState === EventSource.CLOSED) reopen();
  };
}

/** The server refused the stream: ask whether the session is still there, and try again later if it is. */
function reopen(): void {
  timer = window.setTimeout(() => {
    get("session").then(connect, (error: ApiError) => {
      if (error.status === 401) leave("");
      else if (source) reopen();
    });
  }, retry);
  retry = Math.min(2 * retry, MOST_WAIT_MS);
}

function show(now: Connection): void {
  if (connection === now) return;
  connection = now;
  connectionTopic.notify();
}

runsTopic.listen(refresh);
