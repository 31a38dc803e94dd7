"use strict";
let figures = JSON.parse(byId("figures").textContent);
let samples = JSON.parse(byId("samples-data").textContent);

// Plotly reads some markup in names; as entities it is text.
const plain = (text) =>
  text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
const number = (value) =>
  value === null || value === undefined ? "" :
    Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(4)));

function table(head, rows) {
  const cells = (tag, values) => values.map((value) =>
    value instanceof Node ? value : make(tag, typeof value === "number" ? "number" : "",
      typeof value === "number" ? number(value) : value ?? ""));
  return make("table", "", make("thead", "", make("tr", "", ...cells("th", head))),
    make("tbody", "", ...rows.map((row) => make("tr", "", ...cells("td", row)))));
}

function options(select, names) {
  const before = select.selectedOptions[0]?.text;
  select.replaceChildren(...names.map((name, i) => {
    const option = make("option", "", name);
    option.value = i;
    return option;
  }));
  select.selectedIndex = Math.max(0, names.indexOf(before));
  select.hidden = names.length < 2;
}

const several = () => figures.runs.length > 1;
// Whether some runs differ by the seed alone: these have one colour, and a mean.
const grouped = () => figures.variants.length < figures.runs.length;
const COLOURS = ["#1f77b4", "#e0762b", "#3a9a5c", "#8a5cc2", "#c8394f", "#a07a1a", "#2a9db0",
  "#d457a8", "#7b8794", "#7fa32b", "#9c4f2e", "#4b62c4", "#a99ac9", "#d9a72c", "#2f6f5e", "#b7a08a"];
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash"];
const colour = (index) => COLOURS[index % COLOURS.length];
const dash = (index) => DASHES[index % DASHES.length];
const SYMBOLS = { resume: ["diamond", "◆"], retry: ["triangle-up", "▲"],
  "replica failure": ["x", "✖"] };
const symbolOf = (kind) => SYMBOLS[kind] ?? ["star", "★"];
// The row of a step of a run: thousands of steps are looked up for each of hundreds of keys.
const rowsOf = new WeakMap();
function rowOf(run, step) {
  if (!rowsOf.has(run)) rowsOf.set(run, new Map(run.steps.map((each, i) => [each, i])));
  return rowsOf.get(run).get(step);
}
const STDERR = "_stderr", Z_95 = 1.96;
const MAX_STEPS_WITH_POINTS = 40;

// The plots.

const hidden = new Set();  // names of runs
const chosen = [];  // keys of the plot of any quantity
let plots = [];  // {panel, box, drawn}
const watcher = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    const plot = plots.find((other) => other.box === entry.target);
    if (plot) plot.visible = entry.isIntersecting;
    if (plot?.visible && plot.stale) draw(plot);
  }
}, { rootMargin: "500px" });

// The mean with exponentially falling weights, without the pull of the first value.
function smoothed(values, weight) {
  let mean = 0, total = 0;
  return values.map((value) => {
    mean = weight * mean + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return mean / total;
  });
}

function lines(panel, log) {
  const weight = Number(byId("smoothing").value), found = [];
  figures.runs.forEach((run) => {
    if (hidden.has(run.name)) return;
    panel.keys.forEach(([key, label], k) => {
      const values = run.series[key] ?? [];
      const places = [...values.keys()].filter((i) => values[i] !== null && (!log || values[i] > 0));
      if (!places.length) return;
      const x = places.map((i) => run.steps[i]), y = places.map((i) => values[i]);
      const errors = run.series[key + STDERR];
      const half = errors && places.map((i) => Z_95 * (errors[i] ?? 0));
      const smooth = weight > 0 && !key.startsWith("eval/");
      const alone = !several();
      const shade = !alone ? colour(run.variant) : key.endsWith("/correct") ? "#2a9d5c" :
        key.endsWith("/incorrect") ? "#d1495b" : colour(k);
      const name = plain([...(alone ? [] : [run.name]), ...(label ? [label] : [])].join(" ")) ||
        plain(key);
      const dense = x.length > 100;
      const line = { color: shade, width: grouped() ? 0.8 : dense ? 1.1 : 1.8,
        dash: dash(alone ? Math.floor(k / 9) : k) };
      const mode = x.length <= MAX_STEPS_WITH_POINTS ? "lines+markers" : "lines";
      const common = { x, type: "scatter", mode, name, marker: { size: 4, color: shade } };
      if (smooth) {
        found.push({ ...common, y, line: { ...line, width: 1 }, opacity: 0.25, mode: "lines",
          showlegend: false, hoverinfo: "skip" });
      }
      found.push({
        ...common, ...(grouped() ? { showlegend: false, opacity: 0.4, mode: "lines" } : {}), line,
        y: smooth ? smoothed(y, weight) : y, customdata: y,
        hovertemplate: smooth ? "%{y:.4g} (logged %{customdata:.4g})" :
          half ? "%{y:.4g} ± %{error_y.array:.2g}" : "%{y:.4g}",
        ...(half ? { error_y: { type: "data", array: half, thickness: 1,
          color: `${shade}99`, width: dense ? 0 : 3 } } : {}),
      });
    });
  });
  return grouped() ? [...found, ...means(panel, log, weight)] : found;
}

