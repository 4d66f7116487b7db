// Numbers and times as text.

let clockOffset = 0;  // seconds by which the server's clock is ahead

export function setServerTime(now) {
  clockOffset = now - Date.now() / 1000;
}

export function serverNow() {
  return Date.now() / 1000 + clockOffset;
}

const NONE = "–";

export function count(value) {
  return value === null || value === undefined ? NONE : Math.round(value).toLocaleString("en-US");
}

export function plural(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}

export function compact(value) {
  if (value === null || value === undefined) return NONE;
  for (const [unit, size] of [["T", 1e12], ["B", 1e9], ["M", 1e6], ["k", 1e3]]) {
    if (Math.abs(value) >= size) return `${trim(value / size)}${unit}`;
  }
  return trim(value);
}

function trim(value) {
  return String(Number(value.toPrecision(3)));
}

export function loss(value) {
  return value === null || value === undefined ? NONE : value.toFixed(value >= 100 ? 1 : 4);
}

export function precise(value) {
  if (value === null || value === undefined) return NONE;
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(2) : String(Number(value.toPrecision(5)));
}

// A learning rate: 6e-4, 0.02.
export function scientific(value) {
  if (value === null || value === undefined) return NONE;
  if (value === 0 || Math.abs(value) >= 0.01) return precise(value);
  const [digits, exponent] = value.toExponential(2).split("e");
  return `${Number(digits)}e${exponent}`;
}

export function percent(value) {
  return value === null || value === undefined ? NONE : `${(value * 100).toFixed(1)} %`;
}

export function bytes(value) {
  if (value === null || value === undefined) return NONE;
  for (const [unit, size] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (value >= size) return `${trim(value / size)} ${unit}`;
  }
  return `${value} B`;
}

// A measured value with its prediction: 23.3 GB (predicted 24.1 GB).
export function beside(actual, predicted, text) {
  const shown = text(actual), expected = text(predicted);
  return shown === NONE || expected === NONE ? shown : `${shown} (predicted ${expected})`;
}

// Money: 1.87 USD, 12,300 USD.
export function money(amount, currency) {
  if (amount === null || amount === undefined) return NONE;
  const text = amount >= 1000 ? count(amount) : amount.toFixed(2);
  return `${text} ${currency}`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return NONE;
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 60) return `${whole} s`;
  const minutes = Math.floor(whole / 60);
  if (minutes < 60) return minutes < 10 ? `${minutes} min ${whole % 60} s` : `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return `${hours} h ${minutes % 60} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

export function shortDuration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return NONE;
  const whole = Math.max(0, Math.round(seconds));
  for (const [unit, size] of [["d", 86400], ["h", 3600], ["min", 60]]) {
    if (whole >= 2 * size) return `${Math.round(whole / size)} ${unit}`;
  }
  return `${whole} s`;
}

export function ago(epoch) {
  return epoch ? shortDuration(serverNow() - epoch) : NONE;
}

// Time until the end of a run: from its metrics, or as the log of a run on a cluster has it.
export function left(row) {
  if (row.max_steps && row.step >= row.max_steps) return NONE;  // evaluates or saves
  return row.eta ? shortDuration(row.eta - serverNow()) : row.time_left ?? NONE;
}

// Date and time, with the year if it is another one.
export function clock(epoch) {
  if (!epoch) return NONE;
  const at = new Date(epoch * 1000), isThisYear = at.getFullYear() === new Date(serverNow() * 1000).getFullYear();
  const options = { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" };
  return at.toLocaleString(undefined, { ...options, ...(isThisYear ? {} : { year: "numeric" }) }).replaceAll(" ", "\u00a0");
}
