// Samples of a run, and one sample token by token.
import { el } from "./dom.js";

export async function showSamples(container, run, params) {
  container.replaceChildren(el("p", { class: "quiet" }, "No samples are shown here yet."));
}

export async function showTokens(container, run, step, index) {
  container.replaceChildren(el("p", { class: "quiet" }, "No tokens are shown here yet."));
}
