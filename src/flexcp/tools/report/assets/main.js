// Puts the page together, and redraws what a choice changes.
function focusRank(rank) {
  if (state.kept !== null) rank = state.kept;  // a click has isolated one
  if (state.rank === rank) return;
  state.rank = rank;
  redrawFigures();
}
function unfocus() { hideTip(); focusRank(null); }
// A click shows one rank alone, in all figures, until it is clicked again or Escape is pressed.
function isolate(rank) {
  state.kept = state.kept === rank ? null : rank;
  state.rank = state.kept;
  $("isolated").hidden = state.kept === null;
  $("isolated").textContent = state.kept === null ? "" : `Rank ${state.kept} alone is shown. Click it again, or press Escape, to see all.`;
  redrawFigures();
}
function redrawFigures() { redrawMatrix(); redrawStrip(); redrawBars(); redrawTime(); }

function card(name, value, about) {
  return element("div", { className: "card" }, element("span", { className: "name", textContent: name }),
    element("b", { textContent: value }), element("span", { textContent: about }));
}
function share(x) { return (100 * x).toFixed(x < 0.0995 ? 1 : 0) + "%"; }

function writeVerdict() {
  const { stats } = strategy(), first = DATA.strategies[0].stats, mean = stats.area_per_rank.reduce((a, b) => a + b, 0) / DATA.ranks;
  const others = DATA.strategies.slice(1), here = stats.predicted_seconds;
  const fastest = others.length && Math.min(...others.map(s => s.stats.predicted_seconds));
  const compared = state.strategy === 0
    ? (others.length ? [`${(fastest / here).toFixed(2)} ×`, "as fast as the best of the others below"] : ["–", "nothing to compare with"])
    : [`${(here / first.predicted_seconds).toFixed(2)} ×`, "the time of the chosen plan"];
  $("sentence").replaceChildren(element("b", { textContent: strategy().name }),
    ` is predicted to take ${asSeconds(here)} for attention forward and backward. ${asSeconds(strategy().exposed)} of it, ${share(Math.min(1, strategy().exposed / (here || 1)))}, is exposed communication; the rest is computing on the busiest rank.`);
  $("verdict").replaceChildren(
    card("Predicted", asSeconds(here), `${asSeconds(stats.forward_seconds)} forward, ${asSeconds(stats.backward_seconds)} backward`),
    card("Busiest rank", `${stats.imbalance.toFixed(3)} ×`, `the mean of ${asCount(mean)} pairs; no layout is below ${stats.imbalance_lower_bound.toFixed(3)}`),
    card("Received", asBytes(Math.max(...stats.bytes_received_per_rank)), `forward at most; ${share(stats.received_fraction)} of an all-gather's rows`),
    card("Memory", asBytes(strategy().memory.peak), `of a rank at most, for one layer: ${asBytes(strategy().memory.own)} own, ${asBytes(strategy().memory.received)} received at a time, ${asBytes(strategy().memory.kept)} kept` + (DATA.machine.memory ? `; ${DATA.machine.name} has ${asBytes(DATA.machine.memory)}` : "")),
    card("Between nodes", asBytes(strategy().far), `of all that moves; ${asBytes(strategy().near)} within nodes of ${Math.min(DATA.machine.ranks_per_node, DATA.ranks)}`),
    card(state.strategy === 0 ? "Gain" : "Against the chosen", ...compared));
}

