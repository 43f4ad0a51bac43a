// The playground: connects the page's form with the conversations.

import { Api } from "./playground-api.js";
import { codeOf } from "./playground-code.js";
import { parameterFields, readParameters, validate } from "./playground-parameters.js";
import { linkTo, shared, Store } from "./playground-store.js";
import { money, Talk } from "./playground-talk.js";

const form = document.getElementById("playground");
const byId = (id) => document.getElementById(id);
const field = (name) => form.elements[name];
const { base, currency, person } = form.dataset;
const offers = JSON.parse(byId("offers").textContent);
const api = new Api(base, field("csrf").value);
const store = new Store(`playground ${base} ${person}`);
const talks = [...form.querySelectorAll(".talk .said")].map((place) => new Talk(place, currency));
const KEPT = ["INPUT", "SELECT", "TEXTAREA"];

const isComparing = () => field("second").checked;
const chosen = () => talks.slice(0, isComparing() ? 2 : 1).map((talk, side) => [talk, field(`model${side}`).value]);

// The request of one conversation, without its model.
function bodyOf(messages) {
  const system = field("system").value.trim();
  return { messages: system ? [{ role: "system", content: system }, ...messages] : messages, ...readParameters(form) };
}

function report(text, isError = true) {
  const place = byId("problem");
  place.textContent = text;
  place.classList.toggle("text-danger", isError);
}

// Returns whether all parameters are valid; else shows the first that is not.
function checked() {
  const wrong = parameterFields(form).filter((one) => !one.closest("[hidden]") && !validate(one));
  try {
    if (wrong.length === 0) readParameters(form);
  } catch (error) {
    report(error.message);
    error.field?.focus();
    return false;
  }
  if (wrong.length === 0) return true;
  for (let place = wrong[0].closest("details"); place; place = place.parentElement.closest("details")) place.open = true;
  wrong[0].focus();
  report("Correct the marked parameter first.");
  return false;
}

async function send(text) {
  if (text.trim() === "" || talks.some((talk) => talk.isBusy) || !checked()) return false;
  report("");
  Promise.all(chosen().map(([talk, model]) => talk.run(api, model, text, bodyOf)));
  return true;
}

// Runs a turn again with this text, in all conversations that are shown.
async function runAgain(number, text) {
  if (talks.some((talk) => talk.isBusy) || text.trim() === "" || !checked()) return;
  for (const [talk] of chosen()) talk.cut(number);
  await send(text);
}

function state() {
  const fields = {};
  for (const one of form.elements) {
    if (!KEPT.includes(one.tagName) || one.name === "csrf" || !one.name) continue;
    fields[one.name] = one.type === "checkbox" ? one.checked : one.value;
  }
  return { fields, talks: talks.map((talk) => talk.turns) };
}

function restore(kept) {
  for (const [name, value] of Object.entries(kept?.fields ?? {})) {
    const one = field(name);
    if (!one || !KEPT.includes(one.tagName) || name === "csrf") continue;
    if (one.type === "checkbox") one.checked = value === true;
    else if (one.tagName !== "SELECT" || [...one.options].some((option) => option.value === value)) one.value = String(value);
  }
  (kept?.talks ?? []).slice(0, talks.length).forEach((turns, side) => {
    talks[side].turns = turns.filter((turn) => typeof turn.text === "string").map((turn) => ({ counts: false, ...turn }));
    talks[side].render();
  });
}

function showOffers() {
  [0, 1].forEach((side) => {
    const offer = offers[field(`model${side}`).value];
    const price = offer?.input
      ? `${money(offer.input, currency)} input, ${money(offer.cached, currency)} cached, ${money(offer.output, currency)} output per 1M tokens` : "";
    const context = offer?.context ? `${offer.context.toLocaleString("en")} context` : "";
    byId(`offer${side}`).textContent = [price, context].filter(Boolean).join(" · ");
  });
  const uses = Object.entries(offers[field("model0").value]?.temperatures ?? {});
  byId("temperatures").replaceChildren(...uses.map(([use, value]) => new Option(use.replaceAll("_", " "), value)));
}

