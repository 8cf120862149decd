// Curves of several runs as one figure for plotly.
import { plotText } from "./dom.js";

export const LARGEST_SMOOTHING = 0.99;
const FEW_POINTS = 40;
const MIN_SMOOTHED = 40;  // as in the report: a shorter line is clear as it is
const MANY_RUNS = 12;
const TITLES = { step: "step", samples: "samples", tokens: "tokens of completions", seconds: "seconds in steps" };

/**
 * Exponential moving average, its start corrected as Adam's is: y[i] = (1 - w) * sum of w^(i - j) x[j], over 1 - w^(i + 1).
 * A bucket of n points counts as n, so that a thinned curve is smoothed like the whole one.
 */
export function smooth(values, weight, perBucket) {
  if (!weight) return values;
  const w = weight ** perBucket;
  let [sum, norm] = [0, 1];
  return values.map((value) => {
    sum = w * sum + (1 - w) * value;
    norm *= w;
    return Number((sum / (1 - norm)).toPrecision(7));  // a constant stays one
  });
}

/** Arguments of Plotly.newPlot: for each run a faint line of its values, if they are smoothed, and a bold one. */
export function specOf(lines, curves, { axis, smoothing, logX, logY }, layout) {
  const data = [];
  const isCrowded = lines.length > MANY_RUNS;
  for (const { id, hue, dash } of lines) {
    const { x, y, mean_x: meanX, mean_y: meanY, per_bucket: perBucket } = curves.get(id);
    const isSmoothed = smoothing > 0 && meanY.length >= MIN_SMOOTHED;
    const line = { color: `var(--${hue})`, dash };
    const name = plotText(id);
    if (isSmoothed && !isCrowded) {
      data.push({ type: "scatter", mode: "lines", x, y, name, hoverinfo: "skip", opacity: 0.28, line: { ...line, width: 1 } });
    }
    const [ownX, ownY] = isSmoothed ? [meanX, smooth(meanY, smoothing, perBucket)] : [x, y];
    data.push({
      type: "scatter", mode: ownX.length <= FEW_POINTS ? "lines+markers" : "lines", x: ownX, y: ownY, name,
      line: { ...line, width: isCrowded ? 1.25 : 2 }, marker: { size: 5, color: line.color },
    });
  }
  const unit = TITLES[axis];
  const xaxis = {
    ...layout.xaxis, title: { text: unit, standoff: 6 }, hoverformat: axis === "seconds" ? ",.1f" : ",d",
    unifiedhovertitle: { text: `${unit} %{x}` }, type: logX ? "log" : "linear",
  };
  const yaxis = { ...layout.yaxis, type: logY ? "log" : "linear" };
  return { data, layout: { ...layout, xaxis, yaxis, hovermode: isCrowded ? "closest" : "x unified" } };
}
