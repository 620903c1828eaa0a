// What all figures share: state, colours, sharp canvases, zooming, the tooltip.
const $ = id => document.getElementById(id);
const state = { strategy: 0, view: 0, rank: null, kept: null, order: "rank", colours: "rank", head: null };
const strategy = () => unpackLayout(DATA.strategies[state.strategy]);
const view = () => unpackTiles(DATA.views[state.view]);
const groupSize = () => strategy().group_sizes[view().mask];
const ownersShown = () => strategy().owners[strategy().batch_elements > 1 ? view().element : 0];

const RANK_RGB = DATA.colours.map(c => [1, 3, 5].map(i => parseInt(c.slice(i, i + 2), 16)));
// Colours by node or by group are those of as many ranks, spread over the circle.
const perColour = () => state.colours === "node" ? Math.min(DATA.machine.ranks_per_node, DATA.ranks)
  : state.colours === "group" ? groupSize() : 1;
const colourRank = r => { const per = perColour(); return Math.min(DATA.ranks - 1, Math.floor(r / per) * per + (per >> 1)); };
const rankCss = r => DATA.colours[colourRank(r)];
// Which rank of a group computes the head that is looked at; of all heads, the one in its middle.
function groupRank(group, size) {
  const heads = strategy().heads[view().mask];
  const place = state.head === null ? size >> 1 : Math.max(0, heads.findIndex(([a, b]) => a <= state.head && state.head < b));
  return Math.min(group * size + place, DATA.ranks - 1);
}
const documents = () => DATA.documents[DATA.documents.length > 1 ? view().element : 0] || [];
const groupName = (group, size) => size === 1 ? `rank ${group}` : size === DATA.ranks ? "all ranks" : `ranks ${group * size}–${group * size + size - 1}`;

function themeColour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
}
function themeRgb(name) {
  const hex = themeColour(name);
  return [1, 3, 5].map(i => parseInt(hex.slice(i, i + 2), 16));
}

function element(tag, props = {}, ...children) {
  const node = Object.assign(document.createElement(tag), props);
  node.append(...children);
  return node;
}

// A canvas with one pixel per device pixel; returns its context, in CSS pixels.
function sharp(canvas) {
  const box = canvas.parentElement.getBoundingClientRect(), scale = Math.min(window.devicePixelRatio || 1, 3);
  const width = Math.max(1, Math.round(box.width)), height = Math.max(1, Math.round(box.height));
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const ctx = canvas.getContext("2d");
  ctx.setTransform(scale, 0, 0, scale, 0, 0);
  ctx.clearRect(0, 0, width, height);
  ctx.font = "11px system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif";
  return { ctx, width, height, scale };
}

// Steps of 1, 2 or 5 (in tokens: powers of two) with about so many in a range.
function niceStep(range, wanted, base = 10) {
  const rough = range / Math.max(1, wanted);
  if (base === 2) return Math.max(1, 2 ** Math.ceil(Math.log2(rough)));
  const power = 10 ** Math.floor(Math.log10(rough));
  return power * ([1, 2, 5, 10].find(f => f * power >= rough) || 10);
}

function showTip(event, html) {
  const tip = $("tip");
  tip.replaceChildren(...html);
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const x = event.clientX + 14 + box.width > innerWidth ? event.clientX - box.width - 12 : event.clientX + 14;
  const y = event.clientY + 16 + box.height > innerHeight ? event.clientY - box.height - 12 : event.clientY + 16;
  tip.style.left = Math.max(4, x) + "px";
  tip.style.top = Math.max(4, y) + "px";
}
function hideTip() { $("tip").hidden = true; }
function lines(...texts) { return texts.filter(Boolean).flatMap((t, i) => i ? [element("br"), t] : [element("b", { textContent: t })]); }

