// The documents of a run that is shown: fetched once, and again when the server says that one changed.
import { useEffect, useState } from "preact/hooks";
import { get, messageOf } from "../../api";
import { whenFilesChange } from "../../store";
import type { RunDocuments } from "../../types";

const LEAST_MS = 1000;

export function useDocuments(id: string): { documents: RunDocuments | null; problem: string } {
  const [documents, setDocuments] = useState<RunDocuments | null>(null);
  const [problem, setProblem] = useState("");
  useEffect(() => {
    let gone = false;
    let timer = 0;
    const load = (): void => {
      timer = 0;
      get<RunDocuments>("run", { id }).then(
        (answer) => gone || (setDocuments(answer), setProblem("")),
        (error: unknown) => gone || setProblem(messageOf(error)),
      );
    };
    setDocuments(null);
    setProblem("");
    load();
    const stop = whenFilesChange((changed) => {
      if (changed === id && !timer) timer = window.setTimeout(load, LEAST_MS);
    });
    return () => {
      gone = true;
      clearTimeout(timer);
      stop();
    };
  }, [id]);
  return { documents, problem };
}
