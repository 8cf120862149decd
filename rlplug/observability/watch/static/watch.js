// The page: one view for each address behind the #.
import { el } from "./dom.js";
import { showSamples, showTokens } from "./samples.js";

const page = document.getElementById("page");
const trail = document.getElementById("trail");

/** The address of a view: parts are encoded, so that the id of a run is one part whatever its name. */
export function address(...parts) {
  return `#/${parts.map(encodeURIComponent).join("/")}`;
}

function route() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const parts = path.split("/").map((part) => decodeURIComponent(part));
  return { parts, params: new URLSearchParams(query) };
}

async function show() {
  const { parts, params } = route();
  const container = el("div");
  page.replaceChildren(container);
  trail.replaceChildren();
  const [view, run, what, ...rest] = parts;
  if (view === "run" && what === "samples") return showSamples(container, run, params);
  if (view === "run" && what === "tokens") return showTokens(container, run, rest[0], rest[1]);
  container.append(el("p", { class: "quiet" }, "Nothing is here yet."));
}

addEventListener("hashchange", show);
show();
