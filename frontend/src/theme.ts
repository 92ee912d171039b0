// Light and dark: as the system says, or as was chosen here.
import { Topic } from "./topic";

export type Scheme = "auto" | "light" | "dark";
export const SCHEMES: readonly Scheme[] = ["auto", "light", "dark"];

export const themeTopic = new Topic();
const KEY = "atoll.theme";
const dark = window.matchMedia("(prefers-color-scheme: dark)");

let scheme: Scheme = SCHEMES.find((one) => one === read(KEY)) ?? "auto";

export const currentScheme = (): Scheme => scheme;

export function setScheme(chosen: Scheme): void {
  scheme = chosen;
  write(KEY, chosen);
  apply();
  themeTopic.notify();
}

/** Return a colour of the theme as it is now, for a canvas. */
export const colour = (name: string): string =>
  getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

export function startTheme(): void {
  apply();
  dark.addEventListener("change", () => themeTopic.notify());
}

/** Read a remembered choice; storage may be forbidden. */
export function read(key: string): string | null {
  try {
    return localStorage.getItem(key);
  } catch {
    return null;
  }
}

export function write(key: string, value: string): void {
  try {
    localStorage.setItem(key, value);
  } catch {
    return;
  }
}

function apply(): void {
  if (scheme === "auto") delete document.documentElement.dataset["theme"];
  else document.documentElement.dataset["theme"] = scheme;
}
