// Start a run: a plan, the rules that apply to it, and a name.
import { useState } from "preact/hooks";
import { post } from "../api";
import { t } from "../i18n";
import { ActionButton, Problem, Section } from "../parts/basics";
import { runLink } from "../router";
import { can } from "../session";
import type { PlanCheck } from "../types";

const MOST_BYTES = 1_000_000;

export function StartPage() {
  const [plan, setPlan] = useState("");
  const [name, setName] = useState("");
  const [checked, setChecked] = useState<(PlanCheck & { plan: string }) | null>(null);
  const [problem, setProblem] = useState("");
  const choose = async (file: File | undefined): Promise<void> => {
    if (!file) return;
    if (file.size > MOST_BYTES) return setProblem(t("start.tooLarge", { name: file.name }));
    setProblem("");
    setPlan(await file.text());
  };
  const check = async (): Promise<void> => {
    const answer = await post<PlanCheck>("actions/check_plan", { plan });
    setChecked({ ...answer, plan });
    if (!name && answer.name) setName(answer.name);
  };
  const start = async (): Promise<void> => {
    const answer = await post<{ run: string }>("actions/add_run", { run: name.trim(), plan });
    location.hash = runLink(answer.run);
  };
  const current = checked?.plan === plan ? checked : null;
  return (
    <>
      <h1>{t("nav.start")}</h1>
      <p class="lead">{t("start.lead")}</p>
      <Section title={t("start.plan")}>
        <Problem text={problem} />
        <label class="file">
          {t("start.choose")} <input type="file" accept=".toml,text/plain" onChange={(event) => void choose(event.currentTarget.files?.[0])} />
        </label>
        <label class="block">
          {t("start.paste")}
          <textarea rows={16} spellcheck={false} value={plan} onInput={(event) => setPlan(event.currentTarget.value)} />
        </label>
        <div class="buttons">
          {can("check_plan") && <ActionButton main={!current?.ok} disabled={!plan.trim()} action={check}>{t("start.check")}</ActionButton>}
        </div>
        <div role="status">{current && <Checked answer={current} />}</div>
      </Section>
      {can("add_run") && (
        <Section title={t("start.run")}>
          <div class="buttons">
            <label class="inline">
              {t("start.name")}
              <input value={name} onInput={(event) => setName(event.currentTarget.value)} />
            </label>
            <ActionButton main disabled={!current?.ok || !name.trim()} action={start}>{t("start.start")}</ActionButton>
          </div>
          {!current?.ok && <p class="note">{t("start.first")}</p>}
        </Section>
      )}
    </>
  );
}

function Checked({ answer }: { answer: PlanCheck }) {
  return (
    <>
      <p class={answer.ok ? "verdict good" : "verdict bad"}>{answer.ok ? t("start.holds", { num: answer.rules.length }) : answer.problem}</p>
      {answer.rules.length > 0 && (
        <ul class="rules" tabIndex={0} aria-label={t("start.rules")}>
          {answer.rules.map((rule) => (
            <li key={rule.name}>
              <strong>{rule.name}</strong> {rule.reason}
            </li>
          ))}
        </ul>
      )}
    </>
  );
}
