// The headline numbers of a run, its cohort as it fills, its curves and its budgets.
import { useRef } from "preact/hooks";
import { axis, axisOf, lineOf, movingAxes } from "../../charts/axes";
import { Chart, type ChartData } from "../../charts/chart";
import type { Line } from "../../charts/lines";
import { fileAddress } from "../../api";
import { NONE, SMALLER_IS_BETTER, bytes, count, figure, figureName, measureTitle, seconds, short, time } from "../../format";
import { t, tOr } from "../../i18n";
import { Card, Meter, Section, Switch } from "../../parts/basics";
import { type Route, setQuery } from "../../router";
import type { Rows } from "../../rows";
import { currentSession } from "../../session";
import { figuresTopic, isLive, rowsOf } from "../../store";
import { useTopic } from "../../topic";
import type { Live, RunDocuments, Summary } from "../../types";

const MOST_NAMED = 60;
const MOST_CHIPS = 300;

export function Overview({ run, documents, route }: { run: Summary; documents: RunDocuments | null; route: Route }) {
  useTopic(figuresTopic);
  const rows = rowsOf(run.id);
  return (
    <>
      {run.live && isLive(run) && <Cohort run={run} live={run.live} />}
      <Cards run={run} rows={rows} documents={documents} />
      <Curves run={run} rows={rows} route={route} />
      <Budgets run={run} rows={rows} />
      <Facts run={run} documents={documents} />
    </>
  );
}

function Cohort({ run, live }: { run: Summary; live: Live }) {
  const last = useRef(live);
  if (live.asked) last.current = live;
  const { clients: named, asked, arrived } = last.current; // between two rounds, those of the last one stay
  return (
    <Section title={t("cohort.title", { round: count(Math.min(run.round + 1, run.rounds)), rounds: count(run.rounds) })} aside={<Phase run={run} live={live} />}>
      {live.text && <p class="note">{live.text}</p>}
      {!!asked && <Meter value={arrived ?? 0} most={asked} label={t("cohort.arrived")} text={t("cohort.of", { arrived: count(arrived ?? 0), asked: count(asked) })} />}
      {named && named.length > 0 && (
        <details class="cohort" open={named.length <= MOST_NAMED}>
          <summary>{currentSession()?.kind === "federation" ? t("cohort.working") : t("cohort.clients", { num: count(asked ?? named.length) })}</summary>
          <ul class="chips">
            {named.slice(0, MOST_CHIPS).map((client) => <li key={client}>{client}</li>)}
            {named.length > MOST_CHIPS && <li>…</li>}
          </ul>
        </details>
      )}
      {named === null && live.attempt !== 0 && <p class="note">{t("cohort.hidden")}</p>}
    </Section>
  );
}

const Phase = ({ run, live }: { run: Summary; live: Live }) => (
  <span class="phase">
    <span class="pulse" aria-hidden="true" />
    {tOr(`phase.${live.phase}`, live.phase)}
    {(live.attempt ?? 0) > run.round + 1 && ` · ${t("cohort.attempt", { attempt: count(live.attempt) })}`}
    {(live.seconds_waiting ?? 0) >= 5 && ` · ${t("cohort.waiting", { time: seconds(live.seconds_waiting) })}`}
  </span>
);

