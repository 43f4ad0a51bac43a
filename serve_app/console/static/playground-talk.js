// One conversation with one model: its turns, and how they look.

import { showMarkdown } from "./playground-markdown.js";

const RENDER_MS = 80; // between two renderings of a reply that grows
const SIGNS = { USD: "$", EUR: "€", GBP: "£" };

// An amount with its currency: "$0.27" or "0.27 CHF".
export function money(amount, currency) {
  return currency in SIGNS ? `${SIGNS[currency]}${amount}` : `${amount} ${currency}`;
}

export class Talk {
  constructor(place, currency) {
    this.place = place;
    this.currency = currency;
    this.turns = [];
    this.stopper = null;
    this.onChange = () => {};
    this.onEdit = () => {};
  }

  get isBusy() {
    return this.stopper !== null;
  }

  // The functions that the last reply calls: the next message is their result.
  get openCalls() {
    return this.turns.findLast((turn) => turn.counts)?.toolCalls ?? [];
  }

  get cost() {
    return this.turns.reduce((sum, turn) => sum + Number(turn.charged ?? 0), 0);
  }

  get tokens() {
    return this.turns.reduce((sum, turn) => sum + (turn.usage?.total_tokens ?? 0), 0);
  }

  // The messages of the turns, as a request has them.
  messages(turns = this.turns) {
    const messages = [];
    let open = [];
    for (const turn of turns) {
      if (turn.counts === false) continue;
      if (open.length) messages.push(...open.map((call) => ({ role: "tool", tool_call_id: call.id, content: turn.text })));
      else messages.push({ role: "user", content: turn.text });
      open = turn.toolCalls ?? [];
      if (turn.counts === undefined) continue; // its reply is still to come
      const reply = { role: "assistant", content: turn.reply };
      if (open.length) reply.tool_calls = open;
      messages.push(reply);
    }
    return messages;
  }

  stop() {
    this.stopper?.abort();
  }

  // Removes the turn with this number and all later ones.
  cut(number) {
    this.stop();
    this.turns.length = Math.min(this.turns.length, number);
    this.render();
  }

  async run(api, model, text, bodyOf) {
    const turn = { text, model, reply: "", reasoning: "", toolCalls: [], tokens: [], usage: null, note: "" };
    this.turns.push(turn);
    const view = this.#append(turn, this.turns.length - 1);
    this.stopper = new AbortController();
    this.onChange();
    const began = performance.now();
    let first = null;
    let last = began;
    let id = null;
    try {
      for await (const event of api.stream({ model, ...bodyOf(this.messages()) }, this.stopper.signal)) {
        id = event.id;
        turn.usage = event.usage ?? turn.usage;
        const choice = event.choices[0];
        if (choice === undefined) continue;
        last = performance.now();
        first ??= last - began;
        this.#take(turn, choice);
        view.grow();
      }
      turn.finish ??= "stop";
    } catch (error) {
      turn.note = error.name === "AbortError" ? "Stopped" : error.message;
      turn.failed = error.name !== "AbortError";
    }
    turn.counts = turn.reply !== "" || turn.toolCalls.length > 0;
    const generated = (last - began - (first ?? 0)) / 1000;
    turn.firstMs = first === null ? null : Math.round(first);
    turn.totalMs = Math.round(performance.now() - began);
    if (generated > 0.05 && turn.usage?.completion_tokens > 1) {
      turn.perSecond = (turn.usage.completion_tokens - 1) / generated;
    }
    this.stopper = null;
    view.finish();
    this.onChange();
    if (id !== null) {
      turn.id = id;
      turn.charged = await api.charged(id);
      view.finish();
      this.onChange();
    }
  }

