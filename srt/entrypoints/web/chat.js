// The chat: it streams answers of /v1/chat/completions, and colours tokens by their probability.

import { $, count, element, eventsOf, problemOf } from "./common.js";

const TOP_LOGPROBS = 5;
const messages = []; // what is sent: {role, content}
let running = null; // the AbortController of the answer that streams

function number(id) {
  const given = $(id).value.trim();
  return given === "" ? undefined : Number(given);
}

function requestBody() {
  const system = $("system").value.trim();
  const body = {
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    stream: true,
    stream_options: { include_usage: true },
    temperature: number("temperature"),
    top_p: number("top-p"),
    max_completion_tokens: number("max-tokens"),
    seed: number("seed"),
  };
  if ($("colours").checked) Object.assign(body, { logprobs: true, top_logprobs: TOP_LOGPROBS });
  return JSON.stringify(body);
}

function addMessage(role) {
  $("empty").hidden = true;
  const box = element("article", `message ${role}`);
  box.setAttribute("aria-label", role === "user" ? "You" : "Model");
  const text = element("div", "text");
  box.append(text);
  $("messages").append(box);
  return { box, text };
}

// Keeps the newest text in view, unless the reader has scrolled up.
function following(change) {
  const log = $("messages");
  const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  change();
  if (follows) log.scrollTop = log.scrollHeight;
}

class Answer {
  constructor() {
    this.content = "";
    this.usage = null;
    this.finish = null;
    this.decoder = new TextDecoder();
    this.tokens = [];
    this.view = addMessage("assistant");
    this.begun = performance.now();
    this.firstToken = null;
  }

  take(chunk) {
    if (chunk.error) throw new Error(chunk.error.message);
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices[0];
    if (!choice) return;
    if (choice.finish_reason) this.finish = choice.finish_reason;
    const text = choice.delta.content ?? "";
    const tokens = choice.logprobs?.content ?? [];
    if ((text || tokens.length) && this.firstToken === null) this.firstToken = performance.now();
    this.content += text;
    following(() => {
      for (const token of tokens) this.addToken(token);
      if (!this.tokens.length) this.view.text.append(text);
    });
  }

  addToken(token) {
    const bytes = token.bytes ? Uint8Array.from(token.bytes) : new TextEncoder().encode(token.token);
    const text = this.decoder.decode(bytes, { stream: true });
    const probability = Math.exp(token.logprob);
    const level = probability < 0.1 ? 0 : probability < 0.4 ? 1 : probability < 0.75 ? 2 : 3;
    const span = element("span", `token p${level}`, text);
    span.tabIndex = 0;
    span.tercetToken = token;
    this.tokens.push(span);
    this.view.text.append(span);
  }

  // The tokens after the end of the text belong to a stop, which the text leaves out.
  hideStop() {
    let length = 0;
    for (const span of this.tokens) {
      length += span.textContent.length;
      span.hidden = length > this.content.length;
    }
  }

  showFacts(note) {
    this.hideStop();
    const facts = element("p", "facts");
    if (note) facts.append(element("span", "", note));
    if (this.finish === "length") facts.append(element("span", "", "stopped at the maximum number of tokens"));
    if (this.usage) {
      const { prompt_tokens: prompt, completion_tokens: output, prompt_tokens_details: details } = this.usage;
      const cached = details?.cached_tokens ?? 0;
      const share = element("span", "cache");
      const meter = element("span", "meter");
      const filled = element("i");
      filled.style.width = `${(100 * cached) / Math.max(prompt, 1)}%`;
      meter.append(filled);
      share.append(meter, `${count(cached)} of ${count(prompt)} prompt tokens from the cache`);
      facts.append(share, element("span", "", `${count(output)} tokens`));
      const seconds = (performance.now() - this.firstToken) / 1000;
      if (this.firstToken !== null) {
        facts.append(element("span", "", `first after ${Math.round(this.firstToken - this.begun)} ms`));
        if (output > 1 && seconds > 0) facts.append(element("span", "", `${((output - 1) / seconds).toFixed(1)} tokens/s`));
      }
    }
    following(() => this.view.box.append(facts));
  }

  fail(message) {
    this.view.box.classList.add("failed");
    following(() => this.view.text.append(this.content ? `\n${message}` : message));
  }
}

async function send(text) {
  messages.push({ role: "user", content: text });
  following(() => addMessage("user").text.append(text));
  $("messages").scrollTop = $("messages").scrollHeight;
  const answer = new Answer();
  running = new AbortController();
  $("send").hidden = true;
  $("stop").hidden = false;
  let note = "";
  try {
    const response = await fetch("/v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: requestBody(),
      signal: running.signal,
    });
    if (!response.ok) throw new Error(await problemOf(response));
    for await (const chunk of eventsOf(response)) answer.take(chunk);
  } catch (error) {
    if (error.name === "AbortError") note = "stopped";
    else answer.fail(error.message);
  }
  running = null;
  $("send").hidden = false;
  $("stop").hidden = true;
  if (answer.content) messages.push({ role: "assistant", content: answer.content });
  else if (!note) messages.pop(); // the message that failed is not part of the conversation
  answer.showFacts(note);
  $("input").focus();
}

function submit() {
  const input = $("input");
  const text = input.value.trim();
  if (!text || running) return;
  input.value = "";
  fitInput();
  send(text);
}

function fitInput() {
  const input = $("input");
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight + 2}px`;
}

function stop() {
  running?.abort();
}

function clear() {
  stop();
  messages.length = 0;
  for (const box of document.querySelectorAll(".message")) box.remove();
  $("empty").hidden = false;
  $("input").focus();
}

// The alternatives of the token under the pointer or with the focus

const tip = element("div", "tip");
tip.hidden = true;
tip.setAttribute("role", "status");
document.body.append(tip);

function showTip(event) {
  const token = event.target.tercetToken;
  tip.hidden = !token || !$("colours").checked;
  if (tip.hidden) return;
  const table = element("table");
  const listed = token.top_logprobs ?? [];
  const isListed = listed.some((other) => other.token === token.token);
  for (const other of isListed ? listed : [...listed, token]) {
    const row = element("tr", other.token === token.token ? "chosen" : "");
    row.append(element("td", "", JSON.stringify(other.token)));
    row.append(element("td", "", `${(100 * Math.exp(other.logprob)).toFixed(1)} %`));
    table.append(row);
  }
  tip.replaceChildren(table);
  const at = event.target.getBoundingClientRect();
  tip.style.left = `${Math.min(at.left, window.innerWidth - tip.offsetWidth - 8)}px`;
  const below = at.bottom + 6;
  tip.style.top = `${below + tip.offsetHeight < window.innerHeight ? below : at.top - tip.offsetHeight - 6}px`;
}

for (const kind of ["mouseover", "focusin"]) $("messages").addEventListener(kind, showTip);
for (const kind of ["mouseleave", "focusout", "scroll"]) $("messages").addEventListener(kind, () => (tip.hidden = true));

function showColours() {
  $("messages").classList.toggle("coloured", $("colours").checked);
  $("legend").hidden = !$("colours").checked;
}

$("colours").addEventListener("change", showColours);
$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
$("input").addEventListener("input", fitInput);
$("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    submit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
});
$("stop").addEventListener("click", stop);
$("clear").addEventListener("click", clear);
showColours();
