// Server-sent events over POST, and the server's refusals as sentences.

export class Refusal extends Error {
  constructor(message, { status = 0, retryAfter = 0 } = {}) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

const GONE = "The server cannot be reached. Is underdraw serve still running?";
const WRONG_KEY = "That is not the API key of this server; enter it below.";

function sentence(text) {
  return text[0].toUpperCase() + text.slice(1);
}

async function refusal(response, key) {
  const body = await response.json().catch(() => null);
  const retryAfter = Number(response.headers.get("Retry-After")) || 0;
  const texts = {
    401: key ? WRONG_KEY : "This server needs an API key; enter it below.",
    429: `The server is busy: its queue is full. Try again in about ${retryAfter || 1}\u00a0s.`,
  };
  const message = body?.error?.message || `the server answered with status ${response.status} and no reason.`;
  const text = texts[response.status] ?? sentence(message);
  return new Refusal(text, { status: response.status, retryAfter });
}

export async function fetchJson(url) {
  let response;
  try {
    response = await fetch(url);
  } catch {
    throw new Refusal(GONE);
  }
  if (!response.ok) throw await refusal(response);
  return response.json();
}

/** Calls `onEvent(name, data)` for every event of a POST; resolves after the last one, throws a Refusal. */
export async function postEvents(url, body, { key, signal, onEvent }) {
  const headers = { "Content-Type": "application/json" };
  if (/[^ -~]/.test(key ?? "")) throw new Refusal(WRONG_KEY, { status: 401 }); // keys are ASCII, headers too
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(url, { method: "POST", headers, body: JSON.stringify(body), signal });
  } catch (error) {
    throw error.name === "AbortError" ? error : new Refusal(GONE);
  }
  if (!response.ok) throw await refusal(response, key);
  let finished = false;
  try {
    for await (const [name, data] of events(response.body)) {
      if (name === "error") throw new Refusal(sentence(data.error.message));
      if (name === "done") finished = true;
      onEvent(name, data);
    }
  } catch (error) {
    if (error instanceof Refusal || error.name === "AbortError") throw error;
  }
  if (!finished && !signal?.aborted) throw new Refusal("The connection broke before the picture was finished.");
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const blocks = text.split("\n\n");
    text = blocks.pop();
    for (const block of blocks) {
      const fields = Object.fromEntries(block.split("\n").map((line) => line.split(/: (.*)/s, 2)));
      if (fields.data && fields.data !== "[DONE]") yield [fields.event, JSON.parse(fields.data)];
    }
  }
}
