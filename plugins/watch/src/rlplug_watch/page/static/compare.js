// Curves of several runs, and what differs between their configurations.
import { chunks, get, poll } from "./api.js";
import { draw, forget } from "./charts.js";
import { LARGEST_SMOOTHING, specOf } from "./curves.js";
import { address, el, number, scrollable, table } from "./dom.js";

const GROUPS = ["reward", "validate", "completion", "policy", "critic", "advantages", "filter", "mismatch", "partial"];
const AXES = [["step", "steps"], ["samples", "samples"], ["tokens", "tokens"], ["seconds", "seconds in steps"]];
const [RUNS_AT_ONCE, ROUGH_RUNS_AT_ONCE] = [8, 50];

export async function showCompare(container, params, signal) {
  const ids = (params.get("runs") ?? "").split(",").filter(Boolean).map(decodeURIComponent);
  if (!ids.length) {
    container.append(el("p", { class: "message" }, "No runs are chosen. ", el("a", { href: "#/runs" }, "Choose some"), "."));
    return;
  }
  const options = {
    axis: AXES.some(([axis]) => axis === params.get("axis")) ? params.get("axis") : "step",
    smoothing: Math.min(LARGEST_SMOOTHING, Math.max(0, Number(params.get("smoothing") ?? 0.6) || 0)),
    logX: params.has("logx"),
    logY: params.has("logy"),
    filter: params.get("filter") ?? "",
  };
  const hidden = new Set();
  const charts = new Map();
  const sections = el("div");
  const legend = el("ul", { class: "legend runs-legend" });
  const known = await get("metrics", { run: ids.slice(0, 200) }).catch((error) => error);
  if (known instanceof Error) {
    container.append(el("p", { class: "message failed" }, known.message));
    return;
  }
  const lines = ids.map((id, index) => ({
    id, hue: known.hues[index % known.hues.length], dash: ["solid", "dash", "dot"][Math.floor(index / known.hues.length) % 3],
  }));

  const configs = el("div");
  container.append(
    el("div", { class: "heading" }, el("div", {}, el("h1", {}, ids.length === 1 ? "Curves" : `Compare ${ids.length} runs`))),
    legend,
    controls(options, () => { remember(); for (const chart of charts.values()) chart.change(); }, arrange),
    sections,
    configs,
  );

  for (const line of lines) {
    const value = el("b");
    const button = el("button", { type: "button", "aria-pressed": "true" },
      el("span", { class: `swatch ${line.dash}`, hue: line.hue }), el("span", { class: "name" }, line.id), value);
    button.addEventListener("click", () => {
      const was = !hidden.delete(line.id);
      if (was) hidden.add(line.id);
      button.setAttribute("aria-pressed", String(!was));
      for (const chart of charts.values()) chart.draw();
    });
    line.value = value;
    legend.append(el("li", {}, button, el("a", { href: address("run", line.id), "aria-label": `Open ${line.id}` }, "open")));
  }

  const seen = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) charts.get(target.dataset.metric)?.see(isIntersecting);
  }, { rootMargin: "300px" });
  signal.addEventListener("abort", () => {
    seen.disconnect();
    for (const chart of charts.values()) chart.end();
  });

  function remember() {
    const query = new URLSearchParams({ runs: ids.map(encodeURIComponent).join(","), axis: options.axis, smoothing: options.smoothing });
    if (options.logX) query.set("logx", "");
    if (options.logY) query.set("logy", "");
    if (options.filter) query.set("filter", options.filter);
    history.replaceState(null, "", `#/compare?${query}`);
  }

  /** Put the charts whose metric is asked for into the page, in sections by the part of the name before the slash. */
  function arrange() {
    const words = options.filter.toLowerCase().split(/\s+/).filter(Boolean);
    const fits = (metric) => words.every((word) => metric.toLowerCase().includes(word));
    const groups = new Map([["Overview", known.overview], ...GROUPS.map((name) => [name, []])]);
    for (const metric of known.metrics) {
      const group = metric.includes("/") ? metric.slice(0, metric.indexOf("/")) : "other";
      if (!groups.has(group)) groups.set(group, []);
      if (!groups.get("Overview").includes(metric)) groups.get(group).push(metric);
    }
    const parts = [];
    for (const [group, metrics] of groups) {
      const cards = metrics.filter(fits).map((metric) => {
        if (!charts.has(metric)) {
          charts.set(metric, makeChart(metric, lines, options, hidden, known.layout));
          seen.observe(charts.get(metric).element);
        }
        return charts.get(metric).element;
      });
      if (cards.length) parts.push(el("section", {}, el("h2", {}, group), el("div", { class: "figures many" }, cards)));
    }
    if (!parts.length) parts.push(el("p", { class: "message" }, known.metrics.length ? "No metric has this name." : "No step has ended yet."));
    sections.replaceChildren(...parts);
  }

  arrange();
  configs.append(await differences(ids));
  let versions = {};
  return poll(signal, async () => {
    const { runs } = await get("runs");
    const changed = runs.filter((run) => ids.includes(run.id) && versions[run.id] !== run.version);
    for (const line of lines) {
      const run = runs.find((run) => run.id === line.id);
      line.value.textContent = run ? `reward ${number(run.latest.reward)}` : "gone";
    }
    if (!changed.length) return;
    const isFirst = !Object.keys(versions).length;
    for (const run of changed) versions[run.id] = run.version;
    if (isFirst) return;
    const now = await get("metrics", { run: ids.slice(0, 200) });
    if (now.metrics.length !== known.metrics.length) { Object.assign(known, now); arrange(); }
    for (const chart of charts.values()) chart.change(changed.map((run) => run.id));
  });
}