// Zoom and pan of one or two axes; `area` is the part that is shown, in shares of the whole.
function zoomable(canvas, { axes, plot, changed, limit }) {
  const area = { x: 0, y: 0, w: 1, h: 1 };
  const pointers = new Map();
  let last = null;
  function clamp() {
    area.w = Math.min(1, Math.max(limit(), area.w));
    area.h = axes === 2 ? area.w : 1;
    area.x = Math.min(1 - area.w, Math.max(0, area.x));
    area.y = axes === 2 ? Math.min(1 - area.h, Math.max(0, area.y)) : 0;
    canvas.style.touchAction = area.w < 1 ? "none" : "pan-x pan-y";
  }
  function zoom(factor, px = 0.5, py = 0.5) {
    const x = area.x + px * area.w, y = area.y + py * area.h;
    area.w /= factor;
    clamp();
    area.x = x - px * area.w;
    if (axes === 2) area.y = y - py * area.h;
    clamp();
    changed();
  }
  function pan(dx, dy) { area.x -= dx * area.w; area.y -= dy * area.h; clamp(); changed(); }
  function all() { Object.assign(area, { x: 0, y: 0, w: 1, h: 1 }); clamp(); changed(); }
  function share(event) {
    const box = canvas.getBoundingClientRect(), p = plot();
    return [(event.clientX - box.left - p.x) / p.w, (event.clientY - box.top - p.y) / p.h];
  }
  canvas.addEventListener("wheel", event => {
    if (!event.ctrlKey && !event.metaKey && document.activeElement !== canvas) return;
    event.preventDefault();
    zoom(Math.exp(-event.deltaY * (event.ctrlKey ? 0.01 : 0.0022)), ...share(event));
  }, { passive: false });
  canvas.addEventListener("pointerdown", event => {
    pointers.set(event.pointerId, event);
    canvas.setPointerCapture(event.pointerId);
    last = null;
  });
  canvas.addEventListener("pointermove", event => {
    if (!pointers.has(event.pointerId)) return;
    const before = pointers.get(event.pointerId);
    pointers.set(event.pointerId, event);
    const p = plot();
    if (pointers.size === 1 && area.w < 1) {
      pan((event.clientX - before.clientX) / p.w, (event.clientY - before.clientY) / p.h);
    } else if (pointers.size === 2) {
      const [a, b] = [...pointers.values()];
      const apart = Math.hypot(a.clientX - b.clientX, a.clientY - b.clientY);
      const [px, py] = share({ clientX: (a.clientX + b.clientX) / 2, clientY: (a.clientY + b.clientY) / 2 });
      if (last) zoom(apart / last, px, py);
      last = apart;
    }
  });
  for (const name of ["pointerup", "pointercancel"])
    canvas.addEventListener(name, event => { pointers.delete(event.pointerId); last = null; });
  canvas.addEventListener("dblclick", event => zoom(event.shiftKey ? 0.5 : 2, ...share(event)));
  canvas.addEventListener("keydown", event => {
    const actions = {
      "+": () => zoom(1.5), "=": () => zoom(1.5), "-": () => zoom(1 / 1.5), "0": all,
      ArrowLeft: () => pan(0.1, 0), ArrowRight: () => pan(-0.1, 0),
      ArrowUp: axes === 2 && (() => pan(0, 0.1)), ArrowDown: axes === 2 && (() => pan(0, -0.1)),
    };
    if (!actions[event.key] || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    actions[event.key]();
  });
  clamp();
  return { area, zoom, pan, all, share };
}

// Draws at most once per frame.
function framed(draw) {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => { asked = false; draw(); });
  };
}

// Calls `isolate` with the rank at a click, unless the pointer was dragged.
function isolateOnClick(canvas, rankAt) {
  let down = null;
  canvas.addEventListener("pointerdown", event => { down = event; });
  canvas.addEventListener("click", event => {
    const moved = down && Math.hypot(event.clientX - down.clientX, event.clientY - down.clientY) > 4;
    const rank = moved || (down && down.pointerType === "touch") ? null : rankAt(event);
    if (rank !== null && rank !== undefined) isolate(rank);
  });
}
