// The ledger of a run: what each record says, and whether the chain holds.
import { useEffect, useState } from "preact/hooks";
import { get, messageOf, post } from "../../api";
import { count, seconds } from "../../format";
import { t } from "../../i18n";
import { ActionButton, Empty, Pager, Problem, Section } from "../../parts/basics";
import { figuresTopic } from "../../store";
import type { LedgerPage, Verdict } from "../../types";

const PER_PAGE = 200;

export function LedgerView({ id, title }: { id: string; title?: string }) {
  const [ledger, setLedger] = useState<LedgerPage | null>(null);
  const [page, setPage] = useState<number | null>(null);
  const [verdict, setVerdict] = useState<Verdict | null>(null);
  const [problem, setProblem] = useState("");
  useEffect(() => {
    let gone = false;
    const load = async (): Promise<void> => {
      const known = await get<LedgerPage>("ledger", { id, from: (page ?? 0) * PER_PAGE });
      const last = Math.max(0, Math.ceil(known.length / PER_PAGE) - 1);
      const shown = page === null && last > 0 ? await get<LedgerPage>("ledger", { id, from: last * PER_PAGE }) : known;
      if (!gone) setLedger(shown);
    };
    const report = (error: unknown): void => void (gone || setProblem(messageOf(error)));
    load().catch(report);
    const stop = page === null ? figuresTopic.listen(() => void load().catch(report)) : () => {};
    return () => {
      gone = true;
      stop();
    };
  }, [id, page]);
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
              <li key={record.number} value={record.number}>
                <details>
                  <summary>
                    <span class="number">{count(record.number)}</span> <span class="kind">{record.kind}</span> {record.says}
                  </summary>
                  <p class="note"><code>{record.hash}</code></p>
                  <pre tabIndex={0}>{JSON.stringify(record.body, null, 1)}</pre>
                </details>
              </li>
            ))}
          </ol>
          <Pager page={page ?? pages - 1} pages={pages} onPage={setPage} />
        </>
      )}
    </Section>
  );
}
