"""The page that __init__.py fills in: {{title}}, {{summary}}, {{examples}}, {{tables}} and {{data}}.

The script draws each chart as SVG from the data: training curves as a faint line with a smoothed
one over it, held-out values as dots; a cross-hair reads all values of a step. The horizontal axis
is the step, or the tokens or the time where these are known of every run.
"""

PAGE = r"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1">
<title>{{title}}</title>
<style>
:root { --ink:#1c2430; --soft:#66717f; --line:#e3e7ec; --page:#f5f6f8; --card:#fff; --mark:#fff3c4;
  --c0:#2563eb; --c1:#dc6803; --c2:#0f9d72; --c3:#b4237f; --c4:#7c4fe0; --c5:#0891b2; --c6:#a16207;
  --c7:#475569; --bad:#d92d20 }
@media (prefers-color-scheme:dark) { :root { --ink:#e6eaf0; --soft:#98a3b1; --line:#303844;
  --page:#14181e; --card:#1c222a; --mark:#574a1a; --c0:#6ea0ff; --c1:#ff9f55; --c2:#3ecfa2;
  --c3:#f172c0; --c4:#a98bff; --c5:#45c8e6; --c6:#e0b040; --c7:#a3b1c4; --bad:#ff7a6b } }
* { box-sizing:border-box }
body { margin:0 auto; max-width:1240px; padding:28px 24px 60px; background:var(--page);
  color:var(--ink); font:14px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif }
h1 { font-size:24px; margin:0 0 16px; overflow-wrap:anywhere }
h2 { font-size:17px; margin:30px 0 10px }
small { color:var(--soft); font-weight:400 }
.card, details, .example { background:var(--card); border:1px solid var(--line);
  border-radius:10px }
.card { padding:14px 16px }
.grid { display:grid; grid-template-columns:repeat(auto-fill,minmax(min(360px,100%),1fr));
  gap:14px }
.bar { display:flex; gap:18px; flex-wrap:wrap; align-items:center; margin:22px 0 12px;
  color:var(--soft) }
.bar label { display:flex; gap:7px; align-items:center }
.bar input { accent-color:var(--c0) }
.bar select { font:inherit; color:var(--ink); background:var(--card); padding:2px 6px;
  border:1px solid var(--line); border-radius:6px }
.legend { display:flex; gap:16px; flex-wrap:wrap; color:var(--ink) }
.legend:empty { display:none }
.dot { display:inline-block; width:10px; height:10px; border-radius:50%; margin-right:7px }
.chart h3 { margin:0 0 2px; font-size:14px; font-weight:600; display:flex;
  justify-content:space-between; gap:10px }
.chart h3 { white-space:nowrap }
.chart h3 > span { font-size:12px; line-height:1.7; text-align:right; white-space:normal }
.chart h3 span { font-weight:400; color:var(--soft); font-variant-numeric:tabular-nums }
svg { display:block; width:100%; height:210px; overflow:visible }
svg text { fill:var(--soft); font-size:11px; font-variant-numeric:tabular-nums }
.tiles { display:grid; grid-template-columns:repeat(auto-fill,minmax(150px,1fr)); gap:16px 20px }
.tiles div { font-size:20px; font-weight:600; font-variant-numeric:tabular-nums }
.tiles small { display:block; font-size:12px; line-height:1.35 }
ul.verdicts { margin:0 0 12px; padding-left:18px; font-weight:600; overflow-wrap:anywhere }
ul.told { margin:0 0 14px; padding-left:18px; overflow-wrap:anywhere }
.classes td, .classes th + th { text-align:right }
.classes td, .classes th { white-space:nowrap }
.share { position:relative; width:140px; height:12px; margin-top:4px; border-radius:3px;
  background:var(--line) }
.share i { position:absolute; inset:0 auto 0 0; border-radius:3px; background:var(--c0) }
.share b { position:absolute; top:-3px; bottom:-3px; width:2px; background:var(--ink) }
.gridline { stroke:var(--line) }
.cross { stroke:var(--soft); stroke-dasharray:3 3 }
table { border-collapse:collapse; font-variant-numeric:tabular-nums }
.scroll { overflow-x:auto }
th, td { text-align:left; padding:4px 26px 4px 0; border-bottom:1px solid var(--line);
  overflow-wrap:anywhere; vertical-align:top }
tr:last-child > * { border-bottom:0 }
tbody th { font-weight:400; color:var(--soft) }
tr:first-child th + th { color:var(--ink); font-weight:600 }
tr.different > * { background:var(--mark) }
tr.different > th { padding-left:8px }
details { margin-top:14px; padding:12px 16px }
details summary { cursor:pointer; font-weight:600; font-size:15px }
details .scroll { margin-top:10px }
.example { padding:12px 16px }
.example p { margin:0 0 8px; overflow-wrap:anywhere }
.example.right { border-left:3px solid var(--c2) }
.example.wrong { border-left:3px solid var(--bad) }
.verdict { color:var(--soft) }
.example em { font-style:normal; font-weight:700; color:var(--c2) }
.example.wrong em { color:var(--bad) }
.verdict b { color:var(--ink) }
.words span { display:inline-block; margin:0 2px 4px 0; vertical-align:top; line-height:1.25 }
.words i { display:block; width:fit-content; padding:0 5px; border-radius:4px; font-style:normal;
  font-size:10.5px; background:color-mix(in srgb, var(--c2) 20%, transparent) }
.words i.miss { background:color-mix(in srgb, var(--bad) 22%, transparent) }
.example ol { list-style:none; margin:0; padding:0 }
.example li { position:relative; padding:1px 8px; margin-bottom:2px }
.example li span { position:absolute; inset:0 auto 0 0; background:var(--c0); opacity:.16;
  border-radius:4px }
mark { background:var(--mark); color:inherit; border-radius:3px; padding:0 3px }
@media (max-width:500px) { body { padding:20px 14px 40px } th, td { padding-right:12px }
  .share { width:64px } }
.c0{background:var(--c0)} .c1{background:var(--c1)} .c2{background:var(--c2)}
.c3{background:var(--c3)} .c4{background:var(--c4)} .c5{background:var(--c5)}
.c6{background:var(--c6)} .c7{background:var(--c7)}
</style>
<h1>{{title}}</h1>
<div class="card">{{summary}}</div>
{{examples}}
<div class="bar">
  <div class="legend" id="legend"></div>
  <label>Horizontal axis <select id="axis"></select></label>
  <label>Smoothing <input id="smooth" type="range" min="0" max="0.98" step="0.02"></label>
  <label><input id="log" type="checkbox"> logarithmic values</label>
  <small>Line: training, dots: held-out; the values at the pointer are above</small>
</div>
<div class="grid" id="charts"></div>
{{tables}}
<script>
"use strict";
const data = {{data}};
const svgNS = "http://www.w3.org/2000/svg", H = 210, L = 52, R = 12, T = 10, B = 24;
const color = run => `var(--c${run % 8})`;
const smooth = document.getElementById("smooth"), log = document.getElementById("log");
const longest = Math.max(...data.charts.flatMap(c => c.series.map(s => s.x.length)), 0);
// Of a series: x = steps, tokens, time = seconds since the first record of its run.
const axis = document.getElementById("axis");
for (const [name, text] of [["x", "steps"], ["tokens", "tokens, with padding"],
                            ["time", "time since first record"]])
  if (name === "x" || data.charts.every(c => c.series.every(s => s[name])))
    axis.append(new Option(text, name));
const units = [["days", 86400, 3 * 86400], ["h", 3600, 3 * 3600], ["min", 60, 180], ["s", 1, 0]];
smooth.value = longest > 60 ? 0.8 : longest > 20 ? 0.5 : 0;

if (data.runs.length > 1) data.runs.forEach((name, i) => {
  const item = document.createElement("span"), dot = document.createElement("i");
  dot.className = "dot"; dot.style.background = color(i);
  item.append(dot, name);
  document.getElementById("legend").append(item);
});

function element(parent, name, attributes, text) {
  const node = document.createElementNS(svgNS, name);
  for (const key in attributes) node.setAttribute(key, attributes[key]);
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}
function short(v, percent) {
  if (percent) return +(100 * v).toFixed(100 * v < 10 ? 2 : 1) + " %";
  const a = Math.abs(v);
  if (a >= 1e9) return +(v / 1e9).toPrecision(4) + "G";
  if (a >= 1e6) return +(v / 1e6).toPrecision(4) + "M";
  if (a >= 1e4) return +(v / 1e3).toPrecision(4) + "k";
  if (a !== 0 && a < 1e-3) return (+v.toPrecision(4)).toExponential();
  return String(+v.toPrecision(4));
}
function ticks(low, high, count) {
  const raw = (high - low) / count, base = 10 ** Math.floor(Math.log10(raw));
  const step = base * [1, 2, 5, 10].find(m => m * base >= raw);
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; k++)
    found.push(+(k * step).toPrecision(12));
  return found;
}
function logTicks(low, high) {
  const found = [];
  for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++)
    for (const m of high / low > 200 ? [1] : [1, 2, 5])
      if (m * 10 ** e >= low * 0.999 && m * 10 ** e <= high * 1.001) found.push(m * 10 ** e);
  return found.length > 1 ? found : [low, high];
}
// Exponential mean, started from the values themselves; gaps between steps count by their length,
// on every axis.
function smoothed(s, weight) {
  const gap = s.x.length > 2 ? (s.x.at(-1) - s.x[0]) / (s.x.length - 1) : 1;
  let mean = 0, mass = 0;
  return s.y.map((y, i) => {
    const keep = weight ** Math.min(10, i ? (s.x[i] - s.x[i - 1]) / gap : 1);
    mean = keep * mean + (1 - keep) * y; mass = keep * mass + (1 - keep);
    return weight ? mean / mass : y;
  });
}
function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle + 1; else high = middle;
  }
  return low && x - xs[low - 1] < xs[low] - x ? low - 1 : low;
}

