// The page: a question by form or address, its answer as it comes, and what is made of both.

import { drawn } from "./look.js";
import { Refused, part, parts } from "./ask.js";
import { draw, figures, lines, tableOf } from "./answer.js";
import { changed, listen, offer, show, withSet } from "./form.js";
import { draw as drawMap } from "./map.js";
import { choices, first, nameOf, read, spelled, state } from "./state.js";

const at = (id) => document.getElementById(id);
const PATIENCE_MS = 300, REST_MS = 350;
const NAMES = { nvlink: "NVLink", pcie: "PCIe", nic: "NICs", hbm: "HBM", compute: "FLOP/s", launch: "launch time" };

let running = null;  // the question that is being answered: its end, and whether its figures have come
let again = false;  // whether the question has changed since
let rests = 0;  // a timer, until nothing changes for a while
let shown = {};  // what is shown of the answer
let sliders = {};  // keys of figures by their names

// ---- asking ------------------------------------------------------------------------------------------------------

/** Asks a question, now or as soon as the one before has its figures: while a slider moves, each that is answered is
 *  shown, and those between are left out. */
function ask(question, { anyway = false } = {}) {
  state.question = question;
  remember();
  show(question);
  clearTimeout(rests);
  if (running && !running.figures && performance.now() - running.since < PATIENCE_MS && !anyway) {
    again = true;
    return;
  }
  again = false;
  running?.ends.abort();
  answer(question, anyway);
}

async function answer(question, anyway) {
  const own = running = { ends: new AbortController(), figures: false, since: performance.now() };
  const late = setInterval(() => {
    const waited = (performance.now() - own.since) / 1000;
    if (own === running && !own.figures && 1000 * waited >= PATIENCE_MS) progress(`answering, ${waited.toFixed(1)} s…`, true);
  }, 100);
  try {
    for await (const one of parts("ask", { question, anyway }, own.ends.signal)) {
      if (own !== running) return;
      take(one, question);
      if (one.part === "figures" || one.part === "error" || one.part === "refused") own.figures = true;
      if (one.part === "whole" || one.part === "error" || one.part === "refused") clearInterval(late);
      if (own.figures && again) {
        ask(state.question);
        return;
      }
    }
    if (own === running) rests = setTimeout(rested, REST_MS);
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    if (own === running) wrong(error.message);
  } finally {
    clearInterval(late);
    if (own === running) running = null;
    document.documentElement.dataset.answered = String(Number(document.documentElement.dataset.answered ?? 0) + 1);
  }
}

function take(one, question) {
  if (one.part === "spelled") {
    at("command").textContent = one.command;
    at("python").textContent = one.python;
  } else if (one.part === "draft") {
    say(`${one.said}; ${one.takes}…`);
    old(true);
  } else if (one.part === "figures") {
    old(false);
    shown = { ...one, more: [] };
    at("title").textContent = one.title;
    at("beside").textContent = one.beside;
    say(one.said);
    figure();
    draw(at("charts"), one.charts);
    progress("");
  } else if (one.part === "answer") {
    shown.more.push(...one.shown);
    say(one.answer);
    figure();
  } else if (one.part === "whole") {
    shown.more.push(...one.shown);
    figure();
    draw(at("bounds"), one.charts);
    lines("rests", [...one.rests_on, ...one.warnings, ...one.techniques.map((name) => `technique: ${name}`)]);
    lines("evidence", one.evidence);
    progress("");
  } else if (one.part === "offers") {
    offer(one);
    if (one.sliders) slide(one.sliders, question);
  } else if (one.part === "refused") {
    wrong(`${one.said}.`);
    const button = Object.assign(document.createElement("button"), { type: "button", textContent: "Ask anyway" });
    button.onclick = () => ask(state.question, { anyway: true });
    at("progress").replaceChildren(button);
  } else if (one.part === "error") {
    wrong(one.error);
    point(one.fields);
  }
  if (one.part === "figures" || one.part === "refused") point([]);
}

const CONTROLS = {
  model: "model", cluster: "cluster", gpus: "gpus", nodes: "gpus", seq: "length", global_batch: "global", schedule: "schedule",
  stack: "stack", software: "software", ulysses_degree: "degrees", ring_degree: "degrees", dp_degree: "degrees", mask: "mask",
};

/** What the form calls a field that an error names. */
function nameOfControl(field) {
  return CONTROLS[field] ? document.querySelector(`label[for="${CONTROLS[field]}"]`).textContent : field.replaceAll("_", " ");
}

/** Marks the controls of the fields that an error names. */
function point(fields) {
  const wrongs = fields.map((field) => CONTROLS[field]);
  for (const id of new Set(Object.values(CONTROLS))) at(id).setAttribute("aria-invalid", String(wrongs.includes(id)));
}

/** Asks what takes longer, once nothing has changed for a while. */
async function rested() {
  const question = state.question;
  const now = () => question === state.question;
  const quietly = async (asks) => {
    try { await asks(); } catch (error) { if (!(error instanceof Refused)) throw error; }
  };
  quietly(compare);
  if (at("time").children.length) quietly(timeline);
  quietly(async () => {
    const found = await part("longest", { question }, "longest");
    if (found && now()) { shown.longest = found.said; figure(); }
  });
}

