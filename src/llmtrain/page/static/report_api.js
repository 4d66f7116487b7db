// Takes the place of api.js in a report: answers from the data in the file, since there is no server.

export const data = JSON.parse(document.getElementById("data").textContent);

// Where a step is on another axis, by interpolation.
function place(run, step, axis) {
  if (axis === "step") return step;
  const steps = run.axes.step, values = run.axes[axis];
  if (!steps.length) return null;
  let low = 0, high = steps.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] <= step) low = middle;
    else high = middle;
  }
  const share = steps[high] === steps[low] ? 0 : (step - steps[low]) / (steps[high] - steps[low]);
  return values[low] + Math.min(1, Math.max(0, share)) * (values[high] - values[low]);
}

function part(run, curve, axis, from, to) {
  const x = curve.x.map((step) => place(run, step, axis));
  if (from === undefined) return { x, y: curve.y };
  const first = x.findIndex((value) => value >= from), last = x.findLastIndex((value) => value <= to);
  if (first < 0 || last < 0) return { x: [], y: [] };
  const begin = Math.max(0, first - 1), end = last + 2;  // one more on each side, so that the line reaches the edge
  return { x: x.slice(begin, end), y: curve.y.slice(begin, end) };
}

export async function get(_, { key, axis, smooth, from, to }) {
  const run = data.runs.find((each) => each.key === key);
  const curves = {};
  for (const [name, own] of Object.entries(run.curves)) {
    const shown = part(run, own, axis, from, to);
    const total = from === undefined ? own.total : Math.max(shown.x.length, Math.round((own.total * shown.x.length) / own.x.length));
    curves[name] = { ...shown, total };
    if (own.smooth && smooth !== 0) curves[name].smooth = part(run, own.smooth, axis, from, to);
  }
  const marks = run.details.marks.map((mark) => ({ ...mark, x: place(run, mark.step, axis) }));
  return { position: "0-0", time_base: 0, curves, marks };
}

export function notice() {}

export const session = { csrf: null };
export const post = null, Refused = null, Stream = null;