// The mean over the runs of each variant, at the steps that all of them have.
function means(panel, log, weight) {
  return figures.variants.flatMap((variant, v) => panel.keys.flatMap(([key, label], k) => {
    const runs = figures.runs.filter((run) =>
      run.variant === v && !hidden.has(run.name) && run.series[key]);
    const values = (step) => runs.map((run) => run.series[key][rowOf(run, step)] ?? null);
    const x = (runs[0]?.steps ?? []).filter((step) => values(step).every((value) => value !== null));
    const y = x.map((step) => values(step).reduce((sum, value) => sum + value, 0) / runs.length);
    if (!x.length || (log && y.some((value) => value <= 0))) return [];
    const smooth = weight > 0 && !key.startsWith("eval/");
    return [{
      x, y: smooth ? smoothed(y, weight) : y, type: "scatter", mode: "lines",
      name: plain([variant || "all", ...(label ? [label] : [])].join(" ")),
      line: { color: colour(v), width: 2.4, dash: dash(k) },
      hovertemplate: `%{y:.4g} (mean of ${runs.length})`,
    }];
  }));
}

// The parts of a step over the steps; with several runs, their means side by side.
function stacked(panel) {
  const shown = figures.runs.filter((run) => !hidden.has(run.name));
  const stages = panel.keys.map(([key, label], k) => [key, label, k]);
  if (several()) {
    return stages.map(([key, label, k]) => ({
      type: "bar", name: plain(label), marker: { color: colour(k), opacity: k > 8 ? 0.6 : 1 },
      x: shown.map((run) => plain(run.name)), y: shown.map((run) => run.stage_means[key] ?? 0),
      hovertemplate: "%{y:.3g} s",
    }));
  }
  return stages.filter(([key]) => shown[0]?.series[key]?.some((value) => value)).map(
    ([key, label, k]) => ({
      x: shown[0].steps, y: shown[0].series[key].map((value) => value ?? 0), type: "scatter",
      mode: "lines", stackgroup: "one", name: plain(label), hovertemplate: "%{y:.3g} s",
      line: { width: 0.5, color: colour(k) },
    }));
}

function eventMarks() {
  const found = [];
  figures.runs.forEach((run) => {
    if (hidden.has(run.name)) return;
    for (const kind of new Set(run.events.map((event) => event.kind))) {
      const own = run.events.filter((event) => event.kind === kind);
      const who = several() ? `${plain(run.name)} ` : "";
      found.push({
        x: own.map((event) => event.step), y: own.map(() => 0.03), yaxis: "y2", mode: "markers",
        type: "scatter", showlegend: false, name: who + kind, cliponaxis: false,
        marker: { symbol: symbolOf(kind)[0], size: 8,
          color: several() ? colour(run.variant) : "#b8860b" },
        text: own.map((event) => plain(event.text)), hovertemplate: "%{text}",
      });
    }
  });
  return found;
}

