// The clients of a federation: who is there, who is at work, and, for operators, who may take part.
import { useMemo, useState } from "preact/hooks";
import { post } from "../api";
import { NONE, count, seconds } from "../format";
import { type Key, t } from "../i18n";
import { ActionButton, Confirmed, Empty, Problem, Secret, Section } from "../parts/basics";
import { type Column, Table } from "../parts/table";
import { can } from "../session";
import type { Client } from "../types";
import { useClients } from "./clients-data";

export function ClientsPage() {
  const { clients, problem, reload } = useClients(true);
  const [text, setText] = useState("");
  const [ticked, setTicked] = useState<ReadonlySet<string>>(new Set());
  const operator = can("approve") || can("revoke");
  const rows = useMemo(() => {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    return (clients ?? []).filter((client) => words.every((word) => `${client.id} ${client.name} ${client.status}`.toLowerCase().includes(word)));
  }, [clients, text]);
  const tick = (id: string, on: boolean): void => {
    const next = new Set(ticked);
    if (on) next.add(id);
    else next.delete(id);
    setTicked(next);
  };
  const chosen = (clients ?? []).filter((client) => ticked.has(client.id));
  const done = (): void => (setTicked(new Set()), reload());
  const online = (clients ?? []).filter((client) => client.online).length;
  const working = (clients ?? []).filter((client) => client.working.length).length;
  return (
    <>
      <h1>{t("nav.clients")}</h1>
      <p class="lead">{clients ? t("clients.lead", { all: count(clients.length), online: count(online), working: count(working) }) : t("page.loading")}</p>
      <Problem text={problem} />
      <Section
        title={t("clients.all")}
        aside={
          <label class="field">
            <span class="hidden-text">{t("clients.filter")}</span>
            <input type="search" value={text} placeholder={t("clients.filter")} onInput={(event) => setText(event.currentTarget.value)} />
          </label>
        }
      >
        {clients && !rows.length && <Empty>{clients.length ? t("clients.noMatch") : t("clients.none")}</Empty>}
        {rows.length > 0 && <Table label={t("clients.all")} columns={columns()} rows={rows} id={(client) => client.id} first="name" {...(operator ? { ticks: { ticked, onTick: tick, name: (client: Client) => client.name } } : {})} />}
        {operator && rows.length > 0 && <Decide chosen={chosen} onDone={done} />}
      </Section>
      {can("enrol_token") && <Enrol />}
    </>
  );
}

function columns(): Column<Client>[] {
  return [
    { key: "name", title: t("column.client"), text: true, by: (client) => client.name, cell: (client) => <><strong>{client.name}</strong> <small>{client.id.slice(0, 12)}</small></> },
    { key: "number", title: t("column.number"), by: (client) => client.number, cell: (client) => count(client.number) },
    { key: "status", title: t("column.status"), text: true, by: (client) => client.status, cell: (client) => <span class={`mark client-${client.status}`}>{t(`client.${client.status}` as Key)}</span> },
    { key: "online", title: t("column.presence"), text: true, by: (client) => client.seconds_since, cell: presence },
    { key: "working", title: t("column.working"), text: true, by: (client) => client.working.join(" ") || null, cell: (client) => client.working.join(", ") || NONE },
    { key: "samples", title: t("column.samples"), by: (client) => client.samples, cell: samples },
    { key: "ready", title: t("column.ready"), text: true, by: (client) => Object.keys(client.ready ?? {}).length, cell: (client) => Object.keys(client.ready ?? {}).join(", ") || NONE },
    { key: "offences", title: t("column.offences"), by: (client) => client.offences, cell: (client) => <>{count(client.offences)} {client.refused && <span class="mark stopped">{t("client.refused")}</span>}</> },
  ];
}

const presence = (client: Client) => (
  <span class={client.online ? "presence on" : "presence"}>
    {client.online ? t("client.online") : client.seconds_since === null ? t("client.never") : t("client.since", { time: seconds(client.seconds_since) })}
  </span>
);

const samples = (client: Client) => (
  <>
    {count(client.samples)} {client.agreed !== null && client.agreed !== client.samples && <small>{t("client.agreed", { samples: count(client.agreed) })}</small>}
  </>
);

function Decide({ chosen, onDone }: { chosen: Client[]; onDone: () => void }) {
  const [agreed, setAgreed] = useState("");
  const clients = chosen.map((client) => client.id);
  const approve = (): Promise<unknown> => post("actions/approve", { clients, samples: agreed ? Number(agreed) : null });
  const names = chosen.map((client) => client.name).join(", ");
  return (
    <div class="buttons">
      {can("approve") && (
        <>
          <label class="inline">
            {t("clients.samples")}
            <input type="number" min="1" step="1" value={agreed} placeholder={t("clients.asStated")} onInput={(event) => setAgreed(event.currentTarget.value)} />
          </label>
          <ActionButton main disabled={!clients.length} action={approve} onDone={onDone}>{t("clients.approve", { num: clients.length })}</ActionButton>
        </>
      )}
      {can("revoke") && (
        <Confirmed label={t("clients.revoke", { num: clients.length })} disabled={!clients.length} question={t("clients.revokeQuestion", { num: clients.length })} detail={`${names}. ${t("clients.revokeDetail")}`} action={() => post("actions/revoke", { clients })} onDone={onDone} />
      )}
    </div>
  );
}

function Enrol() {
  const [hours, setHours] = useState("24");
  const [token, setToken] = useState("");
  const make = async (): Promise<void> => setToken((await post<{ token: string }>("actions/enrol_token", { hours: Number(hours) })).token);
  return (
    <Section title={t("enrol.title")}>
      <p class="note">{t("enrol.note")}</p>
      <div class="buttons">
        <label class="inline">
          {t("access.hours")}
          <input type="number" min="0.1" step="any" value={hours} onInput={(event) => setHours(event.currentTarget.value)} />
        </label>
        <ActionButton action={make} disabled={!(Number(hours) > 0)}>{t("enrol.make")}</ActionButton>
      </div>
      {token && <Secret label={t("enrol.token")} text={token} />}
    </Section>
  );
}
