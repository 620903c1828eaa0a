// The strip of owners, and bars of work and traffic.
const stripCanvas = $("strip");

function drawStrip() {
  const { ctx, width } = sharp(stripCanvas), owners = ownersShown(), top = 4, high = 34;
  // A column shows its owners in their shares, from top to bottom.
  for (let x = 0; x < width; x++) {
    const from = x / width * DATA.tokens, to = (x + 1) / width * DATA.tokens;
    const first = lastUpTo(owners.start, from), last = lastUpTo(owners.start, to - 1e-9);
    const crisp = last - first === 1 ? (owners.start[last] < (from + to) / 2 ? last : first) : null;
    let y = top;
    for (let i = first; i <= last; i++) {
      const part = crisp === null ? (Math.min(to, owners.stop[i]) - Math.max(from, owners.start[i])) / (to - from) * high : i === crisp ? high : 0;
      ctx.globalAlpha = state.rank === null || state.rank === owners.owner[i] ? 1 : 0.15;
      ctx.fillStyle = rankCss(owners.owner[i]);
      ctx.fillRect(x, y, 1, part);
      y += part;
    }
  }
  ctx.globalAlpha = 1;
  ctx.fillStyle = themeColour("soft");
  const step = niceStep(DATA.tokens, width / 90, DATA.tokens >= 2048 ? 2 : 10);
  for (let t = 0; t <= DATA.tokens; t += step) {
    const x = t / DATA.tokens * width;
    ctx.fillRect(Math.min(x, width - 1), top + high, 1, 4);
    ctx.textAlign = x < 12 ? "left" : x > width - 16 ? "right" : "center";
    ctx.fillText(asTokens(t), x, top + high + 17);
  }
  const area = matrixZoom.area;
  if (area.w < 1) {  // where the matrix is looking
    ctx.strokeStyle = themeColour("ink");
    ctx.lineWidth = 1.5;
    ctx.strokeRect(area.x * width + 0.75, top - 2.25, Math.max(3, area.w * width) - 1.5, high + 4.5);
  }
  const seams = documents(), shownSeams = seams.length && seams.length <= width / 4;
  if (shownSeams) {
    ctx.fillStyle = themeColour("ink");
    for (const t of seams) ctx.fillRect(t / DATA.tokens * width - 0.5, top, 1, high);
  }
  $("strip-legend").textContent = "Across: position of the token in the sequence. A column has the colours of its owners." +
    (shownSeams ? ` The ${asWhole(seams.length)} lines are where documents begin.` : seams.length ? ` ${asWhole(seams.length + 1)} documents, too many to draw.` : "") +
    (matrixZoom.area.w < 1 ? " The frame is what the matrix shows." : "");
  const runs = owners.start.length;
  $("strip-note").textContent = `${strategy().layout} layout: ${asWhole(runs)} run${runs === 1 ? "" : "s"} of tokens, ` +
    `${asWhole(Math.min(...strategy().tokens))} to ${asWhole(Math.max(...strategy().tokens))} tokens per rank`;
  stripCanvas.setAttribute("aria-label", `The owners of the tokens from first to last: ${asWhole(runs)} runs on ${DATA.ranks} ranks.`);
}
const redrawStrip = framed(drawStrip);

stripCanvas.addEventListener("pointermove", event => {
  const box = stripCanvas.getBoundingClientRect(), owners = ownersShown();
  const token = Math.min(DATA.tokens - 1, Math.max(0, Math.floor((event.clientX - box.left) / box.width * DATA.tokens)));
  const at = lastUpTo(owners.start, token), rank = owners.owner[at];
  focusRank(rank);
  showTip(event, lines(`Rank ${rank}`, `tokens ${asRange([owners.start[at], owners.stop[at]])}`, `${asWhole(strategy().tokens[rank])} tokens in all`));
});

function barValues(which) {
  const stats = strategy().stats;
  return which === "work" ? [stats.area_per_rank] : [stats.bytes_received_per_rank, stats.backward_bytes_received_per_rank];
}
function rankOrder() {
  const ranks = [...Array(DATA.ranks).keys()];
  if (state.order === "rank") return ranks;
  const parts = barValues(state.order), total = r => parts.reduce((sum, list) => sum + list[r], 0);
  return ranks.sort((a, b) => total(b) - total(a) || a - b);
}

// The scale is that of the worst strategy where that is not too far away, so that they compare.
function barScale(which) {
  const tops = DATA.strategies.map(s => {
    const lists = which === "work" ? [s.stats.area_per_rank] : [s.stats.bytes_received_per_rank, s.stats.backward_bytes_received_per_rank];
    return Math.max(...lists[0].map((_, r) => lists.reduce((sum, list) => sum + list[r], 0)));
  });
  return Math.max(1, Math.min(Math.max(...tops), 2.5 * tops[state.strategy] || Infinity));
}

