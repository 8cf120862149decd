// Requests to the server, and what happens again and again while a view is open.

const EVERY_MS = 2000;

export async function get(path, params = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) {
    for (const item of Array.isArray(value) ? value : [value]) query.append(name, item);
  }
  const answer = await fetch(`/api/${path}?${query}`, { cache: "no-store" });
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}

/** Call `look` at once and every two seconds until the view ends, less often while it fails, not in a hidden tab. */
export async function poll(signal, look) {
  const state = document.getElementById("state");
  let [isFirst, failures] = [true, 0];
  while (!signal.aborted) {
    const began = performance.now();
    try {
      if (isFirst || !document.hidden) await look();
      [isFirst, failures] = [false, 0];
      if (!signal.aborted) state.textContent = "";
    } catch (error) {
      failures += 1;
      if (!signal.aborted) state.textContent = `No answer from rlplug watch: ${error.message}`;
      if (!(error instanceof TypeError)) console.error(error);
    }
    // A long run takes longer to read and draw: never more than a quarter of the time.
    await pause(signal, Math.max(EVERY_MS * Math.min(1 + failures, 5), 3 * (performance.now() - began)));
  }
}

function pause(signal, ms) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => { clearTimeout(timer); resolve(); }, { once: true });
  });
}

/** Split a list, so that no address becomes too long. */
export function chunks(list, size) {
  return Array.from({ length: Math.ceil(list.length / size) }, (_, index) => list.slice(index * size, (index + 1) * size));
}
