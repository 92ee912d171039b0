// What is fetched of a run that is shown: once, and again when the server says that its files changed.
import { useEffect, useRef, useState } from "preact/hooks";
import { get, messageOf } from "../../api";
import { whenFilesChange } from "../../store";
import type { RunDocuments } from "../../types";

const LEAST_MS = 1000;
const STREAMED: readonly string[] = ["log.txt", "ledger.jsonl"];

/** Fetch something of a run, and again whenever one of the files that concern it changes, once a second at most. */
export function useFetched<T>(id: string, concerns: (file: string) => boolean, fetch: () => Promise<T>, version: unknown = 0): { data: T | null; problem: string } {
  const [data, setData] = useState<T | null>(null);
  const [problem, setProblem] = useState("");
  const newest = useRef(fetch);
  newest.current = fetch;
  useEffect(() => {
    let gone = false;
    let timer = 0;
    const load = (): void => {
      timer = 0;
      newest.current().then(
        (answer) => gone || (setData(answer), setProblem("")),
        (error: unknown) => gone || setProblem(messageOf(error)),
      );
    };
    load();
    const stop = whenFilesChange((changed, names) => {
      if (changed === id && !timer && names.some(concerns)) timer = window.setTimeout(load, LEAST_MS);
    });
    return () => {
      gone = true;
      clearTimeout(timer);
      stop();
    };
  }, [id, version]);
  return { data, problem };
}

export function useDocuments(id: string): { documents: RunDocuments | null; problem: string } {
  const { data, problem } = useFetched(id, (file) => !STREAMED.includes(file), () => get<RunDocuments>("run", { id }));
  return { documents: data, problem };
}
