// Several runs side by side: their curves, or means and deviations over the seeds of a plan.
import { useEffect, useMemo, useState } from "preact/hooks";
import { type Against, AXES, axis, axisOf, lineOf, movingAxes } from "../charts/axes";
import { Chart, type ChartData } from "../charts/chart";
import { type Line, colourName, dashOf, meanOf } from "../charts/lines";
import { NONE, bytes, count, measureTitle, seconds, shown } from "../format";
import { t } from "../i18n";
import { Empty, Mark, Problem, Scroll, Section, Switch } from "../parts/basics";
import { saveCsv } from "../parts/files";
import { type Route, runLink, setQuery } from "../router";
import { MOST_ROWS } from "../rows";
import { figuresTopic, rowsOf, runs, runsTopic } from "../store";
import { watch } from "../stream";
import { useTopic } from "../topic";
import type { Measure, Summary } from "../types";

const MOST_RUNS = 60;
/** Points of all curves together that are drawn. */
const POINTS = 12_000;

interface Curve {
  label: string;
  index: number;
  ids: string[];
}

export function ComparePage({ route }: { route: Route }) {
  useTopic(runsTopic);
  const chosen = [...new Set(route.query.getAll("id"))];
  const ids = useMemo(() => chosen.slice(0, MOST_RUNS), [chosen.join("\n")]);
  useEffect(() => (watch(ids), () => watch([])), [ids.join("\n")]);
  const [hidden, setHidden] = useState<ReadonlySet<string>>(new Set());
  useTopic(figuresTopic);
  const grouped = route.query.get("group") === "seeds";
  const against = axisOf(route.query.get("x"));
  const log = route.query.get("log") === "1";
  const all = ids.map(rowsOf);
  const measures = measuresOf(ids);
  const measure = measures.find((one) => one.key === route.query.get("y")) ?? measures[0];
  const curves = curvesOf(ids, grouped);
  const visible = curves.filter((curve) => !hidden.has(curve.label));
  const toggle = (label: string): void => {
    const next = new Set(hidden);
    if (!next.delete(label)) next.add(label);
    setHidden(next);
  };
  if (!ids.length)
    return (
      <>
        <h1>{t("nav.compare")}</h1>
        <section>
          <Empty>{t("compare.none")}</Empty>
          <p><a class="button" href="#/">{t("compare.choose")}</a></p>
        </section>
      </>
    );
  const draw = (key: string, share: boolean, logarithmic: boolean) => (width: number): ChartData => ({
    lines: linesOf(visible, key, against, Math.min(Math.round(width), Math.floor(POINTS / (2 * ids.length))), logarithmic),
    xTitle: axis(against, all).title,
    whole: against === "round",
    share,
    log: logarithmic,
  });
  const version = JSON.stringify([visible.map((curve) => curve.label), against, log, measure?.key, document.documentElement.lang]);
  const controls = (
    <>
      {measures.length > 0 && (
        <label>
          {t("curves.measure")}{" "}
          <select value={measure?.key} onChange={(event) => setQuery({ y: event.currentTarget.value })}>
            {measures.map((one) => <option key={one.key} value={one.key}>{measureTitle(one)}</option>)}
          </select>
        </label>
      )}
      <Switch label={t("curves.axis")} value={against} onChange={(x) => setQuery({ x })} options={movingAxes(all).map((one) => [one, t(`against.${one}`)])} />
      <Switch label={t("compare.group")} value={grouped ? "seeds" : "runs"} onChange={(value) => setQuery({ group: value === "seeds" ? "seeds" : null })} options={[["runs", t("compare.byRun")], ["seeds", t("compare.bySeeds")]]} />
      <label class="tick">
        <input type="checkbox" checked={log} onChange={(event) => setQuery({ log: event.currentTarget.checked ? "1" : null })} /> {t("curves.log")}
      </label>
    </>
  );
  return (
    <>
      <h1>{t("compare.title", { num: ids.length })}</h1>
      <p class="lead">{t("compare.lead")}</p>
      {chosen.length > ids.length && <Problem text={t("compare.most", { num: chosen.length, most: MOST_RUNS })} />}
      <Section title={t("curves.title")} aside={controls}>
        <Legend curves={curves} hidden={hidden} onToggle={toggle} />
        <div class="charts">
          <Chart title={measure ? measureTitle(measure) : t("column.main")} file={`compare-${measure?.key}`} version={version} data={draw(measure?.key ?? "", measure?.share ?? false, false)} />
          <Chart title={t("curves.testLoss")} file="compare-loss" version={version} data={draw("test.loss", false, log)} />
        </div>
        {grouped && <p class="hint">{t("compare.band")}</p>}
        <div class="buttons">
          <button type="button" disabled={!measure} onClick={() => measure && saveShown(visible, measure, against, grouped)}>{t("compare.csv")}</button>
          <CopyLink />
        </div>
      </Section>
      <Section title={t("compare.figures")}>
        {measure && <Figures curves={curves} measure={measure} />}
      </Section>
    </>
  );
}

