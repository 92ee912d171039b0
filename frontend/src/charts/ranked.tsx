// Figures of clients from worst to best, as bars; the worst tenth is orange.
import { shown } from "../format";

const WIDTH = 800;
const HEIGHT = 180;

export function Ranked({ values, share, smaller, label }: { values: readonly number[]; share: boolean; smaller: boolean; label: string }) {
  const sorted = [...values].sort((a, b) => (smaller ? b - a : a - b));
  const tenth = Math.max(1, Math.floor(sorted.length / 10));
  const low = Math.min(0, ...sorted);
  const high = share ? 1 : Math.max(1e-12, ...sorted);
  const mean = sorted.reduce((a, b) => a + b, 0) / sorted.length;
  const y = (value: number): number => HEIGHT - ((value - low) / (high - low || 1)) * HEIGHT;
  const step = WIDTH / sorted.length;
  const gap = sorted.length <= 120 ? 0.82 : 1;
  const bars = (from: number, to: number): string =>
    sorted.slice(from, to).map((value, n) => `M${((from + n) * step).toFixed(2)} ${y(low)}V${y(value).toFixed(1)}h${(step * gap).toFixed(2)}V${y(low)}z`).join("");
  return (
    <figure class="ranked">
      <figcaption>{label}</figcaption>
      <svg viewBox={`0 0 ${WIDTH} ${HEIGHT}`} preserveAspectRatio="none" role="img" aria-label={`${label}: ${shown(sorted[0], share)} – ${shown(sorted[sorted.length - 1], share)}`}>
        <path d={bars(0, tenth)} fill="var(--c1)" />
        <path d={bars(tenth, sorted.length)} fill="var(--c0)" />
        <line x1="0" x2={WIDTH} y1={y(mean)} y2={y(mean)} stroke="var(--ink)" stroke-width="1.3" vector-effect="non-scaling-stroke" />
      </svg>
    </figure>
  );
}
