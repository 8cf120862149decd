// Samples of a run: a list to filter and search, and the completions of one prompt side by side.
import { get } from "./api.js";
import { address, el, number } from "./dom.js";

export { showTokens } from "./tokens.js";

const SORTS = [
  ["newest", "newest first"], ["oldest", "oldest first"], ["-reward", "highest reward"], ["reward", "lowest reward"],
  ["-advantage", "highest advantage"], ["advantage", "lowest advantage"], ["-num_tokens", "longest"], ["num_tokens", "shortest"],
];
const FIELDS = ["query", "phase", "finish", "first_step", "last_step", "reward_min", "reward_max", "errors", "tokens", "sort"];
const LIMIT = 50;

export async function showSamples(container, run, params) {
  if (params.has("step") && (params.has("group") || params.has("uid"))) return showGroup(container, run, params);
  const list = el("ol", { class: "sample-list" });
  const state = el("p", { class: "quiet sample-state", role: "status" });
  const more = el("button", { class: "plain", type: "button", hidden: true }, "Show more");
  let turn = 0;

  const form = filterForm(params, () => start());
  more.addEventListener("click", () => go(turn, Number(more.dataset.next)));
  container.replaceChildren(form, state, list, more);

  function asked() {
    const values = Object.fromEntries([...new FormData(form)].filter(([, value]) => value !== ""));
    if (values.sort === "newest") delete values.sort;
    return values;
  }

  function start() {
    const query = new URLSearchParams(asked()).toString();
    history.replaceState(null, "", `${address("run", run, "samples")}${query ? `?${query}` : ""}`);
    list.replaceChildren();
    turn += 1;
    return go(turn, 0);
  }

  // An answer takes a second at most: a long file is indexed and searched over several of them.
  async function go(mine, next) {
    more.hidden = true;
    const wanted = list.children.length + LIMIT;
    let searched = next;
    while (mine === turn && container.isConnected) {
      let found;
      try {
        found = await get(`runs/${encodeURIComponent(run)}/samples`, { ...asked(), start: next, limit: wanted - list.children.length });
      } catch (error) {
        if (mine === turn) state.textContent = error.message;
        return;
      }
      if (mine !== turn) return;
      if (found.problem) { state.textContent = found.problem; return; }
      const isPartial = found.bytes_indexed < found.bytes;
      if (isPartial) list.replaceChildren();
      list.append(...found.rows.map((sample) => entry(run, sample)));
      searched = (isPartial ? 0 : searched) + found.num_searched;
      state.textContent = stateText(found, list.children.length, searched, isPartial);
      if (isPartial) { next = 0; searched = 0; continue; }
      if (found.next === null) return;
      next = found.next;
      if (list.children.length >= wanted) break;
    }
    more.dataset.next = next;
    more.hidden = false;
  }

  return start();
}

function stateText(found, shown, searched, isPartial) {
  const count = (value) => value.toLocaleString("en");
  const unread = found.num_unreadable ? `; ${count(found.num_unreadable)} lines are no samples (cut short?) and are left out` : "";
  if (isPartial) return `reading samples.jsonl: ${Math.floor((100 * found.bytes_indexed) / found.bytes)}% of ${count(Math.ceil(found.bytes / 1e6))} MB`;
  if (found.reads_texts) return `${count(shown)} found; searched ${count(Math.min(searched, found.num_candidates))} of ${count(found.num_candidates)} samples${unread}`;
  if (found.num_candidates === found.num_samples) return `${count(shown)} of ${count(found.num_samples)} samples${unread}`;
  return `${count(shown)} of ${count(found.num_candidates)} that fit, of ${count(found.num_samples)} samples${unread}`;
}

