// The attention matrix: every pixel is the exact mean of the tiles below it, coloured by rank.
const GUTTER = { left: 64, top: 34, band: 8 };
const matrixCanvas = $("matrix");
let matrixPlot = { x: GUTTER.left, y: GUTTER.top, w: 1, h: 1 };
let cursor = null, pointed = null;  // the pair under the pointer, and the pointer itself

const matrixZoom = zoomable(matrixCanvas, {
  axes: 2, plot: () => matrixPlot, changed: () => { redrawMatrix(); redrawStrip(); if (pointed) inspect(pointed); },
  limit: () => Math.min(1, 4 * view().block[0] / DATA.tokens, 1),
});

// Colours of groups as they are drawn: those that are not in focus step back.
function groupColours(size) {
  const empty = themeRgb("empty"), found = [];
  for (let g = 0; g * size < DATA.ranks; g++) {
    const rank = groupRank(g, size), rgb = RANK_RGB[colourRank(rank)];
    const dim = state.rank !== null && (state.head === null ? Math.floor(state.rank / size) !== g : state.rank !== rank);
    found.push(dim ? rgb.map((c, i) => c * 0.16 + empty[i] * 0.84) : rgb);
  }
  return found;
}

// Adds a run of keys to a line: fractions of pixels at both ends to `sums`, and what lies between as
// a step up and a step down to `steps`. Four numbers to a pixel: red, green, blue, weight.
function addRun(sums, steps, width, left, right, weight, rgb) {
  left = Math.max(0, left);
  right = Math.min(width, right);
  if (right <= left) return;
  const a = Math.floor(left), b = Math.min(width - 1, Math.floor(right));
  const values = [rgb[0] * weight, rgb[1] * weight, rgb[2] * weight, weight];
  for (let c = 0; c < 4; c++) {
    if (a === b) { sums[4 * a + c] += values[c] * (right - left); continue; }
    sums[4 * a + c] += values[c] * (a + 1 - left);
    sums[4 * b + c] += values[c] * (right - b);
    steps[4 * (a + 1) + c] += values[c];
    steps[4 * b + c] -= values[c];
  }
}

function paintTiles(image, width, height, area) {
  const shown = view(), owners = ownersShown(), size = groupSize(), colours = groupColours(size);
  const [rowsPer, keysPer] = shown.block, empty = themeRgb("empty");
  const q0 = area.y * shown.length[0], perY = area.h * shown.length[0] / height;
  const k0 = area.x * shown.length[1], perX = area.w * shown.length[1] / width;
  const sums = new Float64Array(4 * width), steps = new Float64Array(4 * width + 4), pixels = image.data;
  let before = "";
  for (let y = 0; y < height; y++) {
    const low = q0 + y * perY, high = Math.min(low + perY, shown.length[0]);
    let at = lastUpTo(owners.start, low), key = "";
    const parts = [];
    for (let q = low; q < high - 1e-9;) {
      const row = Math.min(shown.rows - 1, Math.floor(q / rowsPer));
      while (owners.stop[at] <= q) at++;
      const end = Math.min(high, (row + 1) * rowsPer, owners.stop[at]);
      const group = Math.floor(owners.owner[at] / size);
      parts.push(row, group, (end - q) / (high - low));
      key += row + ":" + group + ",";
      q = end;
    }
    if (key === before && parts.length === 3) {  // the same tiles as in the line above
      pixels.copyWithin(4 * y * width, 4 * (y - 1) * width, 4 * y * width);
      continue;
    }
    before = key;
    sums.fill(0);
    steps.fill(0);
    for (let p = 0; p < parts.length; p += 3) {
      const row = parts[p], last = shown.first[row + 1];
      for (let r = firstVisible(shown, row, k0 / keysPer); r < last; r++) {
        const left = (shown.start[r] * keysPer - k0) / perX;
        if (left >= width) break;
        const right = (Math.min(shown.stop[r] * keysPer, shown.length[1]) - k0) / perX;
        addRun(sums, steps, width, left, right, parts[p + 2] * (shown.partial[r] ? 0.5 : 1), colours[parts[p + 1]]);
      }
    }
    for (let x = 0; x < width; x++) {
      for (let c = 0; c < 4; c++) {
        if (x) steps[4 * x + c] += steps[4 * x - 4 + c];
        sums[4 * x + c] += steps[4 * x + c];
      }
      const i = 4 * (y * width + x), weight = sums[4 * x + 3] > 1e-9 ? sums[4 * x + 3] : 0;
      const strength = weight > 0 ? 0.22 + 0.78 * Math.min(1, weight) : 0;
      for (let c = 0; c < 3; c++)
        pixels[i + c] = weight > 0 ? sums[4 * x + c] / weight * strength + empty[c] * (1 - strength) : empty[c];
      pixels[i + 3] = 255;
    }
  }
}

