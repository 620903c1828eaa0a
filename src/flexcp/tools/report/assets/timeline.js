// Rounds as they were priced: above, what a rank computes; below, what its channel carries.
const timeCanvas = $("time");
const TIME = { left: 74, top: 40 };
let timePlot = { x: TIME.left, y: TIME.top, w: 1, h: 1 };
const KINDS = { compute: "computes", receive: "receives K and V", return: "sends gradients home", swap: "swaps rows for heads" };

const timeZoom = zoomable(timeCanvas, { axes: 1, plot: () => timePlot, changed: () => redrawTime(), limit: () => 1 / 400 });

function timeline() {
  const found = strategy().timelines[view().mask];
  if (!found.ready) {
    for (const span of found.spans) { span.from = sharesOf(span.begin); span.to = sharesOf(span.end); }
    found.ready = true;
  }
  return found;
}

function lineHeight(count) { return count <= 8 ? 34 : count <= 16 ? 22 : count <= 32 ? 15 : 10; }

function drawTime() {
  const found = timeline(), groupCount = found.groups.length, each = lineHeight(groupCount);
  timeCanvas.parentElement.style.height = TIME.top + groupCount * each + 6 + "px";
  const { ctx, width } = sharp(timeCanvas), area = timeZoom.area, total = found.forward + found.backward || 1;
  timePlot = { x: TIME.left, y: TIME.top, w: width - TIME.left - 2, h: groupCount * each };
  const x = seconds => timePlot.x + (seconds / total - area.x) / area.w * timePlot.w;
  const colours = Object.fromEntries(Object.keys(KINDS).map(k => [k, themeColour(k)]));
  ctx.save();
  ctx.beginPath();
  ctx.rect(timePlot.x, 0, timePlot.w, TIME.top + timePlot.h + 6);
  ctx.clip();
  ctx.fillStyle = themeColour("empty");
  ctx.fillRect(timePlot.x, TIME.top, timePlot.w, timePlot.h);
  const gap = each > 12 ? 2 : 1, split = Math.round((each - gap) * 0.6);
  for (const span of found.spans) {
    const base = span.passing === "forward" ? 0 : found.forward, whole = found[span.passing];
    ctx.fillStyle = colours[span.kind];
    for (let i = 0; i < span.from.length; i++) {
      if (span.to[i] <= span.from[i]) continue;
      const a = Math.max(timePlot.x - 1, x(base + span.from[i] * whole)), b = Math.min(timePlot.x + timePlot.w + 1, x(base + span.to[i] * whole));
      if (b <= timePlot.x || a >= timePlot.x + timePlot.w) continue;
      const at = i % groupCount, first = Math.floor(found.groups[at] * found.group_size), y = TIME.top + at * each;
      ctx.globalAlpha = state.rank === null || (state.rank >= first && state.rank < first + found.group_size) ? 1 : 0.22;
      const wide = Math.max(0.4, b - a - (b - a > 3 ? 0.8 : 0));
      if (span.kind === "compute") ctx.fillRect(a, y, wide, split);
      else if (span.kind === "swap") ctx.fillRect(a, y, wide, each - gap);
      else ctx.fillRect(a, y + split, wide, each - gap - split);
    }
  }
  ctx.globalAlpha = 1;
  drawTimeAxis(ctx, found, x, area, total);
  ctx.restore();
  ctx.fillStyle = themeColour("soft");
  ctx.textAlign = "right";
  const every = Math.max(1, Math.ceil(13 / each));
  found.groups.forEach((group, at) => {
    if (at % every === 0) ctx.fillText(groupName(group, found.group_size), TIME.left - 8, TIME.top + at * each + Math.min(each - 2, each / 2 + 4));
  });
  ctx.textAlign = "left";
  ctx.fillText("time →", 2, TIME.top - 8);
  const rounds = strategy().rounds[view().mask];
  $("time-note").textContent = `Across: seconds since forward began. A line: a rank; above, what it computes, below, what it transfers; empty: it waits. `  + `${rounds} round${rounds === 1 ? "" : "s"}. ` +
    (found.groups.length < found.of ? `${found.groups.length} of ${found.of} ranks are shown, the busiest among them. ` : "") +
    (found.group_size > 1 ? `${found.group_size} ranks at a time share the heads of their rows; a line is the busiest of them.` : "");
  timeCanvas.setAttribute("aria-label", `What each rank does when: forward takes ${asSeconds(found.forward)}, backward ${asSeconds(found.backward)}, in ${rounds} rounds.`);
}
const redrawTime = framed(drawTime);

function drawTimeAxis(ctx, found, x, area, total) {
  ctx.fillStyle = themeColour("soft");
  const step = niceStep(area.w * total, timePlot.w / 90);
  for (let t = Math.ceil(area.x * total / step) * step; t <= (area.x + area.w) * total; t += step) {
    ctx.globalAlpha = 0.3;
    ctx.fillRect(x(t), TIME.top - 4, 1, timePlot.h + 4);
    ctx.globalAlpha = 1;
    const at = x(t) - timePlot.x;
    ctx.textAlign = at < 14 ? "left" : at > timePlot.w - 20 ? "right" : "center";
    ctx.fillText(asSeconds(t), x(t), TIME.top - 8);
  }
  ctx.fillStyle = themeColour("ink");
  ctx.fillRect(x(found.forward) - 1, 2, 2, 12);
  ctx.fillRect(x(found.forward) - 1, TIME.top - 2, 2, timePlot.h + 2);
  ctx.font = "600 11px system-ui, sans-serif";
  ctx.textAlign = "left";
  ctx.fillText("backward →", x(found.forward) + 6, 12);
  ctx.textAlign = "right";
  ctx.fillText("← forward", x(found.forward) - 6, 12);
}

timeCanvas.addEventListener("pointermove", event => {
  const [px, py] = timeZoom.share(event), found = timeline(), groupCount = found.groups.length;
  const at = Math.floor(py * groupCount), area = timeZoom.area;
  if (at < 0 || at >= groupCount || px < 0 || px > 1) { unfocus(); return; }
  const total = found.forward + found.backward, seconds = (area.x + px * area.w) * total, now = [];
  for (const span of found.spans) {
    const base = span.passing === "forward" ? 0 : found.forward, share = (seconds - base) / found[span.passing];
    for (let i = at; i < span.from.length; i += groupCount)
      if (span.from[i] <= share && share < span.to[i])
        now.push(`${KINDS[span.kind]}${span.kind === "swap" ? "" : `, round ${span.rounds[(i - at) / groupCount]}`}, ${asSeconds((span.to[i] - span.from[i]) * found[span.passing])}`);
  }
  focusRank(found.groups[at] * found.group_size);
  const name = groupName(found.groups[at], found.group_size);
  showTip(event, lines(name[0].toUpperCase() + name.slice(1), `${seconds < found.forward ? "forward" : "backward"}, at ${asSeconds(seconds)}`, ...(now.length ? now : ["waits"])));
});
timeCanvas.addEventListener("pointerleave", () => unfocus());
isolateOnClick(timeCanvas, event => {
  const found = timeline(), at = Math.floor(timeZoom.share(event)[1] * found.groups.length);
  return at >= 0 && at < found.groups.length ? found.groups[at] * found.group_size : null;
});
$("time-in").onclick = () => timeZoom.zoom(2);
$("time-out").onclick = () => timeZoom.zoom(0.5);
$("time-all").onclick = () => timeZoom.all();
