// requires: openai@7.57.0 zod@4.6.7
// The openai package of npm: chats, streams, errors, log probabilities, tools, schemas, responses.

import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const model = process.env.TERCET_MODEL;
const client = new OpenAI({ baseURL: `${process.env.TERCET_URL}/v1`, apiKey: "-", maxRetries: 0 });
const messages = [{ role: "user", content: "Name three colours." }];
const given = { model, messages, temperature: 0, max_tokens: 60 };
const Person = z.object({ name: z.string().max(20), age: z.number().int() });
const parameters = {
  type: "object",
  properties: { city: { type: "string", maxLength: 20 } },
  required: ["city"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "weather", parameters, strict: true } }];

test("models", async () => {
  assert.equal((await client.models.list()).data[0].id, model);
});

test("a chat and its stream are equal", async () => {
  const whole = await client.chat.completions.create(given);
  const stream = await client.chat.completions.create({ ...given, stream: true, stream_options: { include_usage: true } });
  let text = "";
  let usage;
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta.content ?? "";
    usage = chunk.usage ?? usage;
  }
  assert.equal(text, whole.choices[0].message.content);
  assert.equal(usage.completion_tokens, whole.usage.completion_tokens);
});

test("log probabilities", async () => {
  const answer = await client.chat.completions.create({ ...given, max_tokens: 3, logprobs: true, top_logprobs: 2 });
  assert.equal(answer.choices[0].logprobs.content[0].top_logprobs.length, 2);
});

test("a required tool call and its result", async () => {
  const answer = await client.chat.completions.create({ ...given, tools, tool_choice: "required" });
  const { message } = answer.choices[0];
  assert.deepEqual(Object.keys(JSON.parse(message.tool_calls[0].function.arguments)), ["city"]);
  const result = { role: "tool", tool_call_id: message.tool_calls[0].id, content: "sunny" };
  const again = await client.chat.completions.create({ ...given, messages: [...messages, message, result], tools });
  assert.ok(again.choices[0].finish_reason);
});

test("a required tool call, streamed", async () => {
  const stream = client.chat.completions.stream({ ...given, tools, tool_choice: "required" });
  const call = (await stream.finalChatCompletion()).choices[0].message.tool_calls[0];
  assert.deepEqual(Object.keys(JSON.parse(call.function.arguments)), ["city"]);
});

test("parse with a zod schema", async () => {
  const answer = await client.chat.completions.parse({ ...given, response_format: zodResponseFormat(Person, "person") });
  assert.ok(Person.parse(answer.choices[0].message.parsed));
});

test("a response and its stream", async () => {
  const asked = { model, input: "Hello!", max_output_tokens: 24, temperature: 0 };
  const whole = await client.responses.create(asked);
  let text = "";
  for await (const event of await client.responses.create({ ...asked, stream: true })) {
    if (event.type === "response.output_text.delta") text += event.delta;
  }
  assert.equal(text, whole.output_text);
});

test("errors", async () => {
  await assert.rejects(client.chat.completions.create({ ...given, temperature: -1 }), OpenAI.BadRequestError);
  await assert.rejects(client.chat.completions.create({ ...given, model: "no-such-model" }), OpenAI.NotFoundError);
});

test("an aborted stream", async () => {
  const stream = await client.chat.completions.create({ ...given, max_tokens: 4000, stream: true });
  for await (const chunk of stream) if (chunk) break;
  assert.ok(stream.controller.signal.aborted);
});
