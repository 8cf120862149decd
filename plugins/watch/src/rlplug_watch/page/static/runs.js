// The list of runs.
import { chunks, get, poll } from "./api.js";
import { address, ago, badge, duration, el, number, scrollable } from "./dom.js";

const COLUMNS = [
  { key: "id", title: "Run", of: (run) => run.id },
  { key: "status", title: "Status", of: (run) => run.status },
  { key: "step", title: "Step", num: true, of: (run) => run.latest.step },
  { key: "reward", title: "Reward", num: true, of: (run) => run.latest.reward },
  { key: "pass1", title: "Pass@1", num: true, of: (run) => run.latest.pass1, optional: true },
  { key: "length", title: "Length", num: true, of: (run) => run.latest.length },
  { key: "tokens_per_s", title: "Tokens/s", num: true, of: (run) => run.latest.tokens_per_s },
  { key: "step_s", title: "Step time", num: true, of: (run) => run.latest.step_s },
  { key: "staleness", title: "Staleness", num: true, of: (run) => run.latest.staleness, optional: true },
  { key: "updated", title: "Updated", num: true, of: (run) => run.updated },
];
const RUNS_AT_ONCE = 25;

// What is chosen stays so while one looks at a run and comes back.
const chosen = new Set();
const order = { key: "updated", sign: -1 };
let filter = "";

export function showRuns(container, signal) {
  const rows = new Map();
  let answer = { runs: [] };
  const body = el("tbody");
  const empty = el("p", { class: "message", hidden: true });
  const about = el("p", { class: "quiet" }, "Reading the files of the runs.");
  const compare = el("button", { type: "button", class: "button", disabled: true, onclick: () => { location.hash = comparison(); } }, "Compare");
  const search = el("input", { type: "search", placeholder: "Filter by name or status", "aria-label": "Filter runs", value: filter });
  const all = el("input", { type: "checkbox", "aria-label": "Choose all runs that are listed" });
  const heads = COLUMNS.map((column) => {
    const button = el("button", { type: "button", onclick: () => sortBy(column.key) }, column.title);
    return el("th", { scope: "col", class: `${column.num ? "num" : ""} col-${column.key}` }, button);
  });
  const head = el("tr", {}, el("th", { class: "check", scope: "col" }, all), heads);
  const sheet = el("table", { class: "runs" }, el("thead", {}, head), body);

  container.append(
    el("div", { class: "heading" }, el("div", {}, el("h1", {}, "Runs"), about), el("div", { class: "tools" }, search, compare)),
    empty,
    scrollable("Runs", "card", sheet),
  );
  sheet.parentElement.hidden = true;
  search.addEventListener("input", () => { filter = search.value; arrange(); });
  all.addEventListener("change", () => {
    for (const run of listed()) chosen[all.checked ? "add" : "delete"](run.id);
    for (const [id, row] of rows) row.check.checked = chosen.has(id);
    tell();
  });

  const seen = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) rows.get(target.dataset.run)?.see(isIntersecting);
    drawSparklines();
  });
  signal.addEventListener("abort", () => seen.disconnect());

  function listed() {
    const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
    const runs = answer.runs.filter((run) => words.every((word) => `${run.id} ${run.status}`.toLowerCase().includes(word)));
    const { of } = COLUMNS.find((column) => column.key === order.key);
    return runs.sort((a, b) => {
      const [x, y] = [of(a) ?? null, of(b) ?? null];
      if (x === null || y === null) return (x === null) - (y === null);
      return order.sign * (typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x - y);
    });
  }

  function sortBy(key) {
    order.sign = order.key === key ? -order.sign : key === "id" || key === "status" ? 1 : -1;
    order.key = key;
    arrange();
  }

  function arrange() {
    const runs = listed();
    const elements = runs.map((run) => rows.get(run.id).element);
    if (elements.some((element, index) => body.children[index] !== element) || body.children.length !== elements.length) {
      const focused = document.activeElement;
      body.replaceChildren(...elements);
      if (body.contains(focused)) focused.focus();
    }
    heads.forEach((cell, index) => {
      if (COLUMNS[index].key === order.key) cell.setAttribute("aria-sort", order.sign > 0 ? "ascending" : "descending");
      else cell.removeAttribute("aria-sort");
    });
    for (const column of COLUMNS.filter((column) => column.optional)) {
      sheet.classList.toggle(`no-${column.key}`, !answer.runs.some((run) => column.of(run) !== null));
    }
    const running = answer.runs.filter((run) => run.status === "running").length;
    const shown = runs.length === answer.runs.length ? "" : `${runs.length} of `;
    about.textContent = `${shown}${answer.runs.length} ${answer.runs.length === 1 ? "run" : "runs"}${running ? `, ${running} running` : ""}`;
    sheet.parentElement.hidden = !answer.runs.length;
    tell();
  }

  function idsToCompare() {
    return answer.runs.map((run) => run.id).filter((id) => chosen.has(id));
  }

  function comparison() {
    return `#/compare?${new URLSearchParams({ runs: idsToCompare().map(encodeURIComponent).join(",") })}`;
  }

  function tell() {
    const ids = idsToCompare();
    compare.textContent = ids.length ? `Compare ${ids.length}` : "Compare";
    compare.disabled = !ids.length;
    const runs = listed();
    all.checked = runs.length > 0 && runs.every((run) => chosen.has(run.id));
    all.indeterminate = !all.checked && runs.some((run) => chosen.has(run.id));
  }

  async function drawSparklines() {
    const wanted = [...rows.values()].filter((row) => row.wantsSparkline());
    for (const row of wanted) row.asked();
    for (const some of chunks(wanted, RUNS_AT_ONCE)) {
      const { rewards } = await get("rewards", { run: some.map((row) => row.run.id) });
      for (const row of some) row.sparkline(...rewards[row.run.id]);
    }
  }

  return poll(signal, async () => {
    answer = await get("runs");
    const ids = new Set(answer.runs.map((run) => run.id));
    for (const [id, row] of rows) if (!ids.has(id)) { seen.unobserve(row.element); rows.delete(id); chosen.delete(id); }
    for (const run of answer.runs) {
      if (!rows.has(run.id)) {
        rows.set(run.id, makeRow(run, tell));
        seen.observe(rows.get(run.id).element);
      }
      rows.get(run.id).update(run);
    }
    empty.hidden = answer.runs.length > 0;
    empty.replaceChildren(...nothing(answer));
    arrange();
    await drawSparklines();
  });
}