function CopyLink() {
  const [copied, setCopied] = useState(false);
  const copy = (): void => void navigator.clipboard?.writeText(location.href).then(() => setCopied(true));
  return <button type="button" onClick={copy}>{copied ? t("secret.copied") : t("compare.link")}</button>;
}

export function Legend({ curves, hidden, onToggle }: { curves: Curve[]; hidden: ReadonlySet<string>; onToggle: (label: string) => void }) {
  return (
    <div class="legend" role="group" aria-label={t("compare.legend")}>
      {curves.map((curve) => (
        <button type="button" key={curve.label} aria-pressed={!hidden.has(curve.label)} onClick={() => onToggle(curve.label)}>
          <svg viewBox="0 0 26 8" aria-hidden="true">
            <line x1="1" x2="25" y1="4" y2="4" stroke-width="3" stroke={`var(--${colourName(curve.index)})`} stroke-dasharray={dashOf({ index: curve.index }).join(" ")} />
          </svg>
          {curve.label}
        </button>
      ))}
    </div>
  );
}

function Figures({ curves, measure }: { curves: Curve[]; measure: Measure }) {
  return (
    <Scroll label={t("compare.figures")}>
      <table class="num">
        <thead>
          <tr>
            <th scope="col" class="text">{t("column.run")}</th>
            <th scope="col" class="text">{t("column.status")}</th>
            <th scope="col">{t("column.round")}</th>
            <th scope="col">{t("compare.newest", { measure: measureTitle(measure) })}</th>
            <th scope="col">{t("compare.best", { measure: measureTitle(measure) })}</th>
            <th scope="col">{t("column.loss")}</th>
            <th scope="col">{t("column.bytes")}</th>
            <th scope="col">{t("column.seconds")}</th>
          </tr>
        </thead>
        <tbody>
          {curves.map((curve) => {
            const members = curve.ids.map((id) => runs.get(id)).filter((run): run is Summary => !!run);
            const newest = curve.ids.map((id) => rowsOf(id)?.newest(measure.key)?.value);
            const best = curve.ids.map((id) => bestOf(id, measure));
            const one = (values: (number | null | undefined)[], text: (value: number) => string): string => spreadText(values, text);
            return (
              <tr key={curve.label}>
                <td class="text">
                  <span class="key" style={{ background: `var(--${colourName(curve.index)})` }} />
                  {curve.ids.length === 1 ? <a href={runLink(curve.ids[0]!)}>{curve.label}</a> : curve.label}
                </td>
                <td class="text">{members.length === 1 ? <Mark status={members[0]!.status} /> : t("compare.seeds", { num: members.length })}</td>
                <td>{count(Math.max(0, ...members.map((run) => run.round)))}</td>
                <td>{one(newest, (value) => shown(value, measure.share))}</td>
                <td>{one(best, (value) => shown(value, measure.share))}</td>
                <td>{one(members.map((run) => run.test?.["loss"]), (value) => shown(value, false))}</td>
                <td>{one(members.map((run) => run.bytes_up), bytes)}</td>
                <td>{one(members.map((run) => run.seconds), seconds)}</td>
              </tr>
            );
          })}
        </tbody>
      </table>
    </Scroll>
  );
}