function draw(plot) {
  plot.stale = false;
  plot.box.hidden = !plot.panel.keys.length;
  if (plot.box.hidden) return;
  const css = getComputedStyle(document.documentElement);
  const tone = (name) => css.getPropertyValue(name).trim();
  const bars = plot.panel.kind === "stacked" && several();
  // Where nothing is above 0, the scale stays linear.
  const log = byId("log").checked && plot.panel.kind !== "stacked" && plot.panel.keys.some(([key]) =>
    figures.runs.some((run) => run.series[key]?.some((value) => value > 0)));
  const own = plot.panel.kind === "stacked" ? stacked(plot.panel) : lines(plot.panel, log);
  const marks = byId("events").checked && !bars ? eventMarks() : [];
  const named = own.filter((trace) => trace.showlegend !== false);
  const legend = named.length > 1 || several() || Boolean(plot.panel.keys[0]?.[1]);
  // The legend lies below the plot and takes a line for as many names as fit.
  const width = plot.box.clientWidth || 360;
  const letters = Math.max(0, ...named.map((trace) => trace.name.length)) * 6.2 + 48;
  const rows = legend ? Math.ceil(named.length / Math.max(1, Math.floor((width - 60) / letters))) : 0;
  const height = 270 + 19 * rows;
  const axis = { gridcolor: tone("--line"), zerolinecolor: tone("--line"), automargin: true };
  const range = plot.panel.kind === "stacked" ? (bars ? undefined : usualRange(own)) :
    plot.panel.unit === "share" ? constantRange(own) : undefined;
  plot.box.style.minHeight = `${height}px`;
  Plotly.react(plot.box, [...own, ...marks], {
    height, autosize: true, barmode: "stack", hovermode: bars ? "closest" : "x unified",
    margin: { l: 8, r: 10, t: 26, b: 30 + 19 * rows }, uirevision: `${log}`,
    paper_bgcolor: "transparent", plot_bgcolor: "transparent",
    font: { color: tone("--text"), size: 11, family: "system-ui, sans-serif" },
    hoverlabel: { bgcolor: tone("--panel"), bordercolor: tone("--line"),
      font: { color: tone("--text"), size: 11 }, namelength: 40 },
    modebar: { bgcolor: "transparent", color: tone("--dim"), activecolor: tone("--accent") },
    showlegend: legend,
    legend: { orientation: "h", yref: "container", y: 0, yanchor: "bottom", x: 0,
      font: { size: 11 } },
    // On a touch screen a finger scrolls the page; two buttons of the plot zoom.
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    xaxis: bars ? { ...axis, type: "category" } :
      { ...axis, title: { text: "step", standoff: 4, font: { size: 11 } }, tickformat: "d",
        nticks: 8, ...wholeTicks() },
    yaxis: { ...axis, type: log ? "log" : "linear", ...(range && !log ? { range } : {}),
      exponentformat: "power", minexponent: 5,
      title: { text: plain(plot.panel.unit), standoff: 6, font: { size: 11 } } },
    yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true },
  }, { responsive: true, displaylogo: false,
    modeBarButtons: [["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d", "toImage"]] });
}

function wholeTicks() {
  const last = Math.max(0, ...figures.runs.map((run) => run.steps.at(-1) ?? 0));
  return last < 8 ? { dtick: 1 } : {};
}

// A first step that compiles would make all others look like zero.
function usualRange(traces) {
  const totals = (traces[0]?.y ?? []).map((_, i) => traces.reduce((sum, t) => sum + t.y[i], 0));
  const median = [...totals].sort((a, b) => a - b)[Math.floor(totals.length / 2)];
  return median && Math.max(...totals) > 2.5 * median ? [0, 2.5 * median] : undefined;
}

// A share that never changes is drawn between 0 and 1.
function constantRange(traces) {
  const values = new Set(traces.flatMap((trace) => trace.y));
  return values.size === 1 && [...values][0] <= 1 ? [0, 1.05] : undefined;
}

function redraw() {
  byId("smoothed").textContent = byId("smoothing").value;
  for (const plot of plots) {
    plot.stale = true;
    if (plot.visible) draw(plot);
  }
}

