// The core cases of tests/clients/test_openai_*.py with OpenAI's Node SDK, against the service that the environment
// names: SERVICE_URL, SERVICE_KEY, EMPTY_KEY (no balance), SLOW_KEY (one request a minute), OPENAI_PACKAGE.
import assert from "node:assert/strict";
import { test } from "node:test";
import { z } from "zod";

const name = process.env.OPENAI_PACKAGE ?? "openai";
const { default: OpenAI } = await import(name);
const { zodFunction, zodResponseFormat } = await import(`${name}/helpers/zod`);

const connect = (apiKey = process.env.SERVICE_KEY, more = {}) =>
  new OpenAI({ apiKey, baseURL: process.env.SERVICE_URL, maxRetries: 0, timeout: 60_000, ...more });
const client = connect();
const messages = [{ role: "user", content: "Name the capital of France." }];
const plain = { model: "svc-chat", messages, temperature: 0 };

const Weather = z.object({ city: z.enum(["Paris", "Rome"]), days: z.literal([1, 2, 3]) });
const weather = {
  type: "function",
  function: { name: "get_weather", description: "The weather.", strict: true, parameters: z.toJSONSchema(Weather) },
};
const weatherAlone = { type: "function", function: { name: "get_weather" } };

async function refusal(promise) {
  try {
    await promise;
  } catch (error) {
    return error;
  }
  assert.fail("nothing was refused");
}

test("a reply", async () => {
  const reply = await client.chat.completions.create({ ...plain, user: "ada", metadata: { a: "b" }, stop: null });
  assert.equal(reply.object, "chat.completion");
  assert.equal(reply.model, "svc-chat");
  assert.ok(reply.choices[0].message.content);
  assert.equal(reply.choices[0].finish_reason, "stop");
  assert.ok(reply.system_fingerprint);
  assert.equal(reply.usage.total_tokens, reply.usage.prompt_tokens + reply.usage.completion_tokens);
  assert.ok(reply._request_id);
});

test("a stream, with usage at its end", async () => {
  const stream = await client.chat.completions.create({
    ...plain,
    stream: true,
    stream_options: { include_usage: true },
  });
  let text = "";
  const chunks = [];
  for await (const chunk of stream) {
    chunks.push(chunk);
    text += chunk.choices[0]?.delta.content ?? "";
  }
  assert.ok(text);
  assert.equal(chunks[0].choices[0].delta.role, "assistant");
  assert.deepEqual(chunks.at(-1).choices, []);
  assert.ok(chunks.at(-1).usage.completion_tokens > 0);
  assert.equal(chunks.at(-2).choices[0].finish_reason, "stop");
  assert.equal(new Set(chunks.map((chunk) => chunk.id)).size, 1);
});

test("several choices, and a seed that gives the same ones again", async () => {
  const ask = { ...plain, temperature: 1.2, n: 3, seed: 7, max_completion_tokens: 8 };
  const [first, again] = [await client.chat.completions.create(ask), await client.chat.completions.create(ask)];
  const texts = (reply) => reply.choices.map((choice) => choice.message.content);
  assert.deepEqual(first.choices.map((choice) => choice.index), [0, 1, 2]);
  assert.deepEqual(texts(first), texts(again));
});

test("log-probabilities, with the bytes of the text", async () => {
  const reply = await client.chat.completions.create({ ...plain, logprobs: true, top_logprobs: 2, max_tokens: 4 });
  const tokens = reply.choices[0].logprobs.content;
  assert.equal(tokens.length, 4);
  const bytes = Uint8Array.from(tokens.flatMap((token) => token.bytes));
  // An unfinished character at the end is left out, as in a reply.
  assert.equal(new TextDecoder().decode(bytes, { stream: true }), reply.choices[0].message.content);
  assert.ok(tokens.every((token) => token.top_logprobs.length === 2 && token.logprob <= 0));
});

test("fields beyond the SDK's own, and parts, a developer, a stop string", async () => {
  const reply = await client.chat.completions.create({
    ...plain,
    messages: [
      { role: "developer", content: "Be short.", name: "rules" },
      { role: "user", content: [{ type: "text", text: "Name the capital of France." }] },
      { role: "assistant", content: "The capital of France is", prefix: true },
    ],
    top_k: 1,
    stop: ["."],
  });
  assert.doesNotMatch(reply.choices[0].message.content, /\./);
  assert.equal(reply.choices[0].finish_reason, "stop");
});

test("an object of the schema that was asked for", async () => {
  const Answer = z.object({ capital: z.enum(["Paris", "Rome"]), sure: z.boolean() });
  const reply = await client.chat.completions.parse({
    ...plain,
    response_format: zodResponseFormat(Answer, "answer"),
  });
  assert.ok(Answer.parse(reply.choices[0].message.parsed));
});

