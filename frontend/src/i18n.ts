// Texts in English and Chinese. Every visible text comes from a dictionary; the server's own texts are shown as they are.
import en from "./i18n/en.json";
import zh from "./i18n/zh.json";
import { read, write } from "./theme";
import { Topic } from "./topic";

export type Key = keyof typeof en;
export type Language = "en" | "zh";
export const LANGUAGES: Record<Language, string> = { en: "English", zh: "中文" };

const KEY = "atoll.language";
const DICTIONARIES: Record<Language, Record<string, string>> = { en, zh };

export const languageTopic = new Topic();

let language: Language = first();

export const currentLanguage = (): Language => language;
export const locale = (): string => (language === "zh" ? "zh-CN" : "en-GB");

export function setLanguage(chosen: Language): void {
  language = chosen;
  write(KEY, chosen);
  startLanguage();
  languageTopic.notify();
}

export function startLanguage(): void {
  document.documentElement.lang = language === "zh" ? "zh-CN" : "en";
}

/** Return a text, with {names} replaced by values. */
export function t(key: Key, values: Record<string, string | number> = {}): string {
  return fill(DICTIONARIES[language][key] ?? en[key], values);
}

/** Return the text of a key that may be missing, such as the name of a metric; else `otherwise`. */
export const tOr = (key: string, otherwise: string): string => DICTIONARIES[language][key] ?? otherwise;

function fill(text: string, values: Record<string, string | number>): string {
  return text.replace(/\{(\w+)\}/g, (whole, name: string) => (name in values ? String(values[name]) : whole));
}

function first(): Language {
  const chosen = read(KEY);
  if (chosen === "en" || chosen === "zh") return chosen;
  return navigator.language.toLowerCase().startsWith("zh") ? "zh" : "en";
}