  #take(turn, choice) {
    turn.reply += choice.delta.content ?? "";
    turn.reasoning += choice.delta.reasoning_content ?? "";
    for (const part of choice.delta.tool_calls ?? []) {
      turn.toolCalls[part.index] ??= { id: part.id, type: "function", function: { name: part.function.name, arguments: "" } };
      turn.toolCalls[part.index].function.arguments += part.function.arguments ?? "";
    }
    for (const { token, logprob, top_logprobs } of choice.logprobs?.content ?? []) {
      const others = top_logprobs.filter((one) => one.token !== token);
      turn.tokens.push({ token, logprob, others: others.map((one) => [one.token, one.logprob]) });
    }
    turn.finish = choice.finish_reason ?? turn.finish;
  }

  render() {
    this.place.replaceChildren();
    this.turns.forEach((turn, number) => this.#append(turn, number).finish());
    this.onChange();
  }

  #append(turn, number) {
    const asked = element("div", "asked");
    const user = element("div", "turn user");
    const text = element("div", "text", turn.text);
    const tools = element("div", "turn-actions");
    tools.append(
      button("Edit", () => this.#edit(user, tools, turn, number)),
      button("Run again", () => this.onEdit(number, turn.text)),
    );
    user.append(text);
    asked.append(user, tools);
    const answer = element("div", "answer");
    const assistant = element("div", "turn assistant");
    const figures = element("div", "figures text-secondary small");
    answer.append(assistant, figures);
    asked.style.order = number * 2; // conversations that are compared share a grid
    answer.style.order = number * 2 + 1;
    this.place.append(asked, answer);
    const room = this.place.closest(".chat");
    const draw = () => {
      const isAtEnd = room.scrollHeight - room.scrollTop - room.clientHeight < 100;
      drawReply(assistant, turn);
      if (isAtEnd) room.scrollTop = room.scrollHeight;
    };
    room.scrollTop = room.scrollHeight;
    let timer = null;
    return {
      grow() {
        timer ??= setTimeout(() => {
          timer = null;
          draw();
        }, RENDER_MS);
      },
      finish: () => {
        clearTimeout(timer);
        draw();
        figures.textContent = this.#figures(turn);
        figures.classList.toggle("text-danger", turn.failed === true);
        figures.classList.toggle("text-secondary", turn.failed !== true);
      },
    };
  }

  #figures(turn) {
    const parts = [];
    if (turn.note) parts.push(turn.note);
    if (turn.usage) {
      const cached = turn.usage.prompt_tokens_details?.cached_tokens;
      const input = `${turn.usage.prompt_tokens.toLocaleString("en")} input${cached ? ` (${cached.toLocaleString("en")} cached)` : ""}`;
      parts.push(`${input} + ${turn.usage.completion_tokens.toLocaleString("en")} output tokens`);
    }
    if (turn.charged) parts.push(money(turn.charged, this.currency));
    const times = [];
    if (turn.firstMs) times.push(`first token after ${turn.firstMs} ms`);
    if (turn.perSecond) times.push(`then ${turn.perSecond.toFixed(1)} tokens/s`);
    if (times.length) parts.push(`${times.join(", ")} (in your browser)`);
    if (turn.finish === "length") parts.push("ended at the maximum number of tokens");
    return parts.join(" · ");
  }

  #edit(user, tools, turn, number) {
    const area = element("textarea", "form-control");
    area.value = turn.text;
    area.rows = Math.min(10, turn.text.split("\n").length + 1);
    area.setAttribute("aria-label", "Edit the message");
    const run = button("Run", () => this.onEdit(number, area.value), "btn-primary");
    tools.replaceChildren(run, button("Cancel", () => this.render()));
    user.replaceChildren(area);
    user.classList.add("edited");
    area.focus();
  }
}

function drawReply(place, turn) {
  place.replaceChildren();
  if (turn.reasoning) {
    const details = element("details", "reasoning");
    details.append(element("summary", "text-secondary small", "Reasoning"), element("div", "text", turn.reasoning));
    place.append(details);
  }
  if (turn.tokens?.length) place.append(...turn.tokens.map(tokenElement));
  else if (turn.reply) {
    const text = element("div", "markdown");
    showMarkdown(text, turn.reply);
    place.append(text);
  }
  for (const call of turn.toolCalls ?? []) {
    place.append(element("pre", "call", `${call.function.name}(${call.function.arguments})`));
  }
  if (!place.hasChildNodes()) place.append(element("span", "text-secondary", turn.counts === undefined ? "…" : "No reply"));
}

function tokenElement({ token, logprob, others }) {
  const share = ([text, value]) => `${JSON.stringify(text)} ${(100 * Math.exp(value)).toFixed(1)}%`;
  const span = element("span", "token", token);
  span.title = [[token, logprob], ...others].map(share).join(", ");
  span.tabIndex = 0;
  return span;
}

function element(tag, classes, text = "") {
  const made = document.createElement(tag);
  made.className = classes;
  made.textContent = text;
  return made;
}

function button(label, act, look = "btn-ghost-secondary") {
  const made = element("button", `btn btn-sm ${look}`, label);
  made.type = "button";
  made.addEventListener("click", act);
  return made;
}
