// Shows an answer: figures, charts with their tables, what it rests on.

import { PALETTE, css, dark, phone, plotted, sortable } from "./look.js";

const at = (id) => document.getElementById(id);
let plotly = null;

/** Loads plotly.js when the first chart is drawn. */
function library() {
  plotly ??= new Promise((loaded, failed) => {
    const script = document.createElement("script");
    script.src = "plotly.js";
    script.onload = loaded;
    script.onerror = failed;
    document.head.append(script);
  });
  return plotly;
}

/** A table of heads and rows of cells, each what it sorts by and what it shows, in a box that scrolls. */
export function tableOf({ title, heads, rows }) {
  const box = document.createElement("div");
  box.className = "scroll";
  box.tabIndex = 0;
  box.setAttribute("role", "group");
  box.setAttribute("aria-label", title);
  const table = box.appendChild(document.createElement("table"));
  table.className = "sortable";
  const line = table.createTHead().insertRow();
  for (const head of heads) {
    const cell = document.createElement("th");
    cell.scope = "col";
    const button = cell.appendChild(document.createElement("button"));
    button.type = "button";
    button.textContent = head;
    if (!head) button.setAttribute("aria-label", "name");
    line.append(cell);
  }
  const body = table.createTBody();
  for (const row of rows) {
    const here = body.insertRow();
    for (const [value, shown] of row) {
      const cell = here.insertCell();
      cell.dataset.value = value;
      cell.textContent = shown;
    }
  }
  sortable(table);
  return box;
}

const charts = new Map();  // what is drawn in each figure

/** Draws charts into a box by their names, each in the figure that it had before. */
export async function draw(box, named) {
  const wanted = Object.entries(named);
  for (const figure of [...box.children]) if (!(figure.dataset.chart in named)) { charts.delete(figure); figure.remove(); }
  for (const [name, chart] of wanted) {
    let figure = [...box.children].find((one) => one.dataset.chart === name);
    if (!figure) {
      figure = document.createElement("figure");
      figure.dataset.chart = name;
      const caption = figure.appendChild(document.createElement("figcaption"));
      caption.appendChild(document.createElement("h3"));
      const plot = figure.appendChild(document.createElement("div"));
      plot.className = "chart";
      plot.setAttribute("role", "img");
      const details = figure.appendChild(document.createElement("details"));
      details.appendChild(document.createElement("summary")).textContent = "figures of this chart";
      box.append(figure);
    }
    figure.querySelector("h3").textContent = chart.title;
    figure.querySelector(".chart").setAttribute("aria-label", chart.about);
    const details = figure.querySelector("details");
    details.replaceChildren(details.firstElementChild, tableOf(chart));
    charts.set(figure, chart);
  }
  await library();
  for (const figure of box.children) if (charts.has(figure)) await plotted(figure.querySelector(".chart"), charts.get(figure));
}

for (const change of [dark, phone]) {
  change.addEventListener("change", () => {
    for (const [figure, chart] of charts) plotted(figure.querySelector(".chart"), chart);
  });
}

/** Shows figures by their names, in their order; those of before that have no place in it go. */
export function figures(pairs) {
  at("figures").replaceChildren(...pairs.map(([name, text]) => {
    const pair = document.createElement("div");
    pair.appendChild(document.createElement("dt")).textContent = name;
    pair.appendChild(document.createElement("dd")).textContent = text;
    return pair;
  }));
}

/** Shows lines as a list. */
export function lines(id, texts) {
  at(id).replaceChildren(...texts.map((text) => {
    const item = document.createElement("li");
    item.textContent = text;
    return item;
  }));
}

/** The colour of a competitor, by its number. */
export function hue(number) {
  const hues = PALETTE[dark.matches ? "dark" : "light"];
  return hues[number % hues.length];
}

export { css };
