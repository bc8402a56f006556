// The pictures of this visit. Nothing is stored: they are gone when the page is closed.

const MAX_PICTURES = 60;

export class History {
  constructor(section, onOpen) {
    this.section = section;
    this.list = section.querySelector("ol");
    this.onOpen = onOpen;
    this.pictures = [];
  }

  add(picture) {
    this.pictures.unshift(picture);
    this.section.hidden = false;
    const item = document.createElement("li");
    const open = Object.assign(document.createElement("button"), { type: "button" });
    const { body, image } = picture;
    const thumbnail = image.cloneNode();
    thumbnail.alt = "";
    const caption = document.createElement("span");
    caption.textContent = body.prompt;
    const details = document.createElement("small");
    details.textContent = describe(picture);
    open.append(thumbnail, caption, details);
    open.title = `${body.prompt}\n${describe(picture)}`;
    open.addEventListener("click", () => this.onOpen(picture));
    item.append(open);
    this.list.prepend(item);
    picture.item = item;
    if (this.pictures.length > MAX_PICTURES) this.pictures.pop().item.remove();
    this.mark(picture);
  }

  mark(picture) {
    for (const other of this.pictures) {
      other.item.classList.toggle("current", other === picture);
      other.item.firstChild.setAttribute("aria-current", other === picture);
    }
  }
}

function describe({ body, result }) {
  const tree = { auto: [], none: ["plain"] }[body.tree] ?? [`${body.tree.split("=")[1]} guesses`];
  const parts = [`seed ${body.seed}`, `T ${body.temperature}`, `guidance ${body.guidance_scale}`, ...tree, `${result.passes} passes`];
  return parts.map((part) => part.replaceAll(" ", "\u00a0")).join(", "); // lines break between parts only
}

/** Saves the PNG as the server sent it, with prompt, seed and settings in its metadata. */
export function download({ body, result }) {
  const bytes = Uint8Array.from(atob(result.image), (char) => char.charCodeAt(0));
  const url = URL.createObjectURL(new Blob([bytes], { type: "image/png" }));
  const words = (body.prompt.toLowerCase().match(/[\p{L}\p{N}]+/gu) ?? ["picture"]).join("-").slice(0, 60);
  const link = Object.assign(document.createElement("a"), { href: url, download: `${words}-${body.seed}.png` });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}