function layPlots() {
  const any = { section: "Any quantity", title: "Quantities of your choice", unit: "", kind: "lines",
    note: "", keys: chosen.map((key) => [key, key]), any: true };
  const wanted = [...figures.panels, any];
  const names = wanted.map((panel) => `${panel.section} ${panel.title}`);
  // After a refresh with the same panels, the plots stay where they are, with their zoom.
  if (plots.length === wanted.length && plots.every((plot, i) => plot.name === names[i])) {
    plots.forEach((plot, i) => { plot.panel = wanted[i]; });
    redraw();
    return;
  }
  for (const plot of plots) Plotly.purge(plot.box);
  watcher.disconnect();
  plots = wanted.map((panel, i) => ({ panel, name: names[i], box: make("div", "plot"), stale: true }));
  const sections = [...new Set(wanted.map((panel) => panel.section))];
  byId("plots").replaceChildren(...sections.map((section) => {
    const grid = make("div", "plots");
    for (const plot of plots.filter((other) => other.panel.section === section)) {
      const note = plot.panel.kind === "stacked" && several() ?
        "Means over all steps; a first step that compiles counts." : plot.panel.note;
      grid.append(make("section", "", make("h3", "", plot.panel.title),
        ...(note ? [make("p", "dim", note)] : []),
        ...Object.entries(plot.panel.links ?? {}).map(([text, target]) => {
          const link = make("a", "", text);
          link.href = target;
          return link;
        }),
        ...(plot.panel.any ? [picker(plot)] : []), plot.box));
    }
    const details = make("details", "", make("summary", "", make("h2", "", section)), grid);
    details.open = true;
    details.id = `section-${sections.indexOf(section)}`;
    return details;
  }));
  for (const plot of plots) {
    plot.box.hidden = !plot.panel.keys.length;
    watcher.observe(plot.box);
  }
  const links = [
    ...sections.map((name, i) => [name, `section-${i}`]), ["Figures at a step", "figures-at"],
    ["Recorded responses", "responses"], ["Configuration", "configuration"], ["Versions and machine", "machine"],
  ];
  byId("nav").replaceChildren(...links.map(([name, id]) => {
    const link = make("a", "", name);
    link.href = `#${id}`;
    return link;
  }));
}

function allKeys() {
  return [...new Set(figures.runs.flatMap((run) => Object.keys(run.series)))].sort();
}

function picker(plot) {
  const select = make("select", ""), clear = make("button", "", "clear");
  select.id = "any";
  select.ariaLabel = "add a quantity";
  select.append(make("option", "", "add a quantity"),
    ...allKeys().map((key) => make("option", "", key)));
  const change = () => {
    plot.panel.keys = chosen.map((key) => [key, key]);
    select.selectedIndex = 0;
    draw(plot);
  };
  select.addEventListener("change", () => {
    if (!chosen.includes(select.value)) chosen.push(select.value);
    change();
  });
  clear.addEventListener("click", () => { chosen.length = 0; change(); });
  return make("div", "bar", select, clear);
}

// Head, figures at a step, events, configuration, machine.

function head() {
  byId("title").textContent = figures.title;
  document.title = figures.title;
  byId("facts").textContent = figures.runs.map((run) => {
    const last = run.steps.at(-1), first = run.starts[0];
    const start = first?.time?.replace("T", " ").slice(0, 16);
    return (several() ? `${run.name}: ` : "") + `run ${run.id}, ` +
      (last === undefined ? "no step yet" : `log up to step ${last}`) +
      (start ? `, ${first.step ? "resumed" : "started"} ${start} UTC` : "");
  }).join("; ");
  const kinds = new Set(figures.runs.flatMap((run) => run.events.map((event) => event.kind)));
  byId("kinds").textContent = kinds.size ?
    `events (${[...kinds].map((kind) => `${symbolOf(kind)[1]} ${kind}`).join(", ")})` : "events";
  const notes = [...figures.pace.filter(Boolean), ...figures.notes];
  byId("notes").replaceChildren(...notes.map((note) => make("p", "", note)));
  byId("runs").replaceChildren(...(several() ? figures.runs.map((run) => {
    const box = make("input", ""), dot = make("span", "dot");
    box.type = "checkbox";
    box.checked = !hidden.has(run.name);
    box.addEventListener("change", () => {
      box.checked ? hidden.delete(run.name) : hidden.add(run.name);
      redraw();
    });
    dot.style.background = colour(run.variant);
    return make("label", "", box, " ", dot, run.name);
  }) : []));
}

// The last evaluation comes after the last training step, so a value may be of an earlier step.
const placeOf = (run, key, step) =>
  run.series[key]?.findLastIndex((value, i) => value !== null && run.steps[i] <= step) ?? -1;
