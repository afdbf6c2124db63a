// The Vercel AI SDK against a Lacuna server: `node ai_client.cjs URL`, with NODE_PATH where it is installed.
//
// The provider of OpenAI speaks Responses unless it is told to chat. Prints a line for each, `{name: [what works]}`, and
// exits with 0 if everything is as the SDK's users expect.

const assert = require("node:assert/strict");
const { createOpenAI } = require("@ai-sdk/openai");
const { APICallError, Output, generateText, stepCountIs, streamText, tool } = require("ai");
const { z } = require("zod");

const PROMPT = "What is ownership?";
const settings = (model) => ({ model, prompt: PROMPT, maxOutputTokens: 24, temperature: 0, maxRetries: 0 });

async function whole(model) {
  const { text, usage, finishReason } = await generateText(settings(model));
  assert.ok(text);
  assert.equal(usage.outputTokens, 24);
  assert.equal(finishReason, "length");
}

async function stream(model) {
  const { text: expected } = await generateText(settings(model));
  const pieces = [];
  const reply = streamText(settings(model));
  for await (const piece of reply.textStream) pieces.push(piece);
  assert.equal(pieces.join(""), expected);
  assert.ok(pieces.length > 8, "the reply comes in pieces");
}

async function tools(model) {
  const asked = [];
  const weather = tool({
    description: "The weather in a city.",
    inputSchema: z.object({ city: z.enum(["Rome", "Paris"]) }),
    execute: async ({ city }) => {
      asked.push(city);
      return "Sunny.";
    },
  });
  const { steps } = await generateText({
    ...settings(model),
    prompt: "What is the weather in Rome?",
    tools: { weather },
    maxOutputTokens: 128,
    stopWhen: stepCountIs(2),
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
  });
  assert.equal(steps.length, 2, "the call, and what the model makes of its result");
  assert.ok(asked.length > 0 && ["Rome", "Paris"].includes(asked[0]));
}

async function structured(model) {
  const schema = z.object({ word: z.enum(["yes", "no"]), sure: z.boolean() });
  const { output } = await generateText({
    ...settings(model),
    maxOutputTokens: 64,
    output: Output.object({ schema }),
  });
  schema.parse(output);
}

async function errors(model) {
  const refused = generateText({ ...settings(model), topP: 7 });
  await assert.rejects(refused, (error) => APICallError.isInstance(error) && error.statusCode === 400);
}

async function main() {
  const openai = createOpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none" });
  const features = [whole, stream, tools, structured, errors];
  for (const [name, model] of [["ai", openai("demo")], ["ai (chat)", openai.chat("demo")]]) {
    for (const feature of features) await feature(model);
    console.log(JSON.stringify({ [name]: features.map((feature) => feature.name) }));
  }
}

main();