function filterForm(params, changed) {
  const value = (name) => params.get(name) ?? "";
  const field = (label, control) => el("label", {}, el("span", {}, label), control);
  const input = (name, type, rest = {}) => el("input", { name, type, value: value(name), autocomplete: "off", ...rest });
  const choice = (name, options) =>
    el("select", { name }, options.map(([key, text]) => el("option", { value: key, selected: value(name) === key }, text)));
  const check = (name) => el("input", { name, type: "checkbox", value: "1", checked: params.has(name) });
  const form = el(
    "form", { class: "card sample-filter", role: "search", "aria-label": "Samples" },
    el("label", { class: "wide" }, el("span", {}, "Search"), input("query", "search", { placeholder: "text of prompt, completion or answer" })),
    field("Phase", choice("phase", [["", "all"], ["train", "train"], ["validate", "validate"]])),
    field("Finish", choice("finish", [["", "all"], ["stop", "stop"], ["length", "length"], ["abort", "abort"]])),
    field("Step from", input("first_step", "number", { min: 0 })),
    field("to", input("last_step", "number", { min: 0 })),
    field("Reward from", input("reward_min", "number", { step: "any" })),
    field("to", input("reward_max", "number", { step: "any" })),
    field("Sort", choice("sort", SORTS)),
    el("label", { class: "check" }, check("errors"), "failed rewards only"),
    el("label", { class: "check" }, check("tokens"), "with tokens only"),
    el("button", { type: "reset", class: "plain" }, "Clear"),
  );
  let timer;
  form.addEventListener("submit", (event) => { event.preventDefault(); changed(); });
  form.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(changed, 250); });
  form.addEventListener("reset", (event) => {
    event.preventDefault();
    for (const name of FIELDS) {
      const control = form.elements[name];
      if (control.type === "checkbox") control.checked = false;
      else control.value = name === "sort" ? "newest" : "";
    }
    changed();
  });
  return form;
}

/** The address of a sample's group. */
function groupAddress(run, sample) {
  const query = new URLSearchParams({ step: sample.step, phase: sample.phase });
  if (sample.group === null) query.set("uid", sample.prompt_uid);
  else query.set("group", sample.group);
  return `${address("run", run, "samples")}?${query}`;
}

function tokensAddress(run, sample) {
  return address("run", run, "tokens", String(sample.step), `${sample.group}.${sample.index}`);
}

function facts(sample) {
  return [
    sample.phase === "train" ? null : el("span", { class: "tag" }, sample.phase),
    el("span", {}, `${sample.num_tokens} ${sample.num_tokens === 1 ? "token" : "tokens"}`),
    sample.num_turns > 1 && el("span", {}, `${sample.num_turns} turns`),
    el("span", { class: sample.finish_reason === "stop" ? undefined : "warn" }, sample.finish_reason),
    sample.policy_version !== null && el("span", {}, `version ${sample.policy_version}`),
    sample.advantage !== null && el("span", {}, `advantage ${signed(sample.advantage)}`),
    Object.keys(sample.errors).length > 0 && el("span", { class: "warn" }, `failed: ${Object.keys(sample.errors).join(", ")}`),
  ];
}

export function signed(value) {
  return `${value > 0 ? "+" : ""}${number(value)}`;
}

function entry(run, sample) {
  const text = (name, place) => [place === 0 && sample.is_cut[0] ? "… " : "", sample[name], place === 1 && sample.is_cut[1] ? " …" : ""];
  const links = [el("a", { href: groupAddress(run, sample) }, "whole group")];
  if (sample.has_tokens) links.unshift(el("a", { href: tokensAddress(run, sample) }, "tokens"));
  return el(
    "li", { class: "card sample-entry" },
    el("div", { class: "head" },
      el("span", { class: "reward", title: "reward" }, sample.reward === null ? "no reward" : number(sample.reward)),
      el("span", {}, `step ${sample.step}`), facts(sample),
      el("span", { class: "links" }, links)),
    el("div", { class: "texts" },
      el("div", { class: "prompt", dir: "auto" }, text("prompt", 0)),
      el("div", { class: "completion", dir: "auto" }, sample.completion === "" ? el("i", {}, "empty") : text("completion", 1))),
  );
}

