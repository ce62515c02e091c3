"use strict";
// The virtual clock of pipeline/clock.py with the schedules of pipeline/schedule.py, for a page that asks it again at
// every move of a slider. tests/planner/explain/test_clock.py holds its spans equal to Python's, to the last bit.
//
// A task is {kind, microbatch, chunk}; a message is named after the task that it lets a stage do.
const meshwrightClock = (() => {
  const F = "F", B = "B", W = "W";
  const named = (task) => task.kind + task.microbatch + (task.chunk ? "." + task.chunk : "");

  // placement.py: chunk c of a stage is at a position c p ... c p + p - 1 of the chain; a v turns in every second chunk.
  class Placement {
    constructor(stages, chunks = 1, shape = "loop") {
      Object.assign(this, { stages, chunks, shape, positions: stages * chunks });
    }
    stageOf(position) {
      const chunk = Math.floor(position / this.stages), along = position % this.stages;
      return this.shape === "v" && chunk % 2 ? this.stages - 1 - along : along;
    }
    position(stage, chunk) {
      return chunk * this.stages + (this.shape === "v" && chunk % 2 ? this.stages - 1 - stage : stage);
    }
    get lastStage() { return this.stageOf(this.positions - 1); }
    receiver(stage, { kind, microbatch, chunk }) {
      if (kind === W) return null;
      const to = this.position(stage, chunk) + (kind === F ? 1 : -1);
      if (to < 0 || to >= this.positions) return null;
      return [this.stageOf(to), { kind, microbatch, chunk: Math.floor(to / this.stages) }];
    }
  }

  // task.py and engine.py: what a schedule sees of its stage, and the messages that overtook others.
  class View {
    constructor(stage, placement, microbatches, limit, kinds, order) {
      Object.assign(this, { stage, placement, microbatches, limit, kinds, order });
      this.chunks = Array.from({ length: placement.chunks }, () => ({ F: 0, B: 0, W: 0, come: { F: 0, B: 0 } }));
      this.arrivals = [];
      this.early = new Set();
      this.isFirst = stage === 0;
      this.isLast = stage === placement.lastStage;
    }
    done(kind) { return this.chunks.reduce((sum, counts) => sum + counts[kind], 0); }
    get ended() { return this.kinds[this.kinds.length - 1]; }
    get inFlight() { return this.done(F) - this.done(this.ended); }
    get isDone() { return this.done(this.ended) === this.microbatches * this.chunks.length; }
    ends(chunk) { return this.isLast && chunk === this.chunks.length - 1; }
    next(kind, chunk = 0) { return { kind, microbatch: this.chunks[chunk][kind], chunk }; }
    ready(kind, chunk = 0) {
      const counts = this.chunks[chunk];
      if (!this.kinds.includes(kind)) return false;
      if (kind === F) {
        const given = chunk === 0 && this.isFirst ? this.microbatches : counts.come.F;
        return counts.F < given && this.inFlight < this.limit;
      }
      if (kind === B) return counts.B < (this.ends(chunk) ? counts.F : counts.come.B);
      return counts.W < counts.B;
    }
    finish(task) {
      this.chunks[task.chunk][task.kind] += 1;
      const place = this.arrivals.findIndex((message) => named(message) === named(task));
      if (place >= 0) this.arrivals.splice(place, 1);
    }
    take(message) {
      const { kind, chunk } = message, come = this.chunks[chunk].come;
      this.early.add(named(message));
      // A message that closes a gap brings those behind it into view at once.
      for (let due = { kind, microbatch: come[kind], chunk }; this.early.delete(named(due));
           due = { kind, microbatch: come[kind], chunk }) {
        this.arrivals.push(due);
        come[kind] += 1;
      }
    }
  }

  // schedule.py: a function of the view, which gives the next task or null, wait.
  function turn(view, done) {
    const rounds = Math.max(1, Math.floor(view.microbatches / view.placement.stages));
    const size = Math.floor(view.microbatches / rounds), larger = view.microbatches % rounds;
    const chunks = view.chunks.length, beyond = done - larger * chunks * (size + 1);
    return (beyond < 0 ? Math.floor(done / (size + 1)) : Math.floor(beyond / size)) % chunks;
  }

  function forwardFirst(view) {
    const forwards = view.done(F), last = view.chunks.length - 1;
    const goes = forwards < view.microbatches * view.chunks.length && view.inFlight < view.limit;
    const task = goes ? view.next(F, turn(view, forwards)) : view.next(B, last - turn(view, view.done(B)));
    return view.ready(task.kind, task.chunk) ? task : null;
  }

  function axonn(view) {
    if (view.isLast && view.ready(B)) return view.next(B);
    if (view.isFirst && view.ready(F)) return view.next(F);
    const message = view.arrivals.find(({ kind }) => view.ready(kind));
    return message ? view.next(message.kind) : null;
  }

  function leavesRoom(view, chunk) {
    const { placement } = view;
    const left = view.chunks.map((_, each) => placement.positions - placement.position(view.stage, each));
    const whole = left.reduce((a, b) => a + b, 0);
    const spare = Math.max(0, Math.min(view.limit, placement.positions) - left.length);
    const reserved = left.slice(chunk + 1).reduce((sum, way) => sum + 1 + Math.floor(spare * way / whole), 0);
    const held = view.chunks.slice(0, chunk + 1).reduce((sum, counts) => sum + counts.F - counts[view.ended], 0);
    return held < view.limit - reserved;
  }

  function messageDriven(view) {
    const deepestFirst = view.chunks.map((_, chunk) => chunk).reverse();
    if (view.order.length) {
      const rest = view.order.slice(view.done(F) + view.done(B));
      const task = rest.find(({ kind, microbatch, chunk }) => view.chunks[chunk][kind] <= microbatch);
      if (view.ready(task.kind, task.chunk)) return task;
      const waiting = deepestFirst.find((chunk) => view.ready(W, chunk));
      return waiting === undefined ? null : view.next(W, waiting);
    }
    for (const kind of [B, F, W])
      for (const chunk of deepestFirst)
        if (view.ready(kind, chunk) && (kind !== F || leavesRoom(view, chunk))) return view.next(kind, chunk);
    return null;
  }

  function zbVOrder(stage, placement, microbatches) {
    const p = placement.stages, least = Math.max(microbatches, 2 * p - 1);
    const order = [], done = [{ F: 0, B: 0, W: 0 }, { F: 0, B: 0, W: 0 }];
    const go = (letters, chunk, times = 1) => {
      for (let each = 0; each < times; each++)
        for (const kind of letters) order.push({ kind, microbatch: done[chunk][kind]++, chunk });
    };
    go("F", 0, 2 * (p - stage) - 1);
    for (let each = 0; each < stage; each++) { go("F", 1); go("F", 0); }
    go("FBW", 1, p - stage);
    while (done[1].F < done[0].F || done[0].F < least) {
      if (done[0].F < least) go("F", 0);
      go("BW", 0);
      go("FBW", 1);
    }
    for (let each = 0; each < stage; each++) { go("B", 0); go("B", 1); }
    go("BW", 0, p - stage);
    for (const chunk of [1, 0]) go("W", chunk, done[chunk].B - done[chunk].W);
    return order.filter((task) => task.microbatch < microbatches);
  }

  function scarceOrder(stage, placement, microbatches, limit) {
    const p = placement.stages;
    const fits = placement.shape === "v" && placement.chunks === 2 && 2 * p <= limit && limit < 5 * p / 2;
    return fits && microbatches >= 2 * p - 1 ? zbVOrder(stage, placement, microbatches) : [];
  }

  function interleavedLimit(stage, { stages, chunks }, microbatches) {
    const largest = Math.ceil(microbatches / Math.max(1, Math.floor(microbatches / stages)));
    return Math.min(2 * (stages - stage - 1) + (chunks - 1) * largest + 1, microbatches * chunks);
  }

  const none = () => [];
  const SCHEDULES = {
    "gpipe": { decide: forwardFirst, kinds: [F, B], order: none, shapes: ["loop", "v"],
      limit: (stage, { chunks }, count) => count * chunks },
    "1f1b": { decide: forwardFirst, kinds: [F, B], order: none, shapes: ["loop"],
      limit: (stage, at, count) => at.chunks === 1 ? at.stages - stage : interleavedLimit(stage, at, count) },
    "axonn": { decide: axonn, kinds: [F, B], order: none, shapes: [], limit: (stage, { stages }) => stages },
    "message-driven": { decide: messageDriven, kinds: [F, B, W], order: scarceOrder, shapes: ["loop", "v"],
      limit: (stage, { positions }) => 2 * positions },
  };

  // clock.py: the spans of a step. seconds(stage, task), latency(from, to, task); limit: of every stage, or null.
  function simulate(placement, microbatches, schedule, limit, seconds, latency) {
    const rule = SCHEDULES[schedule];
    const stages = Array.from({ length: placement.stages }, (_, stage) => {
      const most = limit ?? rule.limit(stage, placement, microbatches);
      const order = rule.order(stage, placement, microbatches, most);
      return { view: new View(stage, placement, microbatches, most, rule.kinds, order), task: null, inbox: [] };
    });
    const events = [], spans = [];
    let number = 0;
    const push = (time, stage, message) => {
      let low = 0, high = events.length;
      while (low < high) {  // events stand in order of time, equal ones in that of their coming
        const middle = (low + high) >> 1;
        if (events[middle].time <= time) low = middle + 1; else high = middle;
      }
      events.splice(low, 0, { time, number: number++, stage, message });
    };
    const begin = (time, index) => {
      const { view } = stages[index], task = view.isDone ? null : rule.decide(view);
      stages[index].task = task;
      if (!task) return;
      const end = time + seconds(index, task);
      spans.push({ stage: index, name: named(task), ...task, start: time, end });
      push(end, index, null);
    };
    const happen = ({ time, stage: index, message }) => {
      const stage = stages[index];
      if (message) {
        stage.inbox.push(message);
        return stage.task ? [] : [index];
      }
      const sent = placement.receiver(index, stage.task);
      if (sent) push(sent[0] === index ? time : time + latency(index, sent[0], stage.task), sent[0], sent[1]);
      stage.view.finish(stage.task);
      stage.task = null;
      return [index];
    };
    stages.forEach((_, index) => begin(0, index));
    while (events.length) {
      const time = events[0].time, free = new Set();
      // All of a moment first: a stage that decides at that moment knows every message of it.
      while (events.length && events[0].time === time) happen(events.shift()).forEach((index) => free.add(index));
      for (const index of [...free].sort((a, b) => a - b)) {
        stages[index].inbox.splice(0).forEach((message) => stages[index].view.take(message));
        begin(time, index);
      }
    }
    const stuck = stages.filter(({ view }) => !view.isDone).length;
    if (stuck) throw new Error(`${stuck} stages wait for each other for ever`);
    return spans;
  }

  return { Placement, SCHEDULES, simulate };
})();
