// What is pinned: side by side with the present question, and as a report page.

import { Refused, part } from "./ask.js";
import { draw, tableOf } from "./answer.js";
import { choices, nameOf, state } from "./state.js";

const at = (id) => document.getElementById(id);
let does = {};  // what the page does for this: ask, progress, remember

/** Calls what the page does when pins are made, asked and let go. */
export function listen(page) {
  does = page;
  at("pin").onclick = pin;
  at("export").onclick = save;
}

/** Shows what is pinned. */
export function pins() {
  at("no-pins").hidden = state.pins.length > 0;
  at("export").disabled = !state.pins.length;
  at("pins").replaceChildren(...state.pins.map((pin, number) => {
    const box = Object.assign(document.createElement("span"), { className: "pin" });
    const go = Object.assign(document.createElement("button"), { type: "button", textContent: pin.name, title: "ask this" });
    go.onclick = () => does.ask(pin.question);
    const off = Object.assign(document.createElement("button"), { type: "button", textContent: "×" });
    off.setAttribute("aria-label", `unpin ${pin.name}`);
    off.onclick = () => {
      state.pins.splice(number, 1);
      does.remember();
      pins();
      compare();
    };
    box.append(go, off);
    return box;
  }));
  if (!state.pins.length) at("compared").replaceChildren();
}

function pin() {
  if (state.pins.length >= choices.most_pinned) {
    does.progress(`${choices.most_pinned} are pinned, and no more fit beside each other: unpin one`);
    return;
  }
  state.pins.push({ name: nameOf(state.question, state.pins.map((one) => one.name)), question: state.question });
  does.remember();
  pins();
  compare();
}

const alike = (one, other) => JSON.stringify(one) === JSON.stringify(other);

/** What is pinned, and the present question where it is none of it. */
export function variants() {
  const found = state.pins.map(({ name, question }) => ({ name, question }));
  if (found.some((one) => alike(one.question, state.question))) return found;
  const name = nameOf(state.question, found.map((one) => one.name));
  return [{ name: found.length ? `now: ${name}`.slice(0, 100) : name, question: state.question }, ...found];
}

/** Lays variants side by side. */
export async function compare() {
  if (!state.pins.length) return;
  let found;
  try {
    found = await part("compare", { variants: variants() }, "compared");
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    does.progress(error.message);
  }
  if (!found) return;
  const box = at("compared");
  if (!box.children.length) {
    box.append(document.createElement("div"), Object.assign(document.createElement("div"), { className: "charts" }));
  }
  box.firstElementChild.replaceChildren(tableOf(found.table));
  await draw(box.lastElementChild, Object.fromEntries(found.charts.map((chart) => [chart.title, chart])));
  document.documentElement.dataset.compared = String(found.table.rows.length);
}

async function save() {
  does.progress("making the report page…");
  try {
    const found = await part("export", { variants: variants() }, "page");
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([found.page], { type: "text/html" }));
    link.download = "longstep-pinned.html";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
    does.progress(`saved as ${link.download}`);
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    does.progress(error.message);
  }
}
