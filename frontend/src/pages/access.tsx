// Who may open this page: links with a role that expire and can be revoked; and what operators did.
import { useEffect, useState } from "preact/hooks";
import { get, messageOf, post } from "../api";
import { NONE, time } from "../format";
import { t } from "../i18n";
import { ActionButton, Confirmed, Empty, Problem, Secret, Section } from "../parts/basics";
import { type Column, Table } from "../parts/table";
import { currentSession } from "../session";
import type { AccessToken, Role } from "../types";
import { LedgerView } from "./run/ledger";

export function AccessPage() {
  const [tokens, setTokens] = useState<AccessToken[] | null>(null);
  const [problem, setProblem] = useState("");
  const [version, setVersion] = useState(0);
  const load = (): void => {
    setVersion((number) => number + 1);
    get<{ tokens: AccessToken[] }>("access").then((answer) => setTokens(answer.tokens), (error: unknown) => setProblem(messageOf(error)));
  };
  useEffect(load, []);
  return (
    <>
      <h1>{t("nav.access")}</h1>
      <p class="lead">{t("access.lead")}</p>
      <Problem text={problem} />
      <NewLink onMade={load} />
      <Section title={t("access.all")}>
        {tokens && !tokens.length && <Empty>{t("access.none")}</Empty>}
        {tokens && tokens.length > 0 && <Table label={t("access.all")} columns={columns(load)} rows={tokens} id={(token) => token.id} first="-created" />}
      </Section>
      {currentSession()?.kind === "federation" && <LedgerView id="@operator" title={t("access.ledger")} version={version} />}
    </>
  );
}

function columns(reload: () => void): Column<AccessToken>[] {
  return [
    { key: "name", title: t("access.name"), text: true, by: (token) => token.name, cell: (token) => token.name },
    { key: "role", title: t("access.role"), text: true, by: (token) => token.role, cell: (token) => t(`role.${token.role}`) },
    { key: "created", title: t("access.created"), by: (token) => token.created, cell: (token) => time(token.created) },
    { key: "expires", title: t("access.expires"), by: (token) => token.expires, cell: (token) => time(token.expires) },
    { key: "used", title: t("access.used"), by: (token) => token.used, cell: (token) => (token.used ? time(token.used) : NONE) },
    { key: "revoke", title: t("access.action"), cell: (token) => <Confirmed label={t("access.revoke")} question={t("access.revokeQuestion", { name: token.name })} action={() => post("actions/access_revoke", { id: token.id })} onDone={reload} /> },
  ];
}

function NewLink({ onMade }: { onMade: () => void }) {
  const [name, setName] = useState("");
  const [role, setRole] = useState<Role>("viewer");
  const [hours, setHours] = useState("24");
  const [link, setLink] = useState("");
  const make = async (): Promise<void> => {
    const answer = await post<{ link: string }>("actions/access_add", { name: name.trim(), role, hours: Number(hours) });
    setLink(new URL(answer.link, location.href).href);
    onMade();
  };
  return (
    <Section title={t("access.make")}>
      <div class="buttons">
        <label class="inline">{t("access.name")}<input value={name} onInput={(event) => setName(event.currentTarget.value)} /></label>
        <label class="inline">
          {t("access.role")}
          <select value={role} onChange={(event) => setRole(event.currentTarget.value as Role)}>
            <option value="viewer">{t("role.viewer")}</option>
            <option value="operator">{t("role.operator")}</option>
          </select>
        </label>
        <label class="inline">{t("access.hours")}<input type="number" min="0.1" step="any" value={hours} onInput={(event) => setHours(event.currentTarget.value)} /></label>
        <ActionButton main disabled={!name.trim() || !(Number(hours) > 0)} action={make}>{t("access.makeLink")}</ActionButton>
      </div>
      {link && <Secret label={t("access.link")} text={link} />}
    </Section>
  );
}
