// What the page shows, unpacked: tiles by row, owners by token, timelines by group.
const DATA = JSON.parse(document.getElementById("data").textContent);

function bytesOf(text) {
  const raw = atob(text), bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return bytes;
}

// Whole numbers, seven bits to a byte; multiplication, since shifts end at 32 bits.
function wholeOf(text) {
  const bytes = bytesOf(text), numbers = [];
  let value = 0, factor = 1;
  for (const byte of bytes) {
    value += (byte & 127) * factor;
    if (byte < 128) { numbers.push(value); value = 0; factor = 1; } else factor *= 128;
  }
  return numbers;
}

function sharesOf(text) {
  const bytes = bytesOf(text), shares = new Float32Array(bytes.length / 2);
  for (let i = 0; i < shares.length; i++) shares[i] = (bytes[2 * i] + 256 * bytes[2 * i + 1]) / 65535;
  return shares;
}

// The last index whose value is not above x, in a rising list.
function lastUpTo(list, x, low = 0, high = list.length) {
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (list[middle] <= x) low = middle; else high = middle;
  }
  return low;
}

// Tiles of a view: runs first[i] .. first[i + 1] belong to row i.
function unpackTiles(view) {
  if (view.first) return view;
  view.counts = { full: view.full, partial: view.partial };
  const numbers = wholeOf(view.tiles), rows = view.rows;
  const first = new Int32Array(rows + 1);
  for (let i = 0; i < rows; i++) first[i + 1] = first[i] + numbers[i];
  const count = first[rows];
  const start = new Int32Array(count), stop = new Int32Array(count), partial = new Uint8Array(count);
  const areaAt = new Int32Array(count);
  let at = rows, seen = 0;
  for (let i = 0; i < rows; i++) {
    let column = 0;
    for (let r = first[i]; r < first[i + 1]; r++) {
      start[r] = column + numbers[at++];
      partial[r] = numbers[at] & 1;
      column = stop[r] = start[r] + (numbers[at++] >> 1);
      areaAt[r] = seen;
      if (partial[r]) seen += stop[r] - start[r];
    }
  }
  const pairs = view.areas === null ? null : wholeOf(view.areas);
  return Object.assign(view, { first, start, stop, partial, areaAt, pairs, tiles: null });
}

// Who owns which tokens, by token; one list per batch element if they differ.
function unpackLayout(strategy) {
  if (strategy.owners) return strategy;
  const numbers = wholeOf(strategy.runs), owners = [];
  let position = 0, found = { start: [], owner: [] };
  for (let i = 0; i < numbers.length; i += 2) {
    found.start.push(position);
    found.owner.push(numbers[i + 1]);
    position += numbers[i];
    if (position >= DATA.tokens) { owners.push(found); found = { start: [], owner: [] }; position = 0; }
  }
  for (const one of owners) one.stop = [...one.start.slice(1), DATA.tokens];
  strategy.owners = owners;
  return strategy;
}

function tileAt(view, row, col) {
  const tile = { row, col, kind: "empty", area: 0 };
  const high = Math.min(view.block[0], view.length[0] - row * view.block[0]);
  const wide = Math.min(view.block[1], view.length[1] - col * view.block[1]);
  Object.assign(tile, { pairs: high * wide, rows: [row * view.block[0], row * view.block[0] + high],
    keys: [col * view.block[1], col * view.block[1] + wide] });
  const a = view.first[row], b = view.first[row + 1];
  if (a === b) return tile;
  const run = lastUpTo(view.start, col, a, b);
  if (view.start[run] > col || view.stop[run] <= col) return tile;
  tile.kind = view.partial[run] ? "partial" : "full";
  tile.area = !view.partial[run] ? tile.pairs
    : view.pairs ? view.pairs[view.areaAt[run] + col - view.start[run]] : null;
  return tile;
}

// Units.
function threeDigits(x) { return x.toLocaleString("en", x < 9.995 ? { minimumFractionDigits: 2, maximumFractionDigits: 2 } : x < 99.95 ? { minimumFractionDigits: 1, maximumFractionDigits: 1 } : { maximumFractionDigits: 0 }); }
function withUnit(x, units) {
  let i = 0;
  while (x >= 999.5 && i < units.length - 1) { x /= 1000; i++; }
  return (i === 0 ? x.toFixed(0) : threeDigits(x)) + (units[i] ? "\u202f" + units[i] : "");
}
const asBytes = x => withUnit(x, ["B", "KB", "MB", "GB", "TB", "PB"]);
const asCount = x => withUnit(x, ["", "K", "M", "G", "T", "P", "E"]);
const asWhole = x => x.toLocaleString("en");
function asSeconds(x) {
  if (!x) return "0\u202fs";
  if (x >= 0.9995) return threeDigits(x) + "\u202fs";
  return x >= 0.9995e-3 ? threeDigits(x * 1e3) + "\u202fms" : threeDigits(x * 1e6) + "\u202fµs";
}
function asTokens(x) {
  for (const [unit, size] of [["M", 1048576], ["K", 1024]])
    if (x && x % (size / 4) === 0 && x >= size) return (x / size) + unit;
  return asWhole(x);
}
const asRange = ([a, b]) => b - a === 1 ? asWhole(a) : asWhole(a) + "–" + asWhole(b - 1);
