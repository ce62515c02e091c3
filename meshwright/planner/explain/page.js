"use strict";
// Draws what page.py has put into the page, and asks the clock (clock.js) again as sliders move.
const facts = JSON.parse(document.getElementById("facts").textContent);
const at = (id) => document.getElementById(id);
const escaped = (text) => String(text).replace(/[&<>"]/g, (c) => "&#" + c.charCodeAt(0) + ";");
const breakable = (name) => escaped(name).replace(/[_+.]/g, "$&<wbr>");
const size = (bytes) => bytes >= 1e9 ? (bytes / 1e9).toFixed(2) + " GB" : bytes >= 1e6 ? (bytes / 1e6).toFixed(2) + " MB"
  : bytes >= 1e3 ? (bytes / 1e3).toFixed(1) + " kB" : bytes + " B";
const many = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
// Neighbouring blocks differ by the golden angle, so that no two of a few dozen look alike.
const colour = (index) => `hsl(${(205 + 137.5 * index) % 360} 62% var(--tone))`;
const options = (select, texts) => { select.innerHTML = texts.map((text, i) => `<option value="${i}">${escaped(text)}</option>`).join(""); };

// The grid of ranks, `fill(rank)` the colour of its cell, `above` drawn over it.
function gridPicture(fill, held, above = "") {
  const { width, height, cell, ranks, boxes, inner } = facts.grid, edge = above ? 44 : 4;
  const drawn = boxes.map((box) => `<rect class="box" rx="6" x="${box.x}" y="${box.y}" width="${box.width}" height="${box.height}"/>`
    + `<text class="small" x="${box.x + 7}" y="${box.y + 13}">${escaped(box.title)}</text>`);
  ranks.forEach(({ x, y, at: where }, rank) => {
    const told = facts.grid.axes.map(({ name }) => `${name} ${where[name]}`).join(", ");
    drawn.push(`<g data-rank="${rank}"><title>rank ${rank}: ${escaped(told)}, node ${Math.floor(rank / facts.ranksPerNode)}</title>`
      + `<rect class="cell${held.has(rank) ? " held" : ""}" rx="5" x="${x}" y="${y}" width="${cell[0]}" height="${cell[1]}" fill="${fill(rank)}"/>`
      + `<text class="on" x="${x + cell[0] / 2}" y="${y + 20}" text-anchor="middle">rank ${rank}</text>`
      + `<text class="small" x="${x + cell[0] / 2}" y="${y + 36}" text-anchor="middle">${escaped(inner)} ${where[inner]}</text></g>`);
  });
  // Little more than life size, so that few ranks are not drawn as barn doors.
  return `<svg viewBox="${-edge} ${-edge} ${width + 2 * edge} ${height + 2 * edge}" width="${1.25 * (width + 2 * edge)}" style="min-width: ${Math.min(width, Math.max(0.45 * width, 260))}px" role="img" aria-label="the grid of ranks">`
    + `<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" orient="auto-start-reverse">`
    + `<path d="M0 0 L8 4 L0 8 z" fill="context-stroke"/></marker></defs>${drawn.join("")}${above}</svg>`;
}

// --- Who holds what
function weightPicture(weight, held) {
  const order = weight.shape.map((_, dim) => dim).sort((a, b) => weight.shape[b] - weight.shape[a] || a - b);
  const [down, across] = weight.shape.length > 1 ? order.slice(0, 2).sort((a, b) => a - b) : [null, 0];
  const third = order[2], panels = new Map();
  weight.blocks.forEach((block, index) => {
    // A third dim, of experts or of query, key and value, is drawn as pictures side by side.
    const from = third === undefined ? 0 : block.offsets[third], long = third === undefined ? 1 : block.lengths[third];
    const key = `${from}-${from + long - 1}`;
    panels.set(key, [...(panels.get(key) ?? []), [block, index]]);
  });
  const count = panels.size, wide = Math.max(90, Math.min(300, 640 / count)), high = down === null ? 40 : Math.min(220, wide);
  return `<div class="order">` + [...panels].map(([key, blocks]) => {
    const x = (value) => (value / weight.shape[across]) * wide, y = (value) => down === null ? 0 : (value / weight.shape[down]) * high;
    const drawn = blocks.map(([block, index]) => {
      const left = x(block.offsets[across]), width = x(block.lengths[across]);
      const top = down === null ? 0 : y(block.offsets[down]), height = down === null ? high : y(block.lengths[down]);
      const ranks = block.ranks.join(", "), short = ranks.length > 9 ? `${block.ranks[0]}, ${block.ranks[1]}, …` : ranks;
      const fits = width > 7 * short.length && height > 16;
      return `<g data-block="${index}"><title>[${block.lengths.join(", ")}] at [${block.offsets.join(", ")}]: ranks ${ranks}</title>`
        + `<rect class="block${held === index ? " held" : ""}" x="${left}" y="${top}" width="${width}" height="${height}" fill="${colour(index)}"/>`
        + (fits ? `<text class="on" x="${left + width / 2}" y="${top + height / 2 + 4}" text-anchor="middle">${short}</text>` : "") + "</g>";
    });
    const title = third === undefined ? `[${weight.shape.join(", ")}]` : `dim ${third}: ${key}`;
    return `<figure style="margin:0"><svg viewBox="-2 -2 ${wide + 4} ${high + 4}" width="${wide + 4}" role="img" aria-label="blocks">${drawn.join("")}</svg>`
      + `<figcaption style="color:var(--faint);font-size:13px">${escaped(title)}</figcaption></figure>`;
  }).join("") + "</div>";
}

function weightSaid(weight) {
  const copies = new Set(weight.blocks.map((block) => block.ranks.length));
  const cuts = Object.entries(weight.cut).map(([axis, dim]) => `dim ${dim} over ${axis}`);
  if (weight.owner) cuts.push(`whole at one rank of ${weight.owner}`);
  const holders = copies.size === 1 ? [...copies][0] : `${Math.min(...copies)} to ${Math.max(...copies)}`;
  return `<b>${breakable(weight.name)}</b> [${weight.shape.join(", ")}]: ${cuts.length ? "cut, " + cuts.join(", ") : "not cut"}; `
    + `${many(weight.blocks.length, "block")},${weight.blocks.length > 1 ? " each" : ""} held by ${holders === 1 ? "one rank" : holders + " ranks"}. `
    + (weight.frozen ? "It is frozen: it has no gradient." : weight.summed.length ? `Its gradient is summed over ${weight.summed.join(", ")}` : "Its gradient is whole where it is made")
    + (weight.frozen ? "" : weight.slices > 1 ? `; each rank steps 1/${weight.slices} of it.` : ".");
}

let held = null;
function drawWeight() {
  const weight = facts.weights[at("weight").value], block = held === null ? null : weight.blocks[held];
  const of = new Map(weight.blocks.flatMap((each, index) => each.ranks.map((rank) => [rank, index])));
  at("owners").innerHTML = gridPicture((rank) => of.has(rank) ? colour(of.get(rank)) : "var(--none)", new Set(block?.ranks));
  at("blocks").innerHTML = weightPicture(weight, held);
  at("held").innerHTML = weightSaid(weight) + (block ? ` The marked block [${block.lengths.join(", ")}] at [${block.offsets.join(", ")}] lies on rank${block.ranks.length > 1 ? "s" : ""} ${block.ranks.join(", ")}.` : "");
  for (const [id, name] of [["owners", "rank"], ["blocks", "block"]])
    at(id).querySelectorAll(`[data-${name}]`).forEach((each) => each.addEventListener("click", () => {
      const index = name === "rank" ? of.get(Number(each.dataset.rank)) ?? null : Number(each.dataset.block);
      held = held === index ? null : index;
      drawWeight();
    }));
}

// --- Who sends what to whom
const VERB_ARROWS = {
  "to each": (group, row) => row.verb === "all_to_all"
    ? group.flatMap((a) => group.filter((b) => b !== a).map((b) => [a, b]))
    : group.map((rank, index) => [rank, group[(index + 1) % group.length]]),
  "from root": (group, row) => group.filter((_, index) => index !== root(row)).map((rank) => [group[root(row)], rank]),
  "to root": (group, row) => group.filter((_, index) => index !== root(row)).map((rank) => [rank, group[root(row)]]),
  "to one": (group, row) => group.flatMap((rank, index) => Object.keys(row.peers).map((far) => {
    const to = index + Number(far);
    return row.verb === "message" && (to < 0 || to >= group.length) ? null : [rank, group[(to + group.length) % group.length]];
  })).filter(Boolean),
};
const root = (row) => Number(Object.keys(row.peers)[0] ?? 0);

function arrow([from, to], own, text) {
  const { cell, ranks } = facts.grid, middle = ({ x, y }) => [x + cell[0] / 2, y + cell[1] / 2];
  const [ax, ay] = middle(ranks[from]), [bx, by] = middle(ranks[to]);
  const far = Math.hypot(bx - ax, by - ay) || 1, bend = 16 + far * 0.12, inset = Math.min(22, far / 3);
  const ux = (bx - ax) / far, uy = (by - ay) / far, cx = (ax + bx) / 2 - uy * bend, cy = (ay + by) / 2 + ux * bend;
  const [lx, ly] = text ? labelPlace(text, [(ax + bx) / 2, (ay + by) / 2], [-uy, ux], bend) : [];
  return `<path class="arrow${own ? "" : " other"}" marker-end="url(#tip)" d="M${ax + ux * inset} ${ay + uy * inset} Q${cx} ${cy} ${bx - ux * inset} ${by - uy * inset}"/>`
    + (text ? `<text class="bytes" text-anchor="middle" x="${lx}" y="${ly}">${escaped(text)}</text>` : "");
}

// The nearest place beside the arrow's middle at which a label covers no text of a rank or of a box.
function labelPlace(text, [x, y], [nx, ny], bend) {
  const { cell, ranks, boxes } = facts.grid, half = 4 * text.length, free = ([a, b]) =>
    ranks.every((rank) => a + half < rank.x + 4 || a - half > rank.x + cell[0] - 4 || b < rank.y + 8 || b - 12 > rank.y + 38)
    && boxes.every((box) => a - half > box.x + 8 + 6 * box.title.length || a + half < box.x || b < box.y || b - 12 > box.y + 14);
  const places = [1, 0.5, 1.5, 2, -0.5, -1, 2.5, -1.5, 3].map((far) => [x + nx * bend * far, y + ny * bend * far + 4]);
  return places.find(free) ?? places[0];
}

// `row`: a line of the table, or a collective of a pass, which has no bytes of a step.
function drawArrows(row, text, said) {
  const first = facts.stages[row.stage].first, stage = new Set(facts.stages[row.stage].ranks);
  const groups = facts.groups[row.axes].filter((group) => group.some((rank) => stage.has(rank)));
  const own = groups.find((group) => group.includes(first));
  const pairs = VERB_ARROWS[row.direction](own, row).filter(([from]) => row.verb !== "message" || from === first);
  const others = groups.filter((group) => group !== own).flatMap((group) => VERB_ARROWS[row.direction](group, row));
  const shown = others.filter(([from]) => row.verb !== "message" || stage.has(from));
  // The bytes once, at the first rank's own arrow, since all of a group send as much.
  const mine = Math.max(0, pairs.findIndex(([from]) => from === first));
  const drawn = shown.map((pair) => arrow(pair, false)).join("") + pairs.map((pair, index) => arrow(pair, true, index === mine ? text : "")).join("");
  at("arrows").innerHTML = gridPicture((rank) => stage.has(rank) ? "var(--none)" : "transparent", new Set([first]), drawn);
  at("told").innerHTML = said;
}

const TASKS = { F: "forward", B: "backward", W: "weight gradients", weight: "weight gradients", "gather for weight": "gather for weight gradients" };
const inWords = ({ task, part }) => `${TASKS[task] ?? task}, ${part}`;

function rowSaid(row) {
  const first = facts.stages[row.stage].first, group = facts.groups[row.axes].find((each) => each.includes(first));
  const verb = row.verb === "message" ? many(row.calls, "message") + " along" : `${many(row.calls, "call")} of ${row.verb} over`;
  const kept = row.bytes === 0 && row.others ? ` It receives: each of the others sends ${size(row.others)}.` : "";
  return `In a step rank ${first} sends <b>${size(row.bytes)}</b> in ${verb} ${escaped(row.axes)}: `
    + `${escaped(inWords(row))}. Its group: ranks ${group.length > 16 ? group.slice(0, 16).join(", ") + ", …" : group.join(", ")}.${kept}`;
}

function drawSent() {
  const rows = facts.sendings.filter((row) => row.stage === Number(at("stage").value)).sort((a, b) => b.bytes - a.bytes);
  const whole = rows.reduce((sum, row) => sum + row.bytes, 0);
  at("sent").innerHTML = rows.map((row, index) => `<tr data-row="${index}" tabindex="0"><td>${escaped(inWords(row))}</td>`
    + `<td>${breakable(row.verb)}</td><td>${breakable(row.axes)}</td><td class="number">${row.calls.toLocaleString("en")}</td><td class="number">${size(row.bytes)}</td></tr>`).join("")
    + `<tr><td>in all</td><td></td><td></td><td class="number">${rows.reduce((sum, row) => sum + row.calls, 0).toLocaleString("en")}</td><td class="number">${size(whole)}</td></tr>`;
  const choose = (index) => {
    at("sent").querySelectorAll("tr").forEach((line) => line.setAttribute("aria-selected", line.dataset.row === String(index)));
    at("order").querySelectorAll("[aria-pressed]").forEach((step) => step.setAttribute("aria-pressed", "false"));
    drawArrows(rows[index], size(rows[index].bytes || rows[index].others), rowSaid(rows[index]));
  };
  at("sent").querySelectorAll("[data-row]").forEach((line) => {
    line.addEventListener("click", () => choose(Number(line.dataset.row)));
    line.addEventListener("keydown", (event) => { if (event.key === "Enter") choose(Number(line.dataset.row)); });
  });
  if (rows.length) choose(0);
  else {
    at("arrows").innerHTML = gridPicture(() => "var(--none)", new Set());
    at("told").textContent = "Nothing is sent: each rank is alone.";
  }
}

// --- One microbatch through one part
function drawPass() {
  const pass = facts.passes[at("pass").value];
  at("order").innerHTML = pass.steps.length ? pass.steps.map((step, index) => step.verb
    ? `<button class="step sent" aria-pressed="false" data-step="${index}">${step.times > 1 ? step.times + " × " : ""}${escaped(step.verb)} over ${escaped(step.axes)}, ${size(step.bytes)}</button>`
    : `<span class="step">${many(step.products, "product")}, ${flops(step.flops)}</span>`).join("→") : "No products, and nothing is sent.";
  at("order").querySelectorAll("[data-step]").forEach((button) => button.addEventListener("click", () => {
    at("order").querySelectorAll("[aria-pressed]").forEach((each) => each.setAttribute("aria-pressed", each === button));
    at("sent").querySelectorAll("tr").forEach((line) => line.setAttribute("aria-selected", "false"));
    const step = pass.steps[button.dataset.step];
    at("stage").value = pass.stage;
    const told = `${escaped(step.verb)} over ${escaped(step.axes)} of a whole tensor of <b>${size(step.bytes)}</b>, in ${TASKS[pass.task]} of ${escaped(pass.part)}.`;
    drawArrows({ ...step, stage: pass.stage }, size(step.bytes), told);
  }));
}
const flops = (count) => count >= 1e12 ? (count / 1e12).toFixed(2) + " Tflop" : count >= 1e9 ? (count / 1e9).toFixed(2) + " Gflop" : (count / 1e6).toFixed(2) + " Mflop";

// --- A step on the virtual clock
const own = facts.clock, { SCHEDULES, Placement, simulate } = meshwrightClock;
const known = own.schedule in SCHEDULES;
const SHAPES = [[1, "loop", "1"], [2, "loop", "2, in a loop"], [2, "v", "2, as a v"], [3, "loop", "3, in a loop"]];
if (!SHAPES.some(([chunks, shape]) => chunks === own.chunks && (shape === own.shape || chunks === 1)))
  SHAPES.push([own.chunks, own.shape, `${own.chunks}, ${own.shape === "v" ? "as a v" : "in a loop"}`]);

function settings() {
  const [chunks, shape] = SHAPES[at("parts").value];
  return { schedule: Object.keys(SCHEDULES)[at("schedule").value], chunks, shape, stages: Number(at("numStages").value),
    microbatches: Number(at("numMicrobatches").value), delay: at("delay").value / 100, slow: 1 + at("slow").value / 100 };
}

const goes = (schedule, chunks, shape) => chunks === 1 || SCHEDULES[schedule].shapes.includes(shape);

function spansOf({ schedule, stages, chunks, shape, microbatches, delay, slow }) {
  const placement = new Placement(stages, chunks, shape);
  const isOwn = stages === own.stages && chunks === own.chunks && (chunks === 1 || shape === own.shape);
  const part = (stage, chunk) => isOwn ? own.work[placement.position(stage, chunk)] : 1 / placement.positions;
  const back = SCHEDULES[schedule].kinds.includes("W") ? 1 : 2;
  // A limit of the run's own is for its schedule; memory for other stages is not known here.
  const limit = isOwn && schedule === own.schedule ? own.limit : null;
  return simulate(placement, microbatches, schedule, limit,
    (stage, task) => part(stage, task.chunk) * (task.kind === "B" ? back : 1) * (stage === stages - 1 ? slow : 1),
    () => delay / placement.positions);
}

const lasts = (spans) => Math.max(...spans.map((span) => span.end));
const idles = (spans, stages) => Array.from({ length: stages }, (_, stage) =>
  1 - spans.reduce((sum, span) => sum + (span.stage === stage ? span.end - span.start : 0), 0) / lasts(spans));
const percent = (share) => (100 * share).toFixed(1) + " %";

function timelinePicture(spans, whole, stages, now = null) {
  const row = 30, left = 62, wide = 1060, x = (time) => left + (time / whole) * wide;
  const drawn = Array.from({ length: stages }, (_, stage) => `<rect x="${left}" y="${stage * row}" width="${wide}" height="${row - 4}" fill="var(--none)" rx="3"/>`
    + `<text class="small" x="0" y="${stage * row + 17}">stage ${stage}</text>`);
  for (const { stage, name, kind, start, end } of spans) {
    const width = x(end) - x(start);
    drawn.push(`<g><title>${name} on stage ${stage}: ${start.toFixed(3)} to ${end.toFixed(3)}</title><rect x="${x(start)}" y="${stage * row}" width="${Math.max(0.5, width - 0.8)}" height="${row - 4}" rx="2" fill="var(--${kind})"/>`
      + (width > 8 * name.length ? `<text class="on" x="${x(start) + width / 2}" y="${stage * row + 17}" text-anchor="middle">${name}</text>` : "") + "</g>");
  }
  if (now !== null) drawn.push(`<line x1="${x(now)}" x2="${x(now)}" y1="-4" y2="${stages * row}" stroke="var(--mark)" stroke-width="2"/>`);
  return `<svg viewBox="0 -6 ${left + wide + 4} ${stages * row + 8}" width="100%" role="img" aria-label="the timeline of a step">${drawn.join("")}</svg>`;
}

// A step is played in so many milliseconds.
const PLAYED = 8000;
let spans = [], playing = null;
function drawStep() {
  if (!known) {
    spans = own.spans.map(([stage, name, start, end]) => ({ stage, name, kind: name[0], start, end }));
    at("timeline").innerHTML = timelinePicture(spans, lasts(spans), own.stages);
    at("step").textContent = `${own.schedule} is of another package: its step is shown as Meshwright computed it, and this page cannot compute another.`;
    return;
  }
  const chosen = settings();
  if (!goes(chosen.schedule, chosen.chunks, chosen.shape)) {
    at("step").textContent = `${chosen.schedule} does not go with ${SHAPES[at("parts").value][2]} parts a stage.`;
    at("timeline").innerHTML = at("schedules").innerHTML = "";
    return;
  }
  Object.entries({ stagesTold: chosen.stages, microbatchesTold: chosen.microbatches,
    delayTold: chosen.delay.toFixed(2) + " of F", slowTold: percent(chosen.slow - 1) }).forEach(([id, text]) => { at(id).textContent = text; });
  spans = spansOf(chosen);
  at("timeline").innerHTML = timelinePicture(spans, lasts(spans), chosen.stages);
  const idle = idles(spans, chosen.stages);
  at("step").innerHTML = `The step takes <b>${lasts(spans).toFixed(2)}</b> forward passes of a microbatch; stages idle for <b>${percent(idle.reduce((a, b) => a + b, 0) / idle.length)}</b> of it`
    + (chosen.stages > 1 ? ` (${idle.map((share, stage) => `stage ${stage} ${percent(share)}`).join(", ")}).` : ". One stage waits for nobody: give it neighbours with the slider.");
  const all = Object.keys(SCHEDULES).filter((name) => goes(name, chosen.chunks, chosen.shape)).map((name) => [name, lasts(spansOf({ ...chosen, schedule: name }))]);
  const most = Math.max(...all.map(([, time]) => time));
  at("schedules").innerHTML = all.map(([name, time]) => `<span${name === chosen.schedule ? ' class="chosen"' : ""}>${escaped(name)}</span><div${name === chosen.schedule ? ' class="chosen"' : ""} style="width:${(100 * time / most).toFixed(1)}%"></div><span>${time.toFixed(2)}</span>`).join("");
}

function setOwn() {
  at("schedule").value = Math.max(0, Object.keys(SCHEDULES).indexOf(own.schedule));
  at("parts").value = SHAPES.findIndex(([chunks, shape]) => chunks === own.chunks && (chunks === 1 || shape === own.shape));
  at("numStages").max = Math.max(16, own.stages);
  at("numMicrobatches").max = Math.max(48, own.microbatches);
  Object.entries({ numStages: own.stages, numMicrobatches: own.microbatches, delay: 0, slow: 0 }).forEach(([id, value]) => { at(id).value = value; });
  drawStep();
}

function play() {
  const ends = playing !== null;
  clearInterval(playing);
  playing = null;
  at("play").textContent = ends ? "play" : "stop";
  if (ends) { drawStep(); return; }
  const stages = known ? settings().stages : own.stages, whole = lasts(spans), step = spans, began = performance.now();
  playing = setInterval(() => {
    const time = whole * (performance.now() - began) / PLAYED;
    if (time >= whole) { play(); return; }
    const begun = step.filter((span) => span.start <= time).map((span) => ({ ...span, end: Math.min(span.end, time) }));
    at("timeline").innerHTML = timelinePicture(begun, whole, stages, time);
  }, 40);
}

// This page's clock beside Meshwright's, on the run's own step.
function agrees() {
  if (!known) return null;
  const key = (a, b) => a[2] - b[2] || a[0] - b[0] || (a[1] < b[1] ? -1 : 1);
  const ours = spansOf({ ...own, delay: 0, slow: 1 }).map((span) => [span.stage, span.name, span.start, span.end]).sort(key);
  return JSON.stringify(ours) === JSON.stringify([...own.spans].sort(key));
}

options(at("weight"), facts.weights.map(({ name }) => name));
options(at("stage"), facts.stages.map(({ holds }, stage) => `${stage}: ${holds}`));
options(at("pass"), facts.passes.map(({ part, task, stage }) => `${part}, ${TASKS[task]}${facts.stages.length > 1 ? ", stage " + stage : ""}`));
options(at("schedule"), Object.keys(SCHEDULES));
options(at("parts"), SHAPES.map(([, , told]) => told));
at("stages").hidden = facts.stages.length === 1;
// The widest matrix of a layer is what a reader wants to see first, not a norm or an embedding.
at("weight").value = Math.max(0, facts.weights.findIndex(({ name, shape }) => name.startsWith("blocks.") && shape.length > 1 && name.endsWith("weight")));
at("pass").value = Math.max(0, facts.passes.findIndex(({ part, task }) => part.startsWith("layer") && task === "F"));
at("weight").addEventListener("input", () => { held = null; drawWeight(); });
at("stage").addEventListener("input", drawSent);
at("pass").addEventListener("input", drawPass);
["schedule", "parts", "numStages", "numMicrobatches", "delay", "slow"].forEach((id) => at(id).addEventListener("input", () => { if (playing !== null) play(); drawStep(); }));
at("reset").addEventListener("click", setOwn);
at("play").addEventListener("click", play);
if (!known) document.querySelectorAll("#schedule, #parts, #numStages, #numMicrobatches, #delay, #slow, #reset").forEach((each) => { each.disabled = true; });
drawWeight();
drawPass();
drawSent();
setOwn();
document.body.dataset.clock = String(agrees());
at("agrees").textContent = agrees() ? `This page's clock and Meshwright's give the same ${many(own.spans.length, "task")} of the run's step, at the same times.`
  : known ? "This page's clock and Meshwright's DIFFER on the run's step: please report it, with the run file." : "";
