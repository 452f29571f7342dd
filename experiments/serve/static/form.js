// The form: controls show the question, and change it.

import { choices, lengthOf, state, tokensOf } from "./state.js";

const at = (id) => document.getElementById(id);
const STEPS = 8;  // of the slider of lengths, from one power of two to the next
let offered = {};  // what the server said of the choices

/** Sets fields of the question; null leaves one out. */
export function changed(question, fields) {
  const found = { ...question };
  for (const [name, value] of Object.entries(fields)) {
    if (value === null || value === "") delete found[name];
    else found[name] = value;
  }
  return found;
}

/** Sets a key of what is `set`; null leaves it out. */
export function withSet(question, keys) {
  const set = changed(question.set ?? {}, keys);
  return changed(question, { set: Object.keys(set).length ? set : null });
}

const FREED = { ulysses_degree: null, ring_degree: null, cp: null, dp_degree: null };

/** Returns a question with its degrees left to the schedule; of one that splits nothing what is left of GPUs are replicas. */
function freed(question, gpus) {
  const alone = choices.alone.includes(question.schedule ?? choices.of_stack[question.stack] ?? "ring");
  const each = (question.tp_degree ?? 1) * (question.pp_degree ?? 1);
  return changed(question, { ...FREED, ...(alone && gpus ? { gpus, dp_degree: Math.floor(gpus / each) } : {}) });
}

/** Returns a question without options of a schedule that another one may not have. */
const without = (question, prefix) =>
  withSet(question, Object.fromEntries(Object.keys(question.set ?? {}).filter((key) => key.startsWith(prefix)).map((key) => [key, null])));

function bySlide() {
  const tokens = choices.least_tokens * 2 ** (Number(at("slide").value) / STEPS);
  const unit = tokens >= 2 ** 17 ? 2 ** 13 : 1024;
  return Math.min(choices.most_tokens, Math.max(choices.least_tokens, Math.round(tokens / unit) * unit));
}

function slideTo(tokens) {
  at("slide").value = String(Math.round(STEPS * Math.log2(Math.max(tokens, 1) / choices.least_tokens)));
  at("slide").setAttribute("aria-valuetext", lengthOf(tokens));
}

/** Calls with the new question whenever a control changes it. */
export function listen(ask) {
  at("slide").max = String(STEPS * Math.log2(choices.most_tokens / choices.least_tokens));
  const change = (question) => ask(question);
  at("slide").oninput = () => {
    const tokens = bySlide();
    at("length").value = lengthOf(tokens);
    at("slide").setAttribute("aria-valuetext", lengthOf(tokens));
    change(changed(state.question, { seq: lengthOf(tokens), documents: null, pad: null }));
  };
  at("length").onchange = () => {
    const text = at("length").value.trim();
    const tokens = tokensOf(text);
    if (tokens) slideTo(tokens);
    change(changed(state.question, { seq: tokens ? lengthOf(tokens) : text, documents: null, pad: null }));
  };
  at("model").onchange = () => change(changed(state.question, { model: at("model").value.trim() || "llama3-8b" }));
  at("cluster").onchange = () => change(freed(changed(without(state.question, "cluster."), { cluster: at("cluster").value.trim() || "hgx-h100", gpus: null }), null));
  at("gpus").onchange = () => {
    const text = at("gpus").value.trim();
    const gpus = /^\d{1,6}$/.test(text) ? Number(text) : text;
    change(freed(changed(state.question, { gpus: gpus === "" ? null : gpus }), typeof gpus === "number" ? gpus : null));
  };
  at("global").onchange = () => {
    const text = at("global").value.trim();
    change(changed(state.question, { global_batch: /^\d{1,9}$/.test(text) ? Number(text) : text }));
  };
  at("schedule").onchange = () => {
    const schedule = at("schedule").value;
    change(freed(changed(without(state.question, "schedule."), { schedule }), state.question.gpus ?? offered.gpus));
  };
  at("stack").onchange = () => {
    const stack = at("stack").value;
    const base = without(state.question, "schedule.");
    change(freed(changed(base, stack ? { stack, schedule: null } : { stack: null, schedule: base.schedule ?? "ulysses" }), state.question.gpus ?? offered.gpus));
  };
  at("software").onchange = () => change(changed(state.question, { software: at("software").value }));
  at("mask").onchange = () => change(changed(state.question, { mask: at("mask").value === "causal" ? null : at("mask").value }));
  at("degrees").onchange = () => {
    const chosen = offered.degrees?.[Number(at("degrees").value)];
    if (!chosen) return;
    const { why, ...fields } = chosen;
    change(changed(state.question, fields));
  };
  for (const box of document.querySelectorAll("[data-technique]")) {
    box.onchange = () => {
      const turns = offered.techniques?.[box.dataset.technique]?.turns ?? {};
      change(withSet(state.question, Object.fromEntries(Object.entries(turns).map(([key, value]) => [`schedule.${key}`, value]))));
    };
  }
  at("question").onsubmit = (event) => event.preventDefault();
}

