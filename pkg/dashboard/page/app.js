"use strict";
// Names and errors come from the network: they only ever become text nodes.
const levels = [["bad", "✗", "NO"], ["warning", "◐", "partly"], ["unknown", "?", "old"], ["good", "✓", "ok"]];
const silence = 4000; // ms without a snapshot, of which one arrives each second
const $ = (id) => document.getElementById(id);
const clean = (text) => String(text).replace(/\p{C}/gu, " ");
let now = 0, last = 0, source, events = [], flips = [], members = [], drawn = {};

function element(name, attributes, ...children) {
  const svg = ["svg", "rect", "line", "circle"].includes(name);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children.flat().map((child) => (child instanceof Node ? child : clean(child))));
  return made;
}

// draw replaces the content of an element, unless it is the same: focus and selection stay.
function draw(id, data, render) {
  const text = JSON.stringify(data);
  if (drawn[id] === text) return;
  drawn[id] = text;
  $(id).replaceChildren(...render(data).flat());
}

const mark = (level, word) => element("span", { class: "mark " + levels[level][0] },
  element("span", { "aria-hidden": "true" }, levels[level][1]), " " + (word || levels[level][2]));
const plural = (count, noun) => count + " " + noun + (count === 1 ? "" : "s");
// ms keeps the fraction of a millisecond, which orders an lb and its frontend.
const ms = (time) => (time ? Date.parse(time) + Number("0." + (/\.\d{3}(\d+)/.exec(time) || [0, 0])[1]) : 0);

function clock(time, digits = 0) {
  if (!time) return "";
  const text = new Date(time).toISOString();
  const day = new Date(now).toISOString().slice(0, 10) === text.slice(0, 10) ? "" : text.slice(0, 10) + " ";
  return day + text.slice(11, 19 + (digits ? digits + 1 : 0));
}

const table = (head, rows) => element("table", {}, element("thead", {}, element("tr", {},
  head.map((title) => element("th", { scope: "col" }, title)))), element("tbody", {}, rows));
// row does not wrap the first short cells.
const row = (name, cells, short = 0) => element("tr", { class: name },
  cells.map((cell, i) => element("td", i < short ? { class: "short" } : {}, cell)));

// section renders a table of objects with a row for each pod.
function section(id, title, via, noun) {
  return (data) => {
    const total = data.levels.reduce((sum, count) => sum + count, 0);
    const rows = (data.objects || []).flatMap((object) => object.parts.map((part, i) => {
      const cells = [mark(part.level), part.pod, part.state, part.cause, part.via, clock(part.since)];
      const made = row(levels[part.level][0] + (i ? " more" : ""), cells, 3);
      if (!i) {
        made.prepend(element("th", { scope: "rowgroup", rowspan: object.parts.length }, object.name,
          object.detail ? element("small", {}, object.detail) : ""));
      }
      return made;
    }));
    const shown = (data.objects || []).length;
    const notes = [];
    if (!total) notes.push(element("p", { class: "note" }, "No " + noun + " is known."));
    else if (data.matching > shown) {
      notes.push(element("p", { class: "note" }, `Showing ${shown} of ${plural(data.matching, noun)}, problems first. ` +
        "Filter to see others."));
    } else if (!shown) notes.push(element("p", { class: "note" }, `The filter matches none of ${plural(total, noun)}.`));
    return [rows.length ? table([title, "", "Pod", "State", "Cause", via, "Since"], rows) : [], notes];
  };
}

const worst = (counts) => { const at = counts.findIndex((count) => count > 0); return at < 0 ? 2 : at; };

function pods(data) {
  return [table(["", "Pod", "Problems", "Frontend answered", "lb answered"], data.map((pod) => row(levels[pod.level][0], [
    mark(pod.level, pod.gone ? "left" : ""), pod.name,
    pod.gone ? ["left the trench at " + clock(pod.gone)] : (pod.problems || []).map((text) => element("div", {}, text)),
    clock(pod.frontend.at) || "never", clock(pod.lb.at) || "never"], 2)))];
}