// ---- showing -----------------------------------------------------------------------------------------------------

function say(text) {
  at("sentence").textContent = text;
  at("sentence").classList.remove("wrong", "old");
}

/** Dims figures that are not those of the question. */
const old = (are) => document.querySelector(".answers").classList.toggle("old", are);

function wrong(text) {
  at("sentence").textContent = text.replace(/`([a-z_]+)`/g, (_, field) => nameOfControl(field));
  at("sentence").classList.add("wrong");
  progress("");
  old(true);
}

function progress(text, busy = false) {
  at("progress").textContent = text;
  at("figures").setAttribute("aria-busy", String(busy));
  at("sentence").classList.toggle("old", busy);
  if (busy) old(true);
}

function figure() {
  const pairs = [...shown.shown, ...shown.more.filter(([, text]) => text)];
  const within = pairs.findIndex(([name]) => name === "90 % interval");
  if (within > 0) pairs.splice(1, 0, ...pairs.splice(within, 1));
  if (shown.longest !== undefined) pairs.push(["longest context that fits", shown.longest]);
  if (state.price) {
    const money = (amount) => amount.toLocaleString("en", { maximumSignificantDigits: 3 });
    pairs.push(["an hour costs", money(state.price * shown.gpus)]);
    if (shown.gpu_hours) pairs.push(["a billion tokens cost", money(state.price * shown.gpu_hours)]);
  }
  figures(pairs);
}

/** Shows a slider for each figure of the machine that the cluster has. */
function slide(keys, question) {
  sliders = keys;
  const box = at("sliders"), most = Math.log2(choices.factor);
  for (const [name, key] of Object.entries(keys)) {
    let one = box.querySelector(`[data-figure="${name}"]`);
    if (!one) {
      one = Object.assign(document.createElement("div"), { className: "slider" });
      one.dataset.figure = name;
      const label = one.appendChild(document.createElement("label"));
      label.htmlFor = `slide-${name}`;
      label.append(NAMES[name], document.createElement("output"));
      const input = one.appendChild(document.createElement("input"));
      Object.assign(input, { type: "range", id: `slide-${name}`, min: -most, max: most, step: 0.25 });
      input.oninput = () => {
        const factor = 2 ** Number(input.value);
        times(one, factor);
        ask(withSet(state.question, { [sliders[name]]: factor === 1 ? null : `*${Number(factor.toPrecision(4))}` }));
      };
      box.append(one);
    }
    const set = question.set?.[key] ?? "*1";
    const factor = set.startsWith("*") ? Number(set.slice(1)) : set.startsWith("/") ? 1 / Number(set.slice(1)) : 1;
    const input = one.querySelector("input");
    if (document.activeElement !== input) input.value = Math.log2(factor || 1);
    times(one, factor);
  }
  for (const one of [...box.children]) if (!(one.dataset.figure in keys)) one.remove();
}

function times(one, factor) {
  const text = `× ${Number(factor.toPrecision(3))}`;
  one.querySelector("output").textContent = text;
  one.querySelector("input").setAttribute("aria-valuetext", text);
}

at("unslide").onclick = () => ask(withSet(state.question, Object.fromEntries(Object.values(sliders).map((key) => [key, null]))));

// ---- pins --------------------------------------------------------------------------------------------------------

function pins() {
  at("no-pins").hidden = state.pins.length > 0;
  at("export").disabled = !state.pins.length;
  at("pins").replaceChildren(...state.pins.map((pin, number) => {
    const box = Object.assign(document.createElement("span"), { className: "pin" });
    const go = Object.assign(document.createElement("button"), { type: "button", textContent: pin.name, title: "ask this" });
    go.onclick = () => ask(pin.question);
    const off = Object.assign(document.createElement("button"), { type: "button", textContent: "×" });
    off.setAttribute("aria-label", `unpin ${pin.name}`);
    off.onclick = () => {
      state.pins.splice(number, 1);
      remember();
      pins();
      compare();
    };
    box.append(go, off);
    return box;
  }));
  if (!state.pins.length) at("compared").replaceChildren();
}

at("pin").onclick = () => {
  if (state.pins.length >= choices.most_pinned) {
    progress(`${choices.most_pinned} are pinned, and no more fit beside each other: unpin one`);
    return;
  }
  state.pins.push({ name: nameOf(state.question, state.pins.map((one) => one.name)), question: state.question });
  remember();
  pins();
  compare();
};

const alike = (one, other) => JSON.stringify(one) === JSON.stringify(other);

/** What is pinned, and the present question where it is none of it. */
function variants() {
  const found = state.pins.map(({ name, question }) => ({ name, question }));
  if (found.some((one) => alike(one.question, state.question))) return found;
  const name = nameOf(state.question, found.map((one) => one.name));
  return [{ name: found.length ? `now: ${name}`.slice(0, 100) : name, question: state.question }, ...found];
}

