// One run: its headline, and views of its curves, clients, data, ledger, plan, log and files.
import { useEffect } from "preact/hooks";
import { fileAddress, post } from "../../api";
import { count, figure, figureName } from "../../format";
import { type Key, t } from "../../i18n";
import { Confirmed, Empty, Mark, Problem } from "../../parts/basics";
import { type Route, runLink } from "../../router";
import { can } from "../../session";
import { hasRuns, isLive, runs, runsTopic } from "../../store";
import { watch } from "../../stream";
import { useTopic } from "../../topic";
import type { RunDocuments, Summary } from "../../types";
import { ClientsView } from "./clients";
import { DataView } from "./data";
import { useDocuments } from "./documents";
import { LedgerView } from "./ledger";
import { Overview } from "./overview";
import { FilesView, LogView, PlanView } from "./texts";
import { useSpoken } from "./spoken";

const VIEWS = ["overview", "clients", "data", "ledger", "plan", "log", "files"] as const;
type View = (typeof VIEWS)[number];

export function RunPage({ route }: { route: Route }) {
  const { id } = route;
  useTopic(runsTopic);
  useEffect(() => (watch([id]), () => watch([])), [id]);
  const { documents, problem } = useDocuments(id);
  const run = runs.get(id) ?? (hasRuns() ? null : documents?.summary) ?? null;
  const spoken = useSpoken(run);
  if (!run)
    return (
      <>
        <h1>{id}</h1>
        <Problem text={problem} />
        {!problem && <Empty>{hasRuns() && !documents ? t("run.gone") : t("page.loading")}</Empty>}
      </>
    );
  const view = VIEWS.find((one) => one === route.query.get("view")) ?? "overview";
  return (
    <>
      <Heading run={run} documents={documents} />
      <Problem text={run.problem ?? problem} />
      <p class="hidden-text" role="status">{spoken}</p>
      <nav class="views" aria-label={t("run.views")}>
        {VIEWS.map((one) => (
          <a key={one} href={runLink(id, one === "overview" ? "" : `view=${one}`)} aria-current={one === view ? "page" : undefined}>
            {t(`view.${one}` as Key)}
          </a>
        ))}
      </nav>
      <Shown view={view} run={run} documents={documents} route={route} />
    </>
  );
}

function Shown({ view, run, documents, route }: { view: View; run: Summary; documents: RunDocuments | null; route: Route }) {
  if (view === "overview") return <Overview run={run} documents={documents} route={route} />;
  if (view === "ledger") return <LedgerView key={run.id} id={run.id} />;
  if (view === "log") return <LogView run={run} />;
  if (!documents) return <Empty>{t("page.loading")}</Empty>;
  if (view === "clients") return <ClientsView run={run} documents={documents} />;
  if (view === "data") return <DataView documents={documents} />;
  if (view === "plan") return <PlanView run={run} documents={documents} />;
  return <FilesView run={run} documents={documents} />;
}

function Heading({ run, documents }: { run: Summary; documents: RunDocuments | null }) {
  const stop = (): Promise<unknown> => post("actions/stop_run", { id: run.id });
  const clients = run.num_clients === null ? "" : t("run.clients", { num: count(run.num_clients) });
  const what = t("run.what", { algorithm: run.algorithm, data: run.data, model: run.model });
  return (
    <div class="heading">
      <div>
        <h1>
          {run.name || run.id} <Mark status={run.problem ? "problem" : run.status} />
        </h1>
        <p class="lead">
          {[what, clients, t("run.seed", { seed: run.seed })].filter(Boolean).join(" · ")}
          {run.name && run.name !== run.id && <> · <code>{run.id}</code></>}
        </p>
        {run.reason && <p class="lead">{t("run.ended", { rounds: count(run.round), planned: count(run.rounds), reason: run.reason })}</p>}
      </div>
      <div class="buttons">
        {documents?.pages.map((name) => (
          <a key={name} class="button" href={fileAddress(run.id, name)} target="_blank" rel="noopener noreferrer">
            {name === "report.html" ? t("run.report") : name === "redteam.html" ? t("run.redteam") : name.replace(/\.html$/, "")} <span aria-hidden="true">↗</span>
          </a>
        ))}
        {can("stop_run") && isLive(run) && (
          <Confirmed label={t("run.stop")} question={t("run.stopQuestion", { name: run.name || run.id })} detail={t("run.stopDetail")} action={stop} />
        )}
      </div>
    </div>
  );
}

/** Return a sentence about how far a run is, for headings and screen readers. */
export function progressText(run: Summary): string {
  const value = run.test?.[run.main];
  const far = t("run.progress", { round: count(run.round), rounds: count(run.rounds) });
  return value == null ? far : `${far}, ${figureName(run.main)} ${figure(run.main, value)}`;
}
