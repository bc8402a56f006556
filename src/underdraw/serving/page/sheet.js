// A sheet: the grid of one picture on a canvas, drawn cell by cell, and its maps.

// Dark blue, teal, green, yellow: the colours of `underdraw generate --heatmap`.
const RAMP = [[48, 18, 90], [52, 96, 141], [33, 145, 140], [94, 201, 98], [253, 231, 37]];
export const MAPS = {
  accepted: "Guesses accepted by the pass that drew a cell. Bright is fast.",
  depth: "How many tokens ahead the pass that drew a cell guessed.",
  entropy: "How uncertain the model was in a cell, in nats. Dark is certain.",
};
const FADE = 260; // milliseconds

export function rampColour(share) {
  const at = Math.min(0.9999, Math.max(0, share)) * (RAMP.length - 1);
  const [low, high] = [RAMP[Math.floor(at)], RAMP[Math.floor(at) + 1]];
  return low.map((value, channel) => Math.round(value + (high[channel] - value) * (at % 1)));
}

export function loadImage(type, base64) {
  return new Promise((resolve, reject) => {
    const image = new Image();
    image.onload = () => resolve(image);
    image.onerror = () => reject(new Error("the picture could not be read"));
    image.src = `data:image/${type};base64,${base64}`;
  });
}

export class Sheet {
  constructor(figure) {
    this.figure = figure;
    this.canvas = figure.querySelector("canvas");
    this.count = figure.querySelector(".count");
    this.view = "picture";
    this.clear(24, 24);
    new ResizeObserver(() => this.render()).observe(this.canvas);
  }

  clear(rows, columns) {
    Object.assign(this, { rows, columns, image: null, preview: null, previewCells: 0, last: null, passes: [] });
    this.colours = [];
    this.born = [];
    this.maps = { accepted: [], depth: [], entropy: [] };
    this.canvas.style.aspectRatio = `${columns} / ${rows}`;
    this.figure.style.maxWidth = rows > columns ? `calc(70vh * ${columns / rows})` : ""; // tall pictures fit the window
    this.count.textContent = "\u00a0";
    this.describe("Nothing drawn yet");
    this.render();
  }

  get cells() {
    return this.rows * this.columns;
  }

  get drawn() {
    return this.colours.length;
  }

  get seconds() {
    return this.passes.reduce((sum, pass) => sum + pass.seconds, 0);
  }

  /** Says in words what the canvas shows. */
  describe(text = this.text) {
    this.text = text;
    this.canvas.setAttribute("aria-label", this.view === "picture" ? text : `${text}, as a map: ${MAPS[this.view]}`);
  }

  /** Adds the cells of one pass. */
  addPass(pass) {
    const first = this.drawn;
    for (let at = 0; at < pass.colours.length; at += 6) {
      const value = parseInt(pass.colours.slice(at, at + 6), 16);
      this.colours.push([value >> 16, (value >> 8) & 255, value & 255]);
      this.born.push(performance.now());
      this.maps.accepted.push(pass.accepted);
      this.maps.depth.push(pass.depth);
    }
    this.maps.entropy.push(...pass.entropy);
    this.passes.push(pass);
    this.last = { first, kept: this.drawn - first, depth: pass.depth };
    this.count.textContent = `${this.drawn} / ${this.cells}, ${this.passes.length} pass${this.passes.length === 1 ? "" : "es"}`;
    this.describe(`A picture of which ${this.drawn} of ${this.cells} tokens are drawn`);
    this.render();
  }

  showPreview(image, cells) {
    if (cells >= this.previewCells && !this.image) Object.assign(this, { preview: image, previewCells: cells });
    this.render();
  }

  finish(image, maps, prompt) {
    Object.assign(this, { image, maps, last: null });
    this.describe(`The finished picture: ${prompt}`);
    this.render();
  }

  show(view) {
    this.view = view;
    this.describe();
    this.render();
  }

  /** Ends of the colour bar of a map: zero, and its largest value. */
  range(view) {
    return [0, Math.max(view === "entropy" ? 0.1 : 1, ...this.maps[view].filter((value) => value !== null))];
  }

  render() {
    if (!this.scheduled) {
      this.scheduled = true;
      requestAnimationFrame(() => this.paint());
    }
  }

  paint() {
    this.scheduled = false;
    const box = this.canvas.getBoundingClientRect();
    if (!box.width) return;
    const scale = window.devicePixelRatio || 1;
    const [width, height] = [Math.round(box.width * scale), Math.round(box.height * scale)];
    if (this.canvas.width !== width || this.canvas.height !== height) Object.assign(this.canvas, { width, height });
    const context = this.canvas.getContext("2d");
    const style = getComputedStyle(this.canvas);
    const pen = { context, width, height, scale, line: style.getPropertyValue("--grid"), ink: style.getPropertyValue("--sanguine") };
    context.fillStyle = style.getPropertyValue("--paper");
    context.fillRect(0, 0, width, height);
    context.imageSmoothingQuality = "high";
    if (this.view === "picture") this.paintPicture(pen);
    else this.paintMap(pen);
    if (this.last) this.paintTree(pen);
  }