const at = (run, key, step) => run.series[key]?.[placeOf(run, key, step)] ?? null;
const stepOf = (run, key, step) => run.steps[placeOf(run, key, step)];
const isAt = (run, key, step) => (run.series[key]?.[rowOf(run, step)] ?? null) !== null;
const isMain = (key) => /^eval\/.*(accuracy|score|mean_length|loss|@\d+)$/.test(key) ||
  ["reward/mean", "reward/correct", "response/length/mean", "policy/entropy", "policy/kl",
    "metrics/effective_rank/mean", "metrics/effective_rank_velocity/mean",
    "metrics/effective_rank_acceleration/mean", "shaping/bonus_to_advantage/mean", "sft/loss"].includes(key);

function stepOptions() {
  const common = figures.runs.map((run) => run.steps).reduce(
    (a, b) => { const there = new Set(b); return a.filter((step) => there.has(step)); });
  const evaluated = (step) => figures.runs.every((run) =>
    Object.keys(run.series).some((key) => key.startsWith("eval/") && isAt(run, key, step)));
  const select = byId("step"), before = select.value;
  select.replaceChildren(...common.map((step) => {
    const option = make("option", "", evaluated(step) ? `${step}, evaluated` : String(step));
    option.value = step;
    return option;
  }).reverse());
  const preferred = common.findLast(evaluated) ?? common.at(-1);
  // A live page stays at the step that somebody chose.
  select.value = select.dataset.chosen && common.includes(Number(before)) ? before : preferred ?? "";
}

function figureTable() {
  const step = Number(byId("step").value), [first] = figures.runs;
  const keys = allKeys().filter((key) => !key.endsWith(STDERR) &&
    (byId("all-keys").checked || isMain(key)) && figures.runs.some((run) => at(run, key, step) !== null));
  const value = (run, key) => {
    const found = at(run, key, step), error = at(run, key + STDERR, step);
    const earlier = found !== null && stepOf(run, key, step) !== step;
    return make("td", "number", number(found) +
      (error === null || found === null ? "" : ` ± ${number(Z_95 * error)}`) +
      (earlier ? ` (step ${stepOf(run, key, step)})` : ""));
  };
  const change = (from, to) => make("td", "number",
    from === null || to === null ? "" : (to >= from ? "+" : "") + number(to - from));
  // Values of different steps are not compared.
  const compared = (run, key) => (stepOf(run, key, step) === stepOf(first, key, step) ?
    change(at(first, key, step), at(run, key, step)) : make("td", ""));
  const start = (key) => first.series[key].find((found) => found !== null) ?? null;
  byId("figure-table").replaceChildren(several() ?
    table(["quantity", ...figures.runs.map((run) => run.name),
      ...figures.runs.slice(1).map((run) => `${run.name} - ${first.name}`)],
    keys.map((key) => [key, ...figures.runs.map((run) => value(run, key)),
      ...figures.runs.slice(1).map((run) => compared(run, key))])) :
    table(["quantity", "first", `step ${byId("step").value}`, "change"],
      keys.map((key) => [key, make("td", "number", number(start(key))), value(first, key),
        change(start(key), at(first, key, step))])));
}

function pairedTable() {
  const box = byId("paired");
  if (!several()) return;
  const share = (value) => make("td", "number", `${(100 * value).toFixed(1)} %`);
  box.replaceChildren(make("h2", "", "Accuracy on the same problems"),
    make("p", "dim", figures.paired.length ?
      `Differences from ${figures.runs[0].name}, by problem, with 95 % intervals over the problems.` :
      "No step at which these runs recorded evaluations of the same problems."));
  if (!figures.paired.length) return;
  box.append(make("div", "", table(
    ["step", "benchmark", "problems", "run", figures.runs[0].name, "this run", "difference"],
    figures.paired.map((row) => [
      row.step, row.benchmark, row.problems, figures.runs[row.run].name,
      share(row.first), share(row.other),
      make("td", "number", `${row.difference >= 0 ? "+" : ""}${(100 * row.difference).toFixed(1)}` +
        (row.half === null ? "" : ` ± ${(100 * row.half).toFixed(1)}`)),
    ]))));
  box.lastChild.className = "wide";
}

function eventList() {
  const rows = figures.runs.flatMap((run) => run.events.map((event) =>
    [...(several() ? [run.name] : []), event.step, event.kind, event.text]));
  const box = byId("event-list");
  box.replaceChildren();
  if (!rows.length) return;
  const wide = make("div", "wide",
    table([...(several() ? ["run"] : []), "step", "event", ""], rows));
  box.append(make("details", "", make("summary", "",
    make("h2", "", `Events (${rows.length})`)), wide));
}