// ---- a group ------------------------------------------------------------------------------------------------------

async function showGroup(container, run, params) {
  const { step, samples } = await get(`runs/${encodeURIComponent(run)}/group`, Object.fromEntries(params));
  const first = samples[0];
  const largest = Math.max(1e-9, ...samples.map((sample) => Math.abs(advantageOf(sample) ?? 0)));
  const rewards = samples.map((sample) => sample.reward).filter((reward) => reward !== null);
  const mean = rewards.reduce((sum, reward) => sum + reward, 0) / Math.max(1, rewards.length);
  const span = Math.max(...rewards) - Math.min(...rewards);
  const parts = [
    el("p", {}, el("a", { href: address("run", run, "samples") }, "← all samples")),
    el("h1", { class: "group-title" }, `${first.prompt_uid}, step ${step}`),
    el("div", { class: "details" },
      el("span", {}, `${samples.length} completion${samples.length === 1 ? "" : "s"} of this group ${samples.length === 1 ? "is" : "are"} logged`),
      isShort(first.answer) && el("span", {}, "answer ", el("code", {}, first.answer)),
      rewards.length > 0 && el("span", {}, `mean reward ${number(mean)}`),
      rewards.length > 1 && span === 0 && el("span", { class: "warn" }, "all rewards are equal: there is no signal between them")),
    el("details", { class: "card", open: true }, el("summary", {}, "Prompt"), el("pre", { dir: "auto" }, first.is_cut[0] ? "… " : "", first.prompt)),
    first.answer === null || isShort(first.answer) ? null : el("details", { class: "card", open: true }, el("summary", {}, "Answer"), el("pre", { dir: "auto" }, first.answer)),
    el("ol", { class: "group", tabindex: 0, "aria-label": "Completions, the best first" }, samples.map((sample) => column(run, sample, largest))),
  ];
  container.replaceChildren(...parts.filter(Boolean));
}

const isShort = (answer) => answer !== null && answer.length <= 60 && !answer.includes("\n");

function advantageOf(sample) {
  return sample.advantage ?? sample.tokens?.advantage ?? null;
}

function column(run, sample, largest) {
  const advantage = advantageOf(sample);
  const share = advantage === null ? 0 : (100 * Math.abs(advantage)) / largest;
  const parts = Object.entries(sample.rewards);
  return el(
    "li", { class: "card sample-entry" },
    el("div", { class: "head" },
      el("span", { class: "reward" }, sample.reward === null ? "no reward" : number(sample.reward)),
      facts({ ...sample, advantage: null })),
    advantage === null ? el("div", { class: "quiet advantage" }, "no advantage is logged") :
      el("div", { class: "advantage", title: `advantage ${advantage}` },
        el("span", { class: "bar-of" }, el("span", { class: advantage < 0 ? "minus" : "plus", style: `width:${share / 2}%` })),
        el("span", {}, `advantage ${signed(advantage)}`)),
    (parts.length > 1 || Object.keys(sample.errors).length > 0) && el("div", { class: "parts" },
      parts.map(([name, value]) => el("span", {}, `${name} `, el("b", {}, number(value)))),
      Object.entries(sample.errors).map(([name, message]) => el("span", { class: "failed" }, `${name}: ${message}`))),
    sample.turns.length > 0 ? sample.turns.map(({ role, text }) => [el("div", { class: `label ${role}` }, role), el("pre", { dir: "auto", tabindex: 0 }, text)]) :
      el("pre", { dir: "auto", tabindex: 0 }, sample.completion === "" ? el("i", {}, "empty") : sample.completion, sample.is_cut[1] ? " …" : ""),
    el("div", { class: "links" },
      sample.has_tokens ? el("a", { href: tokensAddress(run, sample) }, "tokens") : el("span", { class: "quiet" }, "tokens are not logged"),
      sample.tokens?.num_clipped > 0 && el("span", { class: "quiet" }, ` ${sample.tokens.num_clipped} clipped`)),
  );
}