  box(pen, cell) {
    const [row, column] = [Math.floor(cell / this.columns), cell % this.columns];
    const left = Math.round((column * pen.width) / this.columns);
    const top = Math.round((row * pen.height) / this.rows);
    const right = Math.round(((column + 1) * pen.width) / this.columns);
    const bottom = Math.round(((row + 1) * pen.height) / this.rows);
    return [left, top, right - left, bottom - top];
  }

  paintPicture(pen) {
    const { context } = pen;
    if (this.image) {
      context.drawImage(this.image, 0, 0, pen.width, pen.height);
      return;
    }
    this.paintGrid(pen);
    const now = performance.now();
    let fading = false;
    this.colours.forEach((colour, cell) => {
      const age = Math.min(1, (now - this.born[cell]) / FADE);
      fading ||= age < 1;
      context.fillStyle = `rgba(${colour}, ${0.25 + 0.75 * age})`;
      context.fillRect(...this.box(pen, cell));
    });
    if (this.preview) {
      context.save();
      this.clipTo(pen, this.previewCells);
      context.drawImage(this.preview, 0, 0, pen.width, pen.height);
      context.restore();
    }
    if (fading) this.render();
  }

  paintGrid(pen) {
    const { context } = pen;
    context.strokeStyle = pen.line;
    context.lineWidth = Math.max(1, Math.round(pen.scale * 0.75));
    context.beginPath();
    for (let column = 1; column < this.columns; column++) {
      const x = Math.round((column * pen.width) / this.columns) + 0.5;
      context.moveTo(x, 0);
      context.lineTo(x, pen.height);
    }
    for (let row = 1; row < this.rows; row++) {
      const y = Math.round((row * pen.height) / this.rows) + 0.5;
      context.moveTo(0, y);
      context.lineTo(pen.width, y);
    }
    context.stroke();
  }

  clipTo(pen, cells) {
    // One pixel of the picture less than the cells: cells without a token are grey and would bleed over the edge.
    const inset = Math.ceil(pen.width / this.preview.naturalWidth);
    const full = Math.floor(cells / this.columns);
    const rest = cells % this.columns;
    const bottom = Math.round((full * pen.height) / this.rows);
    pen.context.beginPath();
    pen.context.rect(0, 0, pen.width, bottom - inset);
    if (rest) {
      const [x, y, width, height] = this.box(pen, cells - 1);
      pen.context.rect(0, 0, x + width - inset, y + height - inset);
    }
    pen.context.clip();
  }

  paintMap(pen) {
    const { context } = pen;
    this.paintGrid(pen);
    const backdrop = this.image ?? null;
    if (backdrop) {
      context.filter = "grayscale(1)";
      context.drawImage(backdrop, 0, 0, pen.width, pen.height);
      context.filter = "none";
    }
    const [low, high] = this.range(this.view);
    this.maps[this.view].forEach((value, cell) => {
      if (value === null) return;
      context.fillStyle = `rgba(${rampColour((value - low) / (high - low))}, ${backdrop ? 0.78 : 1})`;
      context.fillRect(...this.box(pen, cell));
    });
  }

  /** The last pass: the tokens that it added have solid outlines, the guesses that it rejected dashed ones. */
  paintTree(pen) {
    const { context } = pen;
    const { first, kept, depth } = this.last;
    const thin = Math.max(1, pen.scale);
    const isSmall = pen.width / this.columns <= 10 * thin; // outlines of single cells would cover them
    context.strokeStyle = pen.ink;
    for (let cell = first; cell < Math.min(this.cells, first + Math.max(depth, kept)); cell++) {
      const isKept = cell < first + kept;
      let [x, y, width, height] = this.box(pen, cell);
      if (isSmall && !isKept) { // one outline around all of a row
        const end = Math.min(this.cells, first + depth, (Math.floor(cell / this.columns) + 1) * this.columns);
        const [lastX, , lastWidth] = this.box(pen, end - 1);
        width = lastX + lastWidth - x;
        cell = end - 1;
      }
      context.lineWidth = isKept && !isSmall ? 2 * thin : thin;
      context.setLineDash(isKept ? [] : [2 * thin, 2 * thin]);
      const inset = context.lineWidth / 2;
      context.strokeRect(x + inset, y + inset, width - 2 * inset, height - 2 * inset);
    }
    context.setLineDash([]);
  }
}

/** One bar per pass, as high as the tokens that it committed. */
export function paintBarcode(canvas, sheet) {
  const box = canvas.getBoundingClientRect();
  const scale = window.devicePixelRatio || 1;
  if (!box.width) return;
  Object.assign(canvas, { width: Math.round(box.width * scale), height: Math.round(box.height * scale) });
  const context = canvas.getContext("2d");
  const style = getComputedStyle(canvas);
  const counts = sheet.passes.map((pass) => pass.colours.length / 6);
  const highest = Math.max(8, ...counts);
  const slot = Math.min(8 * scale, canvas.width / Math.max(1, counts.length));
  const bar = Math.max(1, slot - Math.max(1, slot * 0.3));
  context.fillStyle = style.getPropertyValue("--bar");
  counts.forEach((count, index) => {
    const height = Math.max(scale, (count / highest) * (canvas.height - scale));
    context.fillRect(index * slot, canvas.height - height, bar, height);
  });
}