function settingRows() {
  const which = byId("which").selectedOptions[0]?.text ?? "";
  const query = byId("setting").value.trim().toLowerCase();
  const rows = figures.settings.filter(([field, base, ...values]) =>
    (which === "all settings" ||
      (which.startsWith("settings that differ between") ?
        values.some((value) => value !== values[0]) : values.some((value) => value !== base))) &&
    (!query || [field, ...values].some((text) => (text ?? "").toLowerCase().includes(query))));
  byId("settings").replaceChildren(rows.length ? table(
    ["setting", ...figures.runs.map((run) => several() ? run.name : "value"), "default"],
    rows.map(([field, base, ...values]) => [field,
      ...values.map((value) => make("td", value === base ? "" : "changed", value ?? "not set")),
      base ?? "no such setting"])) : make("p", "dim", "No setting."));
}

function machines() {
  byId("machines").replaceChildren(...figures.runs.map((run) => {
    const facts = make("dl", "");
    const fact = (name, value) => facts.append(make("dt", "", name), make("dd", "", String(value)));
    const start = run.starts.at(-1) ?? {};
    for (const name of ["devices", "processes", "cores", "system", "python"]) {
      if (name in start) fact(name, start[name]);
    }
    for (const [name, version] of Object.entries(run.versions)) if (version) fact(name, version);
    for (const each of run.starts) {
      fact(each.step ? "resumed" : "started",
        [`${each.time ?? ""} at step ${each.step}`, ...(each.changed ?? [])].join("; "));
    }
    return make("div", "", ...(several() ? [make("h3", "", run.name)] : []), facts);
  }));
}

// The responses.

const PER_PAGE = 30;
const VERDICTS = [["any verdict", () => true], ["correct", (s) => s.correct],
  ["wrong", (s) => !s.correct], ["verifier failed", (s) => s.error],
  ["truncated", (s) => s.finish === "length"]];
let rows = [], found = [], page = 0, order = { column: -1, sign: 1 };
const open = new Set();
const byText = (a, b) => (typeof a === "string" ? a.localeCompare(b) : a - b);
const groupOf = (sample) => [sample.run, sample.source, sample.step, sample.group].join("|");
let columns = [];

function layResponses() {
  rows = samples.rows.map((row, place) => {
    const sample = Object.fromEntries(samples.columns.map((name, i) => [name, row[i]]));
    return { ...sample, place, text: samples.prompts[sample.prompt] };
  });
  const used = new Set(rows.map((sample) => sample.run));
  byId("sample-note").textContent = samples.note;
  byId("filters").hidden = !rows.length;
  options(byId("run"), used.size > 1 ? ["all runs", ...figures.runs.map((run) => run.name)] : ["all runs"]);
  options(byId("source"), ["training and benchmarks", ...new Set(rows.map((s) => s.source))]);
  options(byId("sample-step"), ["all steps",
    ...[...new Set(rows.map((s) => s.step))].sort((a, b) => a - b).map((step) => `step ${step}`)]);
  options(byId("verdict"), VERDICTS.map(([name]) => name));
  const measured = samples.metric_names.filter((name) => !/_(velocity|acceleration)$/.test(name));
  columns = [
    ...(several() ? [["run", (s) => figures.runs[s.run].name]] : []),
    ["step", (s) => s.step, "number"], ["from", (s) => s.source], ["group", (s) => s.group, "number"],
    ["prompt", (s) => s.text, "text"], ["response", (s) => s.response, "text"],
    ["reference", (s) => s.reference ?? ""], ["answer", (s) => s.extracted ?? ""],
    ["verdict", (s) => (s.correct ? "✓ correct" : "✗ wrong")],
    ["score", (s) => s.score, "number"], ["tokens", (s) => s.tokens, "number"],
    ["end", (s) => s.finish],
    ...measured.slice(0, 1).map((name) => [name.replaceAll("_", " "),
      (s) => s.metrics[samples.metric_names.indexOf(name)] ?? null, "number"]),
  ];
  document.querySelector("#samples thead").replaceChildren(make("tr", "",
    ...(rows.length ? columns : []).map(([name, , kind], i) => {
      const button = make("button", "", name);
      button.addEventListener("click", () => {
        order = { column: i, sign: order.column === i ? -order.sign : 1 };
        filter();
      });
      return make("th", kind === "number" ? "number" : "", button);
    })));
  filter(false);
}

