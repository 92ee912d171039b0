// A matrix of shares as colours on a canvas: one pixel a cell, stretched by the browser.
import { useEffect, useRef } from "preact/hooks";

/** Blue of the report's heat maps. */
const HEAT = [32, 121, 199] as const;

/** Return the opacity of a share: it grows with the root, so that small shares are seen. */
export const heatOf = (share: number): number => (share <= 0 ? 0 : 0.08 + 0.92 * Math.sqrt(Math.min(share, 1)));

export const heatColour = (share: number): string => `rgb(${HEAT.join(" ")} / ${heatOf(share).toFixed(3)})`;

/** `values` holds rows; the largest value has the full colour. */
export function Heat({ values, label, square }: { values: readonly (readonly number[])[]; label: string; square?: boolean }) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const height = values.length;
  const width = values[0]?.length ?? 0;
  useEffect(() => {
    const ctx = canvas.current?.getContext("2d");
    if (!ctx || !width) return;
    const largest = values.reduce((most, row) => row.reduce((a, b) => Math.max(a, b), most), 0) || 1;
    const image = ctx.createImageData(width, height);
    values.forEach((row, y) =>
      row.forEach((value, x) => image.data.set([...HEAT, Math.round(255 * heatOf(value / largest))], 4 * (y * width + x))),
    );
    ctx.putImageData(image, 0, 0);
  }, [values]);
  return <canvas ref={canvas} class={square ? "heat square" : "heat"} width={width} height={height} role="img" aria-label={label} />;
}
