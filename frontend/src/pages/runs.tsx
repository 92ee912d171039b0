// The table of runs, newest first.
import { useMemo, useState } from "preact/hooks";
import { NONE, bytes, count, figure, figureName, seconds, short, time } from "../format";
import { t } from "../i18n";
import { Empty, Mark, Meter, Section } from "../parts/basics";
import { type Column, Table } from "../parts/table";
import { compareLink, runLink } from "../router";
import { hasRuns, runs, runsTopic } from "../store";
import { Topic, useTopic } from "../topic";
import type { Status, Summary } from "../types";

const STATUSES: readonly Status[] = ["running", "waiting", "ended", "stopped"];

/** Runs that are ticked for comparison; kept while the page is open. */
export const ticked = new Set<string>();
export const tickedTopic = new Topic();

export function tick(id: string, on: boolean): void {
  if (on) ticked.add(id);
  else ticked.delete(id);
  tickedTopic.notify();
}

export function RunsPage() {
  useTopic(runsTopic);
  useTopic(tickedTopic);
  const [text, setText] = useState("");
  const [status, setStatus] = useState("");
  const [algorithm, setAlgorithm] = useState("");
  const all = [...runs.values()];
  const algorithms = [...new Set(all.map((run) => run.algorithm).filter(Boolean))].sort();
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const rows = all.filter((run) => {
    if (status && run.status !== status) return false;
    if (algorithm && run.algorithm !== algorithm) return false;
    if (!words.length) return true;
    const name = `${run.id} ${run.name} ${run.algorithm} ${run.model} ${run.data} seed${run.seed}`.toLowerCase();
    return words.every((word) => name.includes(word));
  });
  const filters = (
    <>
      <label class="field">
        <span class="hidden-text">{t("runs.filter")}</span>
        <input type="search" value={text} placeholder={t("runs.filter")} onInput={(event) => setText(event.currentTarget.value)} />
      </label>
      <label>
        <span class="hidden-text">{t("column.status")}</span>
        <select value={status} onChange={(event) => setStatus(event.currentTarget.value)}>
          <option value="">{t("runs.anyStatus")}</option>
          {STATUSES.map((one) => <option key={one} value={one}>{t(`status.${one}`)}</option>)}
        </select>
      </label>
      <label>
        <span class="hidden-text">{t("column.algorithm")}</span>
        <select value={algorithm} onChange={(event) => setAlgorithm(event.currentTarget.value)}>
          <option value="">{t("runs.anyAlgorithm")}</option>
          {algorithms.map((one) => <option key={one} value={one}>{one}</option>)}
        </select>
      </label>
    </>
  );
  const columns = useMemo(runColumns, [document.documentElement.lang]);
  return (
    <>
      <h1>{t("nav.runs")}</h1>
      <p class="lead">{hasRuns() ? t("runs.lead", { shown: count(rows.length), all: count(all.length), live: count(all.filter((run) => run.status === "running").length) }) : t("page.loading")}</p>
      <Section title={t("runs.all")} aside={filters}>
        {rows.length ? (
          <Table label={t("nav.runs")} columns={columns} rows={rows} id={(run) => run.id} first="-started" ticks={{ ticked, onTick: tick, name: (run) => run.id }} rowClass={(run) => run.status} />
        ) : (
          <Empty>{all.length ? t("runs.noMatch") : hasRuns() ? t("runs.none") : t("page.loading")}</Empty>
        )}
        <div class="buttons">
          <a class={ticked.size ? "button main" : "button off"} aria-disabled={!ticked.size} href={ticked.size ? compareLink(ticked) : undefined}>
            {t("runs.compare", { num: ticked.size })}
          </a>
          {ticked.size > 0 && <button type="button" onClick={() => (ticked.clear(), tickedTopic.notify())}>{t("runs.untick")}</button>}
        </div>
      </Section>
    </>
  );
}

function runColumns(): Column<Summary>[] {
  const main = (run: Summary): number | null | undefined => run.test?.[run.main];
  return [
    { key: "name", title: t("column.run"), text: true, by: (run) => run.id, cell: runCell },
    { key: "status", title: t("column.status"), text: true, by: (run) => run.status, cell: (run) => <Mark status={run.problem ? "problem" : run.status} /> },
    { key: "round", title: t("column.round"), by: (run) => run.round, cell: roundCell },
    { key: "main", title: t("column.main"), by: main, cell: (run) => mainCell(run, main(run)) },
    { key: "loss", title: t("column.loss"), by: (run) => run.test?.["loss"] ?? run.train_loss, cell: (run) => short(run.test?.["loss"] ?? run.train_loss) },
    { key: "epsilon", title: t("column.epsilon"), by: (run) => run.privacy?.epsilon, cell: epsilonCell },
    { key: "bytes", title: t("column.bytes"), by: (run) => run.bytes_up, cell: (run) => bytes(run.bytes_up) },
    { key: "seconds", title: t("column.seconds"), by: (run) => run.seconds, cell: (run) => seconds(run.seconds) },
    { key: "algorithm", title: t("column.algorithm"), text: true, by: (run) => run.algorithm, cell: (run) => run.algorithm || NONE },
    { key: "started", title: t("column.started"), by: (run) => run.started, cell: (run) => time(run.started) },
  ];
}

const runCell = (run: Summary) => (
  <>
    <a class="run-name" href={runLink(run.id)}>{run.name || run.id}</a>
    <small>{run.problem ?? (run.name && run.name !== run.id ? run.id : [run.model, run.data].filter(Boolean).join(", "))}</small>
  </>
);

const roundCell = (run: Summary) => (
  <div class="round-cell">
    {count(run.round)} <small>/ {count(run.rounds)}</small>
    <Meter value={run.round} most={run.rounds} label={t("column.round")} />
  </div>
);

const mainCell = (run: Summary, value: number | null | undefined) => (
  <>
    {figure(run.main, value)} {value != null && <small>{figureName(run.main)}</small>}
  </>
);

const epsilonCell = (run: Summary) =>
  run.privacy ? (
    <>
      {short(run.privacy.epsilon)} {run.privacy.budget !== null && <small>/ {short(run.privacy.budget)}</small>}
    </>
  ) : (
    NONE
  );
