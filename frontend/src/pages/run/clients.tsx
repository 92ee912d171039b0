// The clients of a run: what sites measured, how the figure is spread, trust and contribution.
import { useMemo } from "preact/hooks";
import { NONE, SHARES, SMALLER_IS_BETTER, count, figure, figureName, isNumber, percent, short } from "../../format";
import { t } from "../../i18n";
import { Empty, Scroll, Section } from "../../parts/basics";
import { type Column, Table } from "../../parts/table";
import { currentSession } from "../../session";
import type { RunDocuments, Sites, Summary } from "../../types";
import { offencesByNumber, useClients } from "../clients-data";
import { Ranked } from "../../charts/ranked";

export function ClientsView({ run, documents }: { run: Summary; documents: RunDocuments }) {
  const federation = currentSession()?.kind === "federation";
  const { clients } = useClients(federation);
  const offences = offencesByNumber(clients);
  const rows = useMemo(() => clientRows(documents, offences), [documents, clients]);
  const metric = documents.clients?.metric ?? "accuracy";
  const values = (documents.clients?.[metric] ?? []) as (number | null)[];
  const measured = values.filter(isNumber);
  const quarantined = documents.detection?.quarantined;
  if (!documents.sites && !rows.length) return <Section title={t("view.clients")}><Empty>{t("clients.nothing")}</Empty></Section>;
  return (
    <>
      {documents.sites && <SitesTable sites={documents.sites} />}
      {measured.length > 0 && (
        <Section title={t("clients.spread")}>
          <Ranked values={measured} share={SHARES.has(metric)} smaller={SMALLER_IS_BETTER.has(metric)} label={t("clients.ranked", { name: figureName(metric), num: count(measured.length), round: count(documents.clients?.round) })} />
          <SpreadNote values={measured} metric={metric} />
        </Section>
      )}
      {rows.length > 0 && (
        <Section title={t("clients.each")}>
          {quarantined && <p class="note">{t("clients.quarantined", { num: count(quarantined.length) })} {isNumber(documents.detection?.precision) && t("clients.detected", { precision: percent(documents.detection.precision, 1), recall: percent(documents.detection.recall ?? 0, 1) })}</p>}
          <Table label={t("clients.each")} columns={clientColumns(rows, metric)} rows={rows} id={(row) => String(row.client)} first="client" narrow />
        </Section>
      )}
      {run.live?.clients === null && <Empty>{t("cohort.hidden")}</Empty>}
    </>
  );
}

interface ClientRow {
  client: number;
  value: number | null;
  samples: number | null;
  trust: number | null;
  quarantined: boolean;
  contribution: number | null;
  offences: number | null;
}

function clientRows(documents: RunDocuments, offences: Map<number, number>): ClientRow[] {
  const rows = new Map<number, ClientRow>();
  const row = (client: number): ClientRow => {
    let found = rows.get(client);
    if (!found) rows.set(client, (found = { client, value: null, samples: null, trust: null, quarantined: false, contribution: null, offences: offences.get(client) ?? null }));
    return found;
  };
  const { clients, partition, detection, contribution } = documents;
  const values = (clients?.[clients.metric ?? "accuracy"] ?? []) as (number | null)[];
  values.forEach((value, n) => (row(clients?.clients?.[n] ?? n).value = value));
  partition?.counts.forEach((counts, n) => (row(partition.clients?.[n] ?? n).samples = counts.reduce((a, b) => a + b, 0)));
  for (const [client, facts] of Object.entries(detection?.clients ?? {})) row(Number(client)).trust = facts.trust;
  for (const client of detection?.quarantined ?? []) row(client).quarantined = true;
  const shares = contribution && "clients" in contribution ? (contribution.clients as Record<string, number>) : (contribution ?? {});
  for (const [client, value] of Object.entries(shares)) row(Number(client)).contribution = value;
  return [...rows.values()];
}

/** Return the columns that some client has something in. */
function clientColumns(rows: ClientRow[], metric: string): Column<ClientRow>[] {
  const columns: (Column<ClientRow> & { by: (row: ClientRow) => number | null })[] = [
    { key: "client", title: t("column.client"), by: (row) => row.client, cell: (row) => count(row.client) },
    { key: "samples", title: t("column.samples"), by: (row) => row.samples, cell: (row) => count(row.samples) },
    { key: "value", title: figureName(metric), by: (row) => row.value, cell: (row) => figure(metric, row.value) },
    { key: "trust", title: t("column.trust"), by: (row) => row.trust, cell: (row) => <>{short(row.trust)} {row.quarantined && <span class="mark stopped">{t("client.quarantined")}</span>}</> },
    { key: "contribution", title: t("column.contribution"), by: (row) => row.contribution, cell: (row) => short(row.contribution) },
    { key: "offences", title: t("column.offences"), by: (row) => row.offences, cell: (row) => count(row.offences) },
  ];
  return columns.filter((column) => column.key === "client" || rows.some((row) => column.by(row) !== null || (column.key === "trust" && row.quarantined)));
}

function SpreadNote({ values, metric }: { values: number[]; metric: string }) {
  const sorted = [...values].sort((a, b) => a - b);
  const mean = sorted.reduce((a, b) => a + b, 0) / sorted.length;
  const middle = sorted[sorted.length >> 1]!;
  return <p class="note">{t("clients.summary", { mean: figure(metric, mean), median: figure(metric, middle), low: figure(metric, sorted[0]), high: figure(metric, sorted[sorted.length - 1]) })}</p>;
}

function SitesTable({ sites }: { sites: Sites }) {
  const names = Object.keys(sites.pooled ?? {});
  const rows = sites.secret ? [...sites.sites, { ...sites.secret, client: null, name: t("sites.secret", { num: sites.secret.clients.length }) }] : sites.sites;
  const total = rows.reduce((sum, site) => sum + (site.samples ?? 0), 0);
  return (
    <Section title={t("sites.title")}>
      <Scroll label={t("sites.title")}>
        <table class="num">
          <thead>
            <tr>
              <th scope="col" class="text">{t("sites.site")}</th>
              <th scope="col">{t("column.samples")}</th>
              {names.map((name) => <th scope="col" key={name}>{figureName(name)}</th>)}
              <th scope="col" class="text">{t("sites.note")}</th>
            </tr>
          </thead>
          <tbody>
            {rows.map((site) => (
              <tr key={site.name}>
                <td class="text">{site.name}</td>
                <td>{count(site.samples)}</td>
                {names.map((name) => <td key={name}>{figure(name, site.figures?.[name])}</td>)}
                <td class="text">{("rejected" in site && site.rejected) || site.reason || (site.client !== null && site.client === sites.worst?.client ? t("sites.worst") : "")}</td>
              </tr>
            ))}
            {names.length > 0 && (
              <tr class="total">
                <td class="text">{t("sites.pooled")}</td>
                <td>{total ? count(total) : NONE}</td>
                {names.map((name) => <td key={name}>{figure(name, sites.pooled?.[name])}</td>)}
                <td />
              </tr>
            )}
          </tbody>
        </table>
      </Scroll>
      <p class="note">{t("sites.after", { round: count(sites.round) })}</p>
    </Section>
  );
}
