// The data of a run: who holds which samples, and how the model takes one class for another.
import { useMemo } from "preact/hooks";
import { Heat, heatColour, heatOf } from "../../charts/heat";
import { count, percent } from "../../format";
import { t } from "../../i18n";
import { Empty, Scroll, Section } from "../../parts/basics";
import type { RunDocuments } from "../../types";

const MOST_CELLS = 20;

export function DataView({ documents }: { documents: RunDocuments }) {
  const { partition, confusion } = documents;
  if (!partition && !confusion) return <Section title={t("view.data")}><Empty>{t("data.nothing")}</Empty></Section>;
  return (
    <>
      {partition && <Partition partition={partition} names={classNames(documents, partition.counts[0]?.length ?? 0)} />}
      {confusion && <Confusion matrix={confusion.matrix} round={confusion.round} names={classNames(documents, confusion.matrix.length)} />}
    </>
  );
}

function classNames(documents: RunDocuments, num: number): string[] {
  const info = documents.info?.["data"] as { class_names?: unknown[] } | undefined;
  const names = info?.class_names ?? documents.partition?.class_names;
  return names?.length === num ? names.map(String) : Array.from({ length: num }, (_, n) => String(n));
}

function Partition({ partition, names }: { partition: NonNullable<RunDocuments["partition"]>; names: string[] }) {
  const sizes = useMemo(() => partition.counts.map((row) => row.reduce((a, b) => a + b, 0)).sort((a, b) => a - b), [partition]);
  const held = useMemo(() => partition.counts.map((row) => row.filter((num) => num > 0).length).sort((a, b) => a - b), [partition]);
  const turned = useMemo(() => names.map((_, k) => partition.counts.map((row) => row[k] ?? 0)), [partition]);
  const middle = (sorted: number[]): number => sorted[sorted.length >> 1] ?? 0;
  const text = t("data.summary", {
    clients: count(partition.num_clients ?? sizes.length), shown: count(sizes.length),
    median: count(middle(sizes)), low: count(sizes[0]), high: count(sizes[sizes.length - 1]),
    classes: middle(held), fewest: held[0] ?? 0, most: held[held.length - 1] ?? 0,
  });
  return (
    <Section title={t("data.partition")}>
      <p class="note">{text}</p>
      <div class="heat-box">
        <Heat values={turned} label={t("data.heat", { clients: count(sizes.length), classes: names.length })} />
      </div>
      <p class="hint">{t("data.heatHint")}</p>
    </Section>
  );
}

function Confusion({ matrix, round, names }: { matrix: number[][]; round: number | undefined; names: string[] }) {
  const shares = useMemo(() => matrix.map((row) => {
    const all = row.reduce((a, b) => a + b, 0) || 1;
    return row.map((num) => num / all);
  }), [matrix]);
  const right = matrix.reduce((sum, row, n) => sum + (row[n] ?? 0), 0) / (matrix.flat().reduce((a, b) => a + b, 0) || 1);
  return (
    <Section title={t("data.confusion")}>
      {matrix.length <= MOST_CELLS ? (
        <Scroll label={t("data.confusion")}>
          <table class="confusion">
            <thead>
              <tr>
                <th scope="col" class="corner">{t("data.axes")}</th>
                {names.map((name) => <th scope="col" key={name}>{name}</th>)}
              </tr>
            </thead>
            <tbody>
              {shares.map((row, n) => (
                <tr key={n}>
                  <th scope="row">{names[n]}</th>
                  {row.map((share, k) => (
                    <td key={k} class={heatOf(share) > 0.55 ? "strong" : ""} style={{ background: heatColour(share) }}>
                      {share >= 0.0005 ? (100 * share).toFixed(1) : ""}
                    </td>
                  ))}
                </tr>
              ))}
            </tbody>
          </table>
        </Scroll>
      ) : (
        <Heat square values={shares} label={t("data.confusion")} />
      )}
      <p class="note">{t("data.confusionNote", { round: count(round), right: percent(right) })}</p>
    </Section>
  );
}
