// The page of one run: what its report shows, while it goes on.
import { get, poll } from "./api.js";
import { draw, forget, toggles } from "./charts.js";
import { badge, el, number, scrollable, table } from "./dom.js";

export function showRun(container, id, signal) {
  const place = Object.fromEntries(PARTS.map(([name]) => [name, el("div", { class: `part-${name}` })]));
  container.append(...Object.values(place));
  place.header.append(el("p", { class: "quiet" }, "Reading the files of the run."));
  const plots = [];
  signal.addEventListener("abort", () => plots.forEach(forget));
  const before = {};
  let version = "";
  let steps = "";
  const show = async () => {
    const asked = steps;
    const answer = await get(`runs/${encodeURIComponent(id)}`, { known: version, ...(asked && { steps: asked }) });
    if (answer.version === version || asked !== steps) return;
    version = answer.version;
    for (const [name, keys, build] of PARTS) {
      const values = keys.map((key) => answer[key]);
      const text = JSON.stringify(values);
      if (before[name] === text) continue;
      before[name] = text;
      if (name === "figures") figures(place.figures, answer.sections, plots, answer.metric_rows.length);
      else keepOpen(place[name], () => place[name].replaceChildren(...[build(...values)].flat().filter(Boolean)));
    }
    if (answer.has_timelines && !place.steps.childElementCount) place.steps.append(stepsInput(choose));
  };
  const choose = async (text) => {
    [steps, version] = [text, ""];
    try {
      await show();
    } catch (error) {
      steps = ""; // the page goes on with the newest
      throw error;
    }
  };
  return poll(signal, show);
}

/** Which steps the timeline of trainer and engine shows. */
function stepsInput(choose) {
  const input = el("input", { type: "text", placeholder: "newest", pattern: "[0-9]+(-[0-9]+)?", size: "9", "aria-label": "Steps of the timeline, such as 10-14" });
  const problem = el("span", { class: "quiet", role: "status" });
  input.addEventListener("change", async () => {
    if (!input.checkValidity()) return void (problem.textContent = " give steps such as 10-14");
    problem.textContent = "";
    try {
      await choose(input.value);
    } catch (error) {
      problem.textContent = ` ${error.message}`;
    }
  });
  return el("label", { class: "quiet" }, "Timeline of steps ", input, problem);
}

const PARTS = [
  ["header", ["name", "header", "folder"], header],
  ["advice", ["advice"], advice],
  ["tiles", ["tiles"], tiles],
  ["figures", ["sections"], null],
  ["constants", ["constants"], constants],
  ["steps", [], () => []],
  ["timeline", ["timeline"], timeline],
  ["memory", ["memory"], memory],
  ["costs", ["hook_costs"], costs],
  ["plan", ["batch_plan"], plan],
  ["effects", ["effects"], effects],
  ["metrics", ["metric_rows"], metrics],
  ["details", ["plugins", "versions", "profile", "config", "notes", "absent"], details],
];

/** Replace a part of the page, and open again what was open in it. */
function keepOpen(element, replace) {
  const open = new Set([...element.querySelectorAll("details[open] > summary")].map((summary) => summary.textContent));
  replace();
  for (const summary of element.querySelectorAll("details > summary")) {
    if (open.has(summary.textContent)) summary.parentElement.open = true;
  }
}

function section(title, ...content) {
  return el("section", {}, el("h2", {}, title), content);
}

function sheet(label, ...content) {
  return scrollable(label, "card sheet", content);
}

function header(name, { status, message, details }, folder) {
  return [
    el("div", { class: "title" }, el("h1", {}, name), badge(status)),
    el("div", { class: "details" }, details.map((detail) => el("span", {}, detail)), el("span", {}, el("code", {}, folder))),
    message && el("p", { class: `message ${["failed", "interrupted", "killed"].includes(status) ? status : ""}` }, message),
  ];
}