function firstVisible(shown, row, column) {
  const a = shown.first[row], b = shown.first[row + 1];
  if (a === b) return b;
  const run = lastUpTo(shown.start, column, a, b);
  return shown.stop[run] > column ? run : run + 1;
}

// When tiles are large enough to be seen: their edges, and hatching on partial ones.
function drawTileEdges(ctx, plot, area) {
  const shown = view(), wide = plot.w * shown.block[1] / (area.w * shown.length[1]);
  const high = plot.h * shown.block[0] / (area.h * shown.length[0]);
  if (Math.min(wide, high) < 7) return;
  const x = col => plot.x + (col * shown.block[1] / shown.length[1] - area.x) / area.w * plot.w;
  const y = row => plot.y + (row * shown.block[0] / shown.length[0] - area.y) / area.h * plot.h;
  const rows = [Math.floor(area.y * shown.length[0] / shown.block[0]), Math.ceil((area.y + area.h) * shown.length[0] / shown.block[0])];
  const cols = [Math.floor(area.x * shown.length[1] / shown.block[1]), Math.ceil((area.x + area.w) * shown.length[1] / shown.block[1])];
  ctx.strokeStyle = themeColour("card");
  ctx.globalAlpha = 0.55;
  ctx.lineWidth = 1;
  ctx.beginPath();
  for (let row = rows[0]; row < Math.min(rows[1], shown.rows); row++) {
    for (let r = firstVisible(shown, row, cols[0]); r < shown.first[row + 1] && shown.start[r] < cols[1]; r++) {
      for (let col = Math.max(shown.start[r], cols[0]); col < Math.min(shown.stop[r], cols[1]); col++) {
        const box = [x(col), y(row), Math.min(x(col + 1), plot.x + plot.w), Math.min(y(row + 1), plot.y + plot.h)];
        ctx.rect(box[0] + 0.5, box[1] + 0.5, box[2] - box[0], box[3] - box[1]);
        if (!shown.partial[r]) continue;
        for (let s = 4; s < (box[2] - box[0]) + (box[3] - box[1]); s += 6) {
          const dx = Math.min(s, box[2] - box[0]), dy = Math.min(s, box[3] - box[1]);
          ctx.moveTo(box[0] + dx, box[1] + s - dx);
          ctx.lineTo(box[0] + s - dy, box[1] + dy);
        }
      }
    }
  }
  ctx.stroke();
  ctx.globalAlpha = 1;
}

// Where one document ends and the next begins, if they are far enough apart to be told.
function drawDocuments(ctx, plot, area) {
  const seams = documents(), length = DATA.tokens;
  const low = area.x * length, high = (area.x + area.w) * length;
  const inside = seams.filter(t => (t > low && t < high) || (t > area.y * length && t < (area.y + area.h) * length));
  if (!inside.length || inside.length > plot.w / 8) return;
  ctx.strokeStyle = themeColour("ink");
  ctx.globalAlpha = inside.length > 24 ? 0.14 : 0.28;
  ctx.lineWidth = 1;
  ctx.beginPath();
  for (const t of inside) {
    const x = plot.x + (t / length - area.x) / area.w * plot.w, y = plot.y + (t / length - area.y) / area.h * plot.h;
    if (x > plot.x && x < plot.x + plot.w) { ctx.moveTo(x, plot.y); ctx.lineTo(x, plot.y + plot.h); }
    if (y > plot.y && y < plot.y + plot.h) { ctx.moveTo(plot.x, y); ctx.lineTo(plot.x + plot.w, y); }
  }
  ctx.stroke();
  ctx.globalAlpha = 1;
}

