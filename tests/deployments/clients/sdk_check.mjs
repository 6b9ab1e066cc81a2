// The official JavaScript SDK against TYPESAFE_BASE_URL; prints what came back as one JSON line.
import { choice, noul, score, TypeSafeClient } from "@typesafe-ai/sdk";

const client = new TypeSafeClient();
const state = "User: my card was charged twice and nobody answers the phone";
const { answers, usage } = await client.systemOne({
  state,
  questions: {
    team: choice("Who handles it?", { billing: "payments", delivery: null }),
    angry: noul("Is the customer angry?"),
    urgency: score("How urgent?", ["can wait", "today", "at once"]),
  },
});
const models = await client.models.list();
let refused = "";
try {
  await client.systemOne({ state, questions: { q: choice("?", { only: null }) } });
} catch (error) {
  refused = error.constructor.name;
}
console.log(
  JSON.stringify({
    choice: answers.team.choice,
    noul: answers.angry.noul,
    score: answers.urgency.score,
    tokens: usage.input_tokens ?? usage.inputTokens,
    models: models.length,
    refused,
  }),
);
