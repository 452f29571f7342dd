// Asks the server: a job's answer comes in parts, a line of JSON each.

const client = crypto.randomUUID();
let order = 0;

/** Something that the server refused, in a sentence. */
export class Refused extends Error {}

/** Yields the parts of an answer as they come; a signal ends it. */
export async function* parts(job, payload, signal) {
  order += 1;
  let response;
  try {
    response = await fetch(`do/${job}`, {
      method: "POST", headers: { "content-type": "application/json" }, signal,
      body: JSON.stringify({ client, order, payload }),
    });
  } catch (error) {
    if (signal?.aborted) return;
    throw new Refused("longstep serve does not answer: it was ended; start it again, and open the address it prints");
  }
  if (!response.ok) throw new Refused(await response.text());
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let left = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (left + value).split("\n");
      left = lines.pop();
      for (const line of lines) yield JSON.parse(line);
    }
  } catch (error) {
    if (!signal?.aborted) throw new Refused("the answer was cut off");
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Returns the part of an answer that has a name; raises what went wrong. */
export async function part(job, payload, name, signal) {
  for await (const one of parts(job, payload, signal)) {
    if (one.part === "error") throw new Refused(one.error);
    if (one.part === name) return one;
  }
  return null;
}
