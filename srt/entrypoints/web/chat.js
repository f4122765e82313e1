// The chat: it streams answers of /v1/chat/completions, and colours tokens by their probability.

import { $, count, element, eventsOf, problemOf } from "./common.js";

const TOP_LOGPROBS = 5;
let messages = []; // what is sent: {role, content}; another array for each chat
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

// Every text of an answer is in one of two boxes: what the model thinks, and what it says.
class Answer {
  constructor() {
    this.reasoning = "";
    this.content = "";
    this.usage = null;
    this.finish = null;
    this.decoder = new TextDecoder();
    this.tokens = [];
    this.held = []; // tokens whose text has not come yet; that of a stop or of a mark never comes
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
    const reasoning = choice.delta.reasoning_content ?? "";
    const content = choice.delta.content ?? "";
    const tokens = choice.logprobs?.content ?? [];
    if ((reasoning || content || tokens.length) && this.firstToken === null) this.firstToken = performance.now();
    this.reasoning += reasoning;
    this.content += content;
    for (const token of tokens) this.addToken(token);
    following(() => {
      if (!this.tokens.length) {
        if (reasoning) this.reasoningBox().append(reasoning);
        this.view.text.append(content);
      } else if (reasoning || content) {
        (content ? this.view.text : this.reasoningBox()).append(...this.held);
        this.held = [];
      }
    });
  }

  reasoningBox() {
    if (!this.thoughts) {
      this.thoughts = element("div", "thoughts");
      const details = element("details", "reasoning");
      details.open = true;
      details.append(element("summary", "", "Reasoning"), this.thoughts);
      this.view.box.prepend(details);
    }
    return this.thoughts;
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
    this.held.push(span);
  }

  // Puts each token into the box of its text, once all is known. The others are marks of the reasoning, or a stop.
  sortTokens() {
    const whole = this.tokens.map((span) => span.textContent).join("");
    const thought = this.reasoning ? whole.indexOf(this.reasoning) : 0;
    const said = whole.indexOf(this.content, thought + this.reasoning.length);
    if (!this.tokens.length || thought < 0 || said < 0) return;
    const show = (span, box, from, to) => {
      span.textContent = whole.slice(from, to);
      box.append(span);
    };
    let start = 0;
    for (const span of this.tokens) {
      const end = start + span.textContent.length;
      const thoughtEnd = Math.min(end, thought + this.reasoning.length);
      const [saidStart, saidEnd] = [Math.max(start, said), Math.min(end, said + this.content.length)];
      if (Math.max(start, thought) < thoughtEnd) show(span, this.reasoningBox(), Math.max(start, thought), thoughtEnd);
      else if (saidStart < saidEnd) show(span, this.view.text, saidStart, saidEnd);
      else span.remove();
      start = end;
    }
  }

  showFacts(note) {
    this.sortTokens();
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
  const chat = messages; // New chat replaces `messages`, and what this answer adds belongs to the old one
  chat.push({ role: "user", content: text });
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
  if (answer.content) chat.push({ role: "assistant", content: answer.content });
  else chat.pop(); // a message without an answer is not part of the conversation: templates want the roles in turn
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
  messages = [];
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
