// A chart as a picture: title and legend above the canvas, on a solid ground.
import { saveBlob } from "../parts/files";
import { colour } from "../theme";
import { colourName, dashOf } from "./lines";
import type { Plot } from "./plot";

const FONT = "system-ui, -apple-system, sans-serif";
const PAD = 16;
const LINE = 20;

export function savePng(plot: Plot, title: string, note: string, file: string): void {
  const drawn = plot.canvas;
  const data = plot.current;
  if (!drawn || !data) return;
  const scale = drawn.width / Math.max(drawn.clientWidth, 1);
  const width = drawn.clientWidth + 2 * PAD;
  const canvas = document.createElement("canvas");
  const ctx = canvas.getContext("2d")!;
  ctx.font = `13px ${FONT}`;
  const places: { x: number; y: number }[] = [];
  let x = PAD;
  let y = PAD + 34;
  for (const line of data.lines) {
    const need = ctx.measureText(line.label).width + 46;
    if (x > PAD && x + need > width - PAD) [x, y] = [PAD, y + LINE];
    places.push({ x, y });
    x += need;
  }
  const top = y + LINE - 4;
  const height = top + drawn.clientHeight + PAD;
  canvas.width = width * scale;
  canvas.height = height * scale;
  ctx.scale(scale, scale);
  ctx.fillStyle = colour("paper");
  ctx.fillRect(0, 0, width, height);
  ctx.fillStyle = colour("ink");
  ctx.font = `600 16px ${FONT}`;
  ctx.fillText(title, PAD, PAD + 14);
  const wide = ctx.measureText(`${title}  `).width;
  ctx.font = `13px ${FONT}`;
  ctx.fillStyle = colour("muted");
  ctx.fillText(note, PAD + wide, PAD + 14);
  data.lines.forEach((line, n) => {
    const at = places[n]!;
    ctx.strokeStyle = colour(colourName(line.index));
    ctx.lineWidth = 3;
    ctx.setLineDash(dashOf(line));
    ctx.beginPath();
    ctx.moveTo(at.x, at.y - 4);
    ctx.lineTo(at.x + 24, at.y - 4);
    ctx.stroke();
    ctx.fillStyle = colour("ink");
    ctx.fillText(line.label, at.x + 30, at.y);
  });
  ctx.drawImage(drawn, PAD, top, drawn.clientWidth, drawn.clientHeight);
  canvas.toBlob((blob) => blob && saveBlob(blob, `${file}.png`), "image/png");
}
