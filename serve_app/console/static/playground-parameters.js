// Reads the side panel into fields of a chat request, and shows errors at their fields.

const JSON_KINDS = {
  object: (value) => isObject(value) || "Enter a JSON object, such as {\"name\": 1}.",
  tools: checkTools,
  schema: (value) => isObject(value) || "Enter a JSON Schema, which is an object.",
};

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

function checkTools(tools) {
  if (!Array.isArray(tools)) return "Enter a JSON array of tools.";
  const names = new Set();
  for (const [number, tool] of tools.entries()) {
    const at = `Tool ${number + 1}`;
    if (!isObject(tool) || tool.type !== "function" || !isObject(tool.function)) {
      return `${at}: expected {"type": "function", "function": {…}}.`;
    }
    const { name, parameters } = tool.function;
    if (typeof name !== "string" || !/^[A-Za-z0-9_-]{1,64}$/.test(name)) {
      return `${at}: the function's name has 1 to 64 letters, digits, "_" or "-".`;
    }
    if (names.has(name)) return `${at}: the name ${name} is used twice.`;
    if (parameters !== undefined && !isObject(parameters)) return `${at}: "parameters" is a JSON Schema, an object.`;
    names.add(name);
  }
  return true;
}

const lines = (text) => text.split("\n").filter((line) => line !== "");

function parseJson(text, kind) {
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new Error(`This is not valid JSON: ${error.message}`);
  }
  const verdict = JSON_KINDS[kind](value);
  if (verdict !== true) throw new Error(verdict);
  return value;
}

function parse(kind, text) {
  switch (kind) {
    case "integer":
    case "number": {
      const value = Number(text);
      if (Number.isNaN(value) || (kind === "integer" && !Number.isInteger(value))) {
        throw new Error(kind === "integer" ? "Enter a whole number." : "Enter a number.");
      }
      return value;
    }
    case "integers":
      return lines(text).map((line) => {
        if (!/^\d+$/.test(line.trim())) throw new Error("Enter one whole number per line.");
        return Number(line);
      });
    case "lines":
      return lines(text);
    case "object":
    case "tools":
    case "schema":
      return parseJson(text, kind);
    default:
      return text;
  }
}

// Returns the value of a field, undefined if it is not set. Throws an Error whose `field` is the element.
export function valueOf(field) {
  if (field.type === "checkbox") return field.checked || undefined;
  if (field.value.trim() === "") return undefined;
  try {
    const value = parse(field.dataset.kind, field.value);
    if (typeof value === "number") {
      const [low, high] = [field.min, field.max].map((bound) => (bound === "" ? null : Number(bound)));
      if (low !== null && value < low) throw new Error(`The minimum is ${low}.`);
      if (high !== null && value > high) throw new Error(`The maximum is ${high}.`);
    }
    return value;
  } catch (error) {
    throw Object.assign(error, { field });
  }
}

// Shows whether a field is valid. Returns whether it is.
export function validate(field) {
  const problem = document.getElementById(`${field.id}-error`);
  try {
    valueOf(field);
    field.classList.remove("is-invalid");
    field.removeAttribute("aria-invalid");
    if (problem) problem.textContent = "";
    return true;
  } catch (error) {
    field.classList.add("is-invalid");
    field.setAttribute("aria-invalid", "true");
    if (problem) problem.textContent = error.message;
    return false;
  }
}

export const parameterFields = (form) => [...form.querySelectorAll("[data-kind]")];

// Returns the fields of a chat request that the panel sets. Throws if one is not valid.
export function readParameters(form) {
  const body = {};
  const named = (name) => form.elements[name];
  for (const field of form.querySelectorAll("[data-parameter]")) {
    const value = valueOf(field);
    if (value !== undefined) body[field.dataset.parameter] = value;
  }
  const tools = valueOf(named("tools"));
  if (tools?.length) {
    body.tools = tools;
    if (named("tool_choice").value) body.tool_choice = named("tool_choice").value;
    if (named("one_call").checked) body.parallel_tool_calls = false;
  }
  const format = named("reply_format").value;
  if (format === "json_object") body.response_format = { type: "json_object" };
  if (format === "json_schema") {
    const schema = valueOf(named("schema"));
    if (schema === undefined) throw Object.assign(new Error("Enter the JSON Schema of the reply."), { field: named("schema") });
    body.response_format = { type: "json_schema", json_schema: { name: "reply", schema, strict: true } };
  }
  if (format === "guided_regex" && named("guided_regex").value) body.guided_regex = named("guided_regex").value;
  if (format === "guided_choice") body.guided_choice = lines(named("guided_choice").value);
  if (named("logprobs").checked) Object.assign(body, { logprobs: true, top_logprobs: Number(named("top_logprobs").value) });
  return body;
}
