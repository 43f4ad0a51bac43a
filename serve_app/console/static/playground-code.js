// Writes the page's request as code for each endpoint: curl, Python and Node.

// Fields that the chat format and text completions share.
const OF_COMPLETIONS = [
  "temperature", "top_p", "max_tokens", "stop", "seed", "frequency_penalty", "presence_penalty", "logit_bias",
  "response_format", "guided_regex", "guided_choice", "top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos",
  "stop_token_ids", "include_stop_str_in_output",
];
// Fields that the OpenAI SDK does not know: it sends them from `extra_body`.
const EXTENSIONS = [
  "top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids", "include_stop_str_in_output",
  "guided_regex", "guided_choice", "chat_template_kwargs",
];

const picked = (body, names) =>
  Object.fromEntries(names.filter((name) => body[name] !== undefined).map((name) => [name, body[name]]));

// Separates the system message from the others.
function split(messages) {
  const system = messages.filter((one) => one.role === "system").map((one) => one.content);
  return [system.length ? system.join("\n") : undefined, messages.filter((one) => one.role !== "system")];
}

// A request of the chat format in the format of each endpoint, and how an SDK sends it.
const FORMATS = {
  "/chat/completions": (body) => ({ body, sdk: "OpenAI", create: "chat.completions", reply: ".choices[0].message" }),
  "/responses": (chat) => {
    const [instructions, rest] = split(chat.messages);
    const input = rest.flatMap((one) => {
      if (one.role === "tool") return [{ type: "function_call_output", call_id: one.tool_call_id, output: one.content }];
      const calls = (one.tool_calls ?? []).map((call) => ({ type: "function_call", call_id: call.id, ...call.function }));
      return [...(one.content ? [{ role: one.role, content: one.content }] : []), ...calls];
    });
    const body = { model: chat.model, instructions, input, ...picked(chat, ["temperature", "top_p"]) };
    if (chat.max_tokens !== undefined) body.max_output_tokens = chat.max_tokens;
    if (chat.reasoning_effort !== undefined) body.reasoning = { effort: chat.reasoning_effort };
    if (chat.tools !== undefined) body.tools = chat.tools.map((tool) => ({ type: "function", ...tool.function }));
    if (typeof chat.tool_choice === "string") body.tool_choice = chat.tool_choice;
    if (chat.parallel_tool_calls === false) body.parallel_tool_calls = false;
    const format = chat.response_format;
    if (format?.type === "json_schema") body.text = { format: { type: "json_schema", ...format.json_schema } };
    if (format?.type === "json_object") body.text = { format: { type: "json_object" } };
    return { body, sdk: "OpenAI", create: "responses", reply: ".output" };
  },
  "/messages": (chat) => {
    const [system, rest] = split(chat.messages);
    const messages = [];
    for (const one of rest) {
      if (one.role === "tool") {
        const result = { type: "tool_result", tool_use_id: one.tool_call_id, content: one.content };
        const last = messages.at(-1);
        if (Array.isArray(last?.content) && last.role === "user") last.content.push(result);
        else messages.push({ role: "user", content: [result] });
      } else if (one.tool_calls) {
        const uses = one.tool_calls.map((call) => ({
          type: "tool_use", id: call.id, name: call.function.name, input: JSON.parse(call.function.arguments || "{}"),
        }));
        messages.push({ role: one.role, content: [...(one.content ? [{ type: "text", text: one.content }] : []), ...uses] });
      } else messages.push({ role: one.role, content: one.content });
    }
    const body = { model: chat.model, max_tokens: chat.max_tokens ?? 1024, system, messages };
    Object.assign(body, picked(chat, ["temperature", "top_p", "top_k"]));
    if (chat.stop !== undefined) body.stop_sequences = chat.stop;
    if (chat.tools !== undefined) {
      body.tools = chat.tools.map(({ function: { name, description, parameters } }) => ({
        name, description, input_schema: parameters ?? { type: "object" },
      }));
    }
    const choices = { auto: "auto", required: "any", none: "none" };
    if (choices[chat.tool_choice]) body.tool_choice = { type: choices[chat.tool_choice] };
    const schema = chat.response_format?.json_schema?.schema;
    if (schema !== undefined) body.output_config = { format: { type: "json_schema", schema } };
    return { body, sdk: "Anthropic", create: "messages", reply: ".content" };
  },
  "/completions": (chat) => {
    const prompt = chat.messages.map((one) => one.content).filter(Boolean).join("\n\n");
    const body = { model: chat.model, prompt, ...picked(chat, OF_COMPLETIONS) };
    return { body, sdk: "OpenAI", create: "completions", reply: ".choices[0].text" };
  },
};

function python(value, indent = "") {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const deeper = `${indent}    `;
  const items = Array.isArray(value)
    ? value.map((one) => `${deeper}${python(one, deeper)},`)
    : Object.entries(value).map(([name, one]) => `${deeper}${JSON.stringify(name)}: ${python(one, deeper)},`);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  return items.length ? `${open}\n${items.join("\n")}\n${indent}${close}` : open + close;
}

// Returns the code of a chat request by language.
export function codeOf(path, chat, origin) {
  const { body: made, sdk, create, reply } = FORMATS[path](chat);
  const body = JSON.parse(JSON.stringify(made)); // without members that are undefined
  const json = JSON.stringify(body, null, 2);
  const base = sdk === "OpenAI" ? `${origin}/v1` : origin; // each SDK adds the rest of the path
  const more = sdk === "OpenAI" ? picked(body, EXTENSIONS) : {};
  const known = Object.fromEntries(Object.entries(body).filter(([name]) => !(name in more)));
  if (Object.keys(more).length) known.extra_body = more;
  const keywords = Object.entries(known).map(([name, value]) => `    ${name}=${python(value, "    ")},`);
  const version = sdk === "Anthropic" ? ` \\\n  -H "anthropic-version: 2023-06-01"` : "";
  return {
    curl:
      `curl ${origin}/v1${path} \\\n  -H "Authorization: Bearer $API_KEY"${version} \\\n` +
      `  -H "Content-Type: application/json" \\\n  -d '${json.replaceAll("'", "'\\''")}'`,
    python:
      `import os\n\nfrom ${sdk.toLowerCase()} import ${sdk}\n\n` +
      `client = ${sdk}(base_url="${base}", api_key=os.environ["API_KEY"])\n` +
      `reply = client.${create}.create(\n${keywords.join("\n")}\n)\nprint(reply${reply})`,
    node:
      `import ${sdk} from "${sdk === "OpenAI" ? "openai" : "@anthropic-ai/sdk"}";\n\n` +
      `const client = new ${sdk}({ baseURL: "${base}", apiKey: process.env.API_KEY });\n` +
      `const reply = await client.${create}.create(${json});\nconsole.log(reply${reply});`,
  };
}
