// What the server sends: see the module documentation of atoll.ui for the interface.

export type Action = "stop_run" | "add_run" | "check_plan" | "approve" | "revoke" | "enrol_token" | "access_add" | "access_revoke";
export type Role = "viewer" | "operator";

export interface Session {
  role: Role;
  name: string;
  csrf: string;
  expires: string;
  kind: "runs" | "simulation" | "federation";
  title: string;
  version: string;
  can: Action[];
}

export type Status = "running" | "waiting" | "ended" | "stopped";

export interface Live {
  phase: string;
  text: string | null;
  attempt?: number;
  /** Null where privacy hides who is asked. */
  asked?: number | null;
  arrived?: number | null;
  clients?: number[] | null;
  seconds_waiting?: number | null;
}

export interface Summary {
  id: string;
  name: string;
  status: Status;
  reason: string | null;
  round: number;
  rounds: number;
  started: string | null;
  seconds: number | null;
  simulated_seconds: number | null;
  algorithm: string;
  model: string;
  data: string;
  seed: number;
  group: string;
  num_clients: number | null;
  main: string;
  test: Record<string, number | null>;
  train_loss: number | null;
  clients_test: Record<string, number | null> | null;
  bytes_up: number | null;
  bytes_down: number | null;
  privacy: { epsilon: number; delta: number | null; budget: number | null } | null;
  budgets: { bytes?: number | null; seconds?: number | null; simulated_seconds?: number | null };
  live: Live | null;
  problem: string | null;
}

export interface Measure {
  key: string;
  title: string;
  share: boolean;
  smaller: boolean;
}

export type Row = Record<string, number | null> & { round: number };

export interface RowsMessage {
  id: string;
  keep: number;
  rows: Row[];
  measures: Measure[];
}

export interface RowsTable {
  id: string;
  columns: Record<string, (number | null)[]>;
  total: number;
  every: number;
  measures: Measure[];
}

type Json = Record<string, unknown>;

export interface Site {
  client: number | null;
  name: string;
  samples?: number;
  figures?: Record<string, number | null>;
  reason?: string;
  rejected?: string;
}

export interface Sites {
  round?: number;
  sites: Site[];
  pooled?: Record<string, number | null>;
  worst?: { client: number };
  secret?: { clients: number[]; names: string[]; figures?: Record<string, number | null>; reason?: string; samples?: number };
}

export interface Detection {
  round?: number;
  quarantined?: number[];
  precision?: number;
  recall?: number;
  clients?: Record<string, { distance?: number; cosine?: number; trust: number }>;
}

export interface RunDocuments {
  summary: Summary;
  plan: string;
  info: Json | null;
  result: Json | null;
  sites: Sites | null;
  clients: (Json & { round?: number; metric?: string; clients?: number[] }) | null;
  confusion: { round?: number; matrix: number[][] } | null;
  partition: { clients?: number[]; counts: number[][]; num_clients?: number; class_names?: string[] } | null;
  charts: Json | null;
  detection: Detection | null;
  /** Totals of an ended run, or what the newest round says. */
  contribution: Record<string, number> | { clients: Record<string, number> } | null;
  files: { name: string; bytes: number }[];
  pages: string[];
}

export interface LedgerRecord {
  number: number;
  kind: string;
  hash: string | null;
  says: string;
  body: Json;
}

export interface LedgerPage {
  length: number;
  head: string | null;
  records: LedgerRecord[];
}

export interface Verdict {
  ok: boolean;
  length: number;
  fault: string | null;
  seconds: number;
}

export interface Client {
  id: string;
  name: string;
  number: number | null;
  status: "pending" | "approved" | "revoked" | "quarantined";
  samples: number | null;
  agreed: number | null;
  offences: number;
  refused: boolean;
  online: boolean;
  seconds_since: number | null;
  ready: Record<string, unknown>;
  working: string[];
}

export interface PlanCheck {
  ok: boolean;
  problem: string | null;
  rules: { name: string; reason: string }[];
  name: string;
}

export interface AccessToken {
  id: string;
  name: string;
  role: Role;
  created: string;
  expires: string;
  used: string | null;
}
