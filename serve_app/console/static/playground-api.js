// Sends requests to the service's API with the person's playground key. The key stays in memory.

export class Api {
  #key = null; // a promise, null before the first request

  constructor(base, csrf) {
    this.base = base; // path of the playground's page
    this.csrf = csrf;
  }

  async #newKey() {
    const answer = await fetch(`${this.base}/key`, { method: "POST", body: new URLSearchParams({ csrf: this.csrf }) });
    if (!answer.ok) throw new Error("This page is out of date. Reload it to continue.");
    return (await answer.json()).key;
  }

  async #send(path, options) {
    const used = (this.#key ??= this.#newKey()); // one for all columns: a new key revokes the one before it
    const forget = () => {
      if (this.#key === used) this.#key = null;
    };
    const key = await used.catch((problem) => {
      forget();
      throw problem;
    });
    const answer = await fetch(path, { ...options, headers: { ...options.headers, authorization: `Bearer ${key}` } });
    if (answer.status === 401) forget(); // it has expired, or another tab has replaced it
    return answer;
  }

  async call(path, options = {}) {
    let answer = await this.#send(path, options);
    if (answer.status === 401) answer = await this.#send(path, options);
    if (answer.ok) return answer;
    const problem = await answer.json().catch(() => null);
    throw new Error(problem?.error?.message ?? `The service answered with status ${answer.status}.`);
  }

  // Yields the events of a streamed reply.
  async *stream(body, signal) {
    const headers = { "content-type": "application/json" };
    const sent = { ...body, stream: true, stream_options: { include_usage: true } };
    const answer = await this.call("/v1/chat/completions", { method: "POST", headers, body: JSON.stringify(sent), signal });
    let rest = "";
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader(); // not every browser iterates streams
    for (let part = await reader.read(); !part.done; part = await reader.read()) {
      const lines = (rest + part.value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line === "data: [DONE]") return;
        if (!line.startsWith("data: ")) continue;
        const event = JSON.parse(line.slice(6));
        if (event.error) throw new Error(event.error.message);
        yield event;
      }
    }
    throw new Error("The connection was closed before the reply was complete.");
  }

  // Returns the charge of a request as the ledger has it, or null.
  async charged(id) {
    const answer = await fetch(`${this.base}/requests/${encodeURIComponent(id)}`).catch(() => null);
    return answer?.ok ? (await answer.json()).charged : null;
  }
}
