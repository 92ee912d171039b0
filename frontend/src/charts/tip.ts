// The box beside the cursor that says the values of all lines there.
import { count } from "../format";
import { t } from "../i18n";
import { colour } from "../theme";
import type { ChartData } from "./chart";
import { colourName, nearest } from "./lines";

const MOST = 16;

export class Tip {
  private readonly box = document.createElement("div");

  constructor(place: HTMLElement) {
    this.box.className = "tip";
    this.box.hidden = true;
    place.append(this.box);
  }

  show(data: ChartData, x: number, left: number, width: number, text: (value: number) => string): void {
    const table = document.createElement("table");
    const head = table.insertRow();
    for (const title of ["", t("axis.round"), ""]) head.append(element("th", title));
    for (const line of data.lines.slice(0, MOST)) {
      const n = nearest(line.x, x);
      const row = table.insertRow();
      const name = row.insertCell();
      const key = element("span", "");
      key.className = "key";
      key.style.background = colour(colourName(line.index));
      name.append(key, line.label.length > 28 ? `${line.label.slice(0, 27)}…` : line.label);
      row.insertCell().textContent = line.rounds ? count(line.rounds[n]) : count(line.x[n]);
      const band = line.high ? ` ± ${text(line.high[n]! - line.y[n]!)}` : "";
      row.insertCell().textContent = text(line.y[n]!) + band;
    }
    if (data.lines.length > MOST) table.insertRow().insertCell().textContent = "…";
    this.box.replaceChildren(table);
    this.box.hidden = false;
    const far = left > width / 2;
    this.box.style.left = far ? "auto" : `${left + 14}px`;
    this.box.style.right = far ? `${width - left + 14}px` : "auto";
  }

  hide(): void {
    this.box.hidden = true;
  }

  remove(): void {
    this.box.remove();
  }
}

function element(name: string, text: string): HTMLElement {
  const made = document.createElement(name);
  made.textContent = text;
  return made;
}
