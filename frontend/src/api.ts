// Requests to the server that served this page. Addresses are relative to the page: /ui/api/... for /ui/.

export class ApiError extends Error {
  constructor(
    readonly status: number,
    message: string,
    readonly retryAfter: number | null = null,
  ) {
    super(message);
  }
}

let csrf = "";
let onSessionLost = (): void => {};

export function setCsrf(token: string): void {
  csrf = token;
}

/** Call `listener` whenever the server answers that there is no session. */
export function whenSessionLost(listener: () => void): void {
  onSessionLost = listener;
}

export type Params = Record<string, string | number | string[]>;

export function address(path: string, params: Params = {}): string {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(params))
    for (const one of Array.isArray(value) ? value : [value]) query.append(key, String(one));
  const text = query.toString();
  return text ? `${path}?${text}` : path;
}

export const fileAddress = (id: string, name: string): string => address("file", { id, name });

export function get<T>(path: string, params: Params = {}): Promise<T> {
  return answer<T>(path, fetch(address(`api/${path}`, params), { headers: { accept: "application/json" } }));
}

export function post<T>(path: string, body: unknown): Promise<T> {
  const headers: Record<string, string> = { "content-type": "application/json", accept: "application/json" };
  if (csrf) headers["atoll-csrf"] = csrf;
  return answer<T>(path, fetch(`api/${path}`, { method: "POST", headers, body: JSON.stringify(body) }));
}

async function answer<T>(path: string, request: Promise<Response>): Promise<T> {
  let response: Response;
  try {
    response = await request;
  } catch (error) {
    throw new ApiError(0, error instanceof Error ? error.message : String(error));
  }
  const body: unknown = await response.json().catch(() => null);
  if (response.ok) return body as T;
  if (response.status === 401 && path !== "session") onSessionLost();
  const text = (body as { error?: unknown } | null)?.error;
  const wait = Number(response.headers.get("retry-after"));
  throw new ApiError(
    response.status,
    typeof text === "string" ? text : `${response.status} ${response.statusText}`,
    wait > 0 ? wait : null,
  );
}

export const messageOf = (error: unknown): string => (error instanceof Error ? error.message : String(error));
