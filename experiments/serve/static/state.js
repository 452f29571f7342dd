// What the page is about: a question, those that are pinned, a price. All of it is in the address.

export const choices = JSON.parse(document.getElementById("choices").textContent);
export const first = () => ({ question: { model: "llama3-8b", cluster: "hgx-h100", schedule: "ulysses", seq: "128K" }, pins: [], price: null });
export const state = first();

/** Returns a state as a part of an address. */
export function spelled(of) {
  const bytes = new TextEncoder().encode(JSON.stringify(of));
  let text = "";
  for (const byte of bytes) text += String.fromCharCode(byte);
  return btoa(text).replaceAll("+", "-").replaceAll("/", "_").replace(/=+$/, "");
}

/** Returns the state of an address; null where it has none that can be read. */
export function read(text) {
  try {
    const bytes = Uint8Array.from(atob(text.replaceAll("-", "+").replaceAll("_", "/")), (one) => one.charCodeAt(0));
    const found = JSON.parse(new TextDecoder().decode(bytes));
    if (typeof found.question !== "object" || !found.question || !Array.isArray(found.pins)) return null;
    const pins = found.pins.filter((pin) => pin && typeof pin.name === "string" && typeof pin.question === "object" && pin.question);
    return { question: found.question, pins: pins.slice(0, choices.most_pinned), price: Number(found.price) > 0 ? Number(found.price) : null };
  } catch {
    return null;
  }
}

/** Returns a length as people write it: 64K, 1M, or all of its digits. */
export function lengthOf(tokens) {
  if (tokens % 2 ** 20 === 0) return `${tokens / 2 ** 20}M`;
  return tokens % 1024 === 0 ? `${tokens / 1024}K` : String(tokens);
}

/** Returns the tokens of a length; null for what is none. */
export function tokensOf(text) {
  const found = /^\s*(\d{1,12})\s*([KM]?)\s*$/i.exec(String(text));
  return found ? Number(found[1]) * { "": 1, K: 1024, M: 2 ** 20 }[found[2].toUpperCase()] : null;
}

const named = (value) => (typeof value === "object" && value ? value.name : value);

/** Returns a name for a question: its schedule, length and what is not as usual, and other than all that are taken. */
export function nameOf(question, taken) {
  const usual = first().question;
  const said = [question.stack ?? question.schedule ?? "ring", lengthOf(tokensOf(question.seq) ?? question.seq)];
  if (named(question.model) !== usual.model) said.push(named(question.model));
  if (named(question.cluster) !== usual.cluster) said.push(named(question.cluster));
  if (question.gpus) said.push(`${question.gpus} GPUs`);
  if (question.software) said.push(question.software);
  if (question.documents) said.push(`${question.documents.length} documents`);
  for (const [key, value] of Object.entries(question.set ?? {})) said.push(`${key.replace(/^(schedule|cluster)\./, "").replace(".bytes_per_s", "")}=${value}`);
  const base = said.join(", ").slice(0, 80);
  let name = base;
  for (let number = 2; taken.includes(name); number += 1) name = `${base} (${number})`;
  return name;
}
