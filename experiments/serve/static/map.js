// The map: who of the questions is fastest at each place, filled in as cells come.

import { dark } from "./look.js";
import { hue } from "./answer.js";
import { Refused, parts } from "./ask.js";

const at = (id) => document.getElementById(id);
const AXES = {
  seq: ["length", "32K..2M*2"], gpus: ["GPUs", "8,16,32"], "cluster.nvlink.bytes_per_s": ["NVLink", "/4,/2,*1,*2,*4"],
  "cluster.nic.bytes_per_s": ["NICs", "/4,/2,*1,*2,*4"], "cluster.hbm.bytes_per_s": ["HBM", "/2,*1,*2"],
  global_batch: ["global batch", "8,16,32,64"],
};
let ends = null;  // stops the map that is being drawn
let found = [];  // buttons with the number of the competitor that wins there

for (const [id, first] of [["across", "seq"], ["down", "gpus"]]) {
  at(id).replaceChildren(...Object.entries(AXES).map(([key, [name]]) => new Option(name, key, key === first, key === first)));
  at(`${id}-values`).value = AXES[first][1];
  at(id).onchange = () => { at(`${id}-values`).value = AXES[at(id).value][1]; };
}

/** Draws the map of some competitors; `choose` is called with the place of a cell and who wins there. */
export async function draw(competitors, choose) {
  ends?.abort();
  const own = ends = new AbortController();
  const across = { key: at("across").value, values: at("across-values").value.trim() };
  const down = { key: at("down").value, values: at("down-values").value.trim() };
  const names = competitors.map((one) => one.name);
  let places = [], cells = 0, all = 0;
  at("stop-map").hidden = false;
  at("said-map").textContent = "weighing the first cell…";
  at("map").replaceChildren();
  legend(names);
  found = [];
  try {
    for await (const part of parts("atlas", { competitors, across, down }, own.signal)) {
      if (part.part === "error") throw new Refused(part.error);
      if (part.part === "dropped") break;
      if (part.across) {
        places = lay(part, AXES[across.key][0], AXES[down.key][0]);
        all = part.across.length * part.down.length;
        continue;
      }
      if (part.part !== "cell") continue;
      cells += 1;
      fill(places[part.y][part.x], part, names, () => choose({ [across.key]: part.there[across.key], [down.key]: part.there[down.key] }, part.winner));
      at("said-map").textContent = cells < all ? `${cells} of ${all} cells` : summary(names);
    }
    if (cells < all) at("said-map").textContent = `stopped behind ${cells} of ${all} cells`;
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    at("said-map").textContent = error.message;
  } finally {
    if (ends === own) at("stop-map").hidden = true;
  }
}

at("stop-map").onclick = () => ends?.abort();

function lay({ across, down }, acrossName, downName) {
  const head = at("map").createTHead().insertRow();
  const corner = head.appendChild(document.createElement("th"));
  corner.textContent = `${downName} \\ ${acrossName}`;
  for (const [, shown] of across) Object.assign(head.appendChild(document.createElement("th")), { scope: "col", textContent: shown });
  const body = at("map").createTBody();
  return down.map(([, shown]) => {
    const row = body.insertRow();
    Object.assign(row.appendChild(document.createElement("th")), { scope: "row", textContent: shown });
    return across.map(() => Object.assign(row.insertCell(), { className: "waits", textContent: "·" }));
  });
}

function fill(cell, { winner, ratio, tied, why, step_time_s: step }, names, act) {
  const button = document.createElement("button");
  const number = names.indexOf(winner);
  const mark = document.createElement("i");
  mark.className = "swatch";
  button.append(...(number < 0 ? [] : [mark]), number < 0 ? "none" : short(step));
  if (ratio) {
    button.append(document.createElement("br"), tied ? `tied, +${percent(ratio)}` : `+${percent(ratio)}`);
  }
  button.type = "button";
  button.title = why;
  button.setAttribute("aria-label", number < 0 ? `none: ${why}` : `${winner}: ${short(step)} a step; ${why}`);
  button.onclick = act;
  cell.className = "";
  cell.replaceChildren(button);
  found.push([button, number]);
  paint([button, number]);
}

const percent = (ratio) => `${(100 * (ratio - 1)).toPrecision(2)} %`.replace(/e\+\d+/, "");
const short = (seconds) => (seconds >= 1 ? `${Number(seconds.toPrecision(3))} s` : `${Number((1000 * seconds).toPrecision(3))} ms`);

function paint([button, number]) {
  if (number < 0) return;
  button.style.backgroundColor = `color-mix(in srgb, ${hue(number)} 28%, transparent)`;
  button.querySelector(".swatch").style.backgroundColor = hue(number);
}

function legend(names) {
  at("names-map").replaceChildren(...names.map((name, number) => {
    const entry = document.createElement("span");
    const mark = entry.appendChild(document.createElement("i"));
    mark.className = "swatch";
    mark.style.backgroundColor = hue(number);
    entry.append(name);
    return entry;
  }));
}

function summary(names) {
  const wins = names.map((name, number) => [name, found.filter(([, winner]) => winner === number).length]);
  const none = found.filter(([, winner]) => winner < 0).length;
  const told = wins.filter(([, count]) => count).map(([name, count]) => `${name} wins ${count}`);
  return `Of ${found.length} cells ${told.join(", ") || "none is won"}${none ? `; nothing fits at ${none}` : ""}.`;
}

dark.addEventListener("change", () => {
  found.forEach(paint);
  [...at("names-map").children].forEach((entry, number) => { entry.firstElementChild.style.backgroundColor = hue(number); });
});
