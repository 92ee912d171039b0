// The ledger of a run: what each record says, and whether the chain holds.
import { useState } from "preact/hooks";
import { get, post } from "../../api";
import { count, seconds } from "../../format";
import { t } from "../../i18n";
import { ActionButton, Empty, Pager, Problem, Section } from "../../parts/basics";
import type { LedgerPage, LedgerRecord, Verdict } from "../../types";
import { useFetched } from "./documents";

const PER_PAGE = 200;

/** `version` changes when the ledger is to be fetched again without a word of the server. */
export function LedgerView({ id, title, version }: { id: string; title?: string; version?: number }) {
  const [page, setPage] = useState<number | null>(null);
  const [verdict, setVerdict] = useState<Verdict | null>(null);
  const { data: ledger, problem } = useFetched(id, (file) => file === "ledger.jsonl", () => fetchPage(id, page), `${page} ${version}`);
  const verify = async (): Promise<void> => setVerdict(await post<Verdict>("ledger/verify", { id }));
  const pages = Math.ceil((ledger?.length ?? 0) / PER_PAGE);
  const aside = ledger && ledger.length > 0 && <ActionButton main action={verify}>{t("ledger.verify")}</ActionButton>;
  return (
    <Section title={title ?? t("view.ledger")} aside={aside}>
      <Problem text={problem} />
      {verdict && (
        <p class={verdict.ok ? "verdict good" : "verdict bad"} role="status">
          {verdict.ok ? t("ledger.holds", { length: count(verdict.length), time: seconds(verdict.seconds) }) : t("ledger.broken", { fault: verdict.fault ?? "" })}
        </p>
      )}
      {ledger && ledger.length === 0 && <Empty>{t("ledger.none")}</Empty>}
      {ledger && ledger.length > 0 && (
        <>
          <p class="note">{t("ledger.length", { length: count(ledger.length) })} {ledger.head && <code>{ledger.head.slice(0, 16)}…</code>}</p>
          <ol class="ledger" reversed>
            {[...ledger.records].reverse().map((record) => (
              <Record key={record.number} record={record} />
            ))}
          </ol>
          <Pager page={page ?? pages - 1} pages={pages} onPage={setPage} />
        </>
      )}
    </Section>
  );
}

/** A record in words; its body, which may name a thousand clients, is drawn only once it is opened. */
function Record({ record }: { record: LedgerRecord }) {
  const [open, setOpen] = useState(false);
  return (
    <li value={record.number}>
      <details onToggle={(event) => setOpen(event.currentTarget.open)}>
        <summary>
          <span class="number">{count(record.number)}</span> <span class="kind">{record.kind}</span> {record.says}
        </summary>
        {open && (
          <>
            <p class="note"><code>{record.hash}</code></p>
            <pre tabIndex={0}>{JSON.stringify(record.body, null, 1)}</pre>
          </>
        )}
      </details>
    </li>
  );
}

/** Fetch a page of a ledger; null is the newest, which is known once the length is. */
async function fetchPage(id: string, page: number | null): Promise<LedgerPage> {
  const known = await get<LedgerPage>("ledger", { id, from: (page ?? 0) * PER_PAGE });
  const last = Math.max(0, Math.ceil(known.length / PER_PAGE) - 1);
  return page === null && last > 0 ? get<LedgerPage>("ledger", { id, from: last * PER_PAGE }) : known;
}