function showSides() {
  byId("second-talk").parentElement.classList.toggle("compared", isComparing());
  byId("second-talk").hidden = byId("second-model").hidden = !isComparing();
  for (const one of form.querySelectorAll("[data-for-format]")) one.hidden = one.dataset.forFormat !== field("reply_format").value;
}

function showTotals() {
  const isBusy = talks.some((talk) => talk.isBusy);
  byId("stop").hidden = !isBusy;
  byId("send").hidden = isBusy;
  const sides = chosen().map(([talk]) => talk);
  const tokens = sides.reduce((sum, talk) => sum + talk.tokens, 0);
  const cost = sides.reduce((sum, talk) => sum + talk.cost, 0);
  byId("totals").textContent = tokens
    ? `This conversation: ${tokens.toLocaleString("en")} tokens, ${money(cost.toLocaleString("en", { maximumSignificantDigits: 6 }), currency)}`
    : "";
  byId("welcome").hidden = sides.some((talk) => talk.turns.length > 0);
  const calls = talks[0].openCalls;
  byId("prompt-label").textContent = calls.length
    ? `Result of ${calls.map((call) => call.function.name).join(", ")}`
    : "Your message";
}

function showCode() {
  let chat;
  try {
    const asked = field("prompt").value || (talks[0].turns.length ? "" : "Hello");
    const messages = talks[0].messages();
    if (asked) messages.push({ role: "user", content: asked });
    else if (messages.at(-1)?.role === "assistant") messages.pop(); // the request of the last reply
    chat = { model: field("model0").value, ...bodyOf(messages) };
  } catch (error) {
    report(error.message);
    return;
  }
  const code = codeOf(byId("format").value, chat, location.origin);
  for (const language of ["curl", "python", "node"]) byId(`code-${language}`).textContent = code[language];
}

async function share() {
  try {
    const { fields, talks: turns } = state();
    const slim = turns.map((side) => side.map(({ tokens, ...turn }) => turn));
    const link = await linkTo({ fields: { ...fields, prompt: "" }, talks: slim });
    await navigator.clipboard.writeText(link);
    report("The link is copied. It contains the conversation; members of this account can open it.", false);
  } catch (error) {
    report(navigator.clipboard ? error.message : "The browser allows copying only over https.");
  }
}

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  if (await send(field("prompt").value)) {
    field("prompt").value = "";
    field("prompt").focus();
  }
});
field("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
});
byId("stop").addEventListener("click", () => talks.forEach((talk) => talk.stop()));
byId("clear").addEventListener("click", () => {
  for (const talk of talks) talk.cut(0);
  field("prompt").focus();
});
byId("share").addEventListener("click", share);
byId("view-code").addEventListener("click", showCode);
byId("format").addEventListener("change", showCode);
field("second").addEventListener("change", () => {
  if (isComparing() && talks[1].turns.length !== talks[0].turns.length) {
    talks[1].turns = talks[0].turns.map((turn) => ({ ...turn, usage: null, charged: null, perSecond: null, firstMs: null })); // the same history
    talks[1].render();
  }
});
form.addEventListener("change", (event) => {
  if (event.target.dataset.kind) validate(event.target);
  showOffers();
  showSides();
  showTotals();
  store.save(state());
});
let saving = null;
form.addEventListener("input", () => {
  clearTimeout(saving);
  saving = setTimeout(() => store.save(state()), 500);
});
for (const talk of talks) {
  talk.onEdit = runAgain;
  talk.onChange = () => {
    showTotals();
    if (!talk.isBusy) store.save(state());
  };
}

const link = await shared(location.hash);
if (link) history.replaceState(null, "", location.pathname);
restore(link ?? store.load());
showOffers();
showSides();
showTotals();
