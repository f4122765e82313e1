// The live view: it polls /engine_view while the page is visible.

import { $, count, element, percent, problemOf } from "./common.js";

const POLL_MS = 500;
const MAX_STEPS = 1024;
const WINDOW_S = 20; // time that the timeline shows
const RATE_S = 2; // time over which tokens per second are averaged
const MAX_ROWS = 24;

let steps = [];
let counts = []; // of generated tokens, at the times of the last polls

async function poll() {
  try {
    const after = steps.length ? steps[steps.length - 1].number : 0;
    const response = await fetch(`/engine_view?after_step=${after}`);
    if (!response.ok) throw new Error(await problemOf(response));
    show(await response.json());
    setHealth("ok", "ready");
  } catch (error) {
    setHealth("bad", error instanceof TypeError ? "the server does not answer" : error.message);
  }
}

function setHealth(kind, text) {
  $("health").className = `health ${kind}`;
  if ($("health-text").textContent !== text) $("health-text").textContent = text;
}

function show(view) {
  const { state } = view;
  $("model").textContent = `${view.model}, context of ${count(view.context_len)} tokens`;
  if (steps.length && view.now_s < steps[steps.length - 1].start_s) steps = []; // the machine has started again
  steps = steps.concat(view.steps).slice(-MAX_STEPS);
  $("running").textContent = `${state.num_running}`;
  $("waiting").textContent = `${state.num_waiting}`;
  $("throughput").textContent = rate(view).toFixed(0);
  $("hit-rate").textContent = percent(state.cache_hit_rate);
  showKv(state);
  showRequests(view.requests, state);
  showPrefixes(view.prefixes);
  drawTimeline(view.now_s);
}

// Generated tokens per second since a poll about RATE_S ago.
function rate(view) {
  const newest = counts[counts.length - 1];
  if (newest && (view.generated_tokens < newest.tokens || view.now_s <= newest.now_s)) counts = []; // restarted
  counts.push({ now_s: view.now_s, tokens: view.generated_tokens });
  while (counts.length > 2 && counts[1].now_s <= view.now_s - RATE_S) counts.shift();
  const first = counts[0];
  return counts.length > 1 ? (view.generated_tokens - first.tokens) / (view.now_s - first.now_s) : 0;
}

function showKv(state) {
  const owners = {
    private: state.num_private_tokens,
    shared: state.num_protected_tokens,
    cached: state.num_evictable_tokens,
    free: state.num_free_tokens,
  };
  for (const [owner, tokens] of Object.entries(owners)) {
    $(`kv-${owner}`).textContent = count(tokens);
    if (owner !== "free") $("kv").querySelector(`.${owner}`).style.width = `${(100 * tokens) / state.max_total_num_tokens}%`;
  }
}

function showRequests(requests, state) {
  const rows = requests.slice(0, MAX_ROWS).map((request) => {
    const row = element("tr");
    const stage = { waiting: "waits", extending: "prefill", decoding: "decode" }[request.stage];
    const done = request.stage === "extending" ? `${stage} ${percent(request.computed_tokens / request.prompt_tokens)}` : stage;
    const output = `${count(request.output_tokens)} of ${count(request.max_new_tokens)}`;
    const cells = [request.rid, done, count(request.prompt_tokens), count(request.cached_tokens), output];
    row.append(...cells.map((text) => element("td", "", text)));
    row.firstChild.title = request.rid;
    return row;
  });
  const more = state.num_running + state.num_waiting - rows.length;
  if (!rows.length || more > 0) {
    const row = element("tr");
    const cell = element("td", "note", rows.length ? `and ${count(more)} more` : "No request is running.");
    cell.colSpan = 5;
    row.append(cell);
    rows.push(row);
  }
  $("requests").replaceChildren(...rows);
}

function showPrefixes(prefixes) {
  if (!prefixes.length) {
    $("prefixes").replaceChildren(element("li", "note", "No prefix has been used twice yet."));
    return;
  }
  $("prefixes").replaceChildren(
    ...prefixes.map((prefix) => {
      const item = element("li", `d${Math.min(prefix.depth, 4)}`);
      const facts = element("span", "note");
      facts.append(element("b", "", `${count(prefix.num_uses)} uses`));
      facts.append(` of ${count(prefix.num_tokens)} tokens`, prefix.start ? ` after ${count(prefix.start)}` : "");
      if (prefix.is_locked) facts.append(", in use");
      item.append(facts, element("code", "", prefix.text || "The text is not shown."));
      return item;
    }),
  );
}

function drawTimeline(now) {
  const canvas = $("timeline");
  const scale = window.devicePixelRatio || 1;
  const { clientWidth: width, clientHeight: height } = canvas;
  canvas.width = width * scale;
  canvas.height = height * scale;
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  const style = getComputedStyle(document.documentElement);
  const colours = { prefill: style.getPropertyValue("--prefill"), decode: style.getPropertyValue("--decode"), mixed: style.getPropertyValue("--mixed") };
  const begin = now - WINDOW_S;
  const most = Math.max(32, ...steps.map((step) => step.prompt_tokens + step.decodes));
  let shown = 0;
  let busy = 0;
  for (const step of steps) {
    const end = step.start_s + step.duration_s;
    if (end < begin) continue;
    shown += 1;
    busy += end - Math.max(step.start_s, begin);
    const kind = !step.prompt_tokens ? "decode" : step.decodes ? "mixed" : "prefill";
    const left = ((step.start_s - begin) / WINDOW_S) * width;
    const tall = (Math.log1p(step.prompt_tokens + step.decodes) / Math.log1p(most)) * (height - 8);
    context.fillStyle = colours[kind];
    context.fillRect(left, height - tall, Math.max((step.duration_s / WINDOW_S) * width - 0.5, 1), tall);
  }
  const note = `The last ${WINDOW_S} s: ${count(shown)} steps, busy ${percent(Math.min(busy / WINDOW_S, 1))} of the time. Height: tokens of a step, on a logarithmic scale.`;
  $("step-note").textContent = note;
  canvas.setAttribute("aria-label", `Timeline of the last steps. ${note}`);
}

async function watch() {
  for (;;) {
    if (document.hidden) counts = [];
    else await poll();
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
  }
}

watch();