// A band of owners along an edge of the plot.
function drawOwnerBand(ctx, from, to, length, horizontal, place, plot) {
  const owners = ownersShown(), extent = horizontal ? plot.w : plot.h;
  const steps = Math.max(1, Math.round(extent));
  for (let i = 0; i < steps; i++) {
    const token = Math.min(length - 1, (from + (to - from) * (i + 0.5) / steps) * length);
    const rank = owners.owner[lastUpTo(owners.start, token)];
    ctx.globalAlpha = state.rank === null || state.rank === rank ? 1 : 0.2;
    ctx.fillStyle = rankCss(rank);
    if (horizontal) ctx.fillRect(plot.x + i * extent / steps, place, extent / steps + 0.5, GUTTER.band);
    else ctx.fillRect(place, plot.y + i * extent / steps, GUTTER.band, extent / steps + 0.5);
  }
  ctx.globalAlpha = 1;
}

function drawTokenAxis(ctx, from, to, length, horizontal, plot) {
  ctx.fillStyle = themeColour("soft");
  const extent = horizontal ? plot.w : plot.h;
  const step = niceStep((to - from) * length, extent / (horizontal ? 76 : 46), length >= 2048 ? 2 : 10);
  const label = step % 256 ? asWhole : asTokens;
  for (let t = Math.ceil(from * length / step) * step; t <= to * length; t += step) {
    const at = ((t / length) - from) / (to - from) * extent;
    if (horizontal) {
      ctx.textAlign = at < 12 ? "left" : at > extent - 14 ? "right" : "center";
      ctx.fillText(label(t), plot.x + at, GUTTER.top - GUTTER.band - 8);
    } else {
      ctx.textAlign = "right";
      ctx.fillText(label(t), GUTTER.left - GUTTER.band - 6, plot.y + Math.min(extent - 1, Math.max(9, at + 4)));
    }
  }
}

function drawMatrix() {
  const { ctx, width, height, scale } = sharp(matrixCanvas), area = matrixZoom.area, shown = view();
  matrixPlot = { x: GUTTER.left, y: GUTTER.top, w: width - GUTTER.left - 1, h: height - GUTTER.top - 1 };
  const pixelsWide = Math.max(1, Math.round(matrixPlot.w * scale)), pixelsHigh = Math.max(1, Math.round(matrixPlot.h * scale));
  const image = ctx.createImageData(pixelsWide, pixelsHigh);
  paintTiles(image, pixelsWide, pixelsHigh, area);
  ctx.putImageData(image, Math.round(matrixPlot.x * scale), Math.round(matrixPlot.y * scale));
  drawTileEdges(ctx, matrixPlot, area);
  drawOwnerBand(ctx, area.x, area.x + area.w, shown.length[1], true, GUTTER.top - GUTTER.band - 2, matrixPlot);
  drawOwnerBand(ctx, area.y, area.y + area.h, shown.length[0], false, GUTTER.left - GUTTER.band - 2, matrixPlot);
  drawTokenAxis(ctx, area.x, area.x + area.w, shown.length[1], true, matrixPlot);
  drawTokenAxis(ctx, area.y, area.y + area.h, shown.length[0], false, matrixPlot);
  drawDocuments(ctx, matrixPlot, area);
  ctx.fillStyle = themeColour("ink");
  ctx.textAlign = "left";
  ctx.fillText("keys →", 2, 12);
  ctx.fillText("queries ↓", 2, 27);
  drawCursor();
  matrixCanvas.setAttribute("aria-label",
    `Attention matrix of ${asWhole(shown.length[0])} queries by ${asWhole(shown.length[1])} keys, with ` +
    `${asWhole(shown.counts.full)} full and ${asWhole(shown.counts.partial)} partial tiles, coloured by ${state.colours} under ${strategy().name}.`);
}
const redrawMatrix = framed(drawMatrix);