function controls(options, redraw, arrange) {
  const axis = el("select", { onchange: (event) => { options.axis = event.target.value; redraw(); } },
    AXES.map(([name, title]) => el("option", { value: name, selected: name === options.axis }, title)));
  const shown = el("output", {}, String(options.smoothing));
  const smoothing = el("input", { type: "range", min: 0, max: LARGEST_SMOOTHING, step: 0.01 });
  smoothing.value = options.smoothing;
  smoothing.addEventListener("input", () => {
    options.smoothing = Number(smoothing.value);
    shown.textContent = smoothing.value;
    redraw();
  });
  const check = (title, key) => el("label", {},
    el("input", { type: "checkbox", checked: options[key], onchange: (event) => { options[key] = event.target.checked; redraw(); } }), title);
  const filter = el("input", { type: "search", placeholder: "Filter metrics", "aria-label": "Filter metrics", value: options.filter });
  filter.addEventListener("input", () => { options.filter = filter.value; arrange(); redraw(); });
  return el("form", { class: "controls card", onsubmit: (event) => event.preventDefault() },
    el("label", {}, "Over", axis), el("label", {}, "Smoothing", smoothing, shown), check("log x", "logX"), check("log y", "logY"), filter);
}

function makeChart(metric, lines, options, hidden, layout) {
  const plot = el("div", { class: "plot", role: "img", "aria-label": `${metric} of the runs` });
  const about = el("p", { class: "about" });
  const element = el("figure", { class: "card" }, el("figcaption", {}, el("h3", {}, metric), about), plot);
  element.dataset.metric = metric;
  const curves = new Map();
  let [isSeen, isDrawn, axis, asked, frame] = [false, false, "", 0, 0];
  let stale = lines.map((line) => line.id);

  async function load() {
    if (!isSeen || !stale.length) return;
    const [ids, mine] = [stale, ++asked];
    [stale, axis] = [[], options.axis];
    const buckets = lines.length > 30 ? 120 : lines.length > 8 ? 250 : 500;
    const first = ids.filter((id) => !curves.has(id));  // many runs: some points of each, then all
    for (const some of first.length > RUNS_AT_ONCE ? chunks(first, ROUGH_RUNS_AT_ONCE) : []) {
      const answer = await get("curves", { run: some, metric, axis, buckets, rough: 1 }).catch(() => null);
      if (mine !== asked && axis !== options.axis) return;
      for (const id of some) if (answer?.curves[id]) curves.set(id, answer.curves[id]);
      chart.draw();
    }
    for (const some of chunks(ids, RUNS_AT_ONCE)) {
      const answer = await get("curves", { run: some, metric, axis, buckets }).catch(() => null);
      if (mine !== asked && axis !== options.axis) return;
      if (answer === null) { stale = [...new Set([...stale, ...some])]; continue; }  // asked for again at the next change
      for (const id of some) curves.set(id, answer.curves[id]);
      chart.draw();
    }
  }

  const chart = {
    element,
    see(is) { isSeen = is; load(); if (is) chart.draw(); },
    change(ids) {
      if (ids) stale = [...new Set([...stale, ...ids])];
      else if (axis !== options.axis) { stale = lines.map((line) => line.id); curves.clear(); }
      load();
      if (curves.size) chart.draw();
    },
    draw() {
      if (!isSeen || frame || !curves.size) return;
      frame = requestAnimationFrame(() => {
        frame = 0;
        const without = lines.filter((line) => !curves.get(line.id)).length;
        const reason = options.axis === "samples" ? ", or sizes of a batch in their configuration" : "";
        about.textContent = without ? `${without} of ${lines.length} runs have no values of it${reason}.` : "";
        draw(plot, specOf(lines.filter((line) => curves.get(line.id) && !hidden.has(line.id)), curves, options, layout));
        isDrawn = true;
      });
    },
    end() { cancelAnimationFrame(frame); if (isDrawn) forget(plot); },
  };
  return chart;
}

async function differences(ids) {
  if (ids.length < 2) return "";
  const { runs, rows, num_equal: equal, absent } = await get("configs", { run: ids.slice(0, 200) });
  const title = el("h2", {}, "Configurations");
  const notes = [`${equal} keys are equal.`, ...absent.map((id) => `${id} has no config.yaml that could be read.`)];
  const about = el("p", { class: "quiet" }, notes.join(" "));
  if (!rows.length) return el("section", {}, title, el("p", { class: "quiet" }, "No key differs. "), about);
  const common = (values) => [...values].sort((a, b) => values.filter((v) => v === b).length - values.filter((v) => v === a).length)[0];
  const cells = rows.map(({ key, values }) => {
    const most = common(values);
    return [el("code", {}, key), ...values.map((value) => el("span", { class: value === most ? "" : "differs" }, value ?? "–"))];
  });
  const sheet = table([["Key"], ...runs.map((id) => [id])], cells, "configs");
  return el("section", {}, title, about, scrollable("Differences of the configurations", "card", sheet));
}
