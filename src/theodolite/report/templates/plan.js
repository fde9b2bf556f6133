"use strict";
// The formulas are those of theodolite.plan.scaling: float64, one frequency per pair, fastest first.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (name) => document.getElementById(name);
  const clamp = (x, low, high) => Math.min(Math.max(x, low), high);
  const FURTHEST = 1048576, BLOCK = 1024;
  const state = {};

  const plainInvFreq = (base, dim) =>
    Float64Array.from({ length: dim / 2 }, (_, i) => Math.pow(base, -2 * i / dim));

  const ntkBase = (base, factor, dim) => base * Math.pow(factor, dim / (dim - 2));

  function yarnKept(base, dim, length, s) {
    const plain = plainInvFreq(base, dim);
    if (s.ramp === "rotations") {
      const width = Math.max(s.beta_fast - s.beta_slow, 1e-9);
      return plain.map((w) => clamp((length * w / (2 * Math.PI) - s.beta_slow) / width, 0, 1));
    }
    const pairThatTurns = (times) =>
      dim * (Math.log(length) - Math.log(times) - Math.log(2 * Math.PI)) / (2 * Math.log(base));
    let low = pairThatTurns(s.beta_fast), high = pairThatTurns(s.beta_slow);
    if (s.truncate) { low = Math.floor(low); high = Math.ceil(high); }
    low = clamp(low, 0, dim - 1);
    high = clamp(high, 0, dim - 1);
    if (low === high) high += 0.001;
    return plain.map((_, i) => 1 - clamp((i - low) / (high - low), 0, 1));
  }

  const blended = (plain, kept, factor) => plain.map((w, i) => w * kept[i] + w / factor * (1 - kept[i]));

  const SCALINGS = {
    none: { name: "none", make: (r, s) => plainInvFreq(s.base, r.rotary_dim) },
    linear: {
      name: "linear (position interpolation)", factor: true,
      make: (r, s) => plainInvFreq(s.base, r.rotary_dim).map((w) => w / s.factor),
    },
    ntk: {
      name: "NTK-aware", factor: true, wide: true,
      make: (r, s) => plainInvFreq(ntkBase(s.base, s.factor, r.rotary_dim), r.rotary_dim),
    },
    dynamic: {
      name: "dynamic NTK (by the length)", factor: true, original: true, wide: true,
      make: (r, s) => {
        const ratio = Math.max(s.length, s.original) / s.original;
        return plainInvFreq(ntkBase(s.base, s.factor * ratio - (s.factor - 1), r.rotary_dim), r.rotary_dim);
      },
    },
    yarn: {
      name: "YaRN", factor: true, original: true,
      make: (r, s) => {
        const kept = yarnKept(s.base, r.rotary_dim, s.original, r.settings.yarn);
        return blended(plainInvFreq(s.base, r.rotary_dim), kept, s.factor);
      },
    },
    llama3: {
      name: "Llama 3", factor: true, original: true,
      make: (r, s) => {
        const { low_freq_factor: low, high_freq_factor: high } = r.settings.llama3;
        const plain = plainInvFreq(s.base, r.rotary_dim);
        const kept = plain.map((w) => clamp((s.original * w / (2 * Math.PI) - low) / (high - low), 0, 1));
        return blended(plain, kept, s.factor);
      },
    },
    longrope: {
      name: "LongRoPE (the model's divisors)", original: true,
      make: (r, s) => {
        const divisors = s.length > s.original ? r.settings.longrope.long_factor : r.settings.longrope.short_factor;
        return plainInvFreq(s.base, r.rotary_dim).map((w, i) => w / divisors[i]);
      },
    },
  };

  const rotation = () => data.rotations[state.rotation];

  // Tokens that a query of these layers meets: the length, or their window where it is shorter.
  const seen = () => Math.min(state.length, rotation().seen ?? Infinity);

  const invFreq = () => {
    const r = rotation(), made = SCALINGS[state.scaling].make(r, state);
    return r.live_pairs === null ? made : made.map((w, i) => (i < r.live_pairs ? w : 0));
  };

  // cos(a + b) = cos a cos b - sin a sin b: a block of distances is a product of two small tables.
  // It yields after each block, so that a long search leaves the page alive.
  function* search(turning) {
    const n = turning.length;
    if (!n) return null;
    const cosNear = new Float64Array(BLOCK * n), sinNear = new Float64Array(BLOCK * n);
    for (let d = 0; d < BLOCK; d++)
      for (let i = 0; i < n; i++) {
        cosNear[d * n + i] = Math.cos(d * turning[i]);
        sinNear[d * n + i] = Math.sin(d * turning[i]);
      }
    const cosFar = new Float64Array(n), sinFar = new Float64Array(n);
    const blocks = Math.min(FURTHEST, Math.floor(134217728 / n)) / BLOCK;
    for (let block = 0; block < blocks; block++) {
      for (let i = 0; i < n; i++) {
        cosFar[i] = Math.cos(block * BLOCK * turning[i]);
        sinFar[i] = Math.sin(block * BLOCK * turning[i]);
      }
      for (let d = 0; d < BLOCK; d++) {
        let sum = 0;
        for (let i = 0, at = d * n; i < n; i++, at++) sum += cosFar[i] * cosNear[at] - sinFar[i] * sinNear[at];
        if (sum < 0) return block * BLOCK + d;
      }
      yield;
    }
    return null;
  }

  // What was found is kept: null where there is no negative mean, nothing where the search is not done.
  const found = new Map();
  function keep(key, first) {
    if (found.size > 200) found.clear();
    found.set(key, first);
  }
  function searchToTheEnd(turning) {
    const steps = search(turning);
    let step = steps.next();
    while (!step.done) step = steps.next();
    keep(turning.join(), step.value);
  }
  let searching = 0;
  function searchInSlices(turning) {
    const steps = search(turning), mine = ++searching;
    const slice = () => {
      const end = performance.now() + 12;
      let step = { done: false };
      // A newer search takes the place of this one.
      if (mine !== searching) return;
      while (!step.done && performance.now() < end) step = steps.next();
      if (!step.done) { setTimeout(slice); return; }
      keep(turning.join(), step.value);
      draw();
    };
    setTimeout(slice, 40);
  }

  function numbers() {
    const turning = invFreq().filter((w) => w > 0), key = turning.join();
    if (!found.has(key)) searchToTheEnd(turning);
    return { ...measured(turning), firstNegative: found.get(key) };
  }

  function measured(turning) {
    const waves = turning.map((w) => 2 * Math.PI / w);
    const live = waves.filter((wave) => wave <= seen());
    return {
      base: state.base, factor: SCALINGS[state.scaling].factor ? state.factor : null, length: state.length,
      pairs: rotation().rotary_dim / 2,
      unturned: waves.length - live.length,
      shortest: waves.length ? Math.min(...waves) : null,
      longestLive: live.length ? Math.max(...live) : null,
      longest: waves.length ? Math.max(...waves) : null,
    };
  }

  const meanCosine = (turning, distance) => {
    let sum = 0;
    for (const w of turning) sum += Math.cos(w * distance);
    return sum / turning.length;
  };

  // Numbers in words

  function written(x) {
    if (x === null) return "–";
    if (x >= 1e12 || (x > 0 && x < 1e-3)) return x.toExponential(2);
    return x.toLocaleString("en-US", x >= 1000 ? { maximumFractionDigits: 0 } : { maximumSignificantDigits: 3 });
  }
  const exactly = (x) => x.toLocaleString("en-US", { maximumSignificantDigits: 12 });
  const large = (x) => (x >= 1e6 && x < 1e12 ? `${exactly(x / 1e6)}M` : written(x));
  const shortTokens = (x) => (x >= 1048576 && x % 1048576 === 0 ? `${x / 1048576}M`
    : x >= 1024 && x % 1024 === 0 ? `${x / 1024}K` : written(x));

  // Charts: SVG whose colours are the page's, so that dark, light and print need no redrawing.

  const SVG = "http://www.w3.org/2000/svg";
  function put(parent, name, attributes, text) {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return parent.appendChild(made);
  }

  function decades(low, high) {
    const first = Math.ceil(Math.log10(low) - 1e-9), last = Math.floor(Math.log10(high) + 1e-9);
    const step = Math.max(1, Math.ceil((last - first + 1) / 6)), ticks = [];
    for (let power = first; power <= last; power += step) ticks.push(10 ** power);
    return ticks;
  }
  function evenly(low, high, count) {
    const rough = (high - low) / count, size = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((m) => m * size).find((s) => s >= rough), ticks = [];
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; k++) ticks.push(k * step + 0);
    return ticks;
  }
  function powers(high) {
    const last = Math.floor(Math.log2(high)), step = Math.max(1, Math.ceil((last + 1) / 7)), ticks = [];
    for (let power = 0; power <= last; power += step) ticks.push(2 ** power);
    return ticks;
  }

  function frame(id, box, x, y) {
    const svg = byId(id), width = Math.max(280, svg.parentElement.clientWidth), height = 300;
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const left = 74, right = width - 12, top = 12, bottom = height - 46;
    const scale = (axis, from, to) => {
      const f = axis.log ? Math.log : (v) => v, low = f(axis.low), high = f(axis.high);
      return (v) => from + (f(v) - low) / (high - low || 1) * (to - from);
    };
    const px = scale(x, left, right), py = scale(y, bottom, top);
    for (const tick of y.ticks) {
      put(svg, "line", { class: "grid", x1: left, x2: right, y1: py(tick), y2: py(tick) });
      put(svg, "text", { class: "tick", x: left - 6, y: py(tick) + 4, "text-anchor": "end" }, (y.told || large)(tick));
    }
    for (const tick of x.ticks) {
      put(svg, "line", { class: "grid", x1: px(tick), x2: px(tick), y1: top, y2: bottom });
      put(svg, "text", { class: "tick", x: px(tick), y: bottom + 17, "text-anchor": "middle" }, (x.told || written)(tick));
    }
    put(svg, "line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom });
    put(svg, "line", { class: "axis", x1: left, x2: left, y1: top, y2: bottom });
    put(svg, "text", { class: "label", x: (left + right) / 2, y: height - 8, "text-anchor": "middle" }, x.label);
    const middle = (top + bottom) / 2;
    const turned = { class: "label", x: 13, y: middle, "text-anchor": "middle", transform: `rotate(-90 13 ${middle})` };
    put(svg, "text", turned, y.label);
    return { svg, px, py, left, right, top, bottom };
  }

  const path = (f, points) =>
    points.map(([x, y], i) => `${i ? "L" : "M"}${f.px(x).toFixed(2)} ${f.py(y).toFixed(2)}`).join("");

  const pairsOf = (made) => [...made].map((w, i) => [i, w]).filter(([, w]) => w > 0);

  function pairChart(id, label, value, mark, told, hollow) {
    const now = pairsOf(invFreq()).map(([i, w]) => [i, value(w)]);
    const own = pairsOf(rotation().inv_freq).map(([i, w]) => [i, value(w)]);
    const seen = [...now, ...own].map(([, v]) => v).concat(mark);
    const low = Math.min(...seen) / 1.3, high = Math.max(...seen) * 1.3, last = Math.max(1, rotation().rotary_dim / 2 - 1);
    const f = frame(id, null,
      { low: -0.02 * last, high: last * 1.02, ticks: evenly(0, last, 7).filter(Number.isInteger), label: "pair of channels, fastest first" },
      { low, high, log: true, ticks: decades(low, high), label });
    if (id === "coverage") {
      const shade = { class: "shade", x: f.left, width: f.right - f.left, y: f.py(mark), height: f.bottom - f.py(mark) };
      f.svg.prepend(put(f.svg, "rect", shade));
    }
    put(f.svg, "line", { class: "mark", x1: f.left, x2: f.right, y1: f.py(mark), y2: f.py(mark) });
    put(f.svg, "text", { class: "note", x: f.left + 6, y: f.py(mark) - 5 }, told);
    if (own.length) put(f.svg, "path", { class: "own", d: path(f, own) });
    if (now.length) put(f.svg, "path", { class: "line", d: path(f, now) });
    for (const [i, v] of now)
      put(f.svg, "circle", { class: hollow(v) ? "dot hollow" : "dot", cx: f.px(i), cy: f.py(v), r: now.length > 80 ? 2 : 2.8 });
  }

  function decayChart(first) {
    const last = Math.max(2, seen() - 1), distances = [];
    for (let k = 0; k <= 700; k++) {
      const distance = Math.round(last ** (k / 700));
      if (distance !== distances.at(-1)) distances.push(distance);
    }
    const curve = (made) => {
      const turning = [...made].filter((w) => w > 0);
      return turning.length ? distances.map((d) => [d, meanCosine(turning, d)]) : [];
    };
    const now = curve(invFreq()), own = curve(rotation().inv_freq);
    const low = Math.min(-0.1, ...now.map(([, v]) => v), ...own.map(([, v]) => v)) - 0.03;
    const f = frame("decay", null,
      { low: 1, high: last, log: true, ticks: powers(last), told: shortTokens, label: "distance (tokens, log scale)" },
      { low, high: 1.03, ticks: evenly(low, 1.03, 5), told: (v) => v.toFixed(1), label: "mean cosine of the pairs" });
    put(f.svg, "line", { class: "zero", x1: f.left, x2: f.right, y1: f.py(0), y2: f.py(0) });
    if (own.length) put(f.svg, "path", { class: "own", d: path(f, own) });
    if (now.length) put(f.svg, "path", { class: "line", d: path(f, now) });
    if (first !== null && first !== undefined && first <= last) {
      put(f.svg, "line", { class: "mark", x1: f.px(first), x2: f.px(first), y1: f.top, y2: f.bottom });
      const near = f.px(first) < (f.left + f.right) / 2;
      const place = { class: "note", x: f.px(first) + (near ? 6 : -6), y: f.top + 12, "text-anchor": near ? "start" : "end" };
      put(f.svg, "text", place, `first negative at ${written(first)}`);
    }
  }

  // Controls. A slider is a logarithm in steps; the number beside it is exact.

  const STEPS = 2000;
  const RANGES = { base: [2, 1e9], factor: [1, 128], length: [128, 16777216] };
  function range(name) {
    const own = data.rotations.map((r) => r.start[name]);
    return [Math.min(RANGES[name][0], ...own), Math.max(RANGES[name][1], ...own)];
  }
  const toSlider = (name, value) => {
    const [low, high] = range(name);
    return Math.round(STEPS * Math.log(value / low) / Math.log(high / low));
  };
  function fromSlider(name, at) {
    const [low, high] = range(name), value = low * (high / low) ** (at / STEPS);
    if (name === "length") return Math.round(value);
    return Number(value.toPrecision(name === "base" ? 4 : 3));
  }
  const valid = (name, value) => Number.isFinite(value) && (name === "base" ? value > 1
    : name === "factor" ? value >= 1 && value <= data.longest
    : Number.isInteger(value) && value >= 2 && value <= data.longest);

  function show() {
    const uses = SCALINGS[state.scaling];
    byId("rotation").value = String(state.rotation);
    byId("scaling").value = state.scaling;
    for (const name of ["base", "factor", "length"]) {
      byId(`${name}-slider`).value = String(toSlider(name, state[name]));
      byId(`${name}-slider`).setAttribute("aria-valuetext", `${exactly(state[name])}${name === "length" ? " tokens" : ""}`);
      byId(`${name}-number`).value = String(state[name]);
      byId(`${name}-number`).removeAttribute("aria-invalid");
    }
    byId("original-number").value = String(state.original);
    byId("original-number").removeAttribute("aria-invalid");
    for (const id of ["factor-slider", "factor-number"]) byId(id).disabled = !uses.factor;
    byId("original-number").disabled = !uses.original;
    byId("factor-unused").hidden = Boolean(uses.factor);
    byId("original-unused").hidden = Boolean(uses.original);
  }

  function tell(n) {
    const set = (id, text) => { byId(id).textContent = text; };
    set("out-base", exactly(n.base));
    set("out-factor", n.factor === null ? "not used" : exactly(n.factor));
    set("out-length", written(n.length));
    set("out-unturned", `${n.unturned} of ${n.pairs}`);
    set("out-live", n.longestLive === null ? "none" : written(n.longestLive));
    set("out-longest", n.longest === null ? "none" : written(n.longest));
    const first = n.firstNegative === undefined ? "searching" : n.longest === null ? "none"
      : n.firstNegative === null ? `not within ${written(FURTHEST)}` : written(n.firstNegative);
    set("out-first", first);
    const turned = `${n.unturned} of ${n.pairs} pairs make no full turn in ${written(seen())} tokens`;
    byId("wavelengths").setAttribute("aria-label", `Wavelengths: ${written(n.shortest)} to ${written(n.longest)} tokens`);
    byId("coverage").setAttribute("aria-label", `Coverage: ${turned}`);
    byId("decay").setAttribute("aria-label", `Decay of the mean cosine by distance, first negative: ${first}`);
    clearTimeout(tell.later);
    if (n.firstNegative !== undefined)
      tell.later = setTimeout(() => set("said", `${turned}; mean cosine first negative: ${first}.`), 700);
  }

  function table() {
    const rows = byId("pairs"), made = invFreq();
    rows.replaceChildren();
    made.forEach((w, i) => {
      const row = rows.insertRow();
      const head = document.createElement("th");
      head.scope = "row";
      head.textContent = String(i);
      row.append(head);
      const cells = w > 0 ? [String(w), written(2 * Math.PI / w), written(seen() * w / (2 * Math.PI))] : ["0", "–", "0"];
      for (const text of cells) row.insertCell().textContent = text;
    });
  }

  function draw() {
    const turning = invFreq().filter((w) => w > 0), key = turning.join();
    if (!found.has(key)) searchInSlices(turning);
    const n = { ...measured(turning), firstNegative: found.get(key) };
    show();
    tell(n);
    pairChart("wavelengths", "tokens for a full turn", (w) => 2 * Math.PI / w, seen(), seen() < state.length ? `${written(seen())} tokens, all that a query sees` : `${written(seen())} tokens`,
      (v) => v > seen());
    pairChart("coverage", `turns in ${written(seen())} tokens`, (w) => seen() * w / (2 * Math.PI), 1, "one whole turn",
      (v) => v < 1);
    decayChart(n.firstNegative);
    table();
  }

  let waiting = false;
  function redraw() {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; draw(); });
  }

  function reset(number) {
    const r = data.rotations[number];
    Object.assign(state, { rotation: number, scaling: r.scaling }, r.start);
    byId("scaling").replaceChildren(...Object.entries(SCALINGS)
      .filter(([key, { wide }]) => (key !== "longrope" || r.settings.longrope) && !(wide && r.rotary_dim <= 2))
      .map(([key, { name }]) => new Option(name, key)));
  }

  function set(wanted) {
    if (wanted.rotation !== undefined) reset(wanted.rotation);
    Object.assign(state, wanted);
    draw();
  }

  data.rotations.forEach((r, i) => {
    byId("rotation").add(new Option(r.seen === null ? r.name : `${r.name} (see ${written(r.seen)} tokens)`, String(i)));
    if (r.first === null) return;
    // What was found when the page was written, where the model's own frequencies are these.
    reset(i);
    const made = invFreq();
    if (made.every((w, k) => Math.abs(w - r.inv_freq[k]) <= 1e-12 * w)) keep(made.filter((w) => w > 0).join(), r.first.at);
  });
  byId("which").hidden = data.rotations.length < 2;
  byId("rotation").addEventListener("change", (event) => { reset(Number(event.target.value)); redraw(); });
  byId("scaling").addEventListener("change", (event) => { state.scaling = event.target.value; redraw(); });
  byId("reset").addEventListener("click", () => { reset(state.rotation); redraw(); });
  for (const name of ["base", "factor", "length"])
    byId(`${name}-slider`).addEventListener("input", (event) => { state[name] = fromSlider(name, Number(event.target.value)); redraw(); });
  for (const name of ["base", "factor", "length", "original"])
    byId(`${name}-number`).addEventListener("change", (event) => {
      const value = Number(event.target.value);
      if (event.target.value.trim() && valid(name === "original" ? "length" : name, value)) { state[name] = value; redraw(); }
      else event.target.setAttribute("aria-invalid", "true");
    });
  window.addEventListener("resize", redraw);
  window.addEventListener("beforeprint", draw);
  window.theodolite = { invFreq: () => [...invFreq()], numbers, set, state: () => ({ ...state }) };
  reset(0);
  draw();
})();