function show(page) {
  now = ms(page.time);
  $("trench").textContent = clean(page.trench);
  document.title = clean("vipgate " + page.trench);
  const present = page.pods.filter((pod) => !pod.gone), fine = present.filter((pod) => pod.level === 3).length;
  const level = page.error || !present.length ? (page.error ? 0 : 2)
    : Math.min(...present.map((pod) => pod.level), worst(page.vips.levels));
  draw("verdict", [level, page.error, fine, present.length, page.vips.levels], () => {
    $("verdict").className = "banner " + levels[level][0];
    const vips = page.vips.levels, all = vips.reduce((sum, count) => sum + count, 0);
    return [page.error ? mark(0, page.error) : !present.length ? mark(2, "waiting for the first answers")
      : mark(level, `${fine} of ${plural(present.length, "pod")} good; ${vips[3]} of ${plural(all, "VIP")} ` +
        "announced by every pod")];
  });
  const podLevels = [0, 0, 0, 0];
  for (const pod of present) podLevels[pod.level]++;
  draw("cards", [podLevels, page.vips.levels, page.gateways.levels, page.targets.levels], (all) =>
    ["Pods", "VIPs", "Gateways", "Target addresses"].map((title, i) => element("li", { class: levels[worst(all[i])][0] },
      element("b", {}, `${all[i][3]}/${all[i].reduce((sum, count) => sum + count, 0)}`), " " + title,
      element("div", {}, all[i].slice(0, 3).map((count, at) => (count ? [mark(at, String(count) +
        [" not good", " partly", " unknown"][at]), " "] : [])).flat()))));
  draw("pods", page.pods, pods);
  draw("vips", page.vips, section("vips", "VIP", "Received by", "VIP"));
  draw("gateways", page.gateways, section("gateways", "Gateway", "Exported", "gateway"));
  draw("targets", page.targets, section("targets", "Stream / target", "", "target address"));
  draw("groups", page.vips.groups || [], (groups) => groups.length ? [element("ul", { class: "groups" },
    groups.slice(0, 12).map((group) => element("li", {}, mark(group.Level, plural(group.Count, "VIP") + " " + group.State),
      ": " + group.Cause, group.Next ? element("div", { class: "note" }, "Next: " + group.Next) : "")))] : []);
  draw("events", page.events.slice(-50), (list) => [table(["Time", "Pod", "Program", "Object", "From", "To", "Detail"],
    list.toReversed().map((e) => row("", [clock(e.time, 3), e.pod, e.program, e.object, e.from, e.to, e.detail], 6)))]);
  events = page.events.filter((e) => e.time && e.object);
  members = page.pods;
  lanes();
  cluster();
}

// Words of the two programs about a VIP, and the height of their bars: state is not colour alone.
const heights = { "ready": 8, "draining": 5, "not ready": 2, "announced": 8, "de-preferred": 5, "withdrawn": 2, "no answer": 4 };
const isVIP = (e) => e.object.includes("/") && e.to in heights;
const styleOf = (word) => "bar " + word.replace(/[^a-z]/g, "");

// histories returns the transitions of each VIP in each pod; VIPs with the same ones share a lane.
function histories(start) {
  const byLane = new Map();
  for (const e of events) {
    if (!isVIP(e)) continue;
    const key = e.pod + "\n" + e.object;
    if (!byLane.has(key)) byLane.set(key, { pod: e.pod, vips: [e.object], list: [] });
    byLane.get(key).list.push(e);
  }
  const groups = [];
  for (const lane of byLane.values()) {
    if (ms(lane.list.at(-1).time) < start) continue;
    const same = groups.find((group) => group.pod === lane.pod && group.list.length === lane.list.length &&
      group.list.every((e, i) => e.program === lane.list[i].program && e.to === lane.list[i].to &&
        Math.abs(ms(e.time) - ms(lane.list[i].time)) < 1000));
    if (same) same.vips.push(...lane.vips); else groups.push(lane);
  }
  return groups.sort((a, b) => a.vips[0].localeCompare(b.vips[0]) || a.pod.localeCompare(b.pod));
}

const some = (names) => (names.length < 3 ? names.join(", ") : `${names[0]} and ${names.length - 1} more`);