function Cards({ run, rows, documents }: { run: Summary; rows: Rows | undefined; documents: RunDocuments | null }) {
  const value = run.test?.[run.main];
  const name = figureName(run.main);
  const best = bestOf(rows, run.main);
  const tested = rows?.newest(`test.${run.main}`);
  const pace = run.seconds && run.round ? t("card.pace", { time: seconds(run.seconds / run.round) }) : "";
  const params = (documents?.info?.["model"] as { num_params?: number } | undefined)?.num_params;
  const ended = run.status === "ended";
  return (
    <dl class="cards">
      {value != null && <Card main title={t(ended ? "card.final" : "card.latest", { name })} value={figure(run.main, value)} small={t("card.tested", { round: count(tested?.round ?? run.round) })} />}
      {best && <Card main title={t("card.best", { name })} value={figure(run.main, best.value)} small={t("card.tested", { round: count(best.round) })} />}
      <Card title={t("card.rounds")} value={count(run.round)} small={t("card.planned", { rounds: count(run.rounds) })} />
      {run.train_loss !== null && <Card title={t("card.trainLoss")} value={short(run.train_loss)} small={t("card.lastRound")} />}
      {run.seconds !== null && <Card title={t("card.seconds")} value={seconds(run.seconds)} small={pace} />}
      {!!run.simulated_seconds && <Card title={t("card.simulated")} value={seconds(run.simulated_seconds)} small={t("card.virtual")} />}
      {run.bytes_up !== null && <Card title={t("card.uplink")} value={bytes(run.bytes_up)} small={t("card.allClients")} />}
      {run.bytes_down !== null && <Card title={t("card.downlink")} value={bytes(run.bytes_down)} small={t("card.allClients")} />}
      {run.privacy && <Card main title={t("card.epsilon")} value={short(run.privacy.epsilon)} small={run.privacy.delta === null ? "" : `delta ${run.privacy.delta.toExponential()}`} />}
      {run.num_clients !== null && <Card title={t("card.clients")} value={count(run.num_clients)} small={run.clients_test?.["worst_decile"] != null ? t("card.worst", { value: figure(run.main, run.clients_test["worst_decile"]) }) : ""} />}
      {params !== undefined && <Card title={t("card.parameters")} value={count(params)} small={run.model} />}
    </dl>
  );
}

function bestOf(rows: Rows | undefined, name: string): { round: number; value: number } | null {
  if (!rows?.has(`test.${name}`)) return null;
  const values = rows.column(`test.${name}`);
  const smaller = SMALLER_IS_BETTER.has(name);
  let at = -1;
  for (let n = 0; n < values.length; n++)
    if (Number.isFinite(values[n]) && (at < 0 || (smaller ? values[n]! < values[at]! : values[n]! > values[at]!))) at = n;
  return at < 0 ? null : { round: rows.column("round")[at]!, value: values[at]! };
}

function Curves({ run, rows, route }: { run: Summary; rows: Rows | undefined; route: Route }) {
  const against = axisOf(route.query.get("x"));
  const log = route.query.get("log") === "1";
  const measures = (rows?.measures ?? []).filter((one) => one.key !== "test.loss" && one.key !== "train_loss");
  const measure = measures.find((one) => one.key === route.query.get("y")) ?? measures[0];
  const title = measure ? measureTitle(measure) : t("column.main");
  const budget = run.privacy?.budget ?? null;
  const draw = (keys: [string, string][], share: boolean, logarithmic: boolean, floor?: number | null) => (width: number): ChartData => {
    const newest = rowsOf(run.id);
    const { title: xTitle, per } = axis(against, [newest]);
    const lines = keys
      .map(([key, label], n) => lineOf(newest, key, against, { label, index: 0, per, buckets: Math.min(Math.round(width), 1000), positive: logarithmic, thin: n > 0 }))
      .filter((line): line is Line => line !== null);
    const first = lines[0];
    if (floor && first) lines.push({ label: t("budget.limit"), index: 1, thin: true, x: first.x, y: first.x.map(() => floor) });
    return { lines, xTitle, whole: against === "round", share, log: logarithmic };
  };
  const version = JSON.stringify([run.id, against, log, measure?.key, document.documentElement.lang]);
  const controls = (
    <>
      {measures.length > 1 && (
        <label>
          {t("curves.measure")}{" "}
          <select value={measure?.key} onChange={(event) => setQuery({ y: event.currentTarget.value })}>
            {measures.map((one) => <option key={one.key} value={one.key}>{measureTitle(one)}</option>)}
          </select>
        </label>
      )}
      <Switch label={t("curves.axis")} value={against} onChange={(x) => setQuery({ x })} options={movingAxes([rows]).map((one) => [one, t(`against.${one}`)])} />
      <label class="tick">
        <input type="checkbox" checked={log} onChange={(event) => setQuery({ log: event.currentTarget.checked ? "1" : null })} /> {t("curves.log")}
      </label>
      <a class="button" href={fileAddress(run.id, "metrics.csv")} download>CSV</a>
    </>
  );
  return (
    <Section title={t("curves.title")} aside={controls}>
      <div class="charts">
        <Chart title={title} file={`${run.id}-${measure?.key}`} version={version} data={draw(measure ? [[measure.key, title]] : [], measure?.share ?? false, false)} />
        <Chart title={t("curves.loss")} note={t("curves.lossNote")} file={`${run.id}-loss`} version={version} data={draw([["test.loss", t("curves.testLoss")], ["train_loss", t("curves.trainLoss")]], false, log)} />
        {rows?.has("privacy.epsilon") && <Chart title={t("budget.epsilon")} file={`${run.id}-epsilon`} version={version} data={draw([["privacy.epsilon", "epsilon"]], false, false, budget)} />}
      </div>
      <p class="hint">{t("curves.hint")}{rows?.thinned ? ` ${t("curves.thinned")}` : ""}</p>
    </Section>
  );
}