test("a call, streamed, and its result sent back", async () => {
  const asked = [{ role: "user", content: "What is the weather in Paris?" }];
  const stream = client.chat.completions.stream({
    ...plain,
    messages: asked,
    tools: [weather],
    tool_choice: weatherAlone,
  });
  const pieces = [];
  stream.on("tool_calls.function.arguments.delta", (event) => pieces.push(event.arguments_delta));
  const first = await stream.finalChatCompletion();
  assert.equal(first.choices[0].finish_reason, "tool_calls");
  const [call] = first.choices[0].message.tool_calls;
  assert.equal(call.function.name, "get_weather");
  assert.equal(pieces.join(""), call.function.arguments);
  Weather.parse(JSON.parse(call.function.arguments));
  const last = await client.chat.completions.create({
    ...plain,
    messages: [...asked, first.choices[0].message, { role: "tool", tool_call_id: call.id, content: "Sunny." }],
    tools: [weather],
    tool_choice: "none",
    max_tokens: 20,
  });
  assert.ok(last.choices[0].message.content);
});

test("a required call of a zod function, parsed", async () => {
  const reply = await client.chat.completions.parse({
    ...plain,
    tools: [zodFunction({ name: "get_weather", parameters: Weather })],
    tool_choice: "required",
    parallel_tool_calls: false,
  });
  assert.ok(Weather.parse(reply.choices[0].message.tool_calls[0].function.parsed_arguments));
});

test("tools that are run until there is an answer", async () => {
  const cities = [];
  const runner = client.chat.completions.runTools({
    ...plain,
    max_tokens: 40,
    tools: [
      {
        type: "function",
        function: {
          name: "get_weather",
          parameters: z.toJSONSchema(Weather),
          parse: JSON.parse,
          function: ({ city }) => cities.push(city) && "Sunny.",
        },
      },
    ],
    tool_choice: weatherAlone,
  });
  await runner.done();
  assert.equal(cities.length, 1); // a named function is called once, and its result is where the runner ends
});

test("refusals, each of its class", async () => {
  const cases = [
    [{ temperature: "hot" }, OpenAI.BadRequestError, 400, "invalid_format", "temperature"],
    [{ temperature: 3 }, OpenAI.UnprocessableEntityError, 422, "invalid_parameter", "temperature"],
    [{ model: "gpt-4" }, OpenAI.UnprocessableEntityError, 422, "model_not_found", "model"],
  ];
  for (const [fields, kind, status, code, param] of cases) {
    for (const stream of [false, true]) {
      const error = await refusal(client.chat.completions.create({ ...plain, ...fields, stream }));
      assert.ok(error instanceof kind);
      assert.deepEqual([error.status, error.code, error.param], [status, code, param]);
      assert.ok(error.requestID);
    }
  }
  assert.ok((await refusal(connect("sk-nonsense").models.list())) instanceof OpenAI.AuthenticationError);
  assert.ok((await refusal(client.models.retrieve("gpt-4"))) instanceof OpenAI.NotFoundError);
  const empty = await refusal(connect(process.env.EMPTY_KEY, { maxRetries: 2 }).chat.completions.create(plain));
  assert.deepEqual([empty.status, empty.code], [402, "insufficient_balance"]);
  const slow = connect(process.env.SLOW_KEY);
  await slow.chat.completions.create({ ...plain, max_tokens: 1 });
  const limited = await refusal(slow.chat.completions.create(plain));
  assert.ok(limited instanceof OpenAI.RateLimitError);
  assert.ok(Number(limited.headers.get("retry-after-ms")) > 0);
});

test("the models", async () => {
  const found = [];
  for await (const model of client.models.list()) found.push(model.id);
  assert.deepEqual(found.slice(0, 2), ["svc-chat", "svc-coder"]);
  assert.equal((await client.models.retrieve("svc-chat")).context_length, 32768);
});

test("a stream that is left, and a request that is given up", async () => {
  const forever = { ...plain, ignore_eos: true };
  const stream = await client.chat.completions.create({ ...forever, stream: true });
  let seen = 0;
  for await (const _ of stream) if (++seen === 3) break;
  const error = await refusal(connect(undefined, { timeout: 300 }).chat.completions.create(forever));
  assert.ok(error instanceof OpenAI.APIConnectionTimeoutError);
});

test("a raw answer", async () => {
  const { data, response } = await client.chat.completions
    .create({ ...plain, max_tokens: 1 }, { headers: { "x-request-id": "mine-2" } })
    .withResponse();
  assert.equal(response.headers.get("x-request-id"), "mine-2");
  assert.ok(response.headers.get("x-ratelimit-remaining-requests"));
  assert.equal(data.choices[0].finish_reason, "length");
});
