// Who is signed in. A link carries a token in its fragment, which is exchanged for a cookie and removed at once.
import { ApiError, get, messageOf, post, setCsrf, whenSessionLost } from "./api";
import { Topic } from "./topic";
import type { Action, Session } from "./types";

export const sessionTopic = new Topic();

let session: Session | null = null;
let state: "opening" | "open" | "closed" = "opening";
let problem = "";

export const currentSession = (): Session | null => session;
export const sessionState = (): typeof state => state;
export const sessionProblem = (): string => problem;
export const can = (action: Action): boolean => session?.can.includes(action) ?? false;

export async function openSession(): Promise<void> {
  const match = /^#token=([^&]+)(?:&to=(.*))?/.exec(location.hash);
  let refused = "";
  if (match?.[1]) {
    history.replaceState(null, "", `${location.pathname}${location.search}#${match[2] ?? "/"}`);
    try {
      return enter(await post<Session>("session", { token: decodeURIComponent(match[1]) }));
    } catch (error) {
      refused = messageOf(error);
    }
  }
  try {
    enter(await get<Session>("session"));
  } catch (error) {
    leave(refused || (error instanceof ApiError && error.status === 401 ? "" : messageOf(error)));
  }
}

export async function signIn(token: string): Promise<void> {
  enter(await post<Session>("session", { token: tokenOf(token) }));
}

export async function signOut(): Promise<void> {
  await post("session/end", {});
  leave("");
}

export function leave(why: string): void {
  if (state === "closed" && !why) return;
  session = null;
  state = "closed";
  problem = why;
  setCsrf("");
  sessionTopic.notify();
}

/** Return the token of what was pasted: the token itself, or a whole link. */
export function tokenOf(text: string): string {
  const match = /#token=([^&\s]+)/.exec(text);
  return match?.[1] ? decodeURIComponent(match[1]) : text.trim();
}

function enter(opened: Session): void {
  session = opened;
  state = "open";
  problem = "";
  setCsrf(opened.csrf);
  sessionTopic.notify();
}

whenSessionLost(() => leave(""));