/** What to change, in words. A page of the documentation becomes a link only where it is one. */
function advice(items) {
  if (!items.length) return [];
  const lines = items.map(({ text, key, page }) => el("li", {}, text, key && [" ", el("code", {}, key)],
    page && (/^https:\/\//.test(page) ? [" ", el("a", { href: page, rel: "noreferrer" }, "Read more")] : [" ", el("span", { class: "quiet" }, page)])));
  return section("Advice", sheet("Advice", el("ul", { class: "plain" }, lines)));
}

function tiles(items) {
  return el("dl", { class: "tiles" }, items.map(({ label, value, note, before }) => el("div", { class: "card tile" },
    el("dt", {}, label),
    el("dd", {}, el("div", { class: "value" }, before && el("span", { class: "before" }, `${before} → `), value), note && el("div", { class: "note" }, note)))));
}

/** Draw the figures; those that are there already get new values, so that what is hidden stays hidden. */
function figures(container, sections, plots, hasMetrics) {
  const all = sections.flatMap(([, members]) => members);
  const shape = JSON.stringify(sections.map(([name, members]) => [name, members.map(({ title, note, wide, legend }) => [title, note, wide, legend])]));
  if (container.dataset.shape !== shape) {
    plots.splice(0).forEach(forget);
    container.dataset.shape = shape;
    container.replaceChildren(...sections.map(([name, members]) => section(name, el("div", { class: "figures" }, members.map((one) => figure(one, plots))))));
    if (!sections.length && !hasMetrics) container.append(el("p", { class: "message" }, "No step has ended yet."));
  }
  all.forEach(({ spec }, index) => draw(plots[index], spec));
}

function constants(texts) {
  if (!texts.length) return [];
  return folded(`The same in all steps (${texts.length})`, el("ul", { class: "plain" }, texts.map((text) => el("li", {}, text))));
}

function figure({ title, unit, note, wide, legend }, plots) {
  const plot = el("div", { class: "plot", role: "img", "aria-label": `${title} over the steps of the run` });
  plots.push(plot);
  const entries = legend.map(({ label, hue, traces, mark }) => {
    const button = el("button", { type: "button", "aria-pressed": "true" }, el("span", { class: `swatch ${mark}`, hue }), label);
    toggles(button, plot, traces);
    return el("li", {}, button);
  });
  const caption = el("figcaption", {}, el("h3", {}, title, unit && el("span", { class: "unit" }, unit)),
    note && el("p", { class: "about" }, note), legend.length > 1 && el("ul", { class: "legend" }, entries));
  return el("figure", { class: `card ${wide ? "wide" : ""}` }, caption, plot);
}

function timeline({ phases, steps }) {
  if (!steps.length) return [];
  const total = (seconds) => seconds.reduce((sum, value) => sum + (value ?? 0), 0);
  const longest = Math.max(...steps.map(({ seconds }) => total(seconds))) || 1;
  const used = phases.filter((_, index) => steps.some(({ seconds }) => seconds[index] / longest > 0.004));
  const legend = el("ul", { class: "legend" }, used.map(({ name, hue }) => el("li", {}, el("span", { class: "swatch area", hue }), name)));
  const rows = steps.map(({ step, seconds }) => {
    const parts = phases.map(({ name, hue }, index) => ({ name, hue, value: seconds[index] ?? 0 })).filter(({ value }) => value > 0);
    const text = parts.map(({ name, value }) => `${name} ${number(value)} s`).join(", ");
    const bars = parts.map(({ name, hue, value }) => {
      const bar = el("span", { hue, title: `${name}: ${number(value)} s` });
      bar.style.flexBasis = `${(100 * value) / longest}%`;
      return bar;
    });
    return el("li", {}, el("span", { class: "step" }, number(step)), el("span", { class: "bars", role: "img", "aria-label": text }, bars),
      el("span", { class: "seconds" }, `${number(total(seconds))} s`));
  });
  return section("Phases of the newest steps", el("div", { class: "card sheet" }, legend, el("ol", { class: "timeline" }, rows)));
}

function memory(plan) {
  if (!plan) return [];
  const rows = [...plan.rows, ...plan.totals];
  return section("Memory plan",
    el("p", { class: "quiet" }, "GiB on each GPU: what was planned for each phase, and the highest that PyTorch allocated in it."),
    sheet("Memory plan", table([["Item"], ...plan.phases.map((phase) => [phase, true])], rows, "memory")),
    plan.notes.map((note) => el("p", { class: "quiet" }, note)));
}

function costs(rows) {
  if (!rows.length) return [];
  const columns = [["Plugin"], ["Hook"], ["Phase"], ["Calls", true], ["Seconds", true], ["Of wall time", true]];
  return section("Cost by plugin",
    el("p", { class: "quiet" }, "Seconds of the host in hooks, on the first rank since the run was last started. Of a wrapper, without what it wraps."),
    sheet("Cost by plugin", table(columns, rows.map(({ plugin, hook, phase, calls, seconds, share }) => [plugin, hook, phase, calls, seconds, share]))));
}

function plan(rows) {
  if (!rows.length) return [];
  const cells = rows.map(([name, value, meaning]) => [el("code", {}, name), value, meaning]);
  return section("Batch plan", sheet("Batch plan", table([["Size"], ["Value", true], ["What it means"]], cells, "plan")));
}

function effects(items) {
  if (!items.length) return [];
  return section("Optimizations that took effect", sheet("Optimizations that took effect", el("ul", { class: "plain" }, items.map((item) => el("li", {}, item)))));
}

function folded(title, ...content) {
  return el("details", { class: "card" }, el("summary", {}, title), scrollable(title, "", content));
}

function metrics(rows) {
  if (!rows.length) return [];
  const columns = [["Metric"], ["First", true], ["Last", true], ["Lowest", true], ["Highest", true]];
  const cells = rows.map(({ name, first, last, lowest, highest, note }) => [[name, note && el("span", { class: "quiet" }, ` (${note})`)], first, last, lowest, highest]);
  return section("Details", folded("All metrics", table(columns, cells, "metrics")));
}

function details(plugins, versions, profile, config, notes, absent) {
  const packages = versions.map(([name, version]) => el("li", {}, el("span", {}, name), el("b", {}, version)));
  const missing = [...notes, ...absent.map((name) => `${name} was not recorded.`)].map((text) => el("li", {}, text));
  const loaded = plugins.map(({ name, distribution, version, state, reason }) => [name, `${distribution} ${version}`, reason ? `${state}: ${reason}` : state]);
  return [
    loaded.length && folded("Plugins", table([["Plugin"], ["Package"], ["State"]], loaded, "plugins")),
    packages.length && folded("Package versions", el("ul", { class: "versions" }, packages)),
    profile && folded("Profiled steps", el("pre", {}, profile)),
    config && folded("Resolved configuration", el("pre", {}, config)),
    missing.length && folded(`Not here (${missing.length})`, el("ul", { class: "plain" }, missing)),
  ];
}