function Budgets({ run, rows }: { run: Summary; rows: Rows | undefined }) {
  const { budgets, privacy } = run;
  const used = (run.bytes_up ?? 0) + (run.bytes_down ?? 0);
  const lost = ["failed", "rejected", "abandoned"].map((key) => rows?.newest(key)?.value ?? 0);
  return (
    <Section title={t("budget.title")}>
      <div class="meters">
        <Meter value={run.round} most={run.rounds} label={t("card.rounds")} text={`${count(run.round)} / ${count(run.rounds)}`} />
        {privacy && (privacy.budget === null ? <p class="note">{t("budget.noEpsilon", { epsilon: short(privacy.epsilon) })}</p> : <Meter budget value={privacy.epsilon} most={privacy.budget} label={t("budget.epsilon")} text={`${short(privacy.epsilon)} / ${short(privacy.budget)}`} />)}
        {budgets.bytes != null && <Meter budget value={used} most={budgets.bytes} label={t("budget.bytes")} text={`${bytes(used)} / ${bytes(budgets.bytes)}`} />}
        {budgets.seconds != null && <Meter budget value={run.seconds ?? 0} most={budgets.seconds} label={t("card.seconds")} text={`${seconds(run.seconds ?? 0)} / ${seconds(budgets.seconds)}`} />}
        {budgets.simulated_seconds != null && <Meter budget value={run.simulated_seconds ?? 0} most={budgets.simulated_seconds} label={t("card.simulated")} text={`${seconds(run.simulated_seconds ?? 0)} / ${seconds(budgets.simulated_seconds)}`} />}
      </div>
      {lost.some((num) => num > 0) && <p class="note">{t("budget.lost", { failed: count(lost[0]), rejected: count(lost[1]), abandoned: count(lost[2]) })}</p>}
    </Section>
  );
}

function Facts({ run, documents }: { run: Summary; documents: RunDocuments | null }) {
  const info = documents?.info ?? {};
  const data = (info["data"] ?? {}) as Record<string, unknown>;
  const engine = info["engine"] as { name?: string } | string | undefined;
  const facts: [string, string][] = [
    [t("fact.algorithm"), run.algorithm],
    [t("fact.model"), run.model],
    [t("fact.data"), [run.data, t("fact.samples", { train: count(data["num_train"]), test: count(data["num_test"]) })].join("\n")],
    [t("fact.engine"), (typeof engine === "string" ? engine : engine?.name) ?? NONE],
    [t("fact.seed"), String(run.seed)],
    [t("fact.started"), time(run.started)],
    [t("fact.version"), String(info["atoll"] ?? NONE)],
    [t("fact.identity"), String(info["identity"] ?? NONE).slice(0, 12)],
  ];
  return (
    <Section title={t("fact.title")}>
      <dl class="facts">
        {facts.map(([term, text]) => (
          <div key={term}>
            <dt>{term}</dt>
            <dd>{text || NONE}</dd>
          </div>
        ))}
      </dl>
    </Section>
  );
}
