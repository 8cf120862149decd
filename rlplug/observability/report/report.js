"use strict";
(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const touch = matchMedia("(pointer: coarse)").matches;
  const specs = JSON.parse(document.getElementById("figures").textContent);

  const hidden = new Map();

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

  const draw = (plot) => {
    const spec = resolve(specs[plot.dataset.figure], getComputedStyle(document.documentElement));
    for (const index of hidden.get(plot)) spec.data[index].visible = false;
    // A finger on a figure scrolls the page; a tap still shows the values.
    spec.layout.dragmode = touch ? false : "zoom";
    Plotly.react(plot, spec.data, spec.layout, { responsive: true, displayModeBar: false });
  };

  const plots = [...document.querySelectorAll(".plot")];
  for (const plot of plots) {
    hidden.set(plot, new Set());
    draw(plot);
  }
  dark.addEventListener("change", () => plots.forEach(draw));

  for (const button of document.querySelectorAll(".legend button")) {
    button.addEventListener("click", () => {
      const plot = button.closest("figure").querySelector(".plot");
      const shown = button.getAttribute("aria-pressed") === "true";
      button.setAttribute("aria-pressed", String(!shown));
      for (const index of JSON.parse(button.dataset.traces)) {
        hidden.get(plot)[shown ? "add" : "delete"](index);
      }
      draw(plot);
    });
  }
})();