function lanes() {
  const span = Number($("window").value) * 1000, start = now - span;
  const x = (time) => Math.max(0, Math.min(1000, (ms(time) - start) / span * 1000));
  const all = histories(start), made = all.slice(0, 10).map((lane) => {
    const said = [], shapes = [];
    ["lb", "frontend"].forEach((program, i) => {
      const list = lane.list.filter((e) => e.program === program);
      // Before the first kept event, unless it is the first decision, the state was its origin.
      const states = list.length ? [{ to: list[0].from === list[0].to ? "" : list[0].from, time: start }, ...list] : [];
      // A state that its program does not confirm any more is unknown.
      const pod = members.find((pod) => pod.name === lane.pod), old = !pod || pod.gone || pod[program].old;
      if (list.length && old) states.push({ to: "no answer", time: pod && pod[program].at || start });
      states.forEach((e, at) => {
        const from = at ? x(e.time) : 0, to = at + 1 < states.length ? x(states[at + 1].time) : 1000;
        if (to <= from || !(e.to in heights)) return;
        const height = heights[e.to];
        shapes.push(element("rect", { class: styleOf(e.to), x: from, y: i * 10 + 9 - height, width: to - from, height }));
      });
      if (list.length) said.push(`${program}: ${list.at(-1).to} since ${clock(list.at(-1).time, 3)}` +
        (old ? ", but now it does not answer" : ""));
    });
    return element("div", { class: "lane" }, element("div", {}, lane.pod + " ", element("b", {}, some(lane.vips))),
      element("svg", { viewBox: "0 0 1000 20", preserveAspectRatio: "none", role: "img", "aria-label": clean(said.join("; ")) },
        shapes), element("div", { class: "note said" }, said.join("; ")));
  });
  if (made.length) made.push(element("div", { class: "axis" }, element("span", {}, clock(start)), element("span", {}, clock(now))));
  if (all.length > 10) made.push(element("p", { class: "note" }, `${all.length - 10} further groups of VIPs flipped.`));
  $("lanes").replaceChildren(...(made.length ? made : [element("p", { class: "note" }, "No VIP flipped in this time.")]));
}

// cluster joins events that follow each other within two seconds to flips.
function cluster() {
  flips = [];
  for (const e of events) {
    const flip = flips.at(-1);
    if (flip && ms(e.time) - ms(flip.at(-1).time) < 2000) flip.push(e); else flips.push([e]);
  }
  flips = flips.filter((flip) => flip.some((e) => isVIP(e) || /VIPs$/.test(e.object) || /^(up|down)$/.test(e.to)))
    .slice(-15).reverse();
  draw("flip", flips.map((flip) => [flip[0].time, flip.length]), () => {
    const select = $("flip"), chosen = select.selectedIndex > 0 ? select.value : "";
    const options = flips.map((flip) => element("option", { value: flip[0].time }, clock(flip[0].time, 3) + " " +
      some([...new Set(flip.map((e) => e.object))]) + ": " + [...new Set(flip.map((e) => e.to))].slice(0, 4).join(", ")));
    for (const option of options) option.selected = option.value === chosen;
    return options;
  });
  steps();
}

// steps shows a flip like a network waterfall: order from top to bottom, time from left to right.
function steps() {
  const flip = flips.find((list) => list[0].time === $("flip").value) || flips[0] || [];
  const joined = [];
  for (const e of flip) {
    const same = joined.findLast((step) => ["pod", "program", "from", "to", "detail"].every((key) => step[key] === e[key]) &&
      ms(e.time) - ms(step.time) < 100);
    if (same) same.objects.push(e.object); else joined.push({ ...e, objects: [e.object] });
  }
  draw("steps", joined.slice(0, 60), (list) => {
    if (!list.length) return [element("p", { class: "note" }, "No flip is known.")];
    const start = ms(list[0].time), length = Math.max(1, ms(list.at(-1).time) - start);
    return [table(["After", "", "Pod", "Program", "Object", "Change", "Cause"], list.map((e) => {
      const x = 4 + (ms(e.time) - start) / length * 92;
      return row("", [`${(ms(e.time) - start).toFixed(1)} ms`, element("svg", { class: "fall", viewBox: "0 0 100 10", "aria-hidden": "true" },
        element("line", { x1: 4, x2: x, y1: 5, y2: 5 }), element("circle", { class: styleOf(e.to), cx: x, cy: 5, r: 3.5 })),
      e.pod, e.program, some(e.objects), (e.from && e.from !== e.to ? e.from + " → " : "") + e.to, e.detail], 6);
    }))];
  });
}

function stale(reason) {
  document.body.classList.toggle("stale", reason !== "");
  $("lost").hidden = reason === "" || !last;
  $("lost").textContent = clean(reason);
  $("connection").textContent = reason === "" ? `live, ${clock(now)} UTC` : "NOT live";
}

const lost = () => (last ? `Everything below is old, of ${clock(now)} UTC. ` : "") + "vipgate does not answer: " +
  (source.readyState === EventSource.CLOSED ? "start `vipgate dashboard` again, and open its new address." : "reconnecting.");

function connect() {
  if (source) source.close();
  source = new EventSource("stream?q=" + encodeURIComponent($("filter").value));
  source.onmessage = (message) => {
    last = performance.now();
    show(JSON.parse(message.data));
    stale("");
  };
  source.onerror = () => stale(lost());
}

let typing;
$("filter").addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(connect, 250); });
$("window").addEventListener("change", lanes);
$("flip").addEventListener("change", steps);
setInterval(() => { if (last && performance.now() - last > silence) stale(lost()); }, 500);
connect();
