// The page: one view for each address behind the #.
import { showCompare } from "./compare.js";
import { address, el } from "./dom.js";
import { showRun } from "./run.js";
import { showRuns } from "./runs.js";
import { showSamples, showTokens } from "./samples.js";

const page = document.getElementById("page");
const trail = document.getElementById("trail");

let open = new AbortController();
let shown = "";

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

function route() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  return { parts: path.split("/").map(decoded), params: new URLSearchParams(query) };
}

/** The view of an address: its name, the trail to it, and what shows it. */
function viewOf({ parts: [view, run, what, ...rest], params }) {
  if (view === "run" && run) {
    const tabs = [["Overview", address("run", run), !what], ["Samples", address("run", run, "samples"), Boolean(what)]];
    const into = (show) => (container, signal) => {
      const content = el("div");
      container.append(tabList(run, tabs), content);
      return show(content, signal);
    };
    if (what === "samples") return { name: `${run}: samples`, run, show: into((content) => showSamples(content, run, params)) };
    if (what === "tokens") return { name: `${run}: tokens`, run, show: into((content) => showTokens(content, run, ...rest)) };
    return { name: run, run, show: into((content, signal) => showRun(content, run, signal)) };
  }
  if (view === "compare") return { name: "Compare", show: (container, signal) => showCompare(container, params, signal) };
  return { name: "Runs", show: showRuns };
}

function tabList(run, tabs) {
  const links = tabs.map(([title, href, is]) => el("a", { href, "aria-current": is ? "page" : undefined }, title));
  return el("nav", { class: "tabs", "aria-label": `Views of ${run}` }, links);
}

async function show() {
  const { name, run, show: view } = viewOf(route());
  open.abort();
  open = new AbortController();
  document.title = `${name} - rlplug watch`;
  trail.replaceChildren(...(name === "Runs" ? [] : [el("span", { "aria-current": "page" }, run ?? name)]));
  const container = el("div", { class: "view" });
  page.replaceChildren(container);
  scrollTo(0, 0);
  if (shown) page.focus({ preventScroll: true });  // a screen reader begins at the new view
  shown = name;
  try {
    await view(container, open.signal);
  } catch (error) {
    container.append(el("p", { class: "message failed", role: "alert" }, `This view failed: ${error.message}`));
    console.error(error);
  }
}

addEventListener("hashchange", show);
show();
