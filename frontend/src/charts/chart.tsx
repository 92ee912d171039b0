// A chart: uPlot on a canvas, a tooltip, keys, a table of its numbers and a picture to download.
import { useEffect, useRef, useState } from "preact/hooks";
import { short, percent } from "../format";
import { t } from "../i18n";
import { themeTopic } from "../theme";
import { rowsTopic } from "../store";
import { useTopic } from "../topic";
import type { Line } from "./lines";
import { Numbers } from "./numbers";
import { Plot } from "./plot";
import { savePng } from "./png";

export interface ChartData {
  lines: Line[];
  xTitle: string;
  /** x is a whole number, such as a round. */
  whole: boolean;
  /** Shown in percent. */
  share: boolean;
  log: boolean;
}

interface Props {
  title: string;
  note?: string;
  /** File name of the picture, without its ending. */
  file: string;
  /** Return what to draw; called once a frame at most, whenever rows came in or `version` changed. */
  data: (width: number) => ChartData;
  version: string;
}

const NUMBERS_MS = 1000;

export function Chart({ title, note, file, data, version }: Props) {
  const place = useRef<HTMLDivElement>(null);
  const spoken = useRef<HTMLParagraphElement>(null);
  const plot = useRef<Plot | null>(null);
  const latest = useRef(data);
  latest.current = data;
  const [open, setOpen] = useState(false);
  const [empty, setEmpty] = useState(true);

  const draw = (): void => {
    const shown = latest.current(plot.current?.width ?? 400);
    plot.current?.update(shown, title);
    setEmpty(!shown.lines.length);
  };

  useEffect(() => {
    const made = new Plot(place.current!, (text) => (spoken.current!.textContent = text));
    plot.current = made;
    draw();
    const stops = [rowsTopic.listen(draw), themeTopic.listen(() => (made.rebuild(), draw()))];
    const observer = new ResizeObserver(() => made.resize() && draw());
    observer.observe(place.current!);
    return () => {
      observer.disconnect();
      for (const stop of stops) stop();
      made.destroy();
      plot.current = null;
    };
  }, []);
  useEffect(draw, [version, title]);

  const keys = (event: KeyboardEvent): void => {
    if (plot.current?.key(event.key)) event.preventDefault();
  };
  return (
    <figure class="chart">
      <figcaption class="chart-head">
        <h3>
          {title} {note && <span>{note}</span>}
        </h3>
        <button type="button" class="quiet" disabled={empty} onClick={() => plot.current?.current && savePng(plot.current, title, note ?? "", file)}>
          PNG
        </button>
      </figcaption>
      <div class="plot" ref={place} tabIndex={0} role="group" aria-label={t("chart.keys", { title })} onKeyDown={keys} onBlur={() => plot.current?.hide()}>
        {empty && <p class="empty">{t("chart.empty")}</p>}
      </div>
      <p class="hidden-text" aria-live="polite" ref={spoken} />
      <details class="numbers" onToggle={(event) => setOpen(event.currentTarget.open)}>
        <summary>{t("chart.numbers")}</summary>
        {open && <LiveNumbers title={title} data={() => latest.current(400)} />}
      </details>
    </figure>
  );
}

/** The numbers of a chart; refreshed once a second, since nobody reads faster. */
function LiveNumbers({ title, data }: { title: string; data: () => ChartData }) {
  const [, draw] = useState(0);
  useEffect(() => {
    const timer = setInterval(() => draw((n) => n + 1), NUMBERS_MS);
    return () => clearInterval(timer);
  }, []);
  useTopic(themeTopic);
  return <Numbers title={title} data={data()} />;
}

export const valueText = (value: number, share: boolean): string => (share ? percent(value) : short(value));
