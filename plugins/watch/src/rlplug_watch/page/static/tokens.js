// One completion token by token: coloured by a number of each token, with all numbers of the one that is looked at.
import { get } from "./api.js";
import { address, el, number } from "./dom.js";

const PRODUCED = 1;
const TRAINED = 2;
const STEPS = 6;  // shades of a colour, on each side of 0

/** What a token can be coloured by: its number, and the number at which no colour stands. */
const KINDS = {
  ratio: { title: "Ratio", middle: 1, of: (c, i) => exp(c.log_ratio?.[i]), about: "policy after the last pass's weights / policy before the update" },
  advantages: { title: "Advantage", middle: 0, of: (c, i) => c.advantages?.[i], about: "as it trained" },
  mismatch: { title: "Mismatch", middle: 0, of: (c, i) => c.mismatch?.[i], about: "trainer's logprob less the engine's, nats" },
  logprobs: { title: "Logprob, trainer", of: (c, i) => c.logprobs?.[i], isLow: true, about: "before the update, nats; dark is unlikely" },
  engine_logprobs: { title: "Logprob, engine", of: (c, i) => c.engine_logprobs?.[i], isLow: true, about: "as sampled, nats; dark is unlikely" },
  entropy: { title: "Entropy", of: (c, i) => c.entropy?.[i], about: "of the policy in the last pass, nats" },
  ref_log_ratio: { title: "Log ratio to reference", middle: 0, of: (c, i) => c.ref_log_ratio?.[i], about: "trainer's logprob less the reference policy's, nats" },
  values: { title: "Value", middle: 0, of: (c, i) => c.values?.[i], about: "the critic's, before the update" },
  returns: { title: "Return", middle: 0, of: (c, i) => c.returns?.[i], about: "the critic's target" },
  policy_versions: { title: "Policy version", of: (c, i) => (c.flags[i] & PRODUCED ? c.policy_versions[i] : null), about: "that produced the token" },
};

const exp = (value) => (value === null || value === undefined ? null : Math.exp(value));
const present = (value) => value !== null && value !== undefined;
const plus = (a, b) => (present(a) && present(b) ? a + b : null);
const minus = (a, b) => (present(a) && present(b) ? a - b : null);

export async function showTokens(container, run, step, name) {
  const [group, index] = String(name).split(".");
  let start = 0;

  async function load() {
    const path = `runs/${encodeURIComponent(run)}/tokens/${encodeURIComponent(step)}/${encodeURIComponent(group)}/${encodeURIComponent(index)}`;
    let found;
    try {
      found = await get(path, { start });
    } catch (error) {
      container.replaceChildren(el("p", { class: "message" }, error.message));
      return;
    }
    const parts = [heading(run, found), sampleFacts(found.sample, found), pages(found), ...tokenViews(found)];
    container.replaceChildren(...parts.filter(Boolean));
  }

  function pages(found) {
    const count = found.texts.length;
    if (start === 0 && count === found.total) return null;
    const go = (next) => () => { start = next; return load(); };
    return el("p", { class: "pages" },
      `tokens ${start.toLocaleString("en")} to ${(start + count).toLocaleString("en")} of ${found.total.toLocaleString("en")} `,
      start > 0 && el("button", { type: "button", class: "plain", onclick: go(Math.max(0, start - 20000)) }, "before"),
      start + count < found.total && el("button", { type: "button", class: "plain", onclick: go(start + count) }, "after"));
  }

  await load();
}

function heading(run, found) {
  const groupQuery = new URLSearchParams({ step: found.step, group: found.group, phase: "train" });
  const others = found.siblings.length > 1 && el("nav", { class: "siblings", "aria-label": "Completions of the group" },
    found.siblings.map((other) =>
      el("a", { href: address("run", run, "tokens", String(found.step), `${found.group}.${other.index}`),
        "aria-current": other.index === found.index ? "page" : undefined, title: `completion ${other.index}` },
        present(other.reward) ? number(other.reward) : "none")));
  return el("div", {},
    el("p", {}, el("a", { href: `${address("run", run, "samples")}?${groupQuery}` }, "← whole group"),
      others && el("span", { class: "quiet" }, "  rewards of the group: "), others),
    el("h1", { class: "group-title" }, `${found.sample?.prompt_uid ?? `group ${found.group}`}, step ${found.step}`));
}

