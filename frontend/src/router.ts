// The page is named by the fragment, so that a link can be shared: #/run/sweep/lr=0.1/seed0?x=bytes&y=test.accuracy
import { useLayoutEffect, useState } from "preact/hooks";

export type PageName = "runs" | "run" | "compare" | "clients" | "start" | "access";

export interface Route {
  page: PageName;
  id: string;
  query: URLSearchParams;
}

const PAGES: readonly string[] = ["compare", "clients", "start", "access"];

export function parseRoute(hash: string): Route {
  const [path = "", query = ""] = split(hash.replace(/^#/, ""), "?");
  const params = new URLSearchParams(query);
  if (path.startsWith("/run/")) {
    const id = path.slice(5).split("/").map(decoded).join("/");
    if (id) return { page: "run", id, query: params };
  }
  const name = path.slice(1);
  return { page: PAGES.includes(name) ? (name as PageName) : "runs", id: "", query: params };
}

export const runLink = (id: string, query = ""): string =>
  `#/run/${id.split("/").map(encodeURIComponent).join("/")}${query ? `?${query}` : ""}`;

export const compareLink = (ids: Iterable<string>): string =>
  `#/compare?${new URLSearchParams([...ids].map((id) => ["id", id])).toString()}`;

/** Change the query of the page that is shown, without a new entry in the history. */
export function setQuery(change: Record<string, string | null | string[]>): void {
  const [path = "", query = ""] = split(location.hash || "#/", "?");
  const params = new URLSearchParams(query);
  for (const [key, value] of Object.entries(change)) {
    params.delete(key);
    for (const one of Array.isArray(value) ? value : value === null ? [] : [value]) params.append(key, one);
  }
  const text = params.toString();
  history.replaceState(null, "", text ? `${path}?${text}` : path);
  window.dispatchEvent(new HashChangeEvent("hashchange"));
}

export function useRoute(): Route {
  const [route, setRoute] = useState(() => parseRoute(location.hash));
  useLayoutEffect(() => {
    const listener = (): void => setRoute(parseRoute(location.hash));
    window.addEventListener("hashchange", listener);
    return () => window.removeEventListener("hashchange", listener);
  }, []);
  return route;
}

function split(text: string, at: string): [string, string] {
  const place = text.indexOf(at);
  return place < 0 ? [text, ""] : [text.slice(0, place), text.slice(place + 1)];
}

function decoded(text: string): string {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}
