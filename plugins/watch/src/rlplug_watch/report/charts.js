// Figures on a page, drawn with plotly from the arguments of Plotly.newPlot; for the report and for `rlplug watch`.

const dark = matchMedia("(prefers-color-scheme: dark)");
const touch = matchMedia("(pointer: coarse)").matches;

const drawn = new Map();

// Plotly cannot read CSS variables: replace them with their current colours.
const resolve = (value, styles) => {
  if (typeof value === "string") {
    const name = value.startsWith("var(--") && value.slice(4, -1);
    return name ? styles.getPropertyValue(name).trim() : value;
  }
  if (Array.isArray(value)) return typeof value[0] === "object" ? value.map((item) => resolve(item, styles)) : value;
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, resolve(item, styles)]));
};

const redraw = (plot) => {
  const { spec, hidden } = drawn.get(plot);
  const { data, layout } = resolve(spec, getComputedStyle(document.documentElement));
  for (const index of hidden) if (data[index]) data[index].visible = false;
  // A finger on a figure scrolls the page; a tap still shows the values.
  layout.dragmode = touch ? false : "zoom";
  return Plotly.react(plot, data, layout, { responsive: true, displayModeBar: false });
};

/** Draw a figure, or draw it anew with other values: its hidden traces stay hidden. */
export function draw(plot, spec) {
  drawn.set(plot, { spec, hidden: drawn.get(plot)?.hidden ?? new Set() });
  return redraw(plot);
}

/** Forget a figure that leaves the page. */
export function forget(plot) {
  drawn.delete(plot);
  Plotly.purge(plot);
}

/** Let a button of a legend show and hide traces of a figure. */
export function toggles(button, plot, traces) {
  button.addEventListener("click", () => {
    const shown = button.getAttribute("aria-pressed") === "true";
    button.setAttribute("aria-pressed", String(!shown));
    for (const index of traces) drawn.get(plot).hidden[shown ? "add" : "delete"](index);
    redraw(plot);
  });
}

dark.addEventListener("change", () => [...drawn.keys()].forEach(redraw));
