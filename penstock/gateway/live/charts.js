// Tiles and charts: the current value and the hour behind it.

const hour = new Hour();
const SPARK_POINTS = 90;

const TILES = [
  { label: "Requests", unit: "/s", fields: ["requests_per_s"], show: showRate },
  { label: "Output tokens", unit: "/s", fields: ["output_tokens_per_s"], show: showRate },
  { label: "Prompt tokens", unit: "/s", fields: ["prompt_tokens_per_s"], show: showRate },
  { label: "Time to first token", names: ["p50", "p99"], fields: ["ttft_s_p50", "ttft_s_p99"], show: showSeconds },
  { label: "Between tokens", names: ["p50", "p99"], fields: ["itl_s_p50", "itl_s_p99"], show: showSeconds },
  { label: "In flight", fields: ["in_flight"], show: showCount },
  { label: "Waiting", names: ["gateway", "engines"], fields: ["waiting", "engine_waiting"], show: showCount },
  { label: "KV cache", note: "fullest replica", fields: ["kv_use"], show: showShare, most: 1, tone: shareTone },
  { label: "Errors", unit: "/s", fields: ["errors_per_s"], show: showRate, tone: (value) => (value > 0 ? "bad" : "") },
  { label: "GPU use", note: "mean", fields: ["gpu_use"], show: showShare, most: 1 },
  { label: "Power", fields: ["power_watts"], show: showWatts },
];

function makeTile(tile) {
  const parts = { value: el("span", "value number"), unit: el("span", "unit"), second: el("span", "second") };
  const spark = document.createElementNS(SVG, "svg");
  spark.setAttribute("viewBox", `0 0 ${SPARK_POINTS} 30`);
  spark.setAttribute("preserveAspectRatio", "none");
  spark.setAttribute("role", "img");
  parts.paths = tile.fields.map((_, i) => {
    const path = document.createElementNS(SVG, "path");
    path.setAttribute("class", `spark s${i}`);
    spark.append(path);
    return path;
  });
  const name = tile.names ? ` ${tile.names[0]}` : "";
  const node = el("li", "tile", el("h3", "", tile.label, el("small", "", tile.note ? ` ${tile.note}` : name)));
  node.append(el("p", "", parts.value, parts.unit, parts.second), spark);
  return Object.assign(node, { parts: Object.assign(parts, { spark }) });
}

function fillTile(node, tile, hour) {
  const { value, unit, second, paths, spark } = node.parts;
  const columns = tile.fields.map((field) => hour.column(field));
  const now = columns.map((column) => column[column.length - 1] ?? null);
  setText(value, tile.show(now[0]));
  setText(unit, now[0] === null ? "" : (tile.unit ?? ""));
  setText(second, tile.names && now[1] !== null ? `${tile.names[1]} ${tile.show(now[1])}` : "");
  setAttribute(node, "class", `tile ${tile.tone?.(now[0]) ?? ""}`);
  const most = tile.most ?? Math.max(...columns.map((column) => extent(column)[1] ?? 0));
  const [from, to] = hour.span();
  const times = hour.column("at");
  for (const [i, path] of paths.entries()) setAttribute(path, "d", sparkPath(times, columns[i], from, to, most || 1));
  setAttribute(spark, "aria-label", `${tile.label}: ${describe(tile.names, columns, tile)}`);
}

// "p50 now 12, least 3, most 40; p99 ...": what a chart shows, for those who do not see it.
function describe(names, columns, { show, unit = "" }) {
  const parts = columns.map((column, i) => {
    const [least, most] = extent(column);
    if (least === null) return `${names?.[i] ?? ""} no data`.trim();
    const now = show(column[column.length - 1]);
    return `${names?.[i] ?? ""} now ${now}${unit}, least ${show(least)}, most ${show(most)}`.trim();
  });
  return parts.join("; ");
}

function extent(column) {
  const values = column.filter((value) => value !== null);
  return values.length ? [values.reduce((a, b) => Math.min(a, b)), values.reduce((a, b) => Math.max(a, b))] : [null, null];
}