function nothing({ root, exists }) {
  const what = exists ? "holds no runs yet." : "does not exist yet.";
  const how = "A run appears here when it starts: ";
  return [el("b", {}, root), ` ${what} ${how}`, el("code", {}, `rlplug fit -c CONFIG --run.dir ${root}/NAME`)];
}

function makeRow(run, changed) {
  const check = el("input", { type: "checkbox", "aria-label": `Choose ${run.id}`, checked: chosen.has(run.id) });
  check.addEventListener("change", () => { chosen[check.checked ? "add" : "delete"](run.id); changed(); });
  const cells = Object.fromEntries(COLUMNS.map(({ key, num }) => [key, el("td", { class: `${num ? "num" : ""} col-${key}` })]));
  const reward = el("span");
  const line = svg("svg", { viewBox: "0 0 72 20", class: "spark", "aria-hidden": "true" });
  cells.reward.append(line, reward);
  const bar = el("progress", { max: 1, "aria-label": "Steps that are done" });
  const steps = el("span");
  cells.step.append(steps, bar);
  const element = el("tr", { }, el("td", { class: "check" }, check), Object.values(cells));
  element.dataset.run = run.id;
  let drawn = "";
  let isSeen = false;
  const row = {
    element, check, run: null,
    see: (is) => { isSeen = is; },
    wantsSparkline: () => isSeen && drawn !== row.run.version,
    asked: () => { drawn = row.run.version; },
    sparkline: (xs, ys) => line.replaceChildren(...(xs.length ? [polyline(xs, ys)] : [])),
    update(now) {
      const before = row.run;
      row.run = now;
      cells.updated.textContent = ago(now.updated);
      if (before?.version === now.version) return;
      const { latest } = now;
      cells.id.replaceChildren(el("a", { href: address("run", now.id) }, now.id));
      cells.status.replaceChildren(badge(now.status));
      cells.status.title = now.message;
      steps.replaceChildren(number(latest.step), el("span", { class: "total" }, now.num_steps && ` / ${number(now.num_steps)}`));
      bar.hidden = !now.num_steps || now.status !== "running";
      bar.value = now.num_steps ? Math.min(1, (latest.step ?? 0) / now.num_steps) : 0;
      reward.textContent = number(latest.reward);
      for (const key of ["pass1", "length", "tokens_per_s", "staleness"]) cells[key].textContent = number(latest[key]);
      cells.step_s.textContent = duration(latest.step_s);
    },
  };
  return row;
}

function svg(tag, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

function polyline(xs, ys) {
  const [left, right, low, high] = [xs[0], xs[xs.length - 1], Math.min(...ys), Math.max(...ys)];
  const place = (value, from, to, size) => (to > from ? ((value - from) / (to - from)) * size : size / 2);
  const points = xs.map((x, i) => `${(1 + place(x, left, right, 70)).toFixed(1)},${(19 - place(ys[i], low, high, 18)).toFixed(1)}`);
  return svg("polyline", { points: points.join(" ") });
}