function sampleFacts(sample, found) {
  if (!sample) return el("p", { class: "quiet" }, "Its line of samples.jsonl is gone.");
  return el("div", {},
    el("div", { class: "details" },
      el("span", {}, `reward ${present(sample.reward) ? number(sample.reward) : "failed"}`),
      el("span", {}, `${found.total} tokens after ${found.prompt_tokens} of the prompt`),
      el("span", { class: sample.finish_reason === "stop" ? undefined : "warn" }, `finish ${sample.finish_reason}`),
      present(sample.answer) && el("span", {}, `answer ${sample.answer}`)),
    el("details", { class: "card" }, el("summary", {}, "Prompt"), el("pre", { dir: "auto" }, sample.prompt)));
}

// ---- the tokens ---------------------------------------------------------------------------------------------------

function tokenViews(found) {
  const { columns, texts, start } = found;
  const kinds = Object.entries(KINDS).filter(([, kind]) => texts.some((_, i) => present(kind.of(columns, i))));
  for (const name of Object.keys(columns).filter((column) => column.startsWith("loss/"))) {
    kinds.push([name, { title: name.slice(5), of: (c, i) => c[name][i], about: "by the algorithm" }]);
  }
  const legend = el("div", { class: "scale", "aria-live": "polite" });
  const choice = el("select", { id: "colour" }, kinds.map(([key, kind]) => el("option", { value: key }, kind.title)));
  const numbers = el("dl", { class: "numbers" });
  const aside = el("aside", { class: "card token-numbers", "aria-label": "Numbers of the token", "aria-live": "polite" },
    el("p", { class: "quiet" }, "Point at a token, or focus the text and use the arrow keys."), numbers);
  const extremes = el("div", { class: "extremes-of" });
  const spans = texts.map((text, i) => tokenSpan(columns, text, i));
  const text = el("div", { class: "card token-text", role: "group", "aria-label": "Tokens", dir: "auto" }, withMarks(columns, spans));

  let current = spans[0];
  if (current) current.tabIndex = 0;
  const inspect = (i) => {
    aside.firstChild.hidden = true;
    numbers.replaceChildren(...numbersOf(columns, texts, i, start));
  };
  const focus = (i) => {
    const span = spans[Math.max(0, Math.min(spans.length - 1, i))];
    current.tabIndex = -1;
    current = span;
    span.tabIndex = 0;
    span.focus();
  };
  const place = (event) => event.target.closest?.(".tok")?.dataset.i;
  text.addEventListener("mouseover", (event) => { const i = place(event); if (i !== undefined) inspect(Number(i)); });
  text.addEventListener("focusin", (event) => { const i = place(event); if (i !== undefined) inspect(Number(i)); });
  text.addEventListener("click", (event) => { const i = place(event); if (i !== undefined) focus(Number(i)); });
  text.addEventListener("keydown", (event) => {
    const i = Number(place(event));
    const line = () => {  // the token above or below
      const box = spans[i].getBoundingClientRect();
      const down = event.key === "ArrowDown";
      const rest = down ? spans.slice(i + 1) : spans.slice(0, i).reverse();
      const target = rest.find((span) => {
        const other = span.getBoundingClientRect();
        return down ? other.top > box.top + 4 && other.right > box.left : other.top < box.top - 4 && other.left <= box.left;
      });
      return target ? Number(target.dataset.i) : i;
    };
    const moves = { ArrowRight: () => i + 1, ArrowLeft: () => i - 1, ArrowUp: line, ArrowDown: line, Home: () => 0, End: () => spans.length - 1 };
    if (Number.isNaN(i) || !moves[event.key]) return;
    event.preventDefault();
    focus(moves[event.key]());
  });

  const paint = () => {
    const [, kind] = kinds.find(([key]) => key === choice.value) ?? kinds[0];
    const values = texts.map((_, i) => kind.of(columns, i));
    const scale = scaleOf(values, kind);
    spans.forEach((span, i) => { span.dataset.c = scale.shade(values[i]); });
    legend.replaceChildren(...scaleLegend(scale, kind));
    extremes.replaceChildren(...extremesOf(values, texts, kind, focus));
  };
  choice.addEventListener("change", paint);
  const preferred = kinds.find(([key, kind]) => key !== "policy_versions" && isVaried(texts.map((_, i) => kind.of(columns, i))));
  if (preferred) choice.value = preferred[0];
  if (kinds.length) paint();

  return [
    el("div", { class: "token-controls" }, el("label", { for: "colour" }, "Colour by"), choice, legend),
    el("div", { class: "token-view" }, text, el("div", { class: "token-side" }, aside, extremes)),
    marksLegend(columns),
  ];
}

