// Files that are opened or dropped, and documents that are drawn: each makes a question of the present one.

import { Refused, part } from "./ask.js";
import { changed } from "./form.js";
import { state } from "./state.js";

const at = (id) => document.getElementById(id);
const MOST_BYTES = 2 ** 18;

async function open(file, ask) {
  if (!file) return;
  if (file.size > MOST_BYTES) {
    told(`${file.name} has ${file.size} bytes: at most ${MOST_BYTES} are read`, true);
    return;
  }
  const name = file.name.replace(/[^\w.+-]/g, "_").replace(/^[^\w]+/, "").slice(0, 100) || "file";
  await fromFile("read", { name, text: await file.text(), question: state.question }, ask);
}

async function fromFile(job, payload, ask) {
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

/** Says what became of a file. */
export function told(text, isWrong = false) {
  at("told").textContent = text;
  at("told").classList.toggle("wrong", isWrong);
}

/** Calls with the new question when a file is dropped. */
export function listen(ask) {
  at("file").onchange = () => open(at("file").files[0], ask).then(() => { at("file").value = ""; });
  at("distribution").onchange = () => {
    const distribution = at("distribution").value;
    if (distribution) fromFile("drawn", { distribution, question: state.question }, ask);
    else ask(changed(state.question, { documents: null, pad: null }));
  };
  addEventListener("dragover", (event) => { event.preventDefault(); document.body.classList.add("over"); });
  addEventListener("dragleave", (event) => { if (!event.relatedTarget) document.body.classList.remove("over"); });
  addEventListener("drop", (event) => {
    event.preventDefault();
    document.body.classList.remove("over");
    open(event.dataTransfer.files[0], ask);
  });
}