// On a canvas of its own, so that moving it paints no tiles.
function drawCursor() {
  const { ctx } = sharp($("crosshair")), shown = view(), p = matrixPlot, area = matrixZoom.area;
  if (!cursor) return;
  const x = (cursor.key / shown.length[1] - area.x) / area.w * p.w + p.x;
  const y = (cursor.row / shown.length[0] - area.y) / area.h * p.h + p.y;
  ctx.strokeStyle = themeColour("ink");
  ctx.globalAlpha = 0.55;
  ctx.setLineDash([3, 3]);
  ctx.beginPath();
  if (x >= p.x && x <= p.x + p.w) { ctx.moveTo(x, p.y); ctx.lineTo(x, p.y + p.h); }
  if (y >= p.y && y <= p.y + p.h) { ctx.moveTo(p.x, y); ctx.lineTo(p.x + p.w, y); }
  ctx.stroke();
  ctx.setLineDash([]);
  ctx.globalAlpha = 1;
}
const redrawCursor = framed(drawCursor);

function inspect(event) {
  pointed = event;
  const [px, py] = matrixZoom.share(event), shown = view(), area = matrixZoom.area;
  if (px < 0 || py < 0 || px >= 1 || py >= 1) { leaveMatrix(); return; }
  const row = Math.min(shown.length[0] - 1, Math.floor((area.y + py * area.h) * shown.length[0]));
  const key = Math.min(shown.length[1] - 1, Math.floor((area.x + px * area.w) * shown.length[1]));
  cursor = { row, key };
  const tile = tileAt(shown, Math.floor(row / shown.block[0]), Math.floor(key / shown.block[1]));
  const owners = ownersShown(), at = lastUpTo(owners.start, row), size = groupSize();
  const asks = owners.owner[at], holds = owners.owner[lastUpTo(owners.start, key)];
  const group = Math.floor(asks / size), local = Math.floor(holds / size) === group;
  const who = state.head === null || size === 1 ? groupName(group, size) : `rank ${groupRank(group, size)}`;
  const computed = tile.kind === "empty" ? "nobody: nothing is allowed here" : who + (size > 1 ? state.head === null ? ", each some heads" : `, head ${state.head}` : "");
  const allowed = tile.kind === "partial"
    ? tile.area === null ? `partial: some of ${asWhole(tile.pairs)} pairs` : `partial: ${asWhole(tile.area)} of ${asWhole(tile.pairs)} pairs`
    : tile.kind === "full" ? `full: ${asWhole(tile.pairs)} pairs` : "empty";
  const dot = element("span", { className: "dot" });
  dot.style.background = rankCss(groupRank(group, size));
  const pairs = [["Computed by", tile.kind === "empty" ? computed : [dot, computed]], ["Tile", allowed],
    ["Queries", `${asRange(tile.rows)} (query ${asWhole(row)} is on rank ${asks})`],
    ["Keys", `${asRange(tile.keys)} (key ${asWhole(key)} is on rank ${holds})`],
    ["K and V", tile.kind === "empty" ? "not needed" : local ? (size > 1 && holds !== asks ? "swapped within the group" : "already there") : `come from ${groupName(Math.floor(holds / size), size)}`]];
  const list = element("dl");
  for (const [name, value] of pairs) list.append(element("dt", { textContent: name }), element("dd", {}, ...[value].flat()));
  $("inspector").replaceChildren(list);
  if (event.pointerType !== "touch")
    showTip(event, lines(tile.kind === "empty" ? "Nothing allowed" : `Computed by ${who}`, allowed, `queries ${asRange(tile.rows)}`, `keys ${asRange(tile.keys)}`));
  redrawCursor();
}
function leaveMatrix() {
  pointed = null;
  if (!cursor) return;
  cursor = null;
  hideTip();
  emptyInspector();
  redrawCursor();
}
function emptyInspector() {
  $("inspector").replaceChildren(element("p", { className: "muted", textContent: "Point at the matrix, or tap it: which rank computes a tile, which rows it has, and where its keys come from." }));
}
matrixCanvas.addEventListener("pointermove", inspect);
matrixCanvas.addEventListener("pointerdown", inspect);
matrixCanvas.addEventListener("pointerleave", event => { if (event.pointerType !== "touch") leaveMatrix(); });
$("zoom-in").onclick = () => matrixZoom.zoom(2);
$("zoom-out").onclick = () => matrixZoom.zoom(0.5);
$("zoom-all").onclick = () => matrixZoom.all();