function isVaried(values) {
  const known = values.filter(present);
  return known.length > 0 && Math.max(...known.slice(0, 20000)) - Math.min(...known.slice(0, 20000)) > 1e-9;
}

function tokenSpan(columns, text, i) {
  const flags = columns.flags[i];
  const clipped = columns.clipped?.[i] ?? 0;
  const names = ["tok"];
  if (!(flags & PRODUCED)) names.push("observation");
  else if (!(flags & TRAINED)) names.push("untrained");
  if (clipped) names.push("clipped");
  // A line break is shown and kept; a token without text, such as a part of a character, is a dot.
  const shown = text === "" ? "·" : text.replace(/\n/g, "↵\n").replace(/\t/g, "⇥\t");
  return el("span", { class: names.join(" "), "data-i": i, tabindex: -1 }, shown);
}

/** The spans, with the version before the first token and before each token of another one. */
function withMarks(columns, spans) {
  let version = null;
  return spans.flatMap((span, i) => {
    const own = columns.flags[i] & PRODUCED ? columns.policy_versions[i] : version;
    const isNew = own !== version;
    version = own;
    return isNew ? [el("span", { class: "version", title: `tokens of policy version ${own} begin` }, `v${own}`), span] : [span];
  });
}

// ---- colours ------------------------------------------------------------------------------------------------------

/** Shades of numbers: from 0 to STEPS, or on both sides of a middle. The farthest twentieth has the darkest shade. */
function scaleOf(values, kind) {
  const known = values.filter(present).sort((a, b) => a - b);
  const low = known[0], high = known[known.length - 1];
  const hasMiddle = kind.middle !== undefined;
  const distances = known.map((value) => Math.abs(value - (hasMiddle ? kind.middle : kind.isLow ? high : low))).sort((a, b) => a - b);
  const reach = distances[Math.ceil(distances.length * 0.98) - 1] || distances[distances.length - 1] || 0;
  const shade = (value) => {
    if (!present(value)) return "";
    if (reach === 0) return "0";
    const distance = hasMiddle ? value - kind.middle : kind.isLow ? high - value : value - low;
    const size = Math.min(STEPS, Math.round((STEPS * Math.abs(distance)) / reach));
    return size === 0 ? "0" : `${hasMiddle && distance < 0 ? "m" : hasMiddle ? "p" : "s"}${size}`;
  };
  return { low, high, reach, hasMiddle, shade };
}

function scaleLegend(scale, kind) {
  const shades = Array.from({ length: STEPS + 1 }, (_, size) => size);
  const box = (code) => el("i", { class: "tok", "data-c": code });
  let names, row;
  if (scale.hasMiddle) {
    names = [kind.middle - scale.reach, kind.middle, kind.middle + scale.reach];
    row = [...shades.slice(1).reverse().map((size) => box(`m${size}`)), box("0"), ...shades.slice(1).map((size) => box(`p${size}`))];
  } else {
    names = kind.isLow ? [scale.high, scale.high - scale.reach] : [scale.low, scale.low + scale.reach];
    row = shades.map((size) => box(size ? `s${size}` : "0"));
  }
  const range = scale.low === scale.high ? `all ${number(scale.low)}` : `from ${number(scale.low)} to ${number(scale.high)}`;
  return [
    el("span", { class: "shades" }, el("b", {}, number(names[0])), row, names.length === 3 && el("span", { class: "quiet" }, `around ${number(names[1])}`), el("b", {}, number(names[names.length - 1]))),
    el("span", { class: "quiet" }, `${kind.about}; ${range}`),
  ];
}

