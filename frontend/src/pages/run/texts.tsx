// The plan, the log and the files of a run.
import { fileAddress, get } from "../../api";
import { bytes } from "../../format";
import { t } from "../../i18n";
import { Empty, Problem, Section } from "../../parts/basics";
import type { RunDocuments, Summary } from "../../types";
import { useFetched } from "./documents";

export function PlanView({ run, documents }: { run: Summary; documents: RunDocuments }) {
  return (
    <Section title={t("view.plan")} aside={<a class="button" href={fileAddress(run.id, "plan.toml")} download>{t("plan.download")}</a>}>
      <pre tabIndex={0} aria-label={t("view.plan")}>{documents.plan}</pre>
    </Section>
  );
}

export function LogView({ run }: { run: Summary }) {
  const { data, problem } = useFetched(run.id, (file) => file === "log.txt", () => get<{ text: string }>("log", { id: run.id }));
  return (
    <Section title={t("view.log")}>
      <Problem text={problem} />
      {data?.text === "" ? <Empty>{t("log.none")}</Empty> : <pre class="log" tabIndex={0} aria-label={t("view.log")}>{data?.text ?? t("page.loading")}</pre>}
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
