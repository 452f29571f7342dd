// The page: a question by form or address, its answer as it comes, and what is made of both.

import { drawn } from "./look.js";
import { Refused, part, parts } from "./ask.js";
import { draw, figures, lines, tableOf } from "./answer.js";
import { listen as listenToFiles, told } from "./files.js";
import { changed, listen, offer, show, withSet } from "./form.js";
import { draw as drawMap } from "./map.js";
import { compare, listen as listenToPins, pins, variants } from "./pins.js";
import { choices, first, read, spelled, state } from "./state.js";

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
  } else if (one.part === "draft" || one.part === "near") {
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
  } else if (one.part === "bounded") {
    at("sentence").append(` ${one.said}.`);
  } else if (one.part === "error") {
    wrong(one.error);
    point(one.fields);
  }
  if (one.part === "figures" || one.part === "refused") point([]);
}

const CONTROLS = {
  model: "model", cluster: "cluster", gpus: "gpus", nodes: "gpus", seq: "length", global_batch: "global", schedule: "schedule",
  stack: "stack", software: "software", ulysses_degree: "degrees", ring_degree: "degrees", tp_degree: "degrees", pp_degree: "degrees", dp_degree: "degrees", mask: "mask",
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
    const section = at("timeline-empty").content.cloneNode(true);
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
listenToFiles(ask);
listenToPins({ ask, progress, remember });
begin();