function filter(toStart = true) {
  const run = byId("run").selectedIndex - 1, source = byId("source").selectedOptions[0]?.text;
  const step = byId("sample-step").selectedOptions[0]?.text;
  const verdict = VERDICTS[Math.max(0, byId("verdict").selectedIndex)][1];
  const query = byId("search").value.trim().toLowerCase();
  found = rows.filter((s) => (run < 0 || s.run === run) &&
    (byId("source").selectedIndex < 1 || s.source === source) &&
    (byId("sample-step").selectedIndex < 1 || `step ${s.step}` === step) && verdict(s) &&
    (!query || [s.text, s.response, s.reference, s.extracted].some(
      (text) => (text ?? "").toLowerCase().includes(query))));
  if (order.column >= 0) {
    const value = columns[order.column][1];
    found.sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      // What is missing comes last in both directions.
      if (x === null || y === null) return (x === null) - (y === null) || a.place - b.place;
      return order.sign * byText(x, y) || a.place - b.place;
    });
  }
  if (toStart) page = 0;
  render();
}

function render() {
  const pages = Math.max(1, Math.ceil(found.length / PER_PAGE));
  page = Math.min(page, pages - 1);
  byId("count").textContent = `${found.length} of ${rows.length} responses`;
  byId("place").textContent = `${page + 1} / ${pages}`;
  byId("previous").disabled = page === 0;
  byId("next").disabled = page >= pages - 1;
  document.querySelectorAll("#samples th").forEach((th, i) => {
    const sorted = i === order.column;
    th.ariaSort = sorted ? (order.sign > 0 ? "ascending" : "descending") : "none";
    th.firstChild.textContent = columns[i][0] + (sorted ? (order.sign > 0 ? " ▲" : " ▼") : "");
  });
  document.querySelector("#samples tbody").replaceChildren(
    ...found.slice(page * PER_PAGE, (page + 1) * PER_PAGE).flatMap((sample) => {
      const tr = row(sample);
      return open.has(keyOf(sample)) ? [tr, detail(sample)] : [tr];
    }));
}

const keyOf = (sample) => `${groupOf(sample)}|${sample.sample}`;

function row(sample) {
  const button = make("button", "open", open.has(keyOf(sample)) ? "▾" : "▸");
  button.ariaLabel = "show the group";
  button.ariaExpanded = String(open.has(keyOf(sample)));
  const tr = make("tr", "sample", ...columns.map(([name, value, kind], i) => {
    const shown = value(sample);
    const text = kind === "number" ? number(shown) : String(shown).slice(0, 300);
    const cell = make("td", kind ?? "", kind === "text" ? make("div", "", text) : text);
    if (name === "verdict") cell.className = sample.correct ? "correct" : "wrong";
    if (i === 0) {
      cell.prepend(button);
      cell.classList.add("first");
    }
    return cell;
  }));
  tr.addEventListener("click", () => {
    if (getSelection().toString()) return;
    if (open.delete(keyOf(sample))) tr.nextElementSibling.remove();
    else {
      open.add(keyOf(sample));
      tr.after(detail(sample));
      const group = tr.nextElementSibling.querySelector(".group");
      group.scrollLeft = group.querySelector(".chosen").offsetLeft - group.offsetLeft - 30;
    }
    button.textContent = open.has(keyOf(sample)) ? "▾" : "▸";
    button.ariaExpanded = String(open.has(keyOf(sample)));
  });
  return tr;
}

// The whole group; with several runs, also the groups of the same problem and step.
function detail(sample) {
  const group = rows.filter((s) => s.source === sample.source && s.step === sample.step &&
    s.group === sample.group && (s.run === sample.run || s.prompt === sample.prompt))
    .sort((a, b) => a.run - b.run || a.sample - b.sample);
  const right = group.filter((s) => s.correct).length;
  const td = make("td", "detail", make("div", "",
    make("p", "dim", `prompt, with its template; step ${sample.step}, group ${sample.group} of ` +
      `${sample.source}: ${right} of ${group.length} correct; reference ${sample.reference ?? "none"}`),
    withTemplate(sample.text),
    make("div", "group", ...group.map((s) => card(s, s.place === sample.place, group)))));
  td.colSpan = columns.length;
  return make("tr", "detail", td);
}

