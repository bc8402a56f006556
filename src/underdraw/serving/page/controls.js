// The form: prompt, sliders, seed and size, as the body of a request and back.

const element = (id) => document.getElementById(id);
const TREES = ["none", ...[2, 4, 8, 12, 16, 24, 32, 48].map((depth) => `chain:depth=${depth}`), "auto"];
const EXAMPLES = [
  "a fox, 3D render, on a sky blue background",
  "a penguin, 3D render, in front of snowy mountains",
  "an owl, 3D render, on a brown background",
  "a castle, cartoon emoji, on a lavender background",
  "a photo of mountains",
];

export class Controls {
  constructor(info) {
    this.info = info;
    this.seedIsRandom = true;
    for (const id of ["temperature", "guidance", "tree", "seed"]) element(id).addEventListener("input", () => this.label(id));
    element("seed-number").addEventListener("input", () => this.pinSeed(element("seed-number").value));
    element("dice").addEventListener("click", () => this.randomSeed());
    element("reset").addEventListener("click", () => this.reset());
    this.fillSizes();
    this.fillExamples();
    this.reset();
  }

  fillSizes() {
    for (const { size } of this.info.sizes) element("size").add(new Option(size.replace("x", " × "), size));
    element("size-row").hidden = this.info.sizes.length < 2;
  }

  fillExamples() {
    if (this.info.family !== "tiny") return; // other models read any text
    for (const text of EXAMPLES) {
      const button = Object.assign(document.createElement("button"), { type: "button", textContent: text.split(",")[0] });
      button.title = text;
      button.addEventListener("click", () => {
        element("prompt").value = text;
        element("prompt").focus();
      });
      element("suggestions").append(button);
    }
  }

  reset() {
    const { temperature, guidance_scale } = this.info.defaults;
    Object.assign(element("temperature"), { value: temperature });
    Object.assign(element("guidance"), { value: guidance_scale });
    element("tree").value = TREES.length - 1;
    this.randomSeed();
    for (const id of ["temperature", "guidance", "tree"]) this.label(id);
  }

  randomSeed() {
    this.seedIsRandom = true;
    element("seed-number").value = "";
    element("seed-number").placeholder = "random";
    element("seed").value = 0;
    this.markSeed();
  }

  pinSeed(value) {
    if (value === "") return this.randomSeed();
    this.seedIsRandom = false;
    element("seed-number").value = value;
    element("seed").value = Math.min(99, value);
    this.markSeed();
  }

  markSeed() {
    element("dice").setAttribute("aria-pressed", this.seedIsRandom);
    element("seed").classList.toggle("random", this.seedIsRandom);
    element("seed").setAttribute("aria-valuetext", this.seedIsRandom ? "random" : element("seed-number").value);
  }

  label(id) {
    const input = element(id);
    if (id === "seed") return this.pinSeed(input.value);
    const output = document.querySelector(`output[for=${id}]`);
    output.textContent = id === "tree" ? this.treeText() : Number(input.value).toFixed(2);
    if (id === "tree") input.setAttribute("aria-valuetext", output.textContent);
  }

  get tree() {
    return TREES[element("tree").value];
  }

  treeText() {
    if (this.tree === "none") return "none: plain decoding";
    return this.tree === "auto" ? "auto" : this.tree.split("=")[1];
  }

  /** The body of a request; a random seed is chosen here, so that a race has the same one twice. */
  body() {
    const prompt = element("prompt").value.trim() || element("prompt").placeholder;
    element("prompt").value = prompt;
    const seed = this.seedIsRandom ? crypto.getRandomValues(new Uint32Array(1))[0] % 1000000 : Number(element("seed-number").value);
    if (this.seedIsRandom) element("seed-number").placeholder = String(seed);
    return {
      prompt,
      seed,
      temperature: Number(element("temperature").value),
      guidance_scale: Number(element("guidance").value),
      size: element("size").value,
      tree: this.tree,
    };
  }

  /** Restores the settings of an earlier picture. */
  restore(body) {
    element("prompt").value = body.prompt;
    element("temperature").value = body.temperature;
    element("guidance").value = body.guidance_scale;
    element("tree").value = Math.max(0, TREES.indexOf(body.tree));
    element("size").value = body.size;
    this.pinSeed(String(body.seed));
    for (const id of ["temperature", "guidance", "tree"]) this.label(id);
  }
}