function draw(box, chart) {
  const W = Math.max(240, box.clientWidth - 34), weight = chart.exact ? 0 : +smooth.value;
  const all = chart.series.flatMap(s => s.y).filter(v => !log.checked || v > 0);
  const useLog = log.checked && all.length && Math.min(...all) > 0;
  const by = axis.value;
  let x0 = Math.min(...chart.series.map(s => s[by][0]));
  let x1 = Math.max(...chart.series.map(s => s[by].at(-1)));
  let y0 = all.reduce((a, b) => Math.min(a, b)), y1 = all.reduce((a, b) => Math.max(a, b));
  if (x0 === x1) { x0 -= 1; x1 += 1; }
  if (y0 === y1) { const room = Math.abs(y0) * 0.1 || 1; y0 -= useLog ? 0 : room; y1 += room; }
  const yTicks = useLog ? logTicks(y0, y1) : ticks(y0, y1, 5);
  if (!useLog) {
    const room = 0.04 * (y1 - y0);
    if (y0 > 0 && y0 - room < 0) y0 = 0; else if (y0 !== 0) y0 -= room;
    y1 += room;
  }
  const [unit, size] = by === "time" ? units.find(([, , least]) => x1 - x0 >= least) : ["", 1];
  const f = useLog ? Math.log : v => v;
  const X = v => L + (v - x0) / (x1 - x0) * (W - L - R);
  const Y = v => H - B - (f(v) - f(y0)) / (f(y1) - f(y0)) * (H - T - B);

  box.innerHTML = "";
  const title = document.createElement("h3"), reading = document.createElement("span");
  title.append(chart.title, reading);
  const svg = document.createElementNS(svgNS, "svg");
  svg.setAttribute("viewBox", `0 0 ${W} ${H}`);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", chart.title);
  box.append(title, svg);
  for (const v of yTicks) {
    element(svg, "line", {class: "gridline", x1: L, x2: W - R, y1: Y(v), y2: Y(v)});
    element(svg, "text", {x: L - 8, y: Y(v) + 4, "text-anchor": "end"}, short(v, chart.percent));
  }
  for (const v of ticks(x0 / size, x1 / size, W > 420 ? 5 : 4))
    if (by === "time" || Number.isInteger(v))
      element(svg, "text", {x: X(v * size), y: H - 6, "text-anchor": "middle"},
              short(v) + (unit && " " + unit));
  const path = (s, ys) => s[by].map((x, i) => !useLog || ys[i] > 0
    ? `${i ? "L" : "M"}${X(x).toFixed(1)} ${Y(ys[i]).toFixed(1)}` : "").join("");
  for (const s of chart.series) {
    const stroke = color(s.run), line = {fill: "none", stroke, "stroke-linejoin": "round"};
    if (s.kind === "train") {
      s.shown = smoothed(s, weight);
      if (weight) element(svg, "path", {...line, d: path(s, s.y), opacity: .22});
      element(svg, "path", {...line, d: path(s, s.shown), "stroke-width": 1.8});
      if (s.x.length === 1)
        element(svg, "circle", {cx: X(s[by][0]), cy: Y(s.y[0]), r: 2, fill: stroke});
    } else {
      s.shown = s.y;
      element(svg, "path", {...line, d: path(s, s.y), "stroke-dasharray": "4 3", opacity: .7});
      s[by].forEach((x, i) => element(svg, "circle", {cx: X(x), cy: Y(s.y[i]),
        r: s.x.length > 60 ? 2 : 3.5, fill: "var(--card)", stroke, "stroke-width": 1.8}));
    }
  }
  const cross = element(svg, "line", {class: "cross", y1: T, y2: H - B, visibility: "hidden"});
  const read = x => chart.series.map(s => {
    const i = x === null ? s.x.length - 1 : nearest(s[by], x);
    return [s, short(s.shown[i], chart.percent), s[by][i]];
  });
  const say = x => {
    const found = read(x);
    reading.innerHTML = "";
    const place = found[0][2];
    if (x !== null) reading.append(by === "x" ? `step ${place.toLocaleString("en")}: `
      : by === "tokens" ? `${short(place)} tokens: ` : `${short(place / size)} ${unit}: `);
    found.slice(0, 6).forEach(([s, value], i) => {
      const part = document.createElement("span");
      part.style.color = color(s.run);
      part.textContent = (s.kind === "eval" ? "○ " : "") + value;
      part.style.whiteSpace = "pre";
      part.style.marginLeft = i ? "6px" : 0;
      reading.append(part, " ");  // a line may end there
    });
  };
  say(null);
  svg.onpointermove = event => {
    const bounds = svg.getBoundingClientRect();
    const px = (event.clientX - bounds.left) / bounds.width * W;
    const x = Math.max(x0, Math.min(x1, x0 + (px - L) / (W - L - R) * (x1 - x0)));
    const at = read(x)[0][2];
    cross.setAttribute("x1", X(at)); cross.setAttribute("x2", X(at));
    cross.setAttribute("visibility", "visible");
    say(x);
  };
  svg.onpointerleave = () => { cross.setAttribute("visibility", "hidden"); say(null); };
}

const boxes = data.charts.map(chart => {
  const box = document.createElement("div");
  box.className = "card chart";
  document.getElementById("charts").append(box);
  return [box, chart];
});
const redraw = () => boxes.forEach(([box, chart]) => draw(box, chart));
smooth.oninput = log.onchange = axis.onchange = redraw;
let pending;
addEventListener("resize", () => {
  clearTimeout(pending);
  pending = setTimeout(redraw, 100);
});
redraw();
</script>
</html>
"""