/** Shows a question in the controls; leaves the one that is being typed in alone. */
export function show(question) {
  const set = (id, value) => { if (document.activeElement !== at(id)) at(id).value = value; };
  const tokens = tokensOf(question.seq);
  set("model", typeof question.model === "object" ? question.model.name : question.model ?? "llama3-8b");
  set("cluster", typeof question.cluster === "object" ? question.cluster.name : question.cluster ?? "hgx-h100");
  set("gpus", question.gpus ?? "");
  set("length", tokens ? lengthOf(tokens) : question.seq ?? "");
  if (tokens && document.activeElement !== at("slide")) slideTo(tokens);
  set("global", question.global_batch ?? "");
  at("schedule").value = question.schedule ?? choices.of_stack[question.stack] ?? "ring";
  at("stack").value = question.stack ?? "";
  at("about-stack").textContent = choices.stacks[question.stack] ?? "";
  at("software").value = question.software ?? "";
  at("mask").value = question.mask ?? "causal";
  const documents = question.documents;
  at("documents").textContent = documents
    ? `${documents.length} documents of ${lengthOf(Math.min(...documents))} to ${lengthOf(Math.max(...documents))} tokens` : "";
  if (!documents) at("distribution").value = "";
}

/** Shows what may be chosen: what may not is greyed out, with its reason. */
export function offer(some) {
  offered = { ...offered, ...some };
  if (some.schedules) {
    for (const option of at("schedule").options) grey(option, some.schedules[option.value]);
    list();
  }
  if (some.degrees) {
    at("degrees").replaceChildren(...some.degrees.map((one, number) => {
      const option = new Option(degreesOf(one), String(number), false, one.now);
      grey(option, one.now ? "" : one.why);
      return option;
    }));
    list();
  }
  for (const [name, one] of Object.entries(some.techniques ?? {})) {
    const box = document.querySelector(`[data-technique="${CSS.escape(name)}"]`);
    box.checked = one.on;
    box.disabled = one.why !== "";
    box.closest("label").title = one.why;
    box.closest("label").classList.toggle("off", box.disabled);
    box.closest("label").querySelector(".hint").textContent = one.why ? one.why : one.about;
  }
  if (some.techniques) {
    for (const box of document.querySelectorAll("[data-technique]")) {
      if (box.dataset.technique in some.techniques) continue;
      box.checked = false;
      box.disabled = true;
      box.closest("label").classList.add("off");
      box.closest("label").querySelector(".hint").textContent = "this schedule has no such option";
    }
  }
}

const degreesOf = ({ ulysses_degree: u, ring_degree: r, tp_degree: tp, pp_degree: pp, dp_degree: dp }) =>
  [tp > 1 ? `TP ${tp}` : "", pp > 1 ? `${pp} stages` : "", u ? `Ulysses ${u}` : "", r ? `ring ${r}` : "", dp > 1 || !(u || r || pp > 1 || tp > 1) ? `${dp} replica${dp > 1 ? "s" : ""}` : ""].filter(Boolean).join(" × ");

function grey(option, why) {
  option.disabled = Boolean(why);
  option.title = why ?? "";
}

/** Lists why choices are greyed out, since not all readers see titles. */
function list() {
  const schedules = Object.entries(offered.schedules ?? {}).filter(([, why]) => why);
  const degrees = (offered.degrees ?? []).filter((one) => one.why && !one.now).map((one) => [degreesOf(one), one.why]);
  const rows = [...schedules, ...degrees];
  at("refused").hidden = !rows.length;
  at("refused").querySelector("summary").textContent = `why ${rows.length} ${rows.length > 1 ? "are" : "is"} greyed out`;
  at("refused").querySelector("ul").replaceChildren(...rows.map(([name, why]) => {
    const item = document.createElement("li");
    item.textContent = `${name}: ${why}`;
    return item;
  }));
}
