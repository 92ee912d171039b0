// The table that says what a chart shows.
import { NONE, count, short } from "../format";
import { t } from "../i18n";
import { Scroll } from "../parts/basics";
import { type ChartData, valueText } from "./chart";
import { nearest } from "./lines";

const MOST = 60;

export function Numbers({ title, data }: { title: string; data: ChartData }) {
  const { lines, share, xTitle } = data;
  if (!lines.length) return <p class="note">{t("chart.empty")}</p>;
  const all = [...new Set(lines.flatMap((line) => line.x))].sort((a, b) => b - a);
  const step = Math.ceil(all.length / MOST);
  const xs = all.filter((_, n) => n % step === 0);
  return (
    <>
      {step > 1 && <p class="note">{t("chart.everyNth", { shown: xs.length, all: count(all.length) })}</p>}
      <Scroll label={title} tall>
        <table class="num">
          <thead>
            <tr>
              <th scope="col">{xTitle}</th>
              {lines.map((line) => (
                <th scope="col" key={line.label}>{line.label}</th>
              ))}
            </tr>
          </thead>
          <tbody>
            {xs.map((x) => (
              <tr key={x}>
                <td>{Number.isInteger(x) ? count(x) : short(x)}</td>
                {lines.map((line) => {
                  const n = nearest(line.x, x);
                  const found = line.x[n] === x;
                  const band = line.high && found ? ` ± ${valueText(line.high[n]! - line.y[n]!, share)}` : "";
                  return <td key={line.label}>{found ? valueText(line.y[n]!, share) + band : NONE}</td>;
                })}
              </tr>
            ))}
          </tbody>
        </table>
      </Scroll>
    </>
  );
}
