// The stock `openai` package for JavaScript: `npm install openai`, then
// `node ask_openai.mjs "What does the deposit cover?" legal`.
// RAG_URL and RAG_KEY name another service and its key.
import OpenAI from "openai";

const url = process.env.RAG_URL ?? "http://127.0.0.1:8000";
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: process.env.RAG_KEY ?? "none" });
const [question = "What are the early signs of dehydration in adults?", domain = null] = process.argv.slice(2);

const models = await client.models.list();
const stream = await client.chat.completions.create({
  model: models.data[0].id,
  messages: [{ role: "user", content: question }],
  stream: true,
  stream_options: { include_usage: true },
  rag: { domain },
});

for await (const chunk of stream) {
  for (const source of chunk.sources ?? []) console.log(`[${source.index}] ${source.title || source.document_id} (${source.url})`);
  for (const choice of chunk.choices) process.stdout.write(choice.delta.content ?? "");
  if (chunk.metrics) {
    const { acceptance_rate, drafter } = chunk.metrics.speculative_decoding;
    console.log(`\n\nacceptance rate ${acceptance_rate}, drafter ${drafter}`);
    console.log(`first token after ${chunk.metrics.timings.time_to_first_token_seconds} s`);
  }
  if (chunk.usage) console.log(`${chunk.usage.prompt_tokens} + ${chunk.usage.completion_tokens} tokens`);
}
