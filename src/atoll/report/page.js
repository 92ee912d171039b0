// Draws the curves of an Atoll report as SVG. No library: plain functions over the data that the page carries.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("atoll-data").textContent);
  const state = { against: "round", measure: data.measures.length ? data.measures[0].key : "", log: false, hidden: new Set() };
  const DASHES = ["", "10 4", "3 3", "12 3 3 3"];
  const COLOURS = 7;
  const SVG = document.querySelector("svg").namespaceURI;
  const EDGE = { left: 58, right: 12, top: 12, bottom: 40 };

  // ---- small helpers

  function make(name, attributes, parent, text) {
    const svg = ["svg", "path", "line", "circle", "text", "g"].includes(name);
    const node = svg ? document.createElementNS(SVG, name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes || {})) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    if (parent) parent.appendChild(node);
    return node;
  }

  const colour = (index) => `var(--c${index % COLOURS})`;
  const dash = (index) => DASHES[Math.floor(index / COLOURS) % DASHES.length];
  const isWhole = (value) => Math.abs(value - Math.round(value)) < 1e-6;
  const percent = (share, digits = 2) => `${(100 * share).toFixed(digits)} %`;
  const short = (value) => (value === 0 ? "0" : Math.abs(value) >= 1e5 || Math.abs(value) < 1e-3 ? value.toExponential(1) : String(+value.toPrecision(4)));
  const grouped = (value) => (Math.abs(value) >= 1e7 ? value.toExponential(1) : value.toLocaleString("en", { maximumFractionDigits: 4 }));

  function ticks(low, high, most) {
    const rough = (high - low) / most || 1;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10].find((times) => times * power >= rough - 1e-12) * power;
    const found = [];
    for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) found.push(+(n * step).toPrecision(12));
    return found;
  }

  function logTicks(low, high) {
    const all = [];
    for (let power = Math.floor(low); power <= Math.ceil(high); power++)
      for (const times of high - low > 3 ? [1] : [1, 2, 5]) all.push(times * 10 ** power);
    const step = Math.ceil(all.length / 8);
    return all.filter((value, n) => n % step === 0).map(Math.log10).filter((value) => value >= low && value <= high);
  }

  // ---- what is drawn

  function axis() {
    const all = data.runs.flatMap((run) => run.x[state.against]).filter((x) => x !== null);
    const largest = all.reduce((most, x) => Math.max(most, x), 0);
    if (state.against === "round") return { title: "Round", per: 1 };
    if (state.against !== "bytes") {
      const time = state.against === "seconds" ? "Wall time" : "Simulated time";
      return largest >= 7200 ? { title: `${time} (h)`, per: 3600 } : { title: `${time} (s)`, per: 1 };
    }
    return largest >= 1e4 ? { title: "Uplink, all clients (GB)", per: 1e3 } : { title: "Uplink, all clients (MB)", per: 1 };
  }

  function lines(keys, per) {
    const found = [];
    data.runs.forEach((run, index) => {
      if (state.hidden.has(index)) return;
      keys.forEach((key) => {
        const ys = run.y[key] || [], points = [], positive = state.log && isLoss(key);
        run.x[state.against].forEach((x, row) => {
          const y = ys[row];
          if (x !== null && typeof y === "number" && (y > 0 || !positive)) points.push({ x: x / per, y, row });
        });
        if (points.length) found.push({ index, key, points, thin: key === "train_loss" && keys.length > 1 });
      });
    });
    return found;
  }

  const isLoss = (key) => key.endsWith("loss");
  const isShare = (key) => data.shares.includes(key);

  // Keep the extremes of each pixel column, so that a hundred thousand rounds draw as fast as a hundred.
  function thinned(points, width) {
    if (points.length < 4 * width) return points;
    const per = Math.ceil(points.length / width), kept = [];
    for (let start = 0; start < points.length; start += per) {
      const some = points.slice(start, start + per);
      const low = some.reduce((a, b) => (b.y < a.y ? b : a)), high = some.reduce((a, b) => (b.y > a.y ? b : a));
      kept.push(...(low.row < high.row ? [low, high] : low === high ? [low] : [high, low]));
    }
    return kept;
  }

  function range(values, share, floor) {
    let low = Math.min(...values), high = Math.max(...values);
    const pad = (high - low) * 0.06 || Math.abs(high) * 0.05 || 0.05;
    [low, high] = [low - pad, high + pad];
    if (share) high = Math.min(high, 1);
    return floor ? [Math.max(low, 0), high] : [low, high];
  }

  const extremes = (points, of) => points.reduce(([a, b], p) => [Math.min(a, of(p)), Math.max(b, of(p))], [Infinity, -Infinity]);

  // ---- one chart

  function draw(box, keys, title, note) {
    const plot = box.querySelector(".plot"), loss = isLoss(keys[0]), log = loss && state.log;
    const heading = box.querySelector("h3");
    heading.textContent = `${title} `;
    make("span", {}, heading, note);
    plot.replaceChildren();
    const width = Math.max(plot.clientWidth, 200), height = plot.clientHeight;
    const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, tabindex: 0, role: "img", "aria-label": title }, plot);
    const { title: xTitle, per } = axis();
    const series = lines(keys, per);
    if (!series.length) {
      make("text", { x: width / 2, y: height / 2, "text-anchor": "middle", class: "empty" }, svg, "not measured");
      return;
    }
    const of = log ? (p) => Math.log10(p.y) : (p) => p.y;
    const [x0, x1] = series.map((s) => extremes(s.points, (p) => p.x)).reduce(([a, b], [c, d]) => [Math.min(a, c), Math.max(b, d)]);
    const [y0, y1] = range(series.flatMap((s) => extremes(s.points, of)), isShare(keys[0]), !log);
    const right = width - EDGE.right, bottom = height - EDGE.bottom;
    const px = (x) => (x1 > x0 ? EDGE.left + ((x - x0) / (x1 - x0)) * (right - EDGE.left) : (EDGE.left + right) / 2);
    const py = (y) => bottom - ((y - y0) / (y1 - y0)) * (bottom - EDGE.top);

    const xAt = (pixel) => x0 + ((pixel - EDGE.left) / (right - EDGE.left)) * (x1 - x0);

    const yTicks = log ? logTicks(y0, y1) : ticks(y0, y1, 8);
    const digits = yTicks.length > 1 ? [0, 1, 2].find((d) => isWhole(100 * (yTicks[1] - yTicks[0]) * 10 ** d)) ?? 3 : 1;
    for (const y of yTicks) {
      make("line", { class: "grid", x1: EDGE.left, x2: right, y1: py(y), y2: py(y) }, svg);
      const label = isShare(keys[0]) ? percent(y, digits) : short(log ? 10 ** y : y);
      make("text", { x: EDGE.left - 8, y: py(y) + 4, "text-anchor": "end" }, svg, label);
    }
    const xTicks = ticks(x0, x1, width > 420 ? 7 : 4).filter((x) => state.against !== "round" || Number.isInteger(x));
    for (const x of xTicks) make("text", { x: px(x), y: bottom + 18, "text-anchor": "middle" }, svg, grouped(x));
    make("text", { x: (EDGE.left + right) / 2, y: height - 4, "text-anchor": "middle" }, svg, xTitle);

    for (const s of series) {
      const d = thinned(s.points, width).map((p, n) => `${n ? "L" : "M"}${px(p.x).toFixed(1)} ${py(of(p)).toFixed(1)}`).join("");
      const path = make("path", { d, "stroke-dasharray": s.thin ? "1.5 4" : dash(s.index), class: s.thin ? "thin" : "" }, svg);
      path.style.stroke = colour(s.index);
      if (s.points.length <= 40 && !s.thin)
        for (const p of s.points) make("circle", { cx: px(p.x), cy: py(of(p)), r: 2.6 }, svg).style.fill = colour(s.index);
    }
    hover({ plot, svg, series, px, py, xAt, of, width, bottom });
  }

  // ---- reading values

  function nearest(points, x) {
    let low = 0, high = points.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (points[middle].x < x) low = middle; else high = middle;
    }
    return Math.abs(points[low].x - x) <= Math.abs(points[high].x - x) ? low : high;
  }

  function hover({ plot, svg, series, px, py, xAt, of, width, bottom }) {
    const marks = make("g", {}, svg), tip = make("div", { class: "tip", hidden: "" }, plot);
    const longest = series.reduce((a, b) => (b.points.length > a.points.length ? b : a));
    let at = longest.points.length - 1;

    function show(x) {
      marks.replaceChildren();
      make("line", { class: "cross", x1: px(x), x2: px(x), y1: EDGE.top, y2: bottom }, marks);
      for (const s of series) {
        const p = s.points[nearest(s.points, x)];
        const dot = make("circle", { cx: px(p.x), cy: py(of(p)), r: s.thin ? 3 : 4.5 }, marks);
        dot.style.fill = colour(s.index);
        dot.style.stroke = "var(--paper)";
      }
      fill(tip, series, x);
      tip.hidden = false;
      tip.style.left = px(x) > width / 2 ? "auto" : `${px(x) + 14}px`;
      tip.style.right = px(x) > width / 2 ? `${width - px(x) + 14}px` : "auto";
    }

    function hide() {
      marks.replaceChildren();
      tip.hidden = true;
    }

    svg.addEventListener("pointermove", (event) => {
      const mouse = ((event.clientX - svg.getBoundingClientRect().left) / svg.getBoundingClientRect().width) * width;
      const found = series.map((s) => s.points[nearest(s.points, xAt(mouse))].x);
      show(found.reduce((a, b) => (Math.abs(px(b) - mouse) < Math.abs(px(a) - mouse) ? b : a)));
    });
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("blur", hide);
    svg.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
      if (event.key === "Escape") hide();
      if (move === undefined) return;
      event.preventDefault();
      at = Math.max(0, Math.min(longest.points.length - 1, at + move));
      show(longest.points[at].x);
    });
  }

  function fill(tip, series, x) {
    tip.replaceChildren();
    const keys = [...new Set(series.map((s) => s.key))], table = make("table", {}, tip);
    const head = make("tr", {}, table);
    make("th", {}, head, "");
    make("th", {}, head, "round");
    for (const key of keys) make("th", {}, head, data.names[key] || key);
    for (const index of [...new Set(series.map((s) => s.index))]) {
      const mine = series.filter((s) => s.index === index), run = data.runs[index], line = make("tr", {}, table);
      const main = mine[0].points[nearest(mine[0].points, x)];
      const name = make("td", {}, line);
      make("span", { class: "key" }, name).style.background = colour(index);
      name.append(run.label.length > 28 ? `${run.label.slice(0, 27)}…` : run.label);
      make("td", {}, line, grouped(run.x.round[main.row]));
      for (const key of keys) {
        const s = mine.find((one) => one.key === key);
        const p = s && s.points[nearest(s.points, x)];
        make("td", {}, line, p ? (isShare(key) ? percent(p.y) : short(p.y)) : "–");
      }
    }
  }

  // ---- controls

  function redraw() {
    const measure = data.measures.find((one) => one.key === state.measure);
    const key = measure ? measure.key : "test.accuracy";
    draw(document.getElementById("chart-measure"), [key], measure ? measure.title : "Test accuracy", "");
    draw(document.getElementById("chart-loss"), ["test.loss", "train_loss"], "Loss", "test (line), training (dotted)");
  }

  const select = document.getElementById("measure");
  for (const one of data.measures) make("option", { value: one.key }, select, one.title);
  select.addEventListener("change", () => { state.measure = select.value; redraw(); });
  if (data.measures.length < 2) select.parentElement.hidden = true;

  const log = document.getElementById("log");
  log.addEventListener("change", () => { state.log = log.checked; redraw(); });

  const group = document.getElementById("against");
  for (const [key, title] of [["round", "rounds"], ["seconds", "seconds"], ["simulated_seconds", "simulated time"], ["bytes", "MB uplink"]]) {
    if (!data.runs.some((run) => run.x[key].some((x) => x !== null))) continue;
    const button = make("button", { type: "button", "aria-pressed": key === state.against }, group, title);
    button.addEventListener("click", () => {
      state.against = key;
      for (const other of group.children) other.setAttribute("aria-pressed", other === button);
      redraw();
    });
  }

  const legend = document.getElementById("legend");
  if (data.runs.length > 1)
    data.runs.forEach((run, index) => {
      const button = make("button", { type: "button", "aria-pressed": true, title: "show or hide this run" }, legend);
      const key = make("svg", { viewBox: "0 0 26 8" }, button);
      const line = make("line", { x1: 1, x2: 25, y1: 4, y2: 4, "stroke-width": 3, "stroke-dasharray": dash(index) }, key);
      line.style.stroke = colour(index);
      button.append(run.label);
      button.addEventListener("click", () => {
        if (!state.hidden.delete(index)) state.hidden.add(index);
        button.setAttribute("aria-pressed", !state.hidden.has(index));
        redraw();
      });
    });

  redraw();
  const charts = document.querySelector(".charts");
  let width = charts.clientWidth;
  new ResizeObserver(() => {
    if (charts.clientWidth === width) return;
    width = charts.clientWidth;
    requestAnimationFrame(redraw);
  }).observe(charts);
})();