async function compare() {
  if (!state.pins.length) return;
  const found = await part("compare", { variants: variants() }, "compared");
  if (!found) return;
  const box = at("compared");
  if (!box.children.length) {
    box.append(document.createElement("div"), Object.assign(document.createElement("div"), { className: "charts" }));
  }
  box.firstElementChild.replaceChildren(tableOf(found.table));
  await draw(box.lastElementChild, Object.fromEntries(found.charts.map((chart) => [chart.title, chart])));
  document.documentElement.dataset.compared = String(found.table.rows.length);
}

at("export").onclick = async () => {
  progress("making the report page…", true);
  try {
    const found = await part("export", { variants: variants() }, "page");
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([found.page], { type: "text/html" }));
    link.download = "longstep-pinned.html";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
    progress(`saved as ${link.download}`);
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    progress(error.message);
  }
};

// ---- map and timeline --------------------------------------------------------------------------------------------

at("draw-map").onclick = () => {
  const competitors = variants();
  drawMap(competitors, (there, winner) => {
    const base = competitors.find((one) => one.name === winner)?.question ?? state.question;
    let question = base;
    for (const [key, value] of Object.entries(there)) {
      if (key.startsWith("cluster.")) question = withSet(question, { [key]: value === "*1" ? null : value });
      else if (key === "gpus") question = changed(question, { gpus: Number(value), ulysses_degree: null, ring_degree: null, nodes: null, ...(question.cp ? {} : { dp_degree: null }) });
      else question = changed(question, { [key]: /^\d+$/.test(value) ? Number(value) : value });
    }
    ask(question);
    scrollTo({ top: 0 });
  });
};

let ofTime = new AbortController();

async function timeline() {
  at("said-time").textContent = "drawing…";
  try {
    const found = await part("timeline", { question: state.question, ranks: Number(at("ranks").value) }, "timeline");
    if (!found) return;
    ofTime.abort();
    ofTime = new AbortController();
    const section = at("timeline").content.cloneNode(true);
    at("time").replaceChildren(section, tableOf(found.table));
    drawn(at("time").firstElementChild, found.timeline, ofTime.signal);
    at("said-time").textContent = `${found.ranks} of ${found.of} ranks`;
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    at("said-time").textContent = error.message;
  }
}

at("draw-time").onclick = timeline;
at("ranks").onchange = () => at("time").children.length && timeline();

// ---- files -------------------------------------------------------------------------------------------------------

const MOST_BYTES = 2 ** 18;

async function open(file) {
  if (!file) return;
  if (file.size > MOST_BYTES) {
    told(`${file.name} has ${file.size} bytes: at most ${MOST_BYTES} are read`, true);
    return;
  }
  const name = file.name.replace(/[^\w.+-]/g, "_").replace(/^[^\w]+/, "").slice(0, 100) || "file";
  await fromFile("read", { name, text: await file.text(), question: state.question });
}

async function fromFile(job, payload) {
  told("reading…");
  try {
    const found = await part(job, payload, "read");
    if (!found) return;
    told([`taken for a ${{ documents: "list of lengths" }[found.kind] ?? found.kind}`, ...found.told].join("; "));
    ask(found.question);
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    told(error.message, true);
  }
}

function told(text, isWrong = false) {
  at("told").textContent = text;
  at("told").classList.toggle("wrong", isWrong);
}

at("file").onchange = () => open(at("file").files[0]).then(() => { at("file").value = ""; });
at("distribution").onchange = () => {
  const distribution = at("distribution").value;
  if (distribution) fromFile("drawn", { distribution, question: state.question });
  else ask(changed(state.question, { documents: null, pad: null }));
};
addEventListener("dragover", (event) => { event.preventDefault(); document.body.classList.add("over"); });
addEventListener("dragleave", (event) => { if (!event.relatedTarget) document.body.classList.remove("over"); });
addEventListener("drop", (event) => {
  event.preventDefault();
  document.body.classList.remove("over");
  open(event.dataTransfer.files[0]);
});

// ---- the address -------------------------------------------------------------------------------------------------

function remember() {
  history.replaceState(null, "", `#${spelled(state)}`);
}

function begin() {
  const hash = location.hash.slice(1);
  const found = hash ? read(hash) : null;
  Object.assign(state, found ?? first());
  at("price").value = state.price ?? "";
  pins();
  if (hash && !found) told("the address holds no question that can be read: this is the first one", true);
  ask(state.question);
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    at("copied").textContent = "copied";
  } catch {
    at("copied").textContent = "the browser does not let this page copy: mark the text and copy it";
  }
}

at("copy-address").onclick = () => copy(location.href);
for (const button of document.querySelectorAll("[data-copies]")) {
  button.onclick = () => copy(at(button.dataset.copies).textContent);
}
at("price").onchange = () => {
  const price = Number(at("price").value);
  state.price = price > 0 ? price : null;
  remember();
  if (shown.shown) figure();
};
at("reset").onclick = () => {
  Object.assign(state, { ...first(), pins: state.pins, price: state.price });
  told("");
  ask(state.question);
};
addEventListener("hashchange", begin);
listen(ask);
begin();