function card(sample, isChosen, group) {
  const facts = make("dl", "");
  const fact = (name, value) => facts.append(make("dt", "", name), make("dd", "", String(value)));
  fact("answer", sample.extracted ?? "none");
  fact("score", number(sample.score));
  fact("end", `${sample.finish}, ${sample.tokens} tokens`);
  if (sample.error) fact("verifier", sample.error);
  sample.facts.forEach(([name, value]) => fact(name, value));
  samples.metric_names.forEach((name, i) => {
    if ((sample.metrics[i] ?? null) !== null) fact(name.replaceAll("_", " "), number(sample.metrics[i]));
  });
  const who = several() ? `${figures.runs[sample.run].name} ` : "";
  return make("div", isChosen ? "chosen" : "",
    make("h3", "", who, make("span", sample.correct ? "correct" : "wrong",
      sample.correct ? "✓ correct" : "✗ wrong"), ` #${sample.sample}`),
    ...(sample.rewards.length ? episode(sample.response, sample.turns, sample.rewards,
      (from, to) => withTemplate(sample.response.slice(from, to)))
      : [withTemplate(sample.response)]), facts,
    ...sparkline("log-probability of the tokens", sample.logprobs, group.map((s) => s.logprobs)),
    ...sparkline("effective rank of the growing response", sample.ranks,
      group.map((s) => s.ranks)));
}

// All lines of a group have one scale, so that its cards can be compared.
function sparkline(label, values, ofGroup) {
  const kept = values.filter((value) => value !== null);
  if (kept.length < 2) return [];
  const all = ofGroup.flat().filter((value) => value !== null);
  const low = Math.min(...all), high = Math.max(...all, low + 1e-9);
  const element = (name, attributes) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    return node;
  };
  const points = kept.map((value, i) =>
    `${(100 * i) / (kept.length - 1)},${1 + (28 * (high - value)) / (high - low)}`).join(" ");
  const svg = element("svg", { class: "line", viewBox: "0 0 100 30", preserveAspectRatio: "none",
    role: "img", "aria-label": label });
  svg.append(element("polyline", { points }));
  return [svg, make("p", "dim", `${label}, between ${number(Math.min(...kept))} and ` +
    number(Math.max(...kept)))];
}

// A page that a server sent asks it for changes.

const POLL_MS = 2000;

async function follow() {
  const status = byId("live");
  status.hidden = false;
  try {
    const asked = `figures=${figures.version ?? ""}&samples=${samples.version ?? ""}`;
    const answer = await fetch(`data?${asked}`);
    const changes = await answer.json();
    if (!answer.ok) throw new Error(changes.error);
    if (changes.figures) figures = { ...changes.figures, live: true };
    if (changes.samples) samples = changes.samples;
    if (changes.figures) layFigures();
    if (changes.samples) layResponses();
    status.textContent = `live: follows the run, last change ${figures.changed ?? ""}`;
  } catch (error) {
    status.textContent = error instanceof TypeError ?
      "not live: the server has ended; the page shows the last state" : `not live: ${error.message}`;
  }
  setTimeout(follow, POLL_MS);
}

function layFigures() {
  head();
  layPlots();
  stepOptions();
  figureTable();
  pairedTable();
  eventList();
  const names = ["settings other than the default", "all settings"];
  options(byId("which"), several() ? ["settings that differ between the runs", ...names] : names);
  settingRows();
  machines();
}

layFigures();
layResponses();
byId("smoothing").addEventListener("input", redraw);
for (const id of ["log", "events"]) byId(id).addEventListener("change", redraw);
byId("step").addEventListener("change", () => {
  byId("step").dataset.chosen = "yes";
  figureTable();
});
byId("all-keys").addEventListener("change", figureTable);
for (const id of ["run", "source", "sample-step", "verdict"]) {
  byId(id).addEventListener("change", () => filter());
}
let resized;
addEventListener("resize", () => {  // the lines of the legends
  clearTimeout(resized);
  resized = setTimeout(redraw, 200);
});
let waiting;
byId("search").addEventListener("input", () => {
  clearTimeout(waiting);
  waiting = setTimeout(filter, 200);
});
byId("setting").addEventListener("input", settingRows);
byId("which").addEventListener("change", settingRows);
byId("previous").addEventListener("click", () => { page -= 1; render(); });
byId("next").addEventListener("click", () => { page += 1; render(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
if (figures.live) follow();
