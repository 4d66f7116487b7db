// Elements from data. Text is always set as text, never parsed: names, logs and samples come from runs and clusters.

const SVG = "http://www.w3.org/2000/svg";

function setAll(element, properties, children) {
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked" || name === "disabled") element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function h(tag, properties, ...children) {
  return setAll(document.createElement(tag), properties, children);
}

export function svg(tag, properties, ...children) {
  return setAll(document.createElementNS(SVG, tag), properties, children);
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function copyButton(text) {
  const button = h("button", { type: "button", class: "copy", title: "Copy" }, "Copy");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      const area = h("textarea", { class: "offscreen", readonly: true }, text);  // no clipboard without TLS
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  return button;
}

export function command(text) {
  return h("div", { class: "command" }, h("code", null, text), copyButton(text));
}

const TILES = { wide: 7, medium: 5, narrow: 3 };  // in a row at most; page.css says on which width

// Names and values as tiles, in rows of about the same number; the last one takes the rest of its row.
export function tiles(element, values) {
  element.replaceChildren(...values.map(([name, text]) => h("div", { class: "fact" }, h("span", null, name), h("b", null, text))));
  for (const [width, most] of Object.entries(TILES)) {
    const rows = Math.ceil(values.length / most), columns = Math.ceil(values.length / rows);
    element.style.setProperty(`--${width}`, String(columns));
    element.style.setProperty(`--${width}-last`, String(1 + rows * columns - values.length));
  }
  return element;
}

export function card(title, ...children) {
  return h("section", { class: "card" }, title ? h("h2", null, title) : null, ...children);
}

// As in page.css: a phone.
export function isNarrow() {
  return matchMedia("(max-width: 760px)").matches;
}

export function sparkline(curve) {
  const width = 88, height = 22;
  const image = svg("svg", { class: "spark", viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
  const { x, y } = curve;
  if (y.length < 2) return image;
  const low = Math.min(...y), high = Math.max(...y), first = x[0], last = x[x.length - 1];
  const points = y.map((value, i) => {
    const left = ((x[i] - first) / (last - first || 1)) * (width - 2) + 1;
    const top = height - 2 - ((value - low) / (high - low || 1)) * (height - 4);
    return `${left.toFixed(1)},${top.toFixed(1)}`;
  });
  image.append(svg("polyline", { points: points.join(" ") }));
  return image;
}
