// The core cases of tests/clients/test_formats.py with the Node SDKs of OpenAI and Anthropic, against the service that
// the environment names: SERVICE_URL, SERVICE_KEY, EMPTY_KEY (no balance), SLOW_KEY (one request a minute).
import assert from "node:assert/strict";
import { test } from "node:test";
import Anthropic from "@anthropic-ai/sdk";
import OpenAI from "openai";
import { zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const options = { maxRetries: 0, timeout: 60_000 };
const openai = (apiKey = process.env.SERVICE_KEY) =>
  new OpenAI({ apiKey, baseURL: process.env.SERVICE_URL, ...options });
const anthropic = (apiKey = process.env.SERVICE_KEY) =>
  new Anthropic({ apiKey, baseURL: process.env.SERVICE_URL.replace(/\/v1$/, ""), ...options });

const question = "Name the capital of France.";
const asked = [{ role: "user", content: question }];
const ofResponses = { model: "svc-chat", input: question, temperature: 0, store: false };
const ofMessages = { model: "svc-chat", messages: asked, temperature: 0, max_tokens: 100 };
const Weather = z.object({ city: z.enum(["Paris", "Rome"]), days: z.literal([1, 2, 3]) });
const schema = z.toJSONSchema(Weather);
const weather = [{ role: "user", content: "What is the weather in Paris?" }];

async function refusal(promise) {
  try {
    await promise;
  } catch (error) {
    return error;
  }
  assert.fail("nothing was refused");
}

async function ofChat() {
  const reply = await openai().chat.completions.create({ model: "svc-chat", messages: asked, temperature: 0 });
  return [reply.choices[0].message.content, reply.usage.prompt_tokens, reply.usage.completion_tokens];
}

test("Responses: the chat format's reply, and its counts", async () => {
  const reply = await openai().responses.create(ofResponses);
  assert.equal(reply.status, "completed");
  assert.deepEqual([reply.output_text, reply.usage.input_tokens, reply.usage.output_tokens], await ofChat());
});

test("Responses: a stream, by the SDK's own helper", async () => {
  const stream = openai().responses.stream(ofResponses);
  let text = "";
  const numbers = [];
  stream.on("event", (event) => numbers.push(event.sequence_number));
  stream.on("response.output_text.delta", (event) => (text += event.delta));
  const reply = await stream.finalResponse();
  assert.equal(text, reply.output_text);
  assert.deepEqual(numbers, [...numbers.keys()]);
  assert.deepEqual([text, reply.usage.input_tokens, reply.usage.output_tokens], await ofChat());
});

test("Responses: a call, streamed, and its result sent back", async () => {
  const tools = [{ type: "function", name: "get_weather", strict: true, parameters: schema }];
  const ask = { ...ofResponses, input: weather, tools };
  const stream = openai().responses.stream({ ...ask, tool_choice: { type: "function", name: "get_weather" } });
  const { output } = await stream.finalResponse();
  const call = output.find((item) => item.type === "function_call");
  assert.ok(Weather.parse(JSON.parse(call.arguments)));
  const result = { type: "function_call_output", call_id: call.call_id, output: "Sunny." };
  const last = await openai().responses.create({ ...ask, input: [...weather, ...output, result], tool_choice: "none" });
  assert.ok(last.output_text);
});

test("Responses: an object of the schema that was asked for", async () => {
  const reply = await openai().responses.parse({
    ...ofResponses,
    temperature: 1.2,
    text: { format: zodTextFormat(Weather, "weather") },
  });
  assert.ok(Weather.parse(reply.output_parsed));
});

test("Responses: refusals, each of its class", async () => {
  const wrong = await refusal(openai().responses.create({ ...ofResponses, temperature: "hot" }));
  assert.ok(wrong instanceof OpenAI.BadRequestError);
  assert.equal(wrong.param, "temperature");
  const nobody = await refusal(openai("sk-nonsense").responses.create(ofResponses));
  assert.ok(nobody instanceof OpenAI.AuthenticationError);
  assert.equal((await refusal(openai(process.env.EMPTY_KEY).responses.create(ofResponses))).status, 402);
});

test("Completions: whole and streamed", async () => {
  const ask = { model: "svc-chat", prompt: "The capital of France is", temperature: 0, max_tokens: 8 };
  const whole = await openai().completions.create(ask);
  let text = "";
  const stream = await openai().completions.create({ ...ask, stream: true, stream_options: { include_usage: true } });
  let usage;
  for await (const chunk of stream) {
    text += chunk.choices[0]?.text ?? "";
    usage = chunk.usage ?? usage;
  }
  assert.equal(text, whole.choices[0].text);
  assert.deepEqual(usage, whole.usage);
});

test("Messages: the chat format's reply, and its counts", async () => {
  const reply = await anthropic().messages.create(ofMessages);
  assert.equal(reply.stop_reason, "end_turn");
  const { input_tokens, cache_read_input_tokens, output_tokens } = reply.usage;
  assert.deepEqual([reply.content[0].text, input_tokens + cache_read_input_tokens, output_tokens], await ofChat());
  const { input_tokens: counted } = await anthropic().messages.countTokens({ model: "svc-chat", messages: asked });
  assert.equal(counted, input_tokens + cache_read_input_tokens);
});

test("Messages: a stream, by the SDK's own helper", async () => {
  const stream = anthropic().messages.stream(ofMessages);
  let text = "";
  stream.on("text", (piece) => (text += piece));
  const message = await stream.finalMessage();
  const { input_tokens, cache_read_input_tokens, output_tokens } = message.usage;
  assert.equal(text, message.content[0].text);
  assert.deepEqual([text, input_tokens + cache_read_input_tokens, output_tokens], await ofChat());
});

test("Messages: a call, streamed, and its result sent back", async () => {
  const tools = [{ name: "get_weather", description: "The weather.", input_schema: schema, strict: true }];
  const ask = { ...ofMessages, messages: weather, tools };
  const stream = anthropic().messages.stream({ ...ask, tool_choice: { type: "tool", name: "get_weather" } });
  const called = await stream.finalMessage();
  assert.equal(called.stop_reason, "tool_use");
  const call = called.content.find((block) => block.type === "tool_use");
  assert.ok(Weather.parse(call.input));
  const messages = [
    ...weather,
    { role: "assistant", content: called.content },
    { role: "user", content: [{ type: "tool_result", tool_use_id: call.id, content: "Sunny." }] },
  ];
  const last = await anthropic().messages.create({ ...ask, messages, tool_choice: { type: "none" } });
  assert.ok(last.content[0].text);
});

test("Messages: refusals, each of its class", async () => {
  const wrong = await refusal(anthropic().messages.create({ ...ofMessages, temperature: "hot" }));
  assert.ok(wrong instanceof Anthropic.BadRequestError);
  assert.equal(wrong.error.error.type, "invalid_request_error");
  const nobody = await refusal(anthropic("sk-nonsense").messages.create(ofMessages));
  assert.ok(nobody instanceof Anthropic.AuthenticationError);
  assert.ok(nobody.requestID);
  const empty = await refusal(anthropic(process.env.EMPTY_KEY).messages.create(ofMessages));
  assert.deepEqual([empty.status, empty.error.error.type], [402, "billing_error"]);
  const slow = anthropic(process.env.SLOW_KEY);
  await slow.messages.create({ ...ofMessages, max_tokens: 1 });
  assert.ok((await refusal(slow.messages.create(ofMessages))) instanceof Anthropic.RateLimitError);
});