function writeStrategies() {
  const slowest = Math.max(...DATA.strategies.map(s => s.stats.predicted_seconds));
  $("strategies").replaceChildren(...DATA.strategies.map((one, i) => {
    const { stats } = one, input = element("input", { type: "radio", name: "strategy", value: i, checked: i === state.strategy });
    input.onchange = () => choose(i);
    const who = element("span", { className: "who" }, one.name);
    if (i === 0) who.append(element("span", { className: "badge", textContent: "chosen" }));
    who.append(element("small", { textContent: one.about }));
    const meter = element("span", { className: "meter", title: "computing on the busiest rank, and what comes on top" });
    const compute = Math.min(stats.compute_seconds, stats.predicted_seconds);
    for (const part of [compute, stats.predicted_seconds - compute]) {
      const bar = element("i");
      bar.style.width = 100 * part / slowest + "%";
      meter.append(bar);
    }
    const number = (value, about, extra) => element("span", { className: "num" + (extra ? " extra" : "") }, value, element("small", { textContent: about }));
    return element("label", { className: "strategy" }, input, who, meter,
      number(asSeconds(stats.predicted_seconds), i ? `${(stats.predicted_seconds / DATA.strategies[0].stats.predicted_seconds).toFixed(2)} ×` : "predicted"),
      number(`${stats.imbalance.toFixed(2)} ×`, "busiest rank", true),
      number(asBytes(Math.max(...stats.bytes_received_per_rank)), "received, forward", true));
  }));
}

function choose(i) {
  state.strategy = i;
  state.rank = state.kept;
  cursor = null;
  emptyInspector();
  writeVerdict();
  $("h-why").textContent = i === 0 ? "Why this plan" : `About ${strategy().name}`;
  $("why").replaceChildren(...strategy().why.map(text => element("li", { textContent: text })));
  writeHeads();
  writeTables();
  writeLegends();
  redrawFigures();
}

// Where ranks share heads, one head can be looked at: a tile then has the rank that computes it.
function writeHeads() {
  const size = groupSize(), select = $("head"), heads = DATA.shape.num_heads;
  select.hidden = size === 1;
  if (size === 1) { state.head = null; return; }
  const options = [element("option", { value: "", textContent: "all heads" })];
  for (let h = 0; h < heads; h++) options.push(element("option", { value: h, textContent: `head ${h}` }));
  select.replaceChildren(...options);
  select.value = state.head === null ? "" : String(state.head);
}

function swatch(background, text, kind = "") {
  const dot = element("span", { className: "dot " + kind });
  if (background) dot.style.background = background;
  return element("span", {}, dot, text);
}

function writeLegends() {
  const size = groupSize(), per = perColour(), swatches = element("span", { className: "swatches", role: "group", ariaLabel: "Ranks; choose one to see it alone" });
  for (let r = 0; r < DATA.ranks; r++) {
    const bar = element("button", { type: "button", title: `rank ${r}`, ariaLabel: `Show rank ${r} alone`, onclick: () => isolate(r) });
    bar.style.background = rankCss(r);
    swatches.append(bar);
  }
  const names = { rank: `one colour for each rank, 0 to ${DATA.ranks - 1}`, node: `one for each node of ${per} ranks`, group: `one for each group of ${per} that share heads` };
  const parts = [swatches, element("span", { textContent: `From left to right: ${names[state.colours]}. Click one to see a rank alone.` })];
  if (per > 1 && DATA.ranks / per <= 16)
    for (let r = 0; r < DATA.ranks; r += per) parts.push(swatch(rankCss(r), `${state.colours} ${r / per}: ranks ${r}–${Math.min(r + per, DATA.ranks) - 1}`));
  if (size > 1 && state.head === null)
    parts.push(element("span", { textContent: size < DATA.ranks ? `A tile is computed by ${size} ranks, each for some heads; choose a head to see its rank.` : "Every tile is computed by all ranks, each for some heads; choose a head to see its rank." }));
  $("legend").replaceChildren(...parts);
  const tile = rankCss(0);
  $("matrix-legend").replaceChildren(swatch(tile, "full tile: every pair allowed"), swatch(tile, "partial tile: some pairs", "pale"), swatch("var(--empty)", "empty: nothing computed"),
    ...(documents().length ? [swatch("", "line: a document begins", "seam")] : []));
  const kinds = new Set(timeline().spans.map(s => s.kind));
  $("time-legend").replaceChildren(...Object.entries(KINDS).filter(([kind]) => kinds.has(kind)).map(([kind, text]) => {
    const dot = element("span", { className: "dot" });
    dot.style.background = `var(--${kind})`;
    return element("span", {}, dot, text);
  }));
}