const barPlots = {};
function drawBars(which) {
  const { ctx, width, height } = sharp($(which)), parts = barValues(which), order = rankOrder();
  const left = 58, base = height - 20, high = base - 8, wide = width - left, each = wide / DATA.ranks;
  const top = barScale(which), format = which === "work" ? asCount : asBytes;
  barPlots[which] = { left, each, order };
  ctx.fillStyle = themeColour("soft");
  ctx.textAlign = "right";
  const step = niceStep(top, 3);
  for (let v = 0; v <= top; v += step) {
    const y = base - v / top * high;
    ctx.globalAlpha = 0.25;
    ctx.fillRect(left, y, wide, 1);
    ctx.globalAlpha = 1;
    ctx.fillText(format(v), left - 6, y + 4);
  }
  const gap = each > 6 ? 1.5 : each > 3 ? 0.7 : 0;
  order.forEach((rank, i) => {
    let y = base;
    parts.forEach((list, part) => {
      const size = list[rank] / top * high;
      ctx.globalAlpha = (state.rank === null || state.rank === rank ? 1 : 0.25) * (part ? 0.55 : 1);
      ctx.fillStyle = rankCss(rank);
      ctx.fillRect(left + i * each + gap / 2, y - size, Math.max(0.6, each - gap), size);
      y -= size;
    });
  });
  ctx.globalAlpha = 1;
  const totals = order.map(r => parts.reduce((sum, list) => sum + list[r], 0));
  const mean = totals.reduce((a, b) => a + b, 0) / totals.length;
  ctx.strokeStyle = themeColour("ink");
  ctx.setLineDash([5, 3]);
  ctx.beginPath();
  ctx.moveTo(left, base - mean / top * high);
  ctx.lineTo(width, base - mean / top * high);
  ctx.stroke();
  ctx.setLineDash([]);
  ctx.fillStyle = themeColour("soft");
  ctx.textAlign = "center";
  const every = Math.max(1, Math.ceil(26 / each));
  for (let i = 0; i < order.length; i += every) ctx.fillText(order[i], Math.min(left + (i + 0.5) * each, width - 7), height - 6);
  ctx.textAlign = "left";
  ctx.fillText("rank", 2, height - 6);
  const most = Math.max(...totals);
  const over = `${(most / (mean || 1)).toFixed(3)} × the mean`;
  const caption = which === "work"
    ? [element("b", { textContent: "Allowed pairs" }), ` · busiest ${asCount(most)}, ${over} (dashed)`]
    : [element("b", { textContent: "Bytes received" }), ` · forward, and backward (pale) · at most ${asBytes(most)}, mean ${asBytes(mean)}`];
  $(which + "-caption").replaceChildren(...caption);
  const said = which === "work"
    ? `The busiest rank computes ${asCount(most)} allowed pairs, ${over}`
    : `A rank receives at most ${asBytes(most)} forward and backward, and ${asBytes(mean)} in the mean`;
  $(which).setAttribute("aria-label", `${said}; the table below has the numbers of each rank.`);
}
const redrawBars = framed(() => { drawBars("work"); drawBars("traffic"); });

for (const which of ["work", "traffic"]) {
  $(which).addEventListener("pointermove", event => {
    const { left, each, order } = barPlots[which], box = $(which).getBoundingClientRect();
    const rank = order[Math.floor((event.clientX - box.left - left) / each)];
    if (rank === undefined) { unfocus(); return; }
    focusRank(rank);
    const { stats, tokens } = strategy();
    showTip(event, lines(`Rank ${rank}`, `${asWhole(tokens[rank])} tokens`, `${asWhole(stats.area_per_rank[rank])} pairs`,
      `receives ${asBytes(stats.bytes_received_per_rank[rank])} forward, ${asBytes(stats.backward_bytes_received_per_rank[rank])} backward`));
  });
}
for (const which of ["work", "traffic"]) isolateOnClick($(which), event => {
  const { left, each, order } = barPlots[which], box = $(which).getBoundingClientRect();
  return order[Math.floor((event.clientX - box.left - left) / each)] ?? null;
});
isolateOnClick(stripCanvas, event => {
  const box = stripCanvas.getBoundingClientRect(), owners = ownersShown();
  return owners.owner[lastUpTo(owners.start, Math.floor((event.clientX - box.left) / box.width * DATA.tokens))];
});
for (const id of ["work", "traffic", "strip"]) $(id).addEventListener("pointerleave", () => unfocus());
$("order").onchange = event => { state.order = event.target.value; redrawBars(); };