function bestOf(id: string, measure: Measure): number | null {
  const values = (rowsOf(id)?.column(measure.key) ?? []) as Float64Array;
  let best: number | null = null;
  for (const value of values)
    if (Number.isFinite(value) && (best === null || (measure.smaller ? value < best : value > best))) best = value;
  return best;
}

/** Return the mean and the deviation of what there is. */
function spreadText(values: (number | null | undefined)[], text: (value: number) => string): string {
  const found = values.filter((value): value is number => typeof value === "number" && Number.isFinite(value));
  if (!found.length) return NONE;
  const mean = found.reduce((sum, value) => sum + value, 0) / found.length;
  if (found.length === 1) return text(mean);
  const deviation = Math.sqrt(found.reduce((sum, value) => sum + (value - mean) ** 2, 0) / (found.length - 1));
  return `${text(mean)} ± ${text(deviation)}`;
}

function measuresOf(ids: readonly string[]): Measure[] {
  const found = new Map<string, Measure>();
  for (const id of ids) for (const measure of rowsOf(id)?.measures ?? []) found.set(measure.key, measure);
  return [...found.values()];
}

function curvesOf(ids: readonly string[], grouped: boolean): Curve[] {
  const groups = new Map<string, string[]>();
  for (const id of ids) {
    const key = grouped ? (runs.get(id)?.group ?? id) : id;
    groups.set(key, [...(groups.get(key) ?? []), id]);
  }
  const labels = new Map<string, number>();
  return [...groups.values()].map((members, index) => {
    const run = runs.get(members[0]!);
    let label = !grouped || members.length === 1 ? members[0]! : commonName(members) || (run?.name ?? members[0]!);
    const seen = labels.get(label) ?? 0;
    labels.set(label, seen + 1);
    if (seen) label += ` #${seen + 1}`;
    return { label, index, ids: members };
  });
}

/** Return what the ids of runs begin with, up to a slash: sweep/lr=0.1 of sweep/lr=0.1/seed0 and sweep/lr=0.1/seed1. */
function commonName(ids: readonly string[]): string {
  const parts = ids.map((id) => id.split("/"));
  const first = parts[0]!;
  let same = 0;
  while (same < first.length && parts.every((one) => one[same] === first[same])) same++;
  return first.slice(0, same).join("/");
}

function linesOf(curves: readonly Curve[], key: string, against: Against, buckets: number, positive: boolean): Line[] {
  const all = curves.flatMap((curve) => curve.ids.map(rowsOf));
  const per = axis(against, all).per;
  const lines: Line[] = [];
  for (const curve of curves) {
    const members = curve.ids
      .map((id) => lineOf(rowsOf(id), key, against, { label: curve.label, index: curve.index, per, buckets, positive }))
      .filter((line): line is Line => line !== null);
    if (members.length === 1) lines.push({ ...members[0]! });
    if (members.length < 2) continue;
    const { x, mean, deviation } = meanOf(members);
    const low = mean.map((value, n) => (positive ? Math.max(value - deviation[n]!, value / 10) : value - deviation[n]!));
    lines.push({ label: curve.label, index: curve.index, x, y: mean, low, high: mean.map((value, n) => value + deviation[n]!) });
  }
  return lines;
}

function saveShown(curves: readonly Curve[], measure: Measure, against: Against, grouped: boolean): void {
  const rows: (string | number | null)[][] = [["run", ...(grouped ? [] : ["round"]), AXES[against], measure.key, ...(grouped ? ["deviation"] : [])]];
  const per = axis(against, curves.flatMap((curve) => curve.ids.map(rowsOf))).per;
  for (const line of linesOf(curves, measure.key, against, MOST_ROWS, false))
    line.x.forEach((x, n) => {
      const deviation = line.high ? line.high[n]! - line.y[n]! : null;
      rows.push([line.label, ...(grouped ? [] : [line.rounds?.[n] ?? null]), x * per, line.y[n]!, ...(grouped ? [deviation] : [])]);
    });
  saveCsv(rows, `compare-${measure.key}.csv`);
}
