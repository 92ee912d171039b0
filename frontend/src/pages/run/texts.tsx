// The plan, the log and the files of a run.
import { useEffect, useState } from "preact/hooks";
import { fileAddress, get, messageOf } from "../../api";
import { bytes } from "../../format";
import { t } from "../../i18n";
import { Empty, Problem, Section } from "../../parts/basics";
import { isLive, whenFilesChange } from "../../store";
import type { RunDocuments, Summary } from "../../types";

const LOG_MS = 2000;

export function PlanView({ run, documents }: { run: Summary; documents: RunDocuments }) {
  return (
    <Section title={t("view.plan")} aside={<a class="button" href={fileAddress(run.id, "plan.toml")} download>{t("plan.download")}</a>}>
      <pre tabIndex={0} aria-label={t("view.plan")}>{documents.plan}</pre>
    </Section>
  );
}

export function LogView({ run }: { run: Summary }) {
  const [text, setText] = useState<string | null>(null);
  const [problem, setProblem] = useState("");
  const live = isLive(run);
  useEffect(() => {
    let gone = false;
    const load = (): void =>
      void get<{ text: string }>("log", { id: run.id }).then(
        (answer) => gone || setText(answer.text),
        (error: unknown) => gone || setProblem(messageOf(error)),
      );
    load();
    const timer = live ? setInterval(load, LOG_MS) : undefined;
    const stop = whenFilesChange((id) => id === run.id && load());
    return () => {
      gone = true;
      clearInterval(timer);
      stop();
    };
  }, [run.id, live]);
  return (
    <Section title={t("view.log")}>
      <Problem text={problem} />
      {text === "" ? <Empty>{t("log.none")}</Empty> : <pre class="log" tabIndex={0} aria-label={t("view.log")}>{text ?? t("page.loading")}</pre>}
    </Section>
  );
}

export function FilesView({ run, documents }: { run: Summary; documents: RunDocuments }) {
  return (
    <Section title={t("view.files")}>
      {!documents.files.length && <Empty>{t("files.none")}</Empty>}
      <ul class="files">
        {documents.files.map((file) => {
          const page = documents.pages.includes(file.name);
          const open = page ? { target: "_blank", rel: "noopener noreferrer" } : { download: true };
          return (
            <li key={file.name}>
              <a href={fileAddress(run.id, file.name)} {...open}>{file.name}</a> <small>{bytes(file.bytes)}</small>
            </li>
          );
        })}
      </ul>
    </Section>
  );
}
