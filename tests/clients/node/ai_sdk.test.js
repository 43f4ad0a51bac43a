// The AI SDK with each of its providers for this service, against the service that the environment names: SERVICE_URL,
// SERVICE_KEY. The service's model is scripted to do what a capable one would.
import assert from "node:assert/strict";
import { test } from "node:test";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

globalThis.AI_SDK_LOG_WARNINGS = false;
const settings = { baseURL: process.env.SERVICE_URL, apiKey: process.env.SERVICE_KEY };
const openai = createOpenAI(settings);
const compatible = createOpenAICompatible({
  ...settings,
  name: "service",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const models = {
  "openai()": openai("svc-chat"),
  "openai.chat()": openai.chat("svc-chat"),
  "openai-compatible": compatible("svc-chat"),
  "anthropic()": createAnthropic(settings)("svc-chat"),
};
const get_weather = tool({
  description: "The weather in a city.",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => `sunny in ${city}.`,
});
const asked = { system: "Be short.", prompt: "What is the weather in Paris?", maxRetries: 0 };
const loop = { tools: { get_weather }, stopWhen: stepCountIs(3) };

for (const [name, model] of Object.entries(models)) {
  test(`${name}: a tool is called and its result answers`, async () => {
    const reply = await generateText({ model, ...asked, ...loop });
    assert.equal(reply.text, "The answer is sunny in Paris.");
    assert.equal(reply.finishReason, "stop");
    assert.equal(reply.steps.length, 2);
    assert.ok(reply.usage.inputTokens > 0 && reply.usage.outputTokens > 0);
  });

  test(`${name}: the same, streamed`, async () => {
    const reply = streamText({ model, ...asked, ...loop, onError: ({ error }) => { throw error; } });
    const pieces = [];
    for await (const piece of reply.textStream) pieces.push(piece);
    assert.equal(pieces.join(""), "The answer is sunny in Paris.");
    assert.ok(pieces.length > 1);
    assert.equal(await reply.finishReason, "stop");
    const usage = await reply.usage;
    assert.ok(usage.inputTokens > 0 && usage.outputTokens > 0);
  });

  // openai() refers to the items of stored responses, unless told not to store.
  for (const store of name === "openai()" ? [true, false] : [true]) {
    test(`${name}: a second turn, store: ${store}`, async () => {
      const options = { model, ...loop, maxRetries: 0, providerOptions: { openai: { store } } };
      const first = { role: "user", content: "What is the weather in Paris?" };
      const { response } = await generateText({ ...options, messages: [first] });
      const messages = [first, ...response.messages, { role: "user", content: "And in Rome?" }];
      assert.equal((await generateText({ ...options, messages })).text, "The answer is sunny in Rome.");
    });

    test(`${name}: a turn after reasoning, store: ${store}`, async () => {
      const options = { model, maxRetries: 0, providerOptions: { openai: { store } } };
      const first = { role: "user", content: "Think: what is two times two?" };
      const { response, text } = await generateText({ ...options, messages: [first] });
      assert.equal(text, "4");
      const messages = [first, ...response.messages, { role: "user", content: "Name the capital of France." }];
      assert.equal((await generateText({ ...options, messages })).text, "The capital of France is Paris.");
    });
  }

  test(`${name}: an object of a schema`, async () => {
    const schema = z.object({ setup: z.string(), punchline: z.string() });
    const { object } = await generateObject({ model, schema, prompt: "Tell a joke.", maxRetries: 0 });
    assert.ok(schema.parse(object));
  });
}