// The mean of each of SPARK_POINTS equal times; a gap where nothing was measured.
function sparkPath(times, values, from, to, most) {
  const sums = new Array(SPARK_POINTS).fill(0);
  const counts = new Array(SPARK_POINTS).fill(0);
  const step = (to - from) / (SPARK_POINTS - 1);
  for (let i = 0; i < times.length; i++) {
    const at = Math.round((times[i] - from) / step);
    if (values[i] === null || at < 0 || at >= SPARK_POINTS) continue;
    sums[at] += values[i];
    counts[at] += 1;
  }
  const sparse = step < 5; // fewer rows than points: join over the empty ones
  let path = "";
  let isDrawing = false;
  for (let x = 0; x < SPARK_POINTS; x++) {
    if (!counts[x]) {
      isDrawing = isDrawing && sparse;
      continue;
    }
    path += `${isDrawing ? "L" : "M"}${x} ${(28.5 - (27 * sums[x]) / counts[x] / most).toFixed(1)}`;
    isDrawing = true;
  }
  return path;
}

// The two large charts.

const CHARTS = [
  { label: "Tokens", unit: "/s", names: ["output", "prompt"], fields: ["output_tokens_per_s", "prompt_tokens_per_s"], show: showRate },
  { label: "Time to first token", names: ["p50", "p99"], fields: ["ttft_s_p50", "ttft_s_p99"], show: showSeconds },
  { label: "Requests", names: ["in flight", "waiting"], fields: ["in_flight", "waiting"], show: showCount },
];

function colour(name) {
  return () => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function makeChart(chart) {
  const values = chart.names.map(() => el("b", "number"));
  const legend = el("p", "legend", ...chart.names.map((name, i) => el("span", `s${i}`, `${name} `, values[i])));
  const when = el("span", "quiet number");
  const range = el("p", "quiet range");
  const place = el("div", "plot");
  place.setAttribute("role", "img");
  const node = el("figure", "panel chart");
  node.append(el("figcaption", "", el("h3", "", chart.label, el("small", "", chart.unit ?? "")), when, legend), place, range);
  Object.assign(node, { chart, parts: { values, when, range, place } });
  return node;
}

function plotOptions(node) {
  const { chart } = node;
  const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
  const clock = (_, splits) => splits.map((at) => showTime(at).slice(0, splits[1] - splits[0] < 60 ? 8 : 5));
  const series = chart.names.map((label, i) => ({
    label, stroke: colour(`--s${i}`), width: 1.5, points: { show: false }, fill: i ? undefined : colour("--s0-fill"),
  }));
  return {
    ...plotSize(node), legend: { show: false }, padding: [8, 18, 0, 0],
    cursor: { sync: { key: "hour" }, drag: { x: false, y: false }, points: { size: 7 } },
    scales: { x: { range: () => hour.span() }, y: { range: (_, __, most) => [0, most > 0 ? most * 1.08 : 1] } },
    axes: [{ ...axis, values: clock, size: 26 }, { ...axis, values: (_, splits) => splits.map((value) => (value ? chart.show(value) : "0")), size: 58 }],
    series: [{}, ...series], hooks: { setCursor: [() => fillLegend(node)] },
  };
}

function plotSize(node) {
  return { width: Math.max(100, node.parts.place.clientWidth), height: 170 };
}

// The values under the cursor, or the newest.
function fillLegend(node) {
  const { parts, plot, chart } = node;
  if (!plot) return;
  const last = plot.data[0].length - 1;
  const at = plot.cursor.idx ?? last;
  for (const [i, value] of parts.values.entries()) setText(value, chart.show(plot.data[i + 1][at]));
  setText(parts.when, plot.cursor.idx == null ? "" : showTime(plot.data[0][at]));
}

function drawCharts() {
  const shown = CHARTS.filter((chart) => hasData(chart.fields));
  fillList($("charts"), shown, (chart) => chart.label, makeChart, (node) => {
    const data = [hour.column("at"), ...node.chart.fields.map((field) => hour.column(field))];
    const text = describe(node.chart.names, data.slice(1), node.chart);
    setAttribute(node.parts.place, "aria-label", `${node.chart.label}, last hour: ${text}`);
    const ranges = data.slice(1).map((column, i) => {
      const [least, most] = extent(column);
      return least === null ? "" : `${node.chart.names[i]} ${node.chart.show(least)} to ${node.chart.show(most)}`;
    });
    setText(node.parts.range, ranges.filter(Boolean).join(" · "));
    if (!node.plot) node.plot = new uPlot(plotOptions(node), data, node.parts.place);
    else node.plot.setData(data);
    fillLegend(node);
  });
}

function hasData(fields) {
  return fields.some((field) => hour.rows.some((row) => (row[field] ?? null) !== null));
}

function drawTiles() {
  const shown = TILES.filter((tile) => hasData(tile.fields));
  fillList($("tiles"), shown, (tile) => tile.label, makeTile, (node, tile) => fillTile(node, tile, hour));
}