function tableOf(node, header, rows, sort) {
  const body = element("tbody", {}, ...rows.map(row => element("tr", {}, ...row.map(cell => element("td", { textContent: cell })))));
  const cells = header.map((text, i) => element("th", { scope: "col" }, sort ? element("button", { type: "button", textContent: text, onclick: () => sort(i) }) : text));
  node.replaceChildren(element("thead", {}, element("tr", {}, ...cells)), body);
}
let tableOrder = 0;
function writeTables() {
  const { stats, tokens } = strategy();
  const rows = tokens.map((count, r) => [r, count, stats.area_per_rank[r], stats.tokens_received_per_rank[r], stats.bytes_received_per_rank[r], stats.backward_bytes_received_per_rank[r],
    stats.bytes_received_between_nodes_per_rank[r] + stats.backward_bytes_received_between_nodes_per_rank[r], stats.memory_bytes_per_rank[r]]);
  if (tableOrder) rows.sort((a, b) => b[tableOrder] - a[tableOrder] || a[0] - b[0]);
  tableOf($("table"), ["Rank", "Tokens", "Allowed pairs", "Rows received", "Bytes, forward", "Bytes, backward", "Of them from other nodes", "Peak memory"],
    rows.map(row => row.map(asWhole)), column => { tableOrder = column; writeTables(); });
}

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  $("theme").textContent = name === "dark" ? "Light" : "Dark";
  $("theme").setAttribute("aria-pressed", String(name === "dark"));
}

function start() {
  const shape = DATA.shape;
  $("title").append(element("code", { textContent: DATA.title }), ` on ${DATA.ranks} rank${DATA.ranks === 1 ? "" : "s"}`);
  $("setting").textContent = `${asWhole(DATA.tokens)} tokens · ${shape.num_heads} heads` +
    (shape.num_kv_heads === shape.num_heads ? "" : ` (${shape.num_kv_heads} for keys and values)`) +
    ` of ${shape.head_dim} · ${shape.dtype}` + (shape.batch > 1 ? ` · batch ${shape.batch}` : "") + ` · priced for ${DATA.machine.name}`;
  $("machine").textContent = DATA.machine.name;
  $("notes").textContent = DATA.notes.length ? DATA.notes.join("; ") + "." : "";
  $("made").textContent = `Made by flexcp ${DATA.version}.`;
  if (DATA.views.length > 1) {
    $("view").hidden = false;
    DATA.views.forEach((v, i) => $("view").append(element("option", { value: i, textContent: v.label })));
    $("view").onchange = event => { state.view = Number(event.target.value); choose(state.strategy); };
  }
  tableOf($("priced"), ["Layout and schedule", "Predicted"], DATA.considered.map(([name, seconds]) => [name, asSeconds(seconds)]));
  setTheme(document.documentElement.dataset.theme);
  $("theme").onclick = () => { setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"); redrawFigures(); };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", event => { setTheme(event.matches ? "dark" : "light"); redrawFigures(); });
  $("print").onclick = () => window.print();
  // Paper is light; figures are drawn anew for its width, at once, since no frame comes before.
  const drawAll = () => { drawMatrix(); drawStrip(); drawBars("work"); drawBars("traffic"); drawTime(); };
  let screenTheme = null;
  addEventListener("beforeprint", () => { screenTheme = document.documentElement.dataset.theme; setTheme("light"); drawAll(); });
  addEventListener("afterprint", () => { if (screenTheme) setTheme(screenTheme); drawAll(); });
  matchMedia("print").addEventListener("change", drawAll);
  new ResizeObserver(redrawFigures).observe(document.querySelector("main"));
  document.addEventListener("keydown", event => { if (event.key === "Escape") { if (state.kept !== null) isolate(state.kept); unfocus(); leaveMatrix(); } });
  $("colours").onchange = event => { state.colours = event.target.value; writeLegends(); redrawFigures(); };
  $("head").onchange = event => { state.head = event.target.value === "" ? null : Number(event.target.value); writeLegends(); redrawFigures(); };
  writeStrategies();
  choose(0);
}
start();
