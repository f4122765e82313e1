// requires: ai@7.0.173 @ai-sdk/openai-compatible@3.0.92 zod@4.6.7
// Vercel's AI SDK with its OpenAI-compatible provider: text, streams, objects, tools, errors.

import assert from "node:assert/strict";
import { test } from "node:test";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, streamText, tool } from "ai";
import { z } from "zod";

const provider = createOpenAICompatible({
  name: "tercet",
  baseURL: `${process.env.TERCET_URL}/v1`,
  apiKey: "-",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const model = provider(process.env.TERCET_MODEL);
const given = { model, prompt: "Ada is 36 years old. Who is it?", temperature: 0, maxOutputTokens: 60, maxRetries: 0 };
const schema = z.object({ name: z.string().max(20), age: z.number().int() });
const tools = {
  weather: tool({
    description: "The weather in a city",
    inputSchema: z.object({ city: z.string().max(20) }),
    execute: async ({ city }) => `sunny in ${city}`,
  }),
};

test("text", async () => {
  const answer = await generateText(given);
  assert.ok(answer.text);
  assert.ok(answer.usage.outputTokens > 0);
});

test("a stream has the same text", async () => {
  const stream = streamText(given);
  let text = "";
  for await (const part of stream.textStream) text += part;
  assert.equal(text, (await generateText(given)).text);
  assert.ok((await stream.usage).outputTokens > 0);
});

test("text of the completions endpoint", async () => {
  const answer = await generateText({ ...given, model: provider.completionModel(process.env.TERCET_MODEL) });
  assert.ok(answer.text);
});

test("an object", async () => {
  const answer = await generateText({ ...given, output: Output.object({ schema }) });
  assert.ok(schema.parse(answer.output));
});

test("an object that grows", async () => {
  const stream = streamText({ ...given, output: Output.object({ schema }) });
  const parts = [];
  for await (const part of stream.partialOutputStream) parts.push(part);
  assert.ok(schema.parse(parts.at(-1)));
});

test("a required tool call", async () => {
  // A small model repeats its call up to the limit, and the SDK runs no tool of an answer that was cut.
  const providerOptions = { tercet: { parallel_tool_calls: false } };
  const answer = await generateText({ ...given, tools, toolChoice: "required", providerOptions });
  assert.equal(answer.toolCalls[0].toolName, "weather");
  assert.match(answer.toolResults[0].output, /^sunny in/);
});

test("an error", async () => {
  const wrong = generateText({ ...given, model: provider("no-such-model") });
  await assert.rejects(wrong, (error) => error.statusCode === 404);
});
