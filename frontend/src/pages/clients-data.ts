// The clients of a federation, fetched again when the server says that they changed.
import { useCallback, useEffect, useState } from "preact/hooks";
import { get, messageOf } from "../api";
import { clientsTopic } from "../store";
import type { Client } from "../types";

export function useClients(federation: boolean): { clients: Client[] | null; problem: string; reload: () => void } {
  const [clients, setClients] = useState<Client[] | null>(null);
  const [problem, setProblem] = useState("");
  const reload = useCallback(() => {
    if (!federation) return;
    get<{ clients: Client[] }>("clients").then(
      (answer) => (setClients(answer.clients), setProblem("")),
      (error: unknown) => setProblem(messageOf(error)),
    );
  }, [federation]);
  useEffect(() => {
    reload();
    return clientsTopic.listen(reload);
  }, [reload]);
  return { clients, problem, reload };
}

export function offencesByNumber(clients: readonly Client[] | null): Map<number, number> {
  const found = new Map<number, number>();
  for (const client of clients ?? []) if (client.number !== null) found.set(client.number, client.offences);
  return found;
}