function marksLegend(columns) {
  const has = (test) => columns.flags.some((flags, i) => test(flags, i));
  const marks = [
    columns.clipped && has((_, i) => columns.clipped[i]) && [el("span", { class: "tok clipped" }, "clipped"), "the algorithm clipped its ratio"],
    has((flags) => !(flags & PRODUCED)) && [el("span", { class: "tok observation" }, "observation"), "of an environment: the policy did not produce it"],
    has((flags) => (flags & PRODUCED) && !(flags & TRAINED)) && [el("span", { class: "tok untrained" }, "not trained"), "masked: a failed reward, or a choice of the algorithm"],
    [el("span", { class: "version" }, "v3"), "tokens of this policy version begin"],
  ].filter(Boolean);
  const clips = columns.clipped ? null : el("li", {}, "Which tokens were clipped is not logged: the algorithm does not say.");
  return el("ul", { class: "marks quiet" }, marks.map(([mark, text]) => el("li", {}, mark, " ", text)), clips);
}

/** A piece of text on one line, between quotes. */
function quoted(text) {
  const line = text.replace(/\n/g, "↵").replace(/\t/g, "⇥");
  return `“${line.length > 60 ? `${line.slice(0, 60)}…` : line}”`;
}

// ---- numbers ------------------------------------------------------------------------------------------------------

function numbersOf(columns, texts, i, start) {
  const at = (name) => columns[name]?.[i];
  const flags = at("flags");
  const state = !(flags & PRODUCED) ? "observation of the environment" : flags & TRAINED ? "trained" : "produced, not trained";
  const probability = (value) => (present(value) ? [precise(value), el("span", { class: "probability" }, `p ${number(Math.exp(value))}`)] : null);
  const clipped = at("clipped") === undefined ? "not logged" : { "-1": "yes, ratio too low", 0: "no", 1: "yes, ratio too high" }[at("clipped")];
  const rows = [
    ["token", `${start + i}: id ${at("token_ids")}`],
    ["mask", state],
    ["policy version", flags & PRODUCED ? String(at("policy_versions")) : null],
    ["logprob, engine", probability(at("engine_logprobs"))],
    ["logprob, trainer", probability(at("logprobs"))],
    present(at("sampled_logprobs")) && ["of top-k, top-p", probability(at("sampled_logprobs"))],
    ["mismatch", at("mismatch"), true],
    ["logprob, last pass", probability(plus(at("logprobs"), at("log_ratio")))],
    ["ratio", exp(at("log_ratio")), true],
    ["clipped", flags & TRAINED ? clipped : null],
    ["advantage", at("advantages"), true],
    ["entropy", at("entropy"), true],
    ["logprob, reference", probability(minus(at("logprobs"), at("ref_log_ratio")))],
    columns.values && ["value", at("values"), true],
    columns.returns && ["return", at("returns"), true],
    ...Object.keys(columns).filter((name) => name.startsWith("loss/")).map((name) => [name.slice(5), at(name), true]),
  ].filter(Boolean);
  const shown = (value, isNumber) => (!present(value) ? "–" : isNumber ? precise(value) : value);
  return [
    el("div", { class: "piece" }, el("dt", {}, "text"), el("dd", {}, el("code", {}, quoted(texts[i])))),
    ...rows.map(([name, value, isNumber]) => el("div", {}, el("dt", {}, name), el("dd", {}, shown(value, isNumber)))),
  ];
}

/** Ratios of 1.0002 and mismatches of 1e-5 are what one looks for: five digits, as many as are stored. */
function precise(value) {
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(2) : String(Number(value.toPrecision(5)));
}

/** The tokens whose number is farthest from where no colour stands; they take the focus to their place. */
function extremesOf(values, texts, kind, focus) {
  const known = values.filter(present);
  const origin = kind.middle ?? (kind.isLow ? 0 : Math.min(...known.slice(0, 20000)));
  const order = values.map((value, i) => [value, i]).filter(([value]) => present(value) && value !== origin)
    .sort((a, b) => Math.abs(b[0] - origin) - Math.abs(a[0] - origin)).slice(0, 8);
  if (!order.length) return [];
  return [
    el("h2", {}, `Farthest: ${kind.title.toLowerCase()}`),
    el("ol", {}, order.map(([value, i]) => el("li", {},
      el("button", { type: "button", onclick: () => focus(i) }, el("code", {}, quoted(texts[i])), el("span", {}, precise(value)))))),
  ];
}
