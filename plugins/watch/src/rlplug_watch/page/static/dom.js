// Elements from plain values. Text from files only ever becomes text nodes and attributes: nothing is parsed as HTML.

const HIDDEN = new RegExp(
  "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u00ad\\u061c\\u180e\\u200b\\u200d\\u200e\\u200f" +
    "\\u2028-\\u202e\\u2060-\\u206f\\ufeff\\ufff9-\\ufffb\\u{e0000}-\\u{e0fff}]|[\\ud800-\\udfff]",
  "gu",
);

/** Text with escapes for control characters, bidirectional and invisible ones, as the terminal shows it. */
export function visible(text) {
  return String(text ?? "").replace(HIDDEN, (character) => {
    const code = character.codePointAt(0);
    return code < 256 ? `\\x${code.toString(16).padStart(2, "0")}` : `\\u${code.toString(16).padStart(4, "0")}`;
  });
}

/** Text for plotly, which reads some markup in names. */
export function plotText(text) {
  return visible(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}

/** An element: attributes by name (a function is a listener: onclick), children that are nodes or texts. */
export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked") element[name] = value;
    else if (name === "hue") element.style.setProperty("--hue", `var(--${value})`);
    else element.setAttribute(name, value === true ? "" : visible(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child === undefined || child === null || child === false) continue;
    element.append(child instanceof Node ? child : visible(child));
  }
  return element;
}

/** The address of a view: parts are encoded, so that the id of a run is one part whatever its name. */
export function address(...parts) {
  return `#/${parts.map(encodeURIComponent).join("/")}`;
}

/** A table in a card: columns are [title, is a number], rows are lists of cells, the first of which names the row. */
export function table(columns, rows, name = "") {
  const kind = (index) => ({ class: columns[index][1] ? "num" : undefined });
  const head = columns.map(([title], index) => el("th", { ...kind(index), scope: "col" }, title));
  const body = rows.map((cells) =>
    el("tr", {}, cells.map((cell, index) => (index ? el("td", kind(index), cell) : el("th", { scope: "row" }, cell)))),
  );
  return el("table", { class: name }, el("thead", {}, el("tr", {}, head)), el("tbody", {}, body));
}

/** A box for what may be wider than the page: the keyboard reaches it while there is something to scroll. */
export function scrollable(label, name, ...content) {
  const box = el("div", { class: `${name} scroll`, role: "region", "aria-label": label }, content);
  new ResizeObserver(() => {
    if (box.scrollWidth > box.clientWidth) box.setAttribute("tabindex", "0");
    else box.removeAttribute("tabindex");
  }).observe(box);
  return box;
}

const STATUSES = new Set(["running", "finished", "failed", "interrupted", "killed"]);

export function badge(status) {
  return el("span", { class: `status ${STATUSES.has(status) ? status : ""}` }, status || "unknown");
}

/** A number with the few digits that matter, as the report writes it. */
export function number(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1e7 || (size > 0 && size < 1e-3)) return value.toExponential(1);
  if (size >= 1000 || Number.isInteger(value)) return value.toLocaleString("en", { maximumFractionDigits: 0 });
  return size < 10 ? value.toFixed(3) : value.toFixed(1);
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 60) return `${seconds < 10 ? seconds.toFixed(2) : seconds.toFixed(0)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  return minutes < 2880 ? `${Math.floor(minutes / 60)} h ${minutes % 60} min` : `${Math.floor(minutes / 1440)} d`;
}

/** How long ago a time in seconds since 1970 was. */
export function ago(time) {
  if (time === null || time === undefined) return "–";
  const seconds = Math.max(0, Date.now() / 1000 - time);
  return seconds < 10 ? "now" : `${duration(Math.round(seconds))} ago`;
}
