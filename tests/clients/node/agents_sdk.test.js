// OpenAI's Agents SDK for Node with its defaults, which is the Responses format, against the service that the
// environment names: SERVICE_URL, SERVICE_KEY. The service's model is scripted to do what a capable one would.
import assert from "node:assert/strict";
import { test } from "node:test";
import { Agent, run, setDefaultOpenAIClient, setTracingDisabled, tool } from "@openai/agents";
import OpenAI from "openai";
import { z } from "zod";

setTracingDisabled(true);
setDefaultOpenAIClient(new OpenAI({ apiKey: process.env.SERVICE_KEY, baseURL: process.env.SERVICE_URL, maxRetries: 0 }));
const weather = tool({
  name: "get_weather",
  description: "The weather in a city.",
  parameters: z.object({ city: z.string() }),
  execute: async ({ city }) => `sunny in ${city}.`,
});
const helper = new Agent({ name: "Helper", instructions: "Be short.", model: "svc-chat", tools: [weather] });
const asked = "What is the weather in Paris?";

test("a tool is called and its result answers", async () => {
  assert.equal((await run(helper, asked)).finalOutput, "The answer is sunny in Paris.");
});

test("a streamed run tells its text in pieces", async () => {
  const result = await run(helper, asked, { stream: true });
  const pieces = [];
  for await (const piece of result.toTextStream()) pieces.push(piece);
  assert.equal(pieces.join(""), "The answer is sunny in Paris.");
  assert.ok(pieces.length > 1);
});

test("an agent hands off to another", async () => {
  const spanish = new Agent({ name: "Spanish", instructions: "Speak Spanish.", model: "svc-chat" });
  const triage = Agent.create({ name: "Triage", instructions: "Hand off.", model: "svc-chat", handoffs: [spanish] });
  const result = await run(triage, "Hola");
  assert.equal(result.lastAgent.name, "Spanish");
  assert.ok(result.finalOutput);
});
