// Numbers as text, as in the report: the same digits and units.
import { locale, t, tOr } from "./i18n";
import type { Measure } from "./types";

export const NONE = "–";

/** Figures that are shown in percent, and figures that are better when they are smaller. */
export const SHARES = new Set(["accuracy", "balanced_accuracy", "precision", "recall", "f1", "attack_success", "exact_match", "multiple_choice"]);
export const SMALLER_IS_BETTER = new Set(["rmse", "mae", "brier", "calibration_error", "perplexity", "loss"]);

type Maybe = number | null | undefined;

export const isNumber = (value: unknown): value is number => typeof value === "number" && Number.isFinite(value);

export const percent = (share: number, digits = 2): string => `${(100 * share).toFixed(digits)} %`;

export const count = (value: unknown): string => (isNumber(value) ? value.toLocaleString(locale()) : NONE);

export function short(value: Maybe): string {
  if (!isNumber(value)) return NONE;
  if (value === 0) return "0";
  return Math.abs(value) >= 1e5 || Math.abs(value) < 1e-3 ? value.toExponential(1) : String(+value.toPrecision(4));
}

export const shown = (value: Maybe, share: boolean): string => (!isNumber(value) ? NONE : share ? percent(value) : short(value));

export const figure = (name: string, value: Maybe): string => shown(value, SHARES.has(name));

export const figureName = (name: string): string => tOr(`figure.${name}`, name.replaceAll("_", " "));

/** Return the title of a curve: a known one in the language of the page, else the server's. */
export function measureTitle({ key, title }: Measure): string {
  const [group, name] = key.split(".");
  return tOr(`measure.${key}`, group === "test" && name ? t("measure.test", { name: figureName(name) }) : title);
}

export function bytes(value: Maybe): string {
  if (!isNumber(value)) return NONE;
  let power = 0;
  while (Math.abs(value) >= 999.5 && power < 5) {
    value /= 1000;
    power++;
  }
  return power ? `${threeDigits(value)} ${["kB", "MB", "GB", "TB", "PB"][power - 1]}` : `${value.toFixed(0)} B`;
}

export function seconds(value: Maybe): string {
  if (!isNumber(value)) return NONE;
  if (value < 0.9995) return value > 0 ? `${threeDigits(value * 1000)} ${t("unit.ms")}` : `0 ${t("unit.s")}`;
  if (value < 59.95) return `${threeDigits(value)} ${t("unit.s")}`;
  const whole = Math.round(value);
  if (whole < 3600) return `${Math.floor(whole / 60)} ${t("unit.min")} ${pad(whole % 60)} ${t("unit.s")}`;
  const minutes = Math.round(value / 60);
  if (minutes < 24 * 60) return `${Math.floor(minutes / 60)} ${t("unit.h")} ${pad(minutes % 60)} ${t("unit.min")}`;
  const hours = Math.round(value / 3600);
  return `${Math.floor(hours / 24)} ${t("unit.d")} ${pad(hours % 24)} ${t("unit.h")}`;
}

export function time(iso: string | null | undefined): string {
  if (!iso) return NONE;
  const at = new Date(iso);
  if (Number.isNaN(at.getTime())) return iso;
  return at.toLocaleString(locale(), { dateStyle: "medium", timeStyle: "short" });
}

const pad = (value: number): string => String(value).padStart(2, "0");

const threeDigits = (value: number): string =>
  value >= 99.95 ? value.toFixed(0) : value >= 9.995 ? value.toFixed(1) : value.toFixed(2);
