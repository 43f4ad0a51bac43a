// The playground. It sends requests to the service's API with a key for an hour, which it keeps in memory alone.
"use strict";

const root = document.querySelector("main").dataset.root;
const account = document.querySelector("main").dataset.account;
const form = document.getElementById("playground");
const field = (name) => form.elements[name];
const talks = [...document.querySelectorAll("section.talk")].map((place) => ({ place, messages: [], stop: null }));
let key = null;

async function freshKey() {
  const body = new URLSearchParams({ csrf: field("csrf").value });
  const answer = await fetch(`${root}/accounts/${account}/playground/key`, { method: "POST", body });
  if (!answer.ok) throw new Error("The page is out of date: open it again.");
  key = (await answer.json()).key;
}

async function call(path, options = {}) {
  if (key === null) await freshKey();
  const send = () => fetch(path, { ...options, headers: { ...options.headers, authorization: `Bearer ${key}` } });
  let answer = await send();
  if (answer.status === 401) {
    await freshKey(); // its hour is over
    answer = await send();
  }
  if (answer.ok) return answer;
  const problem = await answer.json().catch(() => null);
  throw new Error(problem?.error?.message ?? `status ${answer.status}`);
}

function parsed(name) {
  const text = field(name).value.trim();
  if (text === "") return undefined;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${name}: ${error.message}`);
  }
}

function request(model, messages) {
  const system = field("system").value.trim();
  const body = { model, messages: system === "" ? messages : [{ role: "system", content: system }, ...messages] };
  for (const name of ["temperature", "max_tokens"]) if (field(name).value !== "") body[name] = Number(field(name).value);
  const tools = parsed("tools");
  const schema = parsed("schema");
  if (tools !== undefined) body.tools = tools;
  if (schema !== undefined) {
    body.response_format = { type: "json_schema", json_schema: { name: "reply", schema, strict: true } };
  }
  if (field("logprobs").checked) Object.assign(body, { logprobs: true, top_logprobs: 3 });
  return body;
}

function entry(talk, role, text) {
  const place = document.createElement("div");
  place.className = role;
  place.textContent = text;
  talk.place.querySelector(".said").append(place);
  return place;
}

function showTokens(place, tokens) {
  for (const token of tokens) {
    const span = document.createElement("span");
    span.textContent = token.token;
    const share = (one) => `${JSON.stringify(one.token)} ${(100 * Math.exp(one.logprob)).toFixed(1)}%`;
    span.title = [share(token), ...token.top_logprobs.filter((one) => one.token !== token.token).map(share)].join(", ");
    span.tabIndex = 0;
    place.append(span);
  }
}

async function* events(answer) {
  let rest = "";
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader(); // not every browser iterates streams
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    const lines = (rest + part.value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line === "data: [DONE]") return;
      if (line.startsWith("data: ")) yield JSON.parse(line.slice(6));
    }
  }
  throw new Error("The reply was cut.");
}

async function turn(talk, model, text) {
  const before = talk.messages.length;
  const asked = talk.messages.at(-1)?.tool_calls; // then the text is what each of these calls returns
  if (asked) talk.messages.push(...asked.map((one) => ({ role: "tool", tool_call_id: one.id, content: text })));
  else talk.messages.push({ role: "user", content: text });
  entry(talk, "user", text);
  const place = entry(talk, "assistant", "");
  const figures = entry(talk, "figures", "…");
  const began = performance.now();
  const message = { role: "assistant", content: "" };
  const calls = [];
  talk.stop = new AbortController();
  let first = null;
  let usage = null;
  let id = null;
  try {
    const body = { ...request(model, talk.messages), stream: true, stream_options: { include_usage: true } };
    const headers = { "content-type": "application/json" };
    const options = { method: "POST", headers, body: JSON.stringify(body), signal: talk.stop.signal };
    for await (const event of events(await call("/v1/chat/completions", options))) {
      if (event.error) throw new Error(event.error.message);
      id = event.id;
      usage = event.usage ?? usage;
      const choice = event.choices[0];
      if (choice === undefined) continue;
      first ??= performance.now() - began;
      const piece = choice.delta.content ?? "";
      message.content += piece;
      for (const part of choice.delta.tool_calls ?? []) {
        calls[part.index] ??= { id: part.id, type: "function", function: { name: part.function.name, arguments: "" } };
        calls[part.index].function.arguments += part.function.arguments ?? "";
      }
      if (choice.logprobs?.content?.length) showTokens(place, choice.logprobs.content);
      else place.append(piece);
    }
    if (calls.length > 0) {
      message.tool_calls = calls;
      place.append(calls.map((one) => `${one.function.name}(${one.function.arguments})`).join("\n"));
    }
    const price = await fetch(`${root}/accounts/${account}/playground/requests/${id}`);
    const charged = price.ok ? `, ${(await price.json()).charged}` : "";
    figures.textContent =
      `${usage.prompt_tokens} + ${usage.completion_tokens} tokens${charged}, ` +
      `first after ${Math.round(first)} ms, all after ${Math.round(performance.now() - began)} ms`;
  } catch (error) {
    figures.textContent = error.name === "AbortError" ? "stopped" : error.message;
    figures.classList.toggle("error", error.name !== "AbortError");
  } finally {
    if (message.content || message.tool_calls) talk.messages.push(message);
    else talk.messages.length = before; // nothing was said
    talk.stop = null;
  }
}

function chosen() {
  return talks.slice(0, field("second").checked ? 2 : 1).map((talk, side) => [talk, field(`model${side}`).value]);
}

function python(value) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (typeof value !== "object") return JSON.stringify(value);
  return `{${Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${python(one)}`).join(", ")}}`;
}

// The request of the chat format in each format, and how an SDK sends it.
const FORMATS = {
  "/chat/completions": (body) => ({ body, sdk: "OpenAI", create: "chat.completions", reply: ".choices[0].message" }),
  "/responses": ({ messages, max_tokens, logprobs, top_logprobs, response_format, tools, ...body }) => {
    const [instructions, input] = withoutSystem(messages);
    Object.assign(body, instructions, { input });
    if (max_tokens !== undefined) body.max_output_tokens = max_tokens;
    if (tools !== undefined) body.tools = tools.map((tool) => ({ type: "function", ...tool.function }));
    if (response_format !== undefined) body.text = { format: { type: "json_schema", ...response_format.json_schema } };
    return { body, sdk: "OpenAI", create: "responses", reply: ".output" };
  },
  "/messages": ({ messages, max_tokens, logprobs, top_logprobs, response_format, tools, ...body }) => {
    const [{ instructions: system }, rest] = withoutSystem(messages);
    Object.assign(body, system === undefined ? {} : { system }, { messages: rest, max_tokens: max_tokens ?? 1024 });
    if (tools !== undefined) {
      body.tools = tools.map(({ function: { name, description, parameters } }) => ({
        name, description, input_schema: parameters ?? { type: "object" },
      }));
    }
    return { body, sdk: "Anthropic", create: "messages", reply: ".content" };
  },
};

function withoutSystem(messages) {
  const system = messages.filter((one) => one.role === "system").map((one) => one.content);
  const rest = messages.filter((one) => one.role !== "system").map(({ role, content }) => ({ role, content }));
  return [system.length === 0 ? {} : { instructions: system.join("\n") }, rest];
}

function showCode() {
  const path = document.getElementById("format").value;
  const asked = field("prompt").value || "Hello";
  const messages = [...talks[0].messages, { role: "user", content: asked }];
  const { body: sent, sdk, create, reply } = FORMATS[path](request(field("model0").value, messages));
  const base = sdk === "OpenAI" ? `${location.origin}/v1` : location.origin; // each SDK adds the rest of the path
  const json = JSON.stringify(sent, null, 2);
  const body = JSON.parse(json); // without members that are undefined
  document.getElementById("curl").textContent =
    `curl ${location.origin}/v1${path} -H "Authorization: Bearer $API_KEY" -H "Content-Type: application/json" ` +
    `-d '${json.replaceAll("'", "'\\''")}'`;
  document.getElementById("python").textContent =
    `from ${sdk.toLowerCase()} import ${sdk}\nclient = ${sdk}(base_url="${base}", api_key="API_KEY")\n` +
    `print(client.${create}.create(**${python(body)})${reply})`;
  document.getElementById("node").textContent =
    `import ${sdk} from "${sdk === "OpenAI" ? "openai" : "@anthropic-ai/sdk"}";\n` +
    `const client = new ${sdk}({ baseURL: "${base}", apiKey: "API_KEY" });\n` +
    `console.log((await client.${create}.create(${json}))${reply});`;
}

async function showTemperatures() {
  const list = document.getElementById("temperatures");
  const model = await (await call(`/v1/models/${encodeURIComponent(field("model0").value)}`)).json();
  list.replaceChildren(
    ...Object.entries(model.recommended_temperatures).map(([use, value]) => new Option(use.replaceAll("_", " "), value)),
  );
}

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  const text = field("prompt").value;
  if (text.trim() === "" || talks.some((talk) => talk.stop !== null)) return;
  try {
    request(field("model0").value, []); // tools and schema must be JSON
  } catch (error) {
    document.getElementById("problem").textContent = error.message;
    return;
  }
  document.getElementById("problem").textContent = "";
  field("prompt").value = "";
  await Promise.all(chosen().map(([talk, model]) => turn(talk, model, text)));
  await showTemperatures().catch(() => null);
});
field("stop").addEventListener("click", () => talks.forEach((talk) => talk.stop?.abort()));
field("clear").addEventListener("click", () => {
  for (const talk of talks) {
    talk.stop?.abort();
    talk.messages = [];
    talk.place.querySelector(".said").replaceChildren();
  }
});
field("second").addEventListener("change", () => {
  talks[1].place.hidden = field("model1").parentElement.hidden = !field("second").checked;
});
field("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
});
function refreshCode() {
  try {
    showCode();
  } catch (error) {
    document.getElementById("problem").textContent = error.message;
  }
}
document.getElementById("code").addEventListener("toggle", refreshCode);
document.getElementById("format").addEventListener("change", refreshCode);
